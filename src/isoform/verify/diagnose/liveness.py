"""What in a pass depends on the content, what on positions alone, and what on parameters alone."""

from __future__ import annotations

from isoform.verify.record import Recording

LOOKUPS = ("embedding", "index", "index_select", "mm", "bmm")
"""Operators that rows of a table come out of; a product does, with rows of ones and zeros."""
_SHAPES = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Operators that take no more than the shape of their argument."""

_COUNTING = frozenset(("cumsum", "arange"))


def classify(recording: Recording, useful: set[int]) -> tuple[list[bool], list[bool], list[int]]:
    """Which nodes depend on what the tokens are, which on parameters alone, and where content comes in.

    Args:
        recording: the pass.
        useful: nodes that the result is made of.

    Returns:
        For each node whether it is live and whether it is static, and the entries.
    """
    entries: list[int] = []
    contents = set(recording.contents.values())
    static: list[bool] = []
    counting: list[bool] = []
    chosen: list[bool] = []  # whole numbers that content decides on: the best experts of a token
    from_ids: list[bool] = []
    live: list[bool] = []
    for node in recording.nodes:
        refs = list(node.refs())
        inner = [int(r.name) for r in refs if r.kind == "node"]
        static.append(all(r.kind != "input" for r in refs) and all(static[n] for n in inner))
        counting.append(node.op in _COUNTING or any(counting[n] for n in inner))
        whole = not node.value.is_floating_point()
        chosen.append(whole and any(live[n] or chosen[n] for n in inner))
        if node.op in _SHAPES:  # only the shape of the content counts
            from_ids.append(False)
            live.append(False)
            continue
        touched = any(r.kind == "input" and r.name in contents for r in refs)
        from_ids.append(touched or any(from_ids[n] for n in inner))
        # Rotations are often products of complex numbers.
        if any(live[n] for n in inner) and (node.value.is_floating_point() or node.value.is_complex()):
            live.append(True)
            continue
        entry = touched and node.value.is_floating_point() and node.value.dim() >= 3
        if node.op in LOOKUPS and node.value.is_floating_point() and from_ids[-1]:
            entry = entry or not (counting[-1] or any(chosen[n] for n in inner))
        if entry and node.number in useful:
            entries.append(node.number)
        live.append(entry)
    return live, static, entries
