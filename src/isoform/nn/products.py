"""x ↦ x Wᵀ + b with the weight laid out for one kind of arithmetic, made once and for inference only.

A `Linear`, `Packed` or `TokenHead` whose ``product`` is set computes through it. PyTorch's operators for this
are private or on their way out, so each is called here or in `fbgemm` alone, and where it is missing, or not
made for the device, the same numbers come from a plain product with the weight the form stands for.

Int8 weights are symmetric with one scale an output channel: w ≈ s · q, q in -127 … 127 (R28).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch.nn import functional as F

from isoform.native import loaded
from isoform.native.eights import WIDEST, laid_out, rounded_rows
from isoform.nn.fbgemm import Halves, attempt, halves

Form = Literal["float32", "bfloat16", "int8", "int8_dynamic"]
FORMS: tuple[Form, ...] = get_args(Form)
SHARES = (1.0, 0.97, 0.94, 0.91, 0.88)
"""Scales that are tried, as shares of the one that reaches the largest element of a row."""
SMALL = 2**16
"""Elements of a weight below which oneDNN takes longer to begin than MKL to multiply."""
MIDDLING = 256
"""Rows up to which the compiled product, and oneDNN's where there is none, beats MKL's …"""
MIDDLING_WIDE = 64
"""… and with AVX-512 that up to which it beats oneDNN's, which is faster than MKL's for any number there."""
FEW = 8
"""Rows up to which the kernel for bfloat16 beats widening the weight and multiplying plainly."""


class Product:
    """One affine map.

    Args:
        weight: ``[out, in]`` what the form stands for, or the numbers it is made of.
        bias: ``[out]``, added in float32.
    """

    form: Form

    def __call__(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        """Apply the map; the result has the type of ``x``."""
        raise NotImplementedError

    def dense(self) -> Float[Tensor, "out width"]:
        """The weight that the form stands for, in float32."""
        raise NotImplementedError

    def stored(self) -> Mapping[str, Tensor]:
        """What has to be kept on disk, by a suffix to the weight's name."""
        raise NotImplementedError


class PackedFloat32(Product):
    """The float32 weight as it is, which the compiled step reads where it lies, and in the block layout of
    oneDNN where that is faster."""

    form = "float32"

    def __init__(self, weight: Float[Tensor, "out width"], bias: Float[Tensor, " out"] | None) -> None:
        self._weight = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        machine, rows, wide = loaded(x), x.numel() // x.shape[-1], _wide_registers()
        if machine is not None and rows <= (MIDDLING_WIDE if wide else MIDDLING):
            return machine.linear(x, self._weight, None, self._bias)
        # oneDNN takes 30 µs to begin.
        plain = rows == 1 or (rows > MIDDLING and not wide)
        if plain or x.dtype != torch.float32 or self._packed is None:
            return F.linear(x, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    @functools.cached_property
    def _packed(self) -> Tensor | None:  # another copy, made where it is used
        worth = self._weight.dtype == torch.float32 and self._weight.numel() >= SMALL
        return attempt(_pack_float32, self._weight) if worth else None

    def dense(self) -> Float[Tensor, "out width"]:
        return self._weight

    def stored(self) -> Mapping[str, Tensor]:
        return {"": self._weight}


class Bfloat16(Product):
    """The weight rounded to bfloat16; sums are made in float32. Inputs are rounded too where there are units
    for bfloat16, or no other way to read the weight in two bytes."""

    form = "bfloat16"

    def __init__(self, weight: Float[Tensor, "out width"], bias: Float[Tensor, " out"] | None) -> None:
        self._weight = weight.to(torch.bfloat16).contiguous()
        self._bias = bias
        # Without units of its own a CPU multiplies bfloat16 slower than float32, but reads it twice as fast.
        self._many = weight.is_cuda or bool(attempt(_multiplies_bfloat16))

    def __call__(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        machine = None if self._many else loaded(x)
        if machine is not None:
            return machine.linear(x, self._weight, None, self._bias)
        if x.dtype == torch.float32 and self._halves is not None:
            return self._halves(x)
        if not self._many and x.numel() > FEW * x.shape[-1]:
            return F.linear(x.to(torch.bfloat16).float(), self._weight.float(), self._bias).to(x.dtype)
        out = F.linear(x.to(torch.bfloat16), self._weight).to(x.dtype)
        return out if self._bias is None else out.add_(self._bias)

    @functools.cached_property
    def _halves(self) -> Halves | None:  # another copy, made where it is used
        return None if self._many else halves(self._weight, self._bias)

    def dense(self) -> Float[Tensor, "out width"]:
        return self._weight.float()

    def stored(self) -> Mapping[str, Tensor]:
        return {"": self._weight}


class Int8Weight(Product):
    """Int8 weights. Without a compiled product the numbers are multiplied as halves, and exact."""

    form = "int8"

    def __init__(
        self,
        numbers: Int8[Tensor, "out width"],
        scales: Float[Tensor, " out"],
        bias: Float[Tensor, " out"] | None,
    ) -> None:
        self._numbers, self._scales, self._bias = numbers.contiguous(), scales, bias

    def __call__(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        machine = loaded(x) if x.dtype == self._scales.dtype else None
        if machine is not None:
            return machine.linear(x, self._numbers, self._scales, self._bias)
        out = self._sums(x)
        return out.mul_(self._scales) if self._bias is None else torch.addcmul(self._bias, out, self._scales)

    def _sums(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        """x times the numbers alone."""
        if x.dtype == torch.float32 and self._halves is not None:
            return self._halves(x)
        return F.linear(x, self._numbers.to(x.dtype))

    @functools.cached_property
    def _halves(self) -> Halves | None:  # another copy, made where it is used
        return halves(self._numbers, None)

    def dense(self) -> Float[Tensor, "out width"]:
        return self._numbers.float() * self._scales[:, None]

    def stored(self) -> Mapping[str, Tensor]:
        return {"": self._numbers, "_scale": self._scales}


class Int8Dynamic(Int8Weight):
    """Int8 weights, and inputs rounded to whole numbers from -127 to 127, with a scale a row."""

    form = "int8_dynamic"
    _laid: Tensor | None = None

    def __call__(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        machine = loaded(x) if x.dtype == torch.float32 else None
        laid = None if machine is None else self.laid()
        if machine is not None and laid is not None:
            return machine.eights(x, laid, self._scales, self._bias)
        whole, size = rounded_rows(x)
        out = self._sums(whole).mul_(size).mul_(self._scales)
        return out if self._bias is None else out.add_(self._bias)

    def laid(self) -> Int8[Tensor, "blocks bytes"] | None:
        """The numbers in the order the compiled product reads them in; None: sums could overflow."""
        if self._laid is None and self._numbers.shape[1] <= WIDEST:
            self._laid = laid_out(self._numbers)
        return self._laid


def product(form: Form, weight: Float[Tensor, "out width"], bias: Float[Tensor, " out"] | None) -> Product:
    """A weight in a form."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if form == "float32":
        return PackedFloat32(weight, bias)
    if form == "bfloat16":
        return Bfloat16(weight, bias)
    numbers, scales = rounded(weight)
    return (Int8Weight if form == "int8" else Int8Dynamic)(numbers, scales, bias)


def restored(form: Form, stored: Mapping[str, Tensor], bias: Float[Tensor, " out"] | None) -> Product:
    """The product that `Product.stored` was written from."""
    if form in ("float32", "bfloat16"):
        return product(form, stored[""], bias)
    kind = Int8Weight if form == "int8" else Int8Dynamic
    return kind(stored[""], stored["_scale"], None if bias is None else bias.detach())


def rounded(weight: Float[Tensor, "out width"]) -> tuple[Int8[Tensor, "out width"], Float[Tensor, " out"]]:
    """Nearest multiples of a scale a row, at most 127 of them; of `SHARES` the one with the least squared
    error."""
    wide = weight.float()
    whole = wide.abs().amax(1, keepdim=True) / 127
    whole = torch.where(whole > 0, whole, 1.0)
    least = torch.full_like(whole, torch.inf)
    scales = whole
    for share in SHARES:
        tried = whole * share
        error = ((wide / tried).round_().clamp_(-127, 127) * tried - wide).square().sum(1, keepdim=True)
        scales = torch.where(error < least, tried, scales)
        least = torch.minimum(error, least)
    return nearest(wide, scales[:, 0]), scales[:, 0]


def nearest(weight: Float[Tensor, "out width"], scales: Float[Tensor, " out"]) -> Int8[Tensor, "out width"]:
    """The multiples of given scales."""
    return (weight.float() / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)


def _pack_float32(weight: Tensor) -> Tensor | None:
    if weight.device.type != "cpu":
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 2 * FEW)
    torch.ops.mkldnn._linear_pointwise(weight[:1] * 0, packed, None, "none", [], "")  # or say that it cannot
    return packed


@functools.cache
def _wide_registers() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
