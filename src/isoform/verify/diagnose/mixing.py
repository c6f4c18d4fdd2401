"""From the weights of an attention to what the output projection reads."""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.verify.derivatives import derivatives
from isoform.verify.diagnose.case import Case
from isoform.verify.diagnose.cores import Core, shared_heads, silent_heads
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.unary import gap


def explain_mix(case: Case, place: Place, a: Core, b: Core, role: str) -> None:
    """From weights and values to the output projection."""
    out_a, out_b = a.site.out, b.site.out
    assert out_a is not None and out_b is not None
    kv = shared_heads(case, a, b, "v")
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
        _merge(case, place, a, b)
        return
    mixed_a, mixed_b = a.model.graph.values[a.site.mix], b.model.graph.values[b.site.mix]
    if mixed_a.shape != mixed_b.shape and not _same_rows(a, b, mixed_a):
        return
    # The same context in both: does the merge give the same?
    rows = case.rows.get(("site", b.site.index, "v"))
    if rows is not None and not rows.plain:
        return
    if not torch.equal(silent_heads(case, a, b), torch.arange(b.heads)):
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
        _values(case, place, a, b, ours, role)
        return
    if _merge(case, place, a, b):
        _factor(case, place, a, b)
    elif not explain_order(case, place, ours, theirs, out_b.read):
        case.add(
            "unexplained", place, "hands the context on in one way", "hands it on in another", out_b.read
        )


def _merge(case: Case, place: Place, a: Core, b: Core) -> bool:
    """Whether the merge of one model puts positions together that the other keeps apart."""
    clean_a, clean_b = _own_rows(a), _own_rows(b)
    if clean_a != clean_b:
        assert b.site.out is not None
        right, wrong = "puts the heads of a position side by side", "mixes positions when it merges heads"
        words = right if clean_a else wrong, right if clean_b else wrong
        case.add("head-merge", place, *words, b.site.out.read)
    return clean_a != clean_b


def explain_order(case: Case, place: Place, ours: Tensor, theirs: Tensor, order: int) -> bool:
    """Whether the same numbers are handed on in another order: of channels, or of positions too."""
    add = lambda a, b: case.add("head-merge", place, a, b, order)  # noqa: E731
    if gap(ours.sort(-1).values, theirs.sort(-1).values) < 1e-6:
        add("merges heads in one order of channels", "merges them in another")
        return True
    if gap(ours.flatten(1).sort(-1).values, theirs.flatten(1).sort(-1).values) < 1e-6:
        add("puts the heads of a position side by side", "mixes positions when it merges heads")
        return True
    return False


def _values(case: Case, place: Place, a: Core, b: Core, ours: Tensor, role: str) -> None:
    """B mixes its own values with A's weights: what A's output projection reads comes out, or not."""
    assert b.site.out is not None
    weights, read = _weights(a, b), b.site.out.read
    if not weights:
        return
    theirs = b.model.graph.evaluate(read, {**b.given(), **weights})
    theirs = b.model.graph.canonical(theirs, ours.shape[-1], read)
    if theirs is not None and case.differ(ours, theirs, role) > case.tolerance:
        case.add("unexplained", place, "hands values on in one way", "hands them on in another", b.site.value)


def _factor(case: Case, place: Place, a: Core, b: Core) -> None:
    """Values that are multiplied before they are mixed, where what is made of them cannot be compared."""
    one, two = a.operand("v", a.given()), b.operand("v", b.given())
    if one.shape != two.shape:
        return
    ratio = float((one * two).sum() / one.square().sum().clamp(min=1e-30))
    if abs(ratio - 1) > max(1e-5, case.constants) and ratio != 0 and gap(one * ratio, two) < 1e-6:
        words = "mixes values as they are", f"mixes {ratio:.6g} times these"
        case.add("unexplained", place, *words, b.site.value, ratio=ratio)


def _own_rows(core: Core) -> bool:
    """Whether what the output projection reads at a position comes from the query there alone."""
    assert core.site.out is not None
    graph, read = core.model.graph, core.site.out.read
    leaves = [part.linear.out for part in core.site.q]
    given = {n: v.detach().requires_grad_(n in leaves) for n, v in core.given().items()}
    rows = graph.canonical(graph.evaluate(read, given), core.site.out.weight.shape[1], read)
    assert rows is not None
    row, last = core.model.real(core.model.role(core.site.query)).nonzero()[-1].tolist()
    found = derivatives(rows[row, last].sum(), [given[n] for n in leaves])
    for part, grad in zip(core.site.q, found, strict=True):  # keys and values may come of the same map
        own = None if grad is None else graph.canonical(grad, part.linear.weight.shape[0], part.linear.out)
        touched = None if own is None else own[row][:, part.columns].nan_to_num().abs().amax(-1) > 0
        if touched is not None and bool(touched.nonzero().ne(last).any()):
            return False
    return True


def _same_rows(a: Core, b: Core, mixed: Tensor) -> bool:
    """Whether A's mixed values are in another shape what B mixes with A's weights."""
    own = b.model.graph.evaluate(b.site.mix, {**b.given(), **_weights(a, b)})
    if own.numel() != mixed.numel() or own.shape[-1] != mixed.shape[-1]:
        return False
    close = (mixed.reshape(own.shape) - own).abs().amax(-1) <= 1e-6 * own.nan_to_num().abs().max()
    return float(close.double().mean()) > 0.3  # with another layout hardly any would be


def _weights(a: Core, b: Core) -> dict[int, Tensor]:
    """A's weights where B has its own, if they have the same layout, there or at the softmax."""
    places = [(a.site.weights, b.site.weights)]
    if _used(a) and _used(b):
        places.append((a.site.softmax, b.site.softmax))
    for one, two in places:
        weights, own = a.model.graph.values[one], b.model.graph.values[two]
        if weights.numel() == own.numel() and weights.shape[-2:] == own.shape[-2:]:
            return {two: weights.reshape(own.shape)}
    return {}


def _used(core: Core) -> bool:
    """The weights of the softmax are those that values are mixed with."""
    graph = core.model.graph
    weights, softmax = graph.values[core.site.weights], graph.values[core.site.softmax]
    if weights.numel() != softmax.numel():
        return False
    if weights.shape[-2:] == softmax.shape[-2:]:  # what padding reads does not matter
        real = core.model.real(core.model.role(core.site.query))
        both = [x.reshape(graph.batch, -1, *x.shape[-2:]).transpose(1, 2) for x in (softmax, weights)]
        if both[0].shape[:2] == real.shape and gap(both[0][real], both[1][real]) < 1e-9:
            return True
    # Axes may stand in another order: the same numbers, then.
    soft, mixed = (x.reshape(-1).nan_to_num().sort().values for x in (softmax, weights))
    return gap(mixed, soft) < 1e-9
