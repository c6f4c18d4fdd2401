"""Which positions a module's output depends on, by changed inputs and by gradient (R41)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isoform.tokens import Tokens
from isoform.verify.derivatives import derivatives
from isoform.verify.noise import tolerance
from isoform.verify.subject import Seen, Subject, watching

MOST_PLACES = 12  # positions that are tried as the one changed; evenly spread when the input is longer


DRAWS = 2  # different contents tried at each: a norm can hide one of them completely (exercise 6.9)


@dataclasses.dataclass(frozen=True)
class Leak:
    """One dependence that should not be there: places count from 0."""

    module: str
    query: int
    key: int
    size: float
    row: int


@dataclasses.dataclass(frozen=True)
class Leaks:
    """All forbidden dependences found, in order of dataflow, and how many pairs were tried."""

    found: tuple[Leak, ...]
    pairs: int
    leaking: int
    modules: int

    @property
    def first(self) -> Leak | None:
        """The earliest module's, at its largest."""
        return self.found[0] if self.found else None


def changed_places(length: int) -> list[int]:
    """The positions to be changed, spread over the sequence."""
    if length <= MOST_PLACES:
        return list(range(length))
    return sorted({round(i * (length - 1) / (MOST_PLACES - 1)) for i in range(MOST_PLACES)})


def search_leaks(subject: Subject, forbidden: Callable[[int], Tensor], *, seed: int = 0) -> Leaks:
    """Change one position at a time and look for changes where there must be none.

    Args:
        subject: the module and inputs; it is run in the mode it is in.
        forbidden: for a key position k the ``[B, T]`` places that must not depend on it.
        seed: of the contents drawn.
    """
    stream = subject.target
    content = subject.content(stream)
    batch, length = content.shape[:2]
    generator = torch.Generator().manual_seed(seed)
    base = _counted(subject.timed(subject.run_inline(), batch, length))
    leaks: dict[int, Leak] = {}
    pairs: set[tuple[int, int]] = set()
    leaking: set[tuple[int, int]] = set()
    for key in changed_places(length):
        where = forbidden(key)
        pairs |= {(q, key) for q in where.any(0).nonzero().flatten().tolist()}
        if not where.any():
            continue
        at = torch.zeros(batch, length, dtype=torch.bool, device=content.device)
        at[:, key] = True
        for draw in range(DRAWS + (1 if content.is_floating_point() else 0)):
            inputs = subject.swap(stream, at, generator)
            if draw == DRAWS:  # the mirror image turns every sign that a norm looks at
                inputs = subject.put(stream, torch.where(at[..., None], -content, content))
            run = _counted(subject.timed(subject.run_inline(inputs), batch, length))
            for order, a, b in pairs_of(base, run):
                _note(order, a, b, where, key, leaks, leaking)
    own = [i for i, s in enumerate(base) if not s.inline]
    named = any(i in leaks for i in own[:-1])  # a module says where it is better than a line
    found = tuple(leaks[i] for i in sorted(leaks) if not named or not base[i].inline)
    return Leaks(found, len(pairs), len(leaking), len(own))


def _counted(seen: list[Seen]) -> list[Seen]:
    """What is computed several times at one place, in a loop over layers say, gets the number of the time."""
    times: dict[str, int] = {}
    for s in seen:
        times[s.path] = times.get(s.path, 0) + 1
    counts: dict[str, int] = {}
    found: list[Seen] = []
    for s in seen:
        counts[s.path] = counts.get(s.path, 0) + 1
        more = f", time {counts[s.path]} of {times[s.path]}" if times[s.path] > 1 else ""
        found.append(dataclasses.replace(s, path=s.path + more))
    return found


def pairs_of(base: list[Seen], run: list[Seen]) -> list[tuple[int, Seen, Seen]]:
    """The same values in two runs; only those of modules where other contents take another way."""
    if [s.path for s in base] == [s.path for s in run]:
        return [(order, a, b) for order, (a, b) in enumerate(zip(base, run, strict=True))]
    own = [(i, s) for i, s in enumerate(base) if not s.inline]
    other = [s for s in run if not s.inline]
    return [(i, a, b) for (i, a), b in zip(own, other, strict=False)]


def _note(
    order: int,
    a: Seen,
    b: Seen,
    where: Tensor,
    key: int,
    leaks: dict[int, Leak],
    leaking: set[tuple[int, int]],
) -> None:
    if a.path != b.path or a.value.shape != b.value.shape:
        return
    gap = (a.value - b.value).abs().flatten(2).nan_to_num(nan=0.0, posinf=0.0).amax(-1)
    gap = gap.masked_fill(~where, 0.0)
    size = float(gap.max())
    if size <= tolerance(a.value):
        return
    row, query = divmod(int(gap.argmax()), gap.shape[1])
    leaking |= {(q, key) for q in (gap > tolerance(a.value)).any(0).nonzero().flatten().tolist()}
    if order not in leaks or size > leaks[order].size:
        leaks[order] = Leak(a.path, query, key, size, row)


def gradient_leaks(subject: Subject, forbidden: Callable[[int], Tensor], *, seed: int = 0) -> Leaks | None:
    """The same question asked of the gradient of each layer at a query with respect to the embedded input.

    Returns None when the embedded input cannot be found or does not carry a gradient.
    """
    stream = subject.target
    content = subject.content(stream)
    batch, length = content.shape[:2]
    run, leaf = _run_with_leaf(subject)
    if leaf is None:
        return None
    queries = [q for q in changed_places(length) if q < length - 1][:: max(1, length // 4)] or [0]
    allowed = _allowed_keys(forbidden, batch, length, content.device)
    values = _spread([s for s in run if s.value.requires_grad], 24)
    generator = torch.Generator().manual_seed(seed)
    found: list[Leak] = []
    pairs, leaking = 0, 0
    for s in values:
        worst: Leak | None = None
        for q in queries:
            weight = torch.randn(s.value[:, q].shape, generator=generator, dtype=torch.float64).to(s.value)
            (grad,) = derivatives((s.value[:, q] * weight).sum(), [leaf])
            if grad is None:
                continue
            norms = grad.flatten(2).norm(dim=-1)
            norms = norms if subject.batch_first or not content.is_floating_point() else norms.t()
            scale = float(norms.max())
            bad = norms.masked_fill(allowed[:, q], 0.0)
            pairs += int((~allowed[:, q]).any(0).sum())
            if float(bad.max()) > 64 * torch.finfo(norms.dtype).eps * scale:
                row, key = divmod(int(bad.argmax()), length)
                leaking += int((bad > 0).any(0).sum())
                if worst is None or float(bad.max()) > worst.size:
                    worst = Leak(s.path, q, key, float(bad.max()), row)
        if worst is not None:
            found.append(worst)
    return Leaks(tuple(found), pairs, leaking, len(values))


def _allowed_keys(
    forbidden: Callable[[int], Tensor], batch: int, length: int, device: torch.device
) -> Tensor:
    """``[B, query, key]`` True where the query may depend on the key."""
    return torch.stack([~forbidden(k).to(device) for k in range(length)], -1).expand(batch, length, length)


def _run_with_leaf(subject: Subject) -> tuple[list[Seen], Tensor | None]:
    stream = subject.target
    content = subject.content(stream)
    batch, length = content.shape[:2]
    leaf: list[Tensor] = []
    kwargs = subject.given()
    handles: list[Any] = []
    if content.is_floating_point():
        leaf.append(kwargs[stream.name].detach().clone().requires_grad_())
        kwargs[stream.name] = leaf[0]
    else:

        def cut(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            given = args[0].ids if args and isinstance(args[0], Tokens) else args[0] if args else None
            mine = (
                isinstance(given, Tensor)
                and given.shape[:2] == (batch, length)
                and not given.is_floating_point()
            )
            if leaf or not mine or not isinstance(output, Tensor) or output.shape[:2] != (batch, length):
                return None
            assert isinstance(given, Tensor)
            if not torch.equal(given, content):
                return None
            leaf.append(output.detach().clone().requires_grad_())
            return leaf[0]

        handles = [m.register_forward_hook(cut) for p, m in subject.module.named_modules() if p]
    seen: list[Seen] = []
    try:
        with torch.enable_grad(), watching(subject.module, seen):
            result = subject.module(**kwargs)
    except RuntimeError:
        return [], None
    finally:
        for handle in handles:
            handle.remove()
    from isoform.verify.subject import Run, main_tensor

    run = Run(tuple(seen), subject.batch_major(main_tensor(result)), result)
    root = leaf[0] if leaf else None
    return subject.timed(run, batch, length), root


def _spread(values: list[Seen], most: int) -> list[Seen]:
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
