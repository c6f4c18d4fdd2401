"""What each part reads of the stream, and what each sum adds up: where that is another in the two models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from isoform.verify.align import Key, Model
from isoform.verify.diagnose.case import Case, Raw
from isoform.verify.diagnose.pairing import order


@dataclasses.dataclass(eq=False)
class Wire:
    """A function of one vector per token between two points of the stream.

    Args:
        name: its key in both models.
        what: "trunk" behind a sum, "read" in front of a map, "add" into a sum.
        source, target: nodes.
        held: other nodes that the sum is made of.
        half: it ends or begins where tokens become one vector a row.
    """

    name: Key
    what: str
    source: int
    target: int
    held: tuple[int, ...] = ()
    half: bool = False


def tops(model: Model, node: int) -> dict[Key, int]:
    """What a sum is made of, by key; a map's result that stands for a sum is made of itself."""
    if node in model.structure.by_out:
        return {model.sources[node]: node}
    found: dict[Key, int] = {}
    for arg in model.graph.live_args(node):
        found |= _behind(model, arg)
    return found


def reading(model: Model, node: int) -> dict[Key, int]:
    """What a map reads, by key."""
    return _behind(model, node)


def _behind(model: Model, node: int) -> dict[Key, int]:
    return {model.top_key(t): model.structure.trunk.get(t, t) for t in model.structure.tops(node)}


def matched(
    a: Model, b: Model, ones: dict[Key, int], twos: dict[Key, int]
) -> list[tuple[Key, int, int]] | None:
    """What two parts are made of, in pairs; None: it is not the same.

    A sum that one of the models does not have is taken as what it adds up. Where all else is the same, the
    one thing left in each model corresponds: that these differ is said of the wiring.
    """
    ones, twos = _spread(a, ones, b), _spread(b, twos, a)
    pairs = [(name, ones[name], twos[name]) for name in twos if name in ones]
    left = [n for n in ones if n not in twos], [n for n in twos if n not in ones]
    if not left[0] and not left[1]:
        return pairs
    if len(left[0]) != 1 or len(left[1]) != 1:
        return None
    return [*pairs, (left[1][0], ones[left[0][0]], twos[left[1][0]])]


def _spread(model: Model, found: dict[Key, int], other: Model) -> dict[Key, int]:
    out: dict[Key, int] = {}
    for key, node in found.items():
        own = model.states.get(key)
        plain = own is not None and own == node and own in model.structure.sums and len(found) > 1
        out |= _spread(model, tops(model, node), other) if plain and key not in other.states else {key: node}
    return out


def _reads(case: Case) -> dict[Key, tuple[dict[Key, int], dict[Key, int]]]:
    a, b = case.a, case.b
    return {k: (reading(a, a.reads[k]), reading(b, n)) for k, n in b.reads.items() if k in a.reads}


def parallel(case: Case) -> set[Key]:
    """Feed-forward networks that read the stream before an attention in one model, behind it in the other."""
    reads = _reads(case)
    # Attentions that read the same in both models: what is read beside them, not behind them, is parallel.
    still = {("site", k[1]) for k, (x, y) in reads.items() if k[0] == "site" and set(x) == set(y)}
    extra = {k: _contents(set(x)) ^ _contents(set(y)) for k, (x, y) in reads.items() if k[0] == "inner"}
    return {k for k, found in extra.items() if len(found) == 1 and found <= still}


def explain_wiring(case: Case) -> bool:
    """Sums of other contributions, and parts that read another point of the stream in the other model.

    Returns:
        Whether the same parts are run in the same order.
    """
    count = len(case.raw)
    ordered = _explain(case)
    _joined([r for r in case.raw[count:] if r.hint == RESIDUAL])
    return ordered


def _joined(raws: Sequence[Raw]) -> None:
    """Sums that differ at several places are one finding, with the numbers of each in the evidence."""
    if len({(r.reference, r.candidate) for r in raws}) < 2:
        return
    for raw in raws:
        raw.evidence = {"reference": raw.reference, "candidate": raw.candidate, **raw.evidence}
        raw.reference, raw.candidate = "adds up its stream in one way", "adds it up in another"


def _explain(case: Case) -> bool:
    a, b = case.a, case.b
    reads = _reads(case)
    beside = parallel(case)
    seen: set[tuple[frozenset[Key], frozenset[Key]]] = set()
    numbers = order(b, a)
    if numbers != sorted(numbers) and not case.torn:
        swapped = next(n for n, m in zip(numbers, sorted(numbers), strict=True) if n != m)
        key = (swapped[0], swapped[2])
        place = case.place(reader(case, key), *(m.sources_at(key) or 0 for m in (a, b)))
        case.add(
            "unexplained", place, "runs its parts in one order", "runs them in another", 0, hint=RESIDUAL
        )
        return False
    if not case.torn and _turned(case, reads):
        return False
    for key, nb in b.states.items():
        na = a.states.get(key)
        if case.torn or na is None or (nb not in b.aliases and na not in a.aliases):
            continue
        ones, twos = tops(a, na), tops(b, nb)
        if set(_spread(a, ones, b)) != set(_spread(b, twos, a)):
            seen.add(_left(ones, twos))
            words = f"adds up {_counted(ones)} here", f"adds up {_counted(twos)}"
            case.add("unexplained", case.place("sum of the stream", na, nb), *words, nb, hint=RESIDUAL)
    for key, (ones, twos) in reads.items():
        ra, rb = a.reads[key], b.reads[key]
        left = _left(ones, twos)
        if left == (frozenset(), frozenset()) or left in seen:
            continue
        if any(k[0] not in ("state", "site", "inner", "router") for side in left for k in side):
            continue  # maps in between are numbered by each model's own style
        seen.add(left)
        place = case.place(reader(case, key), ra, rb)
        more = len(_contents(set(ones))), len(_contents(set(twos)))
        if key in beside:
            later, sooner = "reads the stream after attention", "reads the stream before attention"
            words = (later, sooner) if more[0] > more[1] else (sooner, later)
            case.add("parallel-residual", place, *words, rb)
            continue
        if case.torn or _lengths(case, ra, rb):
            continue
        words = f"reads a sum of {more[0]} contributions", f"reads a sum of {more[1]}"
        case.add("unexplained", place, *words, rb, hint=RESIDUAL)
    return True


def _turned(case: Case, reads: dict[Key, tuple[dict[Key, int], dict[Key, int]]]) -> bool:
    """Parts of which one reads the other's result in one model, and the other way round in the other."""
    parts = {k[:2]: (k, _contents(set(x)), _contents(set(y))) for k, (x, y) in reads.items()}
    found = [
        key
        for k, (key, x, y) in parts.items()
        for n in x ^ y
        if n in parts and k in parts[n][1] ^ parts[n][2] and (n in x) == (k in parts[n][2])
    ]
    for key in dict.fromkeys(found):
        place = case.place(reader(case, key), case.a.reads[key], case.b.reads[key])
        words = "runs its parts in one order", "runs them in another"
        case.add("unexplained", place, *words, case.b.reads[key], hint=RESIDUAL)
    return bool(found)


RESIDUAL = "a residual connection is missing, added or elsewhere: compare the sums before this part"


def _lengths(case: Case, na: int, nb: int) -> bool:
    """Whether two nodes hold different numbers of positions: of other streams, as the attention will say."""
    one, two = case.a.of_node(na), case.b.of_node(nb)
    return one is not None and two is not None and one.shape[1] != two.shape[1]


def _left(ones: dict[Key, int], twos: dict[Key, int]) -> tuple[frozenset[Key], frozenset[Key]]:
    return frozenset(set(ones) - set(twos)), frozenset(set(twos) - set(ones))


def _counted(terms: dict[Key, int]) -> str:
    return f"{len(terms)} contributions" if len(terms) > 1 else "one contribution"


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
