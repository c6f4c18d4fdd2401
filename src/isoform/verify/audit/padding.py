"""Does anything read what stands at padded positions? (R41)"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from isoform.tokens import Tokens
from isoform.verify.audit.leaks import pairs_of
from isoform.verify.audit.report import Check, one_line
from isoform.verify.noise import largest_difference, tolerance
from isoform.verify.streams import DOCUMENTS
from isoform.verify.subject import Seen, Stream, Subject

_SHOWS_PADDING = (
    "that these rows give the same states whatever stands behind the mask, and as if they were alone"
)


def check_padding(subject: Subject, side: Literal["left", "right"], *, seed: int = 0) -> Check:
    """Padding on one side: its content changes nothing, and a padded row equals the row alone."""
    name = f"padding-{side}"
    stream = subject.target
    if stream.mask is None:
        return Check(name, None, f"{type(subject.module).__name__} takes no padding mask")
    padded = _pad(subject, stream, side)
    if padded is None:
        return Check(name, None, "the input is too short to pad a row by one position")
    content, real = padded
    generator = torch.Generator().manual_seed(seed)
    inputs = subject.with_content(stream, content, real)
    attempts = [inputs]
    if "position_ids" in subject.parameters and "position_ids" not in subject.kwargs and side == "left":
        attempts.append({**inputs, "position_ids": (real.long().cumsum(-1) - 1).clamp(min=0)})
    results = [_padding_result(subject, stream, tried, content, real, generator, name) for tried in attempts]
    best = next((r for r in results if r.passed), results[0])
    if best.passed and best is not results[0]:
        remark = "; only with position_ids that count real tokens, without them padding shifts every position"
        return dataclasses.replace(best, statement=best.statement + remark)
    if best.passed is False and side == "left" and _pad_id(subject, content) is not None:
        here = Subject(subject.module, inputs)  # positions may be counted by the padding id, not by the mask
        rest = "what other ids behind the mask do: they shift positions"
        only = _alone(subject, here, stream, here.run().output, real, name, rest)
        if only.passed and only.evidence["rows_alone"]:
            statement = "each padded row equals the row alone, if the padding id stands at its padding"
            return dataclasses.replace(only, statement=statement)
    return best


def _pad_id(subject: Subject, content: Tensor) -> int | None:
    pad = getattr(getattr(subject.module, "config", None), "pad_token_id", None)
    return pad if isinstance(pad, int) and not content.is_floating_point() else None


def _padding_result(
    subject: Subject,
    stream: Stream,
    inputs: dict[str, Any],
    content: Tensor,
    real: Tensor,
    generator: torch.Generator,
    name: str,
) -> Check:
    batch, length = content.shape[:2]
    here = Subject(subject.module, inputs)
    try:
        base = here.timed(here.run_inline(), batch, length)
    except Exception as error:
        return Check(name, None, f"it cannot be run with this padding: {one_line(error)}")
    rest = "rows of other lengths, and losses computed over padded positions"
    for _ in range(2):
        changed = here.timed(here.run_inline(here.swap(stream, ~real, generator)), batch, length)
        for a, b in _modules_first(base, changed):
            if a.path != b.path or a.value.shape != b.value.shape or a.value.shape[1] != length:
                continue
            gap = (a.value - b.value).abs().flatten(2).amax(-1).masked_fill(~real, 0.0)
            if not float(gap.max()) <= tolerance(_kept(a.value, real)):
                row, place = divmod(int(gap.argmax()), length)
                return Check(
                    name,
                    False,
                    f"what stands at padded positions reaches position {place} of row {row} at {a.path}: "
                    + _moves(float(gap.max())),
                    {"module": a.path, "row": row, "query": place, "size": float(gap.max())},
                    _SHOWS_PADDING,
                    rest,
                )
    return _alone(subject, here, stream, base[-1].value if base else None, real, name, rest)


def _alone(
    subject: Subject, here: Subject, stream: Stream, output: Tensor | None, real: Tensor, name: str, rest: str
) -> Check:
    content = here.content(stream)
    if output is None:
        return Check(name, True, "the padded content changes nothing", {}, _SHOWS_PADDING, rest)
    alone_too = 0
    for row in range(content.shape[0]):
        keep = real[row].nonzero().flatten()
        single = _one_row(here, stream, row, keep)
        try:
            alone = here.run(single).output
        except Exception:
            continue
        if alone.dim() < 3 or alone.shape[1] != len(keep):
            continue
        alone_too += 1
        gap = largest_difference(alone[0], output[row, keep])
        if gap > tolerance(output):
            return Check(
                name,
                False,
                f"row {row} alone and padded differ by {gap:.3g}: positions or masks count the padding",
                {"row": row, "size": gap, "kind": "position-padding"},
                _SHOWS_PADDING,
                rest,
            )
    n = int((~real).sum())
    return Check(
        name,
        True,
        f"the content of {n} padded positions changes no real one, and "
        + ("each padded row equals the row alone" if alone_too else "no row could be run alone"),
        {"padded_positions": n, "rows": content.shape[0], "rows_alone": alone_too},
        _SHOWS_PADDING,
        rest,
    )


def _one_row(here: Subject, stream: Stream, row: int, keep: Tensor) -> dict[str, Any]:
    single = here.rows(torch.tensor([row]))
    value = single[stream.name]
    if isinstance(value, Tokens):
        single[stream.name] = Tokens(
            value.ids[:, keep],
            None,
            None if value.documents is None else value.documents[:, keep],
            value.prefix,
            None if value.token_types is None else value.token_types[:, keep],
        )
        return single
    content = here.content(stream)[row : row + 1, keep]
    single = here.with_content(stream, content, None, single)
    for extra, given in list(single.items()):
        if (
            extra != stream.name
            and isinstance(given, Tensor)
            and given.dim() == 2
            and extra in ("position_ids", "token_type_ids", *DOCUMENTS)
        ):
            single[extra] = given[:, keep]
    return single


def _pad(subject: Subject, stream: Stream, side: Literal["left", "right"]) -> tuple[Tensor, Tensor] | None:
    """The rows cut to unequal lengths and padded on one side with other content than zeros."""
    content, real = subject.content(stream), subject.real(stream)
    batch, length = content.shape[:2]
    rows = [content[b, real[b]] for b in range(batch)]
    lengths = [len(r) for r in rows]
    if len(set(lengths)) == 1 and lengths[0] == length:
        if length < 2:
            return None
        lengths = [
            max(1, length - (b % 3) * max(1, length // 4)) if b or batch == 1 else length
            for b in range(batch)
        ]
        if batch == 1:
            lengths = [length - 1]
    new, flags = content.clone(), torch.zeros(batch, length, dtype=torch.bool, device=content.device)
    for b, n in enumerate(lengths):
        place = slice(0, n) if side == "right" else slice(length - n, length)
        new[b] = content[b].roll(1, 0)
        new[b, place] = rows[b][:n]
        flags[b, place] = True
    pad = _pad_id(subject, new)
    return new if pad is None else torch.where(flags, new, pad), flags


def check_cross_padding(subject: Subject, *, seed: int = 0) -> Check:
    """What stands at padded source positions does not reach the target."""
    name, stream = "cross-padding", subject.source
    if stream is None:
        return Check(name, None, "there is no second stream to read")
    if stream.mask is None:
        return Check(name, None, f"no padding mask goes with {stream.name}")
    padded = _pad(subject, stream, "right")
    if padded is None:
        return Check(name, None, "the source is too short to pad")
    content, real = padded
    here = Subject(subject.module, subject.with_content(stream, content, real))
    batch, length = subject.content(subject.target).shape[:2]
    generator = torch.Generator().manual_seed(seed)
    base = here.timed(here.run_inline(), batch, length)
    for _ in range(2):
        changed = here.timed(here.run_inline(here.swap(stream, ~real, generator)), batch, length)
        for a, b in _modules_first(base, changed):
            if a.path != b.path or a.value.shape != b.value.shape or _belongs_to(a.value, real):
                continue
            gap = (a.value - b.value).abs().flatten(2).amax(-1)
            if not float(gap.max()) <= tolerance(a.value):
                row, place = divmod(int(gap.argmax()), length)
                text = f"padded source positions reach target position {place} of row {row} at {a.path}"
                evidence = {"module": a.path, "row": row, "query": place, "size": float(gap.max())}
                return Check(name, False, f"{text}: {_moves(float(gap.max()))}", evidence)
    n = int((~real).sum())
    return Check(name, True, f"the content of {n} padded source positions changes no target position")


def _modules_first(base: list[Seen], changed: list[Seen]) -> list[tuple[Seen, Seen]]:
    """The same values in two runs; a module says where something is better than a line does."""
    return [(a, b) for _, a, b in sorted(pairs_of(base, changed), key=lambda pair: pair[1].inline)]


def _belongs_to(value: Tensor, real: Tensor) -> bool:
    """Whether a tensor could as well be the source's own states, whose padded rows do change."""
    return value.shape[:2] == real.shape


def _moves(size: float) -> str:
    return "it becomes NaN" if size != size else f"it moves by {size:.3g}"


def _kept(value: Tensor, real: Tensor) -> Tensor:
    return value[real] if value.shape[:2] == real.shape else value
