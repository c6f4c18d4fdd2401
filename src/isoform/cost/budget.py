"""The gated feed-forward width that costs what a two-layer one does (R10, exercise 6.3)."""

from __future__ import annotations

import dataclasses

from isoform.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class GatedWidth:
    """Widths g for which 3dg stands against 2df.

    Attributes:
        exact: 2f/3.
        down: the largest multiple that is not above it; 0 when there is none.
        up: the smallest multiple that is not below it.
        down_difference: 3·down - 2f, parameters per unit of d (negative: fewer).
        up_difference: 3·up - 2f, parameters per unit of d.
        down_share: ``down_difference`` as a share of 2f.
        up_share: ``up_difference`` as a share of 2f.
    """

    exact: float
    down: int
    up: int
    down_difference: int
    up_difference: int
    down_share: float
    up_share: float

    @property
    def nearest(self) -> int:
        """The multiple with the smaller difference in parameters; the larger one when they tie."""
        return self.down if self.down and abs(self.down_difference) < abs(self.up_difference) else self.up


def equal_budget_width(f: int, multiple: int = 256) -> GatedWidth:
    """Solve 2df = 3dg for g without biases, rounded to a multiple both ways (R10).

    Args:
        f: width of the two-layer network.
        multiple: what the gated width has to be divisible by.

    Raises:
        ConfigError: a width or a multiple below one.
    """
    if f < 1 or multiple < 1:
        raise ConfigError(f"equal_budget_width: width {f} and multiple {multiple} must be at least 1")
    down = 2 * f // (3 * multiple) * multiple
    up = -(-2 * f // (3 * multiple)) * multiple
    low, high = 3 * down - 2 * f, 3 * up - 2 * f
    return GatedWidth(
        exact=2 * f / 3,
        down=down,
        up=up,
        down_difference=low,
        up_difference=high,
        down_share=low / (2 * f),
        up_share=high / (2 * f),
    )
