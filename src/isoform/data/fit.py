"""Limits on length, applied as the run file says; nothing is cut or left out uncounted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from isoform.data.config import OverLong
from isoform.data.ragged import Ints
from isoform.data.records import Record, Records
from isoform.errors import DataError


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the limits did.

    Attributes:
        kept: ``[N]`` the record each row comes from.
        dropped: how many records were over a limit and left out.
        truncated: how many were cut.
    """

    kept: Ints
    dropped: int
    truncated: int


def fit_lengths(
    records: Records[Record],
    lengths: Mapping[str, tuple[Ints, int | None]],
    over_long: OverLong,
) -> Fit:
    """Apply the limits to lengths: which records stay, and how many were dropped or are to be cut.

    Raises:
        DataError: a record over its limit where the policy is ``"error"``.
    """
    over = {n: sizes > limit for n, (sizes, limit) in lengths.items() if limit is not None}
    bad = np.logical_or.reduce(list(over.values())) if over else np.zeros(len(records), dtype=bool)
    if not bad.any() or over_long == "truncate":
        return Fit(np.arange(len(records)), 0, int(bad.sum()))
    if over_long == "error":
        first = int(bad.argmax())
        name = next(n for n, mask in over.items() if mask[first])
        sizes, limit = lengths[name]
        raise DataError(
            f"{records.where(first)}: {name} of {int(sizes[first])} tokens, the limit is {limit}"
            f' ({int(bad.sum())} such in {records.name}); raise it, or set over_long = "drop" or "truncate"'
        )
    return Fit(np.flatnonzero(~bad), int(bad.sum()), 0)
