"""What each part reads of the stream, and what each sum adds up: where that is another in the two models."""

from __future__ import annotations

import dataclasses

from isoform.verify.align import Key, Model
from isoform.verify.diagnose.case import Case


@dataclasses.dataclass(eq=False)
class Wire:
    """A function of one vector per token between two points of the stream.

    Args:
        name: its key in both models.
        what: "trunk" behind a sum, "read" in front of a map, "add" into a sum.
        source, target: nodes.
    """

    name: Key
    what: str
    source: int
    target: int
    held: tuple[int, ...] = ()


def tops(model: Model, node: int) -> dict[Key, int]:
    """What a sum is made of, by key."""
    found: dict[Key, int] = {}
    structure = model.structure
    for arg in model.graph.live_args(node):
        for top in structure.tops(arg):
            if top in model.sources and top not in structure.entries:
                found[model.sources[top]] = top
            else:
                found[model.state_key(top)] = structure.trunk.get(top, top)
    return found


def reading(model: Model, node: int) -> dict[Key, int]:
    structure = model.structure
    found: dict[Key, int] = {}
    for top in structure.tops(node):
        key = model.sources[top] if top in structure.by_out else model.state_key(top)
        found[key] = structure.trunk.get(top, top)
    return found


def explain_wiring(case: Case) -> None:
    """Sublayers that read another point of the stream than in the other model."""
    a, b = case.a, case.b
    only_a, only_b = set(a.states) - set(b.states), set(b.states) - set(a.states)
    if case.torn or (not only_a and not only_b):
        return
    for key, rb in b.reads.items():
        ra = a.reads.get(key)
        if ra is None:
            continue
        tops_a, tops_b = set(reading(a, ra)), set(reading(b, rb))
        if tops_a == tops_b:
            continue
        place = case.place(reader(case, key), ra, rb)
        seen_a, seen_b = _contents(tops_a), _contents(tops_b)
        extra = {k[0] for k in seen_a ^ seen_b}
        if key[0] == "inner" and "site" in extra:
            later, sooner = "reads the stream after attention", "reads the stream before attention"
            said_a, said_b = (later, sooner) if len(seen_a) > len(seen_b) else (sooner, later)
            case.add("parallel-residual", place, said_a, said_b, rb)
            return
        missing = next((a.states[t] for t in tops_a - tops_b if t in only_a), None)
        if missing is not None and len(seen_b) < len(seen_a):
            place = case.place("sum of the stream", missing, rb)
        case.add(
            "unexplained",
            place,
            f"reads a sum of {len(seen_a)} contributions",
            f"reads a sum of {len(seen_b)}",
            rb,
            hint="a residual connection is missing, added or elsewhere: compare the sums before this part",
        )
        return


def _contents(tops: set[Key]) -> set[Key]:
    found: set[Key] = set()
    for key in tops:
        if key[0] == "state":
            found |= set(key[1])  # type: ignore[arg-type]
        else:
            found.add(key)
    return found


def reader(case: Case, key: Key) -> str:
    if key[0] == "site":
        cross = any(s.cross for s in case.a.structure.sites if s.index == key[1])
        return "cross-attention" if cross else "attention"
    return "feed-forward" if key[0] == "inner" else "end of the stack"
