"""Does reading a sequence step by step through a cache give what one full pass gives? (R32)"""

from __future__ import annotations

import torch
from torch import Tensor

from isoform.tokens import Tokens
from isoform.verify.audit.report import Check, one_line
from isoform.verify.noise import tolerance
from isoform.verify.stepping import Step, past_name, stepper
from isoform.verify.subject import Subject


def check_cache(subject: Subject, step: Step | None = None) -> Check:
    """Step logits equal the full pass's at every position, and each position is named where they do not."""
    name, module = "cache", subject.module
    from isoform.nn import Transformer

    ids = subject.content(subject.target)
    if ids.is_floating_point():
        return Check(name, None, "the input is not token ids")
    try:
        if step is not None:
            stepped, full, real, how = *_stepped(subject, step), "the given step function"
        elif isinstance(module, Transformer):
            if module.decoder is None:
                return Check(name, None, "an encoder has no cached steps")
            stepped, full, real, how = *_by_isoform(subject), "isoform's cache"
        elif (past := past_name(module)) is not None:
            stepped, full, real, how = *_stepped(subject, None), past
        else:
            return Check(name, None, "it takes no past_key_values and no step function was given")
    except Exception as error:
        return Check(name, None, f"it cannot be stepped: {one_line(error)}")
    gap = (stepped - full).abs().flatten(2).amax(-1).masked_fill(~real, 0.0)
    size, limit = float(gap.max()), 4 * tolerance(full)
    evidence = {"largest_difference": size, "tolerance": limit, "positions": int(real.sum()), "by": how}
    remark = ""
    if size > limit:
        row = int(gap.amax(1).argmax())
        place = int((gap[row] > limit).nonzero()[0])
        short = _without_what_follows(subject, step, stepped)
        if short is None or short > limit:
            first = f"position {place} of row {row} is the first to differ from the full pass"
            statement = f"by {how}, {first}: {float(gap[row, place]):.3g}"
            return Check(name, False, statement, {**evidence, "row": row, "position": place})
        size, remark = short, " over no more than what is before it; longer ones read ahead (see causality)"
    turned = _rows_swapped(subject, step, stepped, real, limit)
    if turned is not None and turned.passed is False:
        return turned
    return Check(
        name,
        True,
        f"by {how}, every step equals the full pass{remark} within {size:.2g}"
        + (", also when rows change places on the way" if turned is not None else ""),
        {**evidence, "reordered": turned is not None},
        "that positions, masks and cached contents advance together",
        "lengths beyond this input"
        + ("" if turned is not None else ", and rows that change places, as beams do"),
    )


def _without_what_follows(subject: Subject, step: Step | None, stepped: Tensor) -> float | None:
    """The largest difference between each step and a full pass that ends with it; None: none can be run."""
    ids, real = subject.content(subject.target), subject.real(subject.target)
    if isinstance(subject.kwargs[subject.target.name], Tokens):
        return None
    worst = 0.0
    for end in range(1, ids.shape[1] + 1):
        inputs = subject.with_content(subject.target, ids[:, :end], real[:, :end])
        inputs |= {n: v[:, :end] for n, v in inputs.items() if n in ("position_ids", "token_type_ids")}
        if subject.target.mask not in subject.kwargs:
            inputs.pop(subject.target.mask or "", None)
        try:
            last = subject.run(inputs).output[:, -1]
        except Exception:
            return None
        gap = (last - stepped[:, end - 1]).abs().flatten(1).amax(-1).masked_fill(~real[:, end - 1], 0.0)
        worst = max(worst, float(gap.max()))
    return worst


def _rows_swapped(
    subject: Subject, step: Step | None, stepped: Tensor, real: Tensor, limit: float
) -> Check | None:
    """Steps of rows that change places half-way, against those of rows that do not; None: cannot be run."""
    by = stepper(subject, step)
    half = stepped.shape[1] // 2
    if by is None or not half:
        return None
    try:
        swapped = by.swapped(half)
    except Exception:
        return None
    if swapped is None:
        return None
    found, order = swapped
    gap = (found - stepped[order]).abs().flatten(2).amax(-1).masked_fill(~real[order], 0.0)
    if float(gap.max()) <= limit:
        return Check("cache", True, "rows may change places")
    row, place = divmod(int(gap.argmax()), gap.shape[1])
    text = (
        f"by {by.name}, after rows change places at position {half}, as beams do, row {int(order[row])} goes "
        f"on with another past: position {place} differs by {float(gap.max()):.3g}"
    )
    return Check("cache", False, text, {"row": int(order[row]), "position": place, "at": half, "by": by.name})


def _by_isoform(subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    from isoform.nn import Cache, Transformer

    model = subject.module
    assert isinstance(model, Transformer)
    tokens: Tokens = subject.kwargs[subject.target.name].padded("right")
    source = subject.kwargs.get(subject.source.name) if subject.source else None
    real = tokens.real_or_ones()
    with torch.no_grad():
        full = subject.run({**subject.kwargs, subject.target.name: tokens}).output
        dtype = next(model.parameters()).dtype
        cache = Cache.allocate(model.config, tokens.batch, tokens.length, dtype=dtype, device=tokens.device)
        if source is not None:
            model.remember(cache, model.encode(source))
        prompt = 1 if tokens.prefix is None else int(tokens.prefix.max())
        head = Tokens(tokens.ids[:, :prompt], real[:, :prompt], prefix=tokens.prefix)
        states = [model.hidden(head, cache=cache)]
        for t in range(prompt, tokens.length):
            states.append(model.hidden(Tokens(tokens.ids[:, t : t + 1], real[:, t : t + 1]), cache=cache))
        hidden = torch.cat(states, 1)
        stepped = hidden if model.head is None else model.head(hidden)
    return stepped, full, real


def _stepped(subject: Subject, step: Step | None) -> tuple[Tensor, Tensor, Tensor]:
    found = stepper(subject, step)
    assert found is not None
    full = subject.run().output
    return found.run([1] * full.shape[1]), full, subject.real(subject.target)
