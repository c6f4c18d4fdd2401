"""The core of an attention: from projected queries, keys and values to what the output projection reads.

Both cores are run on the reference's projections and compared piece by piece: what is added to the scores and
masked, how scores come from queries and keys, what is done to the weights, how values are mixed and merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.verify.align import Model, Part, Site, values_of
from isoform.verify.diagnose.case import Case, profile
from isoform.verify.diagnose.cores import NOTHING, Core, allowed, biased_norm, open_padding, paired_heads
from isoform.verify.diagnose.masks import explain_mask
from isoform.verify.diagnose.mixing import explain_mix, explain_order
from isoform.verify.diagnose.report import Place
from isoform.verify.diagnose.score_biases import explain_bias, scaled_as_a_whole
from isoform.verify.diagnose.scores import beside, explain_scores
from isoform.verify.diagnose.sites import over_keys
from isoform.verify.rows import Rows

HARDLY = 0.25
"""Below this share of what one model reads, what both read says too little of their scores."""


def check(case: Case, a: Site, b: Site) -> None:
    """One attention of both models."""
    if a.out is None or b.out is None or not (a.q and a.k and a.v and b.q and b.k and b.v):
        return
    starts = ([part.linear.out for _, part in s.parts()] for s in (a, b))
    with case.within(*zip((a.out.read, b.out.read), starts, strict=True)):
        _check(case, a, b)


def _check(case: Case, a: Site, b: Site) -> None:
    assert a.out is not None and b.out is not None
    place = case.place("cross-attention" if a.cross else "self-attention", a.scores, b.scores)
    cores = _cores(case, a, b)
    if cores is None:
        case.add("unexplained", place, _sizes(case.a, a), _sizes(case.b, b), b.scores)
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
    if len(case.raw) == count and not explain_order(case, place, ours, theirs, b.out.read):
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


def _sizes(model: Model, site: Site) -> str:
    found = [values_of(model, parts) for parts in (site.q, site.k, site.v)]
    return "projects to " + ", ".join(_shape(value) for value in found)


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
        more = case.added.get(b.index, {}).get(name)
        value = value if more is None else value + more[0]
        fed = value if rows is None else value[..., rows.index] * rows.scale
        inputs_b[name] = fed if more is None else fed - more[1]
        own = values_of(case.b, pb)
        if own is None or own.shape != inputs_b[name].shape:
            return None
    cores: list[Core] = []
    for side, (model, site, inputs) in enumerate(((case.a, a, inputs_a), (case.b, b, inputs_b))):
        logits = model.graph.values[site.softmax]
        heads = logits.numel() // (model.graph.batch * logits.shape[-1] * logits.shape[-2])
        added = {name: both[side] for name, both in case.added.get(b.index, {}).items()}
        cores.append(Core(model, site, heads, inputs, added))
    return cores[0], cores[1]


def _width(parts: list[Part]) -> int:
    return sum(len(p.columns) for p in parts)


def _scored(a: Tensor, b: Tensor, keys: int) -> tuple[str, str]:
    if a.shape[:-1] != b.shape[:-1]:
        return f"scores {list(a.shape)}", f"scores {list(b.shape)}"
    one, two = (f"{x.shape[-1] - keys:+} places" if x.shape[-1] != keys else "no other" for x in (a, b))
    return f"scores the keys and {one}", f"scores them and {two}"


def _explain(case: Case, place: Place, a: Core, b: Core, role: str) -> None:
    base_a, base_b = a.logits(a.given(q=0.0)), b.logits(b.given(q=0.0))
    if base_a.shape != base_b.shape:
        case.add(
            "unexplained",
            place,
            *_scored(base_a, base_b, case.a.real(case.a.role(a.site.key)).shape[1]),
            b.site.scores,
        )
        beside(lambda kind, x, y, **e: case.add(kind, place, x, y, b.site.scores, **e), case, a, b)
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
    read = (base_a > -NOTHING) & (base_b > -NOTHING)  # elsewhere no score is left to be compared
    both = open_a & open_b & queries[:, None, :, None] & read
    if int(both.sum()) < HARDLY * int((open_a & queries[:, None, :, None]).sum()):
        # They read hardly anything that both read: what becomes of it is asked without padding.
        base_a, base_b = open_padding(a), open_padding(b)
        both = allowed(base_a) & allowed(base_b) & (base_a > -NOTHING) & (base_b > -NOTHING)
    heads = paired_heads(case, place, a, b)
    both = both[:, torch.arange(both.shape[1])]
    base_a, base_b = torch.where(both, base_a, 0.0), torch.where(both, base_b, 0.0)
    # What is added may be counted from the mask, and a norm's bias is no bias of scores.
    if not any(core.opened or biased_norm(core) for core in (a, b)):
        explain_bias(case, place, a, b, base_a[:, heads], base_b, both, keys)
    count = len(case.raw)
    explain_scores(case, place, a, b, base_a, base_b, both, heads)
    ratio = next((r.evidence["ratio"] for r in case.raw[count:] if r.kind == "attention-scale"), None)
    if ratio is not None and scaled_as_a_whole(a, b, base_a, base_b, both, ratio, heads):
        case.raw = [r for i, r in enumerate(case.raw) if i >= count or r.evidence.get("of") != b.site.index]
    explain_mix(case, place, a, b, role)
