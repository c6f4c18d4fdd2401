"""Biases of projections, wherever they are added: with the product, after a split, in the next sum."""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.verify.align import Linear, Model, Part, Site, values_of
from isoform.verify.diagnose.cores import Core, held_columns
from isoform.verify.diagnose.rotations import images
from isoform.verify.diagnose.unary import gap

NOTHING = 1e-12
"""Below this, relative to the values that it is added to, nothing is added."""


def own_core(model: Model, site: Site) -> Core | None:
    """An attention on its own projections; None where these have no clear layout."""
    inputs: dict[str, Tensor] = {}
    for name, parts in (("q", site.q), ("k", site.k), ("v", site.v)):
        value = values_of(model, parts) if parts else None
        if value is None:
            return None
        inputs[name] = value.nan_to_num()
    logits = model.graph.values[site.softmax]
    heads = logits.numel() // (model.graph.batch * logits.shape[-1] * logits.shape[-2])
    return Core(model, site, heads, inputs)


def added(core: Core, which: str) -> Tensor | None:
    """What is added to a projection between its product and attention's, ``[columns]``; None: no vector."""
    value = core.inputs[which]
    own = core.operand(which, core.given())
    zero = core.operand(which, core.put(which, torch.zeros_like(value)))
    if bool(zero.isfinite().all()) and float(zero.abs().max()) <= NOTHING * float(own.abs().max()):
        return None
    twice = core.operand(which, core.put(which, 2 * value))
    matrix = images(core, which)
    if matrix is None or gap(twice - zero, 2 * (own - zero)) > 1e-9:
        return _in_front(core, which)
    vector = torch.zeros(value.shape[-1], dtype=torch.float64)
    for head, own_columns in enumerate(held_columns(core, which)):
        maps, sums = matrix[:, head].flatten(0, 2), zero[:, head].reshape(-1, 1)
        found = torch.linalg.lstsq(maps, sums, driver="gelsd").solution
        if gap(maps @ found, sums) > 1e-8:
            return None
        vector[own_columns] = found[:, 0]
    return vector


def _in_front(core: Core, which: str) -> Tensor | None:
    """Likewise where a norm follows: the vector is read off where each column is still what it was, moved."""
    graph, value = core.model.graph, core.inputs[which]
    width = value.shape[-1]
    numbers = torch.arange(1, width + 1, dtype=torch.float64).expand_as(value)
    node = {"q": core.site.query, "k": core.site.key, "v": core.site.value}[which]
    for number in core.model.structure.chain(node)[1:]:
        found: list[Tensor] = []
        for given in (torch.zeros_like(value), numbers):
            out = graph.evaluate(number, core.put(which, given))
            rows = graph.canonical(out, width, number) if out.numel() == value.numel() else None
            found += [] if rows is None or rows.shape != value.shape else [rows]
        if len(found) < 2:
            continue
        zero, order = found[0], (found[1] - found[0])[0, 0]
        index = order.round().long() - 1
        if gap(order, index.double() + 1) > 1e-9 or not torch.equal(index.sort().values, torch.arange(width)):
            continue
        moved = (numbers[..., index] + zero[:1, :1]).expand_as(value)
        if not bool(zero.any()) or gap(found[1], moved) > 1e-9:
            return None
        vector = torch.zeros(width, dtype=torch.float64)
        vector[index] = zero[0, 0]
        return vector
    return None


def biases(model: Model, site: Site) -> dict[str, tuple[Tensor, Tensor]]:
    """For q, k and v the whole bias, and the share of it that is added after the product."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    core: Core | None = None
    for name, parts in (("q", site.q), ("k", site.k), ("v", site.v)):
        if not parts:
            continue
        bias = torch.cat([p.linear.bias[p.columns] for p in parts])
        more = None
        if _adds(model, {"q": site.query, "k": site.key, "v": site.value}[name], parts):
            core = core or own_core(model, site)
            more = None if core is None else added(core, name)
        more = torch.zeros_like(bias) if more is None or more.shape != bias.shape else more
        found[name] = bias + more, more
    return found


def _adds(model: Model, operand: int, parts: list[Part]) -> bool:
    """Whether an operand is anything where its projections are zero."""
    zeros = {p.linear.out: torch.zeros_like(model.graph.values[p.linear.out]) for p in parts}
    return bool(model.graph.evaluate(operand, zeros).any())


def in_sum(model: Model, state: int) -> Tensor | None:
    """The vector ``[d]`` that a sum of the stream adds to its terms, maps' results among them, if one is."""
    structure = model.structure
    tops = {top for arg in model.graph.live_args(state) for top in structure.tops(arg)}
    if state in tops or not any(t in structure.by_out for t in tops):
        return None
    terms = [structure.trunk.get(t, t) for t in tops]
    zeros = {n: torch.zeros_like(model.graph.values[n]) for n in terms}
    twice = {n: 2 * model.graph.values[n] for n in terms}
    try:
        zero, double = model.graph.evaluate(state, zeros), model.graph.evaluate(state, twice)
    except (RuntimeError, IndexError):  # sizes that hang on which experts were chosen
        return None
    value = model.graph.values[state]
    if not bool(zero.isfinite().all()) or float(zero.abs().max()) <= NOTHING * float(value.abs().max()):
        return None
    rows = zero.reshape(-1, zero.shape[-1])
    if gap(rows, rows[:1].expand_as(rows)) > 1e-9 or gap(double - zero, 2 * (value - zero)) > 1e-9:
        return None
    return rows[0]


def output_bias(model: Model, linear: Linear) -> tuple[Tensor, bool]:
    """What a map that writes to the stream adds to it apart from its product.

    Returns:
        Its bias ``[d]`` and False. Where the sum itself adds a vector: that and the biases of all maps that
        the sum is made of, which cannot be told apart, and True.
    """
    state, maps = summed(model, linear)
    more = None if state is None else in_sum(model, state)
    if more is None or more.shape != linear.bias.shape:
        return linear.bias, False
    return more + total(maps), True


def summed(model: Model, linear: Linear) -> tuple[int | None, list[Linear]]:
    """The sum of the stream that a map goes into, and all maps that do, in order."""
    by_out = model.structure.by_out
    for state in reversed(model.structure.sums):  # the last one goes on; others are read by a norm alone
        terms = {t for arg in model.graph.live_args(state) for t in model.structure.tops(arg)}
        if linear.out in terms:
            return state, [by_out[t] for t in sorted(terms) if t in by_out]
    return None, [linear]


def total(maps: list[Linear]) -> Tensor:
    """The sum of their biases."""
    return torch.stack([linear.bias for linear in maps]).sum(0)
