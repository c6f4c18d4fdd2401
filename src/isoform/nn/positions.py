"""Where a token stands, as the network sees it: sinusoids, tables, rotation (R43). See also `biases`."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from isoform import config
from isoform.errors import ShapeError
from isoform.nn.linear import lookup


class Sinusoidal(nn.Module):
    """Fixed sines and cosines. Nothing is stored: the configuration rebuilds the table exactly (R37)."""

    def __init__(self, cfg: config.Sinusoidal, width: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.width = width

    def forward(
        self, positions: Int[Tensor, "rows length"], dtype: torch.dtype
    ) -> Float[Tensor, "rows length width"]:
        """The encoding of each position."""
        cfg = self.cfg
        half = (self.width + 1) // 2
        steps = half - 1 if cfg.spacing == "half_width_minus_one" else self.width / 2
        wide = torch.float32 if cfg.precision == "float32" else torch.float64
        ladder = torch.arange(half, dtype=wide, device=positions.device)
        if cfg.precision == "float32":
            frequency = torch.exp(ladder * -(math.log(cfg.base) / steps))
        else:
            frequency = cfg.base ** (-ladder / steps)
        angles = (positions + cfg.offset).to(wide)[..., None] * frequency
        sin, cos = angles.sin(), angles.cos()[..., : self.width // 2]
        if cfg.layout == "concatenated":
            table = torch.cat([sin, cos], -1)
        else:
            table = torch.stack([sin[..., : self.width // 2], cos], -1).flatten(-2)
            table = torch.cat([table, sin[..., self.width // 2 :]], -1) if self.width % 2 else table
        if cfg.precision == "float64_to_float32":
            table = table.float()
        return table.to(dtype)


class Learned(nn.Module):
    """A trained row a position."""

    def __init__(self, cfg: config.Learned, width: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.max_positions + cfg.offset, width))

    def forward(
        self, positions: Int[Tensor, "rows length"], dtype: torch.dtype
    ) -> Float[Tensor, "rows length width"]:
        """The row of each position.

        Raises:
            ShapeError: there is none. Rows may be longer than the table where positions begin anew at each of
                their documents: then the values are looked at (but not while compiling, which cannot).
        """
        asked, limit = positions.shape[-1], self.cfg.max_positions
        if asked > limit and not torch.compiler.is_compiling():
            asked = asked if positions.is_meta else int(positions.max()) + 1
            if asked > limit:
                raise ShapeError(
                    f"{asked} positions asked for, the learned table has {limit}: "
                    "shorten the input or train with a larger max_positions"
                )
        return lookup(positions + self.cfg.offset, self.weight, "position").to(dtype)


def rotary_frequencies(
    cfg: config.Rotary, lengths: Int[Tensor, " batch"] | None, device: torch.device
) -> tuple[Float[Tensor, "rows pairs"], float]:
    """Angular frequency of each channel pair, scaling applied, and the factor on cosines and sines.

    Args:
        cfg: the rotary settings.
        lengths: how long each row is so far; read by dynamic NTK and LongRoPE only.
        device: where to build it.
    """
    dtype = torch.float32 if cfg.precision == "float32" else torch.float64
    ladder = torch.arange(0, cfg.width, 2, dtype=dtype, device=device) / cfg.width
    scaling = cfg.scaling
    if isinstance(scaling, config.DynamicNtkScaling):
        assert lengths is not None
        length = lengths.clamp(min=scaling.original_length).to(dtype)
        grown = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
        theta = cfg.theta * grown ** (cfg.width / (cfg.width - 2))
        return 1.0 / theta[:, None] ** ladder, 1.0
    if isinstance(scaling, config.LongRopeScaling):
        assert lengths is not None
        long = (lengths > scaling.original_length)[:, None]
        above, below = (torch.tensor(d, dtype=dtype, device=device) for d in (scaling.long, scaling.short))
        divisor = torch.where(long, above, below)
        return 1.0 / (divisor * cfg.theta**ladder), scaling.attention_factor
    frequency = (1.0 / cfg.theta**ladder)[None]
    if isinstance(scaling, config.LinearScaling):
        return frequency / scaling.factor, 1.0
    if isinstance(scaling, config.Llama3Scaling):
        return _llama3(frequency, scaling), 1.0
    if isinstance(scaling, config.YarnScaling):
        return _yarn(frequency, scaling, cfg), scaling.attention_factor
    return frequency, 1.0


def _llama3(frequency: Tensor, cfg: config.Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / frequency
    low = cfg.original_length / cfg.low_frequency_factor
    high = cfg.original_length / cfg.high_frequency_factor
    span = cfg.high_frequency_factor - cfg.low_frequency_factor
    smooth = (cfg.original_length / wavelength - cfg.low_frequency_factor) / span
    slow = frequency / cfg.factor
    between = (1 - smooth) * slow + smooth * frequency
    scaled = torch.where(wavelength > low, slow, frequency)
    return torch.where((wavelength >= high) & (wavelength <= low), between, scaled)


def _yarn(frequency: Tensor, cfg: config.YarnScaling, rotary: config.Rotary) -> Tensor:
    def dimension(turns: float) -> float:
        ratio = cfg.original_length / (turns * 2 * math.pi)
        return rotary.width * math.log(ratio) / (2 * math.log(rotary.theta))

    low, high = dimension(cfg.beta_fast), dimension(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.width - 1)
    high = high + 0.001 if low == high else high
    pairs = torch.arange(rotary.width // 2, dtype=frequency.dtype, device=frequency.device)
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return frequency / cfg.factor * (1 - keep) + frequency * keep


def rotary_table(
    cfg: config.Rotary,
    positions: Int[Tensor, "rows length"],
    lengths: Int[Tensor, " batch"] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "rows 1 length width"], Float[Tensor, "rows 1 length width"]]:
    """Cosine and signed sine of every position and channel, computed once a forward pass for all layers.

    A pair (a, b) turns to (a cos - b sin, b cos + a sin): each channel times its cosine, plus its partner
    times a sine that is negative for the first of the pair.
    """
    frequency, factor = rotary_frequencies(cfg, lengths, positions.device)
    angles = positions[:, None, :, None].to(frequency.dtype) * frequency[:, None, None, :]
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    if cfg.layout == "half":
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)


def rotate(
    x: Float[Tensor, "batch heads length width"], table: tuple[Tensor, Tensor], layout: str
) -> Float[Tensor, "batch heads length width"]:
    """Turn each channel pair by its position's angle; channels beyond the rotary width pass through."""
    cos, sin = table
    width = cos.shape[-1]
    passing = x.shape[-1] - width
    turned, rest = x.split((width, passing), -1) if passing else (x, None)
    if layout == "half":
        partners = turned.roll(width // 2, -1)
    else:
        partners = turned.unflatten(-1, (width // 2, 2)).flip(-1).flatten(-2)
    out = torch.addcmul(turned * cos, partners, sin).to(x.dtype)  # under autocast the table is wider
    return out if rest is None else torch.cat([out, rest], -1)
