"""Queries, keys and values made of one another's rows: which, in words."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from isoform.verify.align import Part, Site


def told(a: Site, b: Site, packed: Mapping[str, str | None]) -> tuple[str, str]:
    """What each of two attentions does.

    Args:
        a: one attention.
        b: the other.
        packed: those of q, k and v that b makes of other rows, and whose these are, see `whose_rows`.
    """
    if None in packed.values():
        return f"takes {_taken(a)} from the packed projection", f"takes {_taken(b)} from it"
    made = (f"{name} of the rows of {other}" for name, other in packed.items())
    return "makes q, k and v of rows of their own", f"makes {', '.join(made)}"


def whose_rows(parts: list[tuple[str, Part]], width: int, index: Tensor) -> str | None:
    """The one of q, k and v whose rows these are; None: several ones'."""
    at, found = 0, set[str]()
    for name, part in (p for p in parts if p[1].linear.weight.shape[1] == width):
        if bool(((index >= at) & (index < at + len(part.columns))).any()):
            found.add(name)
        at += len(part.columns)
    return found.pop() if len(found) == 1 else None


def _taken(site: Site) -> str:
    words: list[str] = []
    for name, part in site.parts():
        columns = part.columns
        runs = (columns.diff() != 1).nonzero()[:, 0].tolist()
        first = int(columns[0]), int(columns[runs[0]] if runs else columns[-1])
        words.append(f"{name} from columns {first[0]}–{first[1]}" + (" and so on" if runs else ""))
    return ", ".join(words)
