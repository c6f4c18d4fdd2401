"""One attention of one model as functions of its projections; which of their columns each head is made of."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from isoform.verify.align import Model, Site, filled
from isoform.verify.derivatives import derivatives
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import gap
from isoform.verify.rows import Rows

FORBIDDEN = 5e3
"""Scores this far below the largest of their row are masked."""

NOTHING = 1e8
"""Rows that hold no score above minus this read nothing: all of their places are masked alike."""


@dataclasses.dataclass(eq=False)
class Core:
    """One model's attention as functions of its own projections.

    Args:
        model: the model.
        site: the attention.
        heads: number of heads in the products.
        inputs: for q, k and v the reference's values in this model's order of columns, ``[B, T, columns]``.
        added: for some of them what is added to them on the way.
        opened: values of nodes that read the padding mask, if it said one thing of every place; for scores.
        columns: those of each head, for q, k and v, as far as they have been asked for.
    """

    model: Model
    site: Site
    heads: int
    inputs: dict[str, Tensor]
    added: dict[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])
    opened: dict[int, Tensor] = dataclasses.field(default_factory=dict[int, Tensor])
    columns: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict[str, list[list[int]]])

    def given(self, **factors: float) -> dict[int, Tensor]:
        """Values for the projections; a factor of 0 or 2 for q, k or v multiplies them, biases included."""
        out: dict[int, Tensor] = {}
        for name, parts in (("q", self.site.q), ("k", self.site.k), ("v", self.site.v)):
            if parts:
                factor, more = factors.get(name, 1.0), self.added.get(name)
                value = self.inputs[name] * factor
                filled(self.model, parts, value if more is None else value + more * (factor - 1), out)
        return out

    def put(self, name: str, value: Tensor) -> dict[int, Tensor]:
        """Likewise with other values for one of them."""
        out = self.given()
        filled(self.model, {"q": self.site.q, "k": self.site.k, "v": self.site.v}[name], value, out)
        return out

    def logits(self, given: dict[int, Tensor]) -> Tensor:
        """What goes into the softmax, but for what is the same for all keys; ``[B, heads, T, S]``."""
        graph, ends = self.model.graph, (self.site.query, self.site.key)
        if self.opened:  # positions may be counted from the mask: queries and keys stay what they are
            given = {**self.opened, **graph.evaluate_all(ends, given)}
        value = graph.evaluate(self.site.logits, given)
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


def biased_norm(core: Core) -> bool:
    """Whether queries are normalised and a bias is added: what they give at zero is none of the scores."""
    zero = core.operand("q", core.given(q=0.0))
    if not bool(zero.isfinite().all()) or float(zero.abs().max()) < 1e-9:
        return False
    return gap(*(core.operand("q", core.given(q=size)) for size in (1e5, 2e5))) < 1e-5


def open_padding(core: Core) -> Tensor:
    """Let every query read all places that are not hidden for another reason than padding.

    Returns:
        The scores of queries that are zero, ``[B, heads, T, S]``.
    """
    tried: list[tuple[int, dict[int, Tensor], Tensor]] = []
    for real in (True, False):  # a mask that is understood the wrong way round is open where all is padding
        core.opened = _one_kind(core.model, real)
        base = core.logits(core.given(q=0.0))
        tried.append((int((allowed(base) & (base > -NOTHING)).sum()), core.opened, base))
    _, core.opened, base = max(tried, key=lambda t: t[0])
    return base


def _one_kind(model: Model, real_ones: bool) -> dict[int, Tensor]:
    """Values of the nodes that read a padding mask, if it said the same of every place."""
    open_masks: dict[str, Tensor] = {}
    contents = set(model.recording.contents.values())
    for name, value in model.recording.inputs.items():
        for real in model.graph.real.values():
            for mask in (real, real.t()):
                if name in contents or value.shape != mask.shape or bool(mask.all()) or not bool(mask.any()):
                    continue
                kept, other = value[mask][0], value[~mask][0]
                if bool((value[mask] == kept).all()) and bool((value[~mask] == other).all()):
                    open_masks[name] = torch.full_like(value, (kept if real_ones else other).item())
    return model.graph.reading(open_masks) if open_masks else {}


def allowed(base: Tensor) -> Tensor:
    """Where a score can still win a share of the weight."""
    top = base.nan_to_num(neginf=-1e30).amax(-1, keepdim=True)
    return base > top - FORBIDDEN


def columns_of(core: Core, which: str) -> list[list[int]]:
    """For each head the columns of a projection that it is made of."""
    if which not in core.columns:
        core.columns[which] = _columns(core, which)
    return core.columns[which]


def _columns(core: Core, which: str) -> list[list[int]]:
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
    if len(found) > 1 and len({tuple(c) for c in found}) == 1:
        found = _largest(core, which) or found  # normalised over all heads together
    shared = core.heads // max(len(found), 1)  # heads side by side in one product with the same keys
    return [columns for columns in found for _ in range(shared)] if which != "q" else found


def held_columns(core: Core, which: str) -> list[list[int]]:
    """Likewise for each head that the operand itself holds: keys that heads share count once."""
    columns = columns_of(core, which)
    return columns[:: len(columns) // core.operand(which, core.given()).shape[1]]


def _largest(core: Core, which: str) -> list[list[int]] | None:
    """For each head the columns that give the most to it, each by itself; None: not the same number each."""
    zero = torch.zeros_like(core.inputs[which])
    none, found = core.operand(which, core.put(which, zero)), list[int]()
    for column in range(zero.shape[-1]):
        unit = zero.clone()
        unit[..., column] = 1.0
        share = (core.operand(which, core.put(which, unit)) - none).abs().sum((0, 2, 3))
        found.append(int(share.argmax()))
    sets = [[c for c, head in enumerate(found) if head == h] for h in range(none.shape[1])]
    return sets if len({len(s) for s in sets}) == 1 else None


def paired_heads(case: Case, place: Place, a: Core, b: Core) -> Tensor:
    """For each head of B the head of A that reads the same rows of the query projection."""
    same = torch.arange(b.heads)
    rows = case.rows.get(("site", b.site.index, "q"))
    if rows is None or a.heads != b.heads:
        return same
    of_a, of_b = columns_of(a, "q"), columns_of(b, "q")
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
    others = [_paired(case, a, b, which) for which in ("k", "v")]
    if others[0] is not None and others[0] == others[1] != found:  # the queries alone are another head's
        words = "gives the first head query channels ", "gives it "
        channels = _few(of_a[others[0][0]]), _few([int(rows.index[c]) for c in of_b[0]])
        case.add("qkv-packing", place, words[0] + channels[0], words[1] + channels[1], b.site.query)
        index = rows.index.clone()
        for own, head in zip(of_b, others[0], strict=True):
            index[own] = torch.tensor(of_a[head])
        case.rows[("site", b.site.index, "q")] = Rows(index, torch.ones(len(index), dtype=torch.float64))
        b.inputs["q"] = a.inputs["q"][..., index]
        return torch.tensor(others[0])
    return torch.tensor(found)


def _paired(case: Case, a: Core, b: Core, which: str) -> list[int] | None:
    """For each head of B the head of A with the same key or value rows; None where heads share them."""
    rows, of_a, of_b = (
        case.rows.get(("site", b.site.index, which)),
        columns_of(a, which),
        columns_of(b, which),
    )
    if rows is None or len(of_b) != b.heads:
        return None
    sets = [frozenset(s) for s in of_a]
    wanted = [frozenset(int(rows.index[c]) for c in columns) for columns in of_b]
    if len(set(sets)) < len(sets) or any(w not in sets for w in wanted):
        return None
    return [sets.index(w) for w in wanted]


def _few(columns: list[int]) -> str:
    return ", ".join(map(str, columns[:6])) + (" …" if len(columns) > 6 else "")


def shared_heads(case: Case, a: Core, b: Core, which: str) -> tuple[str, str] | None:
    """How heads share key and value heads, where that differs."""
    of_a, of_b = columns_of(a, which), columns_of(b, which)
    rows = case.rows.get(("site", b.site.index, which))
    if len(of_a) != len(of_b) or not all(of_a) or not all(of_b):
        return None
    if {len(c) for c in of_a} != {len(c) for c in of_b}:
        return None  # a head is made of other heads' columns too
    heads = silent_heads(case, a, b)
    moved = of_b if rows is None else [sorted(int(rows.index[c]) for c in columns) for columns in of_b]
    if all(sorted(of_a[int(heads[h])]) == sorted(moved[h]) for h in range(len(moved))):
        return None
    # Heads in the order of their queries' channels: products may hold them in another.
    of_queries = columns_of(a, "q"), columns_of(b, "q")
    index = case.rows.get(("site", b.site.index, "q"))
    order_a = sorted(range(len(of_a)), key=lambda h: of_queries[0][h])
    order_b = sorted(
        range(len(moved)),
        key=lambda h: [c if index is None else int(index.index[c]) for c in of_queries[1][h]],
    )
    groups_a, groups_b = _pattern([of_a[h] for h in order_a]), _pattern([moved[h] for h in order_b])
    if groups_a is None or groups_b is None or len(set(groups_a)) != len(set(groups_b)):
        return None
    return (f"gives its heads the key–value heads {_row(groups_a)}", f"gives them {_row(groups_b)}")


def silent_heads(case: Case, a: Core, b: Core) -> Tensor:
    """`paired_heads` without a word about what is not paired."""
    before = list(case.raw)
    heads = paired_heads(case, Place("", None, "", "", "", ""), a, b)
    case.raw = before
    return heads


def _pattern(columns: list[list[int]]) -> list[int] | None:
    sets = [tuple(sorted(c)) for c in columns]
    order = sorted(set(sets))
    return [order.index(s) for s in sets]


def _row(groups: list[int]) -> str:
    return ", ".join(map(str, groups[:16])) + (" …" if len(groups) > 16 else "")
