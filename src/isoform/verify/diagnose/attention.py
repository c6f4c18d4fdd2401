"""The core of an attention: from projected queries, keys and values to what the output projection reads.

Both cores are run on the reference's projections and compared piece by piece: what is added to the scores and
masked, how scores come from queries and keys, what is done to the weights, how values are mixed and merged.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from isoform.verify.align import Model, Part, Rows, Site, filled, values_of
from isoform.verify.derivatives import derivatives
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.masks import explain_bias, explain_mask
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.scores import explain_scores
from isoform.verify.diagnose.stream import profile
from isoform.verify.diagnose.structure import over_keys
from isoform.verify.diagnose.unary import gap

FORBIDDEN = 5e3
"""Scores this far below the largest of their row are masked."""


@dataclasses.dataclass(eq=False)
class Core:
    """One model's attention as functions of its own projections.

    Args:
        model: the model.
        site: the attention.
        heads: number of heads in the products.
        inputs: for q, k and v the reference's values in this model's order of columns, ``[B, T, columns]``.
    """

    model: Model
    site: Site
    heads: int
    inputs: dict[str, Tensor]

    def given(self, **factors: float) -> dict[int, Tensor]:
        """Values for the projections; a factor of 0 or 2 for q, k or v multiplies them."""
        out: dict[int, Tensor] = {}
        for name, parts in (("q", self.site.q), ("k", self.site.k), ("v", self.site.v)):
            if parts:
                filled(self.model, parts, self.inputs[name] * factors.get(name, 1.0), out)
        return out

    def put(self, name: str, value: Tensor) -> dict[int, Tensor]:
        """Likewise with other values for one of them."""
        out = self.given()
        filled(self.model, {"q": self.site.q, "k": self.site.k, "v": self.site.v}[name], value, out)
        return out

    def logits(self, given: dict[int, Tensor]) -> Tensor:
        """What goes into the softmax, but for what is the same for all keys; ``[B, heads, T, S]``."""
        value = self.model.graph.evaluate(self.site.logits, given)
        return value.reshape(self.model.graph.batch, -1, *value.shape[-2:])

    def operand(self, which: str, given: dict[int, Tensor]) -> Tensor:
        """Queries, keys or values as they go into the products, ``[B, heads, T, channels]``."""
        node = {"q": self.site.query, "k": self.site.key, "v": self.site.value}[which]
        value = self.model.graph.evaluate(node, given)
        if which == "k" and self.site.key_columns:
            value = value.transpose(-1, -2)
        if which == "q" and not self.site.key_columns:
            value = value.transpose(-1, -2) if value.shape[-2] == self.width else value
        if which == "q":  # the queries of heads that share keys may lie one below the other
            return value.reshape(self.model.graph.batch, self.heads, -1, value.shape[-1])
        return value.reshape(self.model.graph.batch, -1, *value.shape[-2:])

    @property
    def width(self) -> int:
        """Channels of a head."""
        value = self.model.graph.values[self.site.query]
        return value.shape[-1]


def check(case: Case, a: Site, b: Site) -> None:
    """One attention of both models."""
    if a.out is None or b.out is None or not (a.q and a.k and a.v and b.q and b.k and b.v):
        return
    place = case.place("cross-attention" if a.cross else "self-attention", a.scores, b.scores)
    cores = _cores(case, a, b)
    if cores is None:
        case.add("unexplained", place, _sizes(a), _sizes(b), b.scores)
        return
    core_a, core_b = cores
    width = a.out.weight.shape[1]
    role = case.a.role(a.query)
    ours = case.a.graph.canonical(case.a.graph.values[a.out.read], width, a.out.read)
    theirs = case.b.graph.canonical(
        case.b.graph.evaluate(b.out.read, core_b.given()), b.out.weight.shape[1], b.out.read
    )
    columns = case.rows.get(("site", b.index, "out"))
    if ours is None or theirs is None or ours.shape != theirs.shape:
        case.add("unexplained", place, f"mixes {_shape(ours)}", f"mixes {_shape(theirs)}", b.scores)
        return
    if columns is not None:
        ours = ours[..., columns.index] / columns.scale
    difference = case.differ(ours, theirs, role)
    case.checked.append(("attention", b.out.read, difference))
    if difference <= case.tolerance:
        return
    count = len(case.raw)
    _explain(case, place, core_a, core_b, role)
    if len(case.raw) == count:
        case.add(
            "unexplained",
            place,
            "mixes the same projections in one way",
            "mixes them in another",
            b.scores,
            relative_difference=difference,
            profile=profile(ours, theirs),
        )


def _shape(value: Tensor | None) -> str:
    return "values without a clear layout" if value is None else str(list(value.shape))


def _sizes(site: Site) -> str:
    return "projects to " + ", ".join(f"{sum(len(p.columns) for p in x)}" for x in (site.q, site.k, site.v))


def _cores(case: Case, a: Site, b: Site) -> tuple[Core, Core] | None:
    inputs_a: dict[str, Tensor] = {}
    inputs_b: dict[str, Tensor] = {}
    for name, pa, pb in (("q", a.q, b.q), ("k", a.k, b.k), ("v", a.v, b.v)):
        value = values_of(case.a, pa)
        if value is None or _width(pa) != _width(pb):
            return None
        value = value.nan_to_num()
        rows: Rows | None = case.rows.get(("site", b.index, name))
        inputs_a[name] = value
        inputs_b[name] = value if rows is None else value[..., rows.index] * rows.scale
        own = values_of(case.b, pb)
        if own is None or own.shape != inputs_b[name].shape:
            return None
    cores: list[Core] = []
    for model, site, inputs in ((case.a, a, inputs_a), (case.b, b, inputs_b)):
        logits = model.graph.values[site.softmax]
        heads = logits.numel() // (model.graph.batch * logits.shape[-1] * logits.shape[-2])
        cores.append(Core(model, site, heads, inputs))
    return cores[0], cores[1]


def _width(parts: list[Part]) -> int:
    return sum(len(p.columns) for p in parts)


def _explain(case: Case, place: Place, a: Core, b: Core, role: str) -> None:
    base_a, base_b = a.logits(a.given(q=0.0)), b.logits(b.given(q=0.0))
    if base_a.shape != base_b.shape:
        case.add(
            "unexplained",
            place,
            f"scores {list(base_a.shape)}",
            f"scores {list(base_b.shape)}",
            b.site.scores,
        )
        return
    if over_keys(a.model.graph, a.site.softmax) != over_keys(b.model.graph, b.site.softmax):
        words = "takes the softmax over another axis than the last", "takes it over the last axis"
        first = over_keys(a.model.graph, a.site.softmax)
        case.add("unexplained", place, words[first], words[not first], b.site.softmax)
        return
    queries = case.a.real(role)
    keys = case.a.real(case.a.role(a.site.key))
    open_a, open_b = allowed(base_a), allowed(base_b)
    explain_mask(case, place, a, b, open_a, open_b, queries, keys)
    both = open_a & open_b & queries[:, None, :, None]
    heads = _paired_heads(case, place, a, b)
    both = both[:, torch.arange(both.shape[1])]
    base_a, base_b = torch.where(both, base_a, 0.0), torch.where(both, base_b, 0.0)
    explain_bias(case, place, a, b, base_a[:, heads], base_b, both, queries, keys)
    explain_scores(case, place, a, b, base_a, base_b, both, heads)
    _explain_mix(case, place, a, b, role)


def allowed(base: Tensor) -> Tensor:
    """Where a score can still win a share of the weight."""
    top = base.nan_to_num(neginf=-1e30).amax(-1, keepdim=True)
    return base > top - FORBIDDEN


def _paired_heads(case: Case, place: Place, a: Core, b: Core) -> Tensor:
    """For each head of B the head of A that reads the same rows of the query projection."""
    same = torch.arange(b.heads)
    rows = case.rows.get(("site", b.site.index, "q"))
    if rows is None or a.heads != b.heads:
        return same
    of_a, of_b = columns_of(a, "q"), columns_of(b, "q")
    if of_a is None or of_b is None:
        return same
    sets = [frozenset(s) for s in of_a]
    if len(set(sets)) < len(sets) or {len(s) for s in of_a} != {len(s) for s in of_b}:
        return same  # normalised over all heads, so that each depends on all columns
    found: list[int] = []
    for columns in of_b:
        wanted = frozenset(int(rows.index[c]) for c in columns)
        if wanted not in sets:
            case.add(
                "qkv-packing",
                place,
                "gives the first head query channels " + _few(of_a[0]),
                "gives it " + _few([int(rows.index[c]) for c in of_b[0]]),
                b.site.query,
            )
            return same
        found.append(sets.index(wanted))
    return torch.tensor(found)


def _few(columns: list[int]) -> str:
    return ", ".join(map(str, columns[:6])) + (" …" if len(columns) > 6 else "")


def columns_of(core: Core, which: str) -> list[list[int]] | None:
    """For each head the columns of a projection that it is made of."""
    given = {n: v.detach().requires_grad_() for n, v in core.given().items()}
    operand = core.operand(which, given)
    parts = {"q": core.site.q, "k": core.site.k, "v": core.site.v}[which]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(operand.shape, generator=generator, dtype=operand.dtype)
    found: list[list[int]] = []
    for head in range(operand.shape[1]):
        leaves = [given[p.linear.out] for p in parts]
        pick = (operand[:, head] * weight[:, head]).sum()
        grads = derivatives(pick, leaves)
        columns: list[int] = []
        at = 0
        for part, grad in zip(parts, grads, strict=True):
            if grad is not None:
                used = grad.reshape(-1, part.linear.weight.shape[0]).abs().sum(0)[part.columns]
                columns += [at + int(c) for c in (used > 0).nonzero()[:, 0]]
            at += len(part.columns)
        found.append(columns)
    shared = core.heads // max(len(found), 1)  # heads side by side in one product with the same keys
    return [columns for columns in found for _ in range(shared)] if which != "q" else found


def _explain_mix(case: Case, place: Place, a: Core, b: Core, role: str) -> None:
    """From weights and values to the output projection."""
    out_a, out_b = a.site.out, b.site.out
    assert out_a is not None and out_b is not None
    kv = _groups(case, a, b, "v")
    if kv is not None:
        case.add("kv-head-order", place, kv[0], kv[1], b.site.value, heads="values")
    weights_a, weights_b = _used(a), _used(b)
    if weights_a != weights_b:
        case.add(
            "unexplained",
            place,
            "mixes with the weights of the softmax" if weights_a else "changes the weights after the softmax",
            "mixes with the weights of the softmax" if weights_b else "changes the weights after the softmax",
            b.site.mix,
        )
    if kv is not None or a.heads != b.heads:
        return
    mixed_a, mixed_b = a.model.graph.values[a.site.mix], b.model.graph.values[b.site.mix]
    if mixed_a.shape != mixed_b.shape:
        return
    # The same context in both: does the merge give the same?
    rows = case.rows.get(("site", b.site.index, "q"))
    if rows is not None and not rows.plain:
        return
    columns = case.rows.get(("site", b.site.index, "out"))
    merged = b.model.graph.evaluate(out_b.read, {b.site.mix: mixed_a.reshape(mixed_b.shape)})
    width = out_b.weight.shape[1]
    theirs = b.model.graph.canonical(merged, width, out_b.read)
    ours = a.model.graph.canonical(a.model.graph.values[out_a.read], width, out_a.read)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return
    if columns is not None:
        ours = ours[..., columns.index]
    difference = case.differ(ours, theirs, role)
    if difference <= case.tolerance:
        return
    clean_a, clean_b = _own_rows(a), _own_rows(b)
    if clean_a != clean_b:
        right, wrong = "puts the heads of a position side by side", "mixes positions when it merges heads"
        case.add("head-merge", place, right if clean_a else wrong, right if clean_b else wrong, out_b.read)
    elif gap(ours.sort(-1).values, theirs.sort(-1).values) < 1e-6:
        case.add(
            "head-merge",
            place,
            "merges heads in one order of channels",
            "merges them in another",
            out_b.read,
        )
    else:
        case.add(
            "unexplained", place, "hands the context on in one way", "hands it on in another", out_b.read
        )


def _own_rows(core: Core) -> bool:
    """Whether what the output projection reads at the first position comes from that query alone."""
    assert core.site.out is not None
    graph = core.model.graph
    context = graph.values[core.site.mix].detach().clone().requires_grad_()
    out = graph.evaluate(core.site.out.read, {core.site.mix: context})
    width = core.site.out.weight.shape[1]
    rows = graph.canonical(out, width, core.site.out.read)
    assert rows is not None
    (grad,) = torch.autograd.grad(rows[0, 0].sum(), context)
    flat = grad.reshape(graph.batch, -1, *grad.shape[-2:])
    touched = (flat[0].abs().sum((0, 2)) > 0).sum()
    return int(touched) <= 1


def _used(core: Core) -> bool:
    """The weights of the softmax are those that values are mixed with."""
    graph = core.model.graph
    weights, softmax = graph.values[core.site.weights], graph.values[core.site.softmax]
    if weights.numel() != softmax.numel():
        return False
    soft = softmax.reshape(-1).nan_to_num()
    ways = (weights, weights.transpose(-1, -2))  # axes of heads may be merged, or keys lie before queries
    return any(gap(way.reshape(-1).nan_to_num(), soft) < 1e-9 for way in ways)


def _groups(case: Case, a: Core, b: Core, which: str) -> tuple[str, str] | None:
    """How heads share key and value heads, where that differs."""
    of_a, of_b = columns_of(a, which), columns_of(b, which)
    rows = case.rows.get(("site", b.site.index, which))
    if of_a is None or of_b is None or len(of_a) != len(of_b) or not all(of_a) or not all(of_b):
        return None
    heads = _silent_heads(case, a, b)
    moved = of_b if rows is None else [sorted(int(rows.index[c]) for c in columns) for columns in of_b]
    if all(sorted(of_a[int(heads[h])]) == sorted(moved[h]) for h in range(len(moved))):
        return None
    groups_a, groups_b = _pattern(of_a), _pattern(moved)
    if groups_a is None or groups_b is None or len(set(groups_a)) != len(set(groups_b)):
        return None
    return (f"gives its heads the key–value heads {_row(groups_a)}", f"gives them {_row(groups_b)}")


def _silent_heads(case: Case, a: Core, b: Core) -> Tensor:
    before = list(case.raw)
    heads = _paired_heads(case, Place("", None, "", "", "", ""), a, b)
    case.raw = before
    return heads


def _pattern(columns: list[list[int]]) -> list[int] | None:
    sets = [tuple(sorted(c)) for c in columns]
    order = sorted(set(sets))
    return [order.index(s) for s in sets]


def _row(groups: list[int]) -> str:
    return ", ".join(map(str, groups[:16])) + (" …" if len(groups) > 16 else "")
