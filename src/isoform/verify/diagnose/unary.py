"""What a function of one vector per token does: nothing, scale, add, normalise.

The function is asked, not read: it is run on vectors made for the purpose, so that a norm's ε shows as
clearly as its gain, whatever the code that computes it looks like.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from isoform.verify.align import Model

Function = Callable[[Tensor], Tensor]
CLOSE = 2e-6


@dataclasses.dataclass(eq=False)
class Step:
    """One step of a function of vectors.

    Attributes:
        kind: "affine" (``scale · x + shift``), "norm", "pool" (tokens become one vector a row), or "other".
        scale: factor, a number where all channels have the same.
        shift: ``[B, T, d]`` what is added, None where nothing is.
        norm: "layer" or "rms".
        gain, bias: ``[d]`` of a norm.
        eps: what keeps a norm finite.
        outside: ε is added to the root and not under it.
        words: how a pooling is done.
    """

    kind: str
    scale: float | Tensor = 1.0
    shift: Tensor | None = None
    norm: str = ""
    gain: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    outside: bool = False
    words: str = ""

    @property
    def identity(self) -> bool:
        """It hands its argument on."""
        return (
            self.kind == "affine"
            and self.shift is None
            and isinstance(self.scale, float)
            and self.scale == 1.0
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "affine":
            return x * self.scale + (0.0 if self.shift is None else self.shift)
        assert self.gain is not None and self.bias is not None
        x = x - x.mean(-1, keepdim=True) if self.norm == "layer" else x
        power = x.square().mean(-1, keepdim=True)
        root = power.sqrt() + self.eps if self.outside else (power + self.eps).sqrt()
        return x / root * self.gain + self.bias

    def __str__(self) -> str:
        if self.kind == "other":
            return "a function of its own"
        if self.kind == "pool":
            return self.words
        if self.kind == "affine":
            if self.identity:
                return "hands it on"
            words = (
                []
                if isinstance(self.scale, float) and self.scale == 1.0
                else [f"multiplies by {said(self.scale)}"]
            )
            return " and ".join([*words, *(["adds a vector"] if self.shift is not None else [])])
        name = {"layer": "LayerNorm", "rms": "RMSNorm"}[self.norm]
        return f"{name} with ε = {self.eps:.3g}{' outside the root' if self.outside else ''}"


def said(value: float | Tensor) -> str:
    """A factor in words."""
    return f"{value:.6g}" if isinstance(value, float) else "a vector"


def function(
    model: Model, source: int, target: int, width: int, held: Collection[int] = ()
) -> Function | None:
    """A part of a model as a function of ``[B, T, width]``; nodes in ``held`` are zero."""
    graph = model.graph
    fixed = {n: torch.zeros_like(graph.values[n]) for n in held}
    if model.of_node(source, width) is None or model.of_node(target) is None:
        return None

    def run(x: Tensor) -> Tensor:
        if source == target:
            return x
        try:
            out = graph.evaluate(target, {**fixed, source: graph.shaped(x, source, width)})
        except (RuntimeError, IndexError):  # sizes that hang on the values
            return torch.full_like(x, math.nan)
        found = graph.canonical(out, out.shape[-1], target)
        assert found is not None
        return found

    return run


def describe(
    model: Model, source: int, target: int, width: int, shape: torch.Size, held: Collection[int] = ()
) -> list[Step]:
    """The steps between two nodes, one or two of them; a single "other" where they are none of these."""
    whole = function(model, source, target, width, held)
    other = [Step("other")]
    if whole is None:
        return other
    real = model.real(model.role(source))
    step = identify(whole, shape, real)
    if step.kind != "other":
        return [step]
    chain = model.structure.chain(target)
    middles = chain[1 : chain.index(source)] if source in chain else []
    for middle in middles:
        if model.graph.values[middle].shape[-1] != width:
            continue
        first, second = (
            function(model, source, middle, width, held),
            function(model, middle, target, width, held),
        )
        if first is None or second is None:
            continue
        a = identify(first, shape, real)
        if a.kind == "other" or a.identity:
            continue
        b = identify(second, shape, real)
        if b.kind != "other" and not b.identity:
            return [a, b]
    return other


def identify(f: Function, shape: torch.Size, real: Tensor | None = None) -> Step:
    """One step that does what ``f`` does on vectors of ``shape``, or "other".

    Args:
        f: the function.
        shape: ``[B, T, d]``.
        real: ``[B, T]``; what is done with padding does not matter.
    """
    if real is not None and real.shape == shape[:2] and not bool(real.all()):
        step = identify(_at_real(f, real, shape), torch.Size((1, int(real.sum()), shape[-1])))
        if step.shift is not None:
            shift = step.shift.new_zeros(shape)
            shift[real] = step.shift[0]
            step.shift = shift
        return step
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = f(x)
    if y.shape != x.shape or not bool(y.isfinite().all()):
        return Step("other")
    for step in (_affine(f, x, y), _norm(f, x, y)):
        if step is not None and all(close(step(z), f(z)) for z in (x, 0.03 * x.flip(-1) + 0.01)):
            return step
    return Step("other")


def _at_real(f: Function, real: Tensor, shape: torch.Size) -> Function:
    def run(x: Tensor) -> Tensor:
        whole = x.new_zeros(shape)
        whole[real] = x[0]
        out = f(whole)
        return out[real][None] if out.shape[:2] == real.shape else out

    return run


def close(a: Tensor, b: Tensor, tolerance: float = CLOSE) -> bool:
    """Equal up to the rounding of constants."""
    if a.shape != b.shape:
        return False
    return gap(a, b) <= tolerance


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value; what is NaN in both, or ±∞, is the same."""
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    if not bool(a.isfinite().all()):
        same = (a == b) | (a.isnan() & b.isnan())
        a, b = a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)
    difference = (a - b).abs()
    if not bool(difference.isfinite().all()):
        return math.inf
    return float(difference.max() / torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-30))


def _affine(f: Function, x: Tensor, y: Tensor) -> Step | None:
    shift = (y + f(-x)) / 2
    factor = (y - shift) / x
    flat = factor.reshape(-1, x.shape[-1])
    scale = flat.median(0).values
    if not bool(scale.isfinite().all()):
        return None
    none = float(shift.abs().max()) <= 1e-9 * float(y.abs().max().clamp(min=1e-30))
    one = float((scale - scale[0]).abs().max()) <= 1e-7 * float(scale.abs().max())
    value: float | Tensor = float(scale[0]) if one else scale
    if isinstance(value, float) and abs(value - 1) < 1e-9:
        value = 1.0
    return Step("affine", scale=value, shift=None if none else shift)


def _norm(f: Function, x: Tensor, y: Tensor) -> Step | None:
    large = 1e6 * x
    up, down = f(large), f(-large)
    bias = ((up + down) / 2).reshape(-1, x.shape[-1]).mean(0)
    moved = f(large + 1e6)
    norm = "layer" if close(moved, up, 1e-7) else "rms"
    centred = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    unit = centred / centred.square().mean(-1, keepdim=True).sqrt()
    flat_up, flat_unit = (up - bias).reshape(-1, x.shape[-1]), unit.reshape(-1, x.shape[-1])
    gain = (flat_up * flat_unit).sum(0) / flat_unit.square().sum(0)
    if not close(unit * gain + bias, up, 1e-7):
        return None
    step = Step("norm", norm=norm, gain=gain, bias=bias)
    if float(bias.abs().max()) < 1e-9 * float(gain.abs().max()):
        step.bias = torch.zeros_like(bias)
    step.eps, step.outside = _eps(f, centred, unit, step)
    return step


def _eps(f: Function, centred: Tensor, unit: Tensor, step: Step) -> tuple[float, bool]:
    """Shrink the argument until ε dominates, and solve for it at two sizes."""
    assert step.gain is not None and step.bias is not None
    full = unit * step.gain
    estimates: list[tuple[float, float]] = []
    for exponent in range(16):
        size = 10.0 ** (-exponent / 2)
        y = f(size * centred) - step.bias
        ratio = float((y * full).sum() / full.square().sum())
        if not math.isfinite(ratio) or ratio <= 0:
            break
        if 0.05 < ratio < 0.97:
            root = size * float(centred.square().mean(-1).sqrt().mean())
            token = (y * full).sum(-1) / full.square().sum(-1)
            power = (size * centred).square().mean(-1)
            inside = (power * (1 / token.square() - 1)).median()
            outside = (power.sqrt() * (1 / token - 1)).median()
            estimates.append((float(inside), float(outside)))
            del root
    if not estimates:
        return 0.0, False
    inside, outside = [e[0] for e in estimates], [e[1] for e in estimates]
    spread = (max(inside) / max(min(inside), 1e-300), max(outside) / max(min(outside), 1e-300))
    if spread[1] < spread[0] and spread[0] > 1.01:
        return sum(outside) / len(outside), True
    return sum(inside) / len(inside), False
