"""`isoform cost` on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from isoform.report.terminal import heading, indented, number, table

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "transient")


def show(console: Console, answer: Mapping[str, Any]) -> None:
    """Print what a step costs.

    Args:
        console: where.
        answer: ``target``, ``work``, ``parameters``, ``flops``, ``memory``, ``roofline``, ``fit``.
    """
    console.print(Text.assemble((f"{answer['target']}  ", "bold"), _work(answer["work"])))
    _parameters(console, answer["parameters"])
    _flops(console, answer["flops"])
    _memory(console, answer["memory"])
    if answer["roofline"] is not None:
        _time(console, answer["roofline"])
    if answer["fit"] is not None:
        _fit(console, answer["work"], answer["fit"])


def size(count: float) -> str:
    """Bytes in the largest unit of which there is at least one: 1.50 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count:,.0f} B"


def many(count: float) -> str:
    """A large number in the largest unit of which there is at least one: 1.23 T."""
    for power, unit in ((6, "E"), (5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if count >= 1000**power:
            return f"{count / 1000**power:.2f} {unit}"
    return f"{count:,.0f}"


def _work(work: Mapping[str, Any]) -> str:
    source = "" if work["source_length"] is None else f", S = {work['source_length']:,}"
    prefix = f", condition of {work['prefix_length']:,}" if work["prefix_length"] else ""
    parts = [
        f"{work['mode']}, B = {work['batch']:,}, T = {work['length']:,}{source}{prefix}",
        f"{work['dtype']} on {work['device']}, attention {work['attention']}",
    ]
    if work["mode"] == "train":
        again = "" if work["recomputation"] == "none" else f", each {work['recomputation']} recomputed"
        parts.append(f"{work['optimizer']}{again}")
    if work["devices"] > 1:
        parts.append(f"{work['devices']} devices, {work['shard']}; figures are those of one")
    return " · ".join(parts)


def _parameters(console: Console, found: Mapping[str, Any]) -> None:
    console.print(heading("Parameters", "closed form of one occurrence; shared ones count once"))
    rows: list[Sequence[object]] = []
    for part in found["components"]:
        rows.append(_parameter_row(part, part["name"]))
        rows += [
            _parameter_row(inner, f"  {inner['name'].replace('layers.', 'layers ')}")
            for inner in part["parts"]
            if part["name"] in ("encoder", "decoder")
        ]
    rows.append(["all", "", "", found["total"]])
    console.print(indented(table(["component", "closed form", "×", "total"], rows, right=(2, 3), total=True)))
    console.print(f"  {found['active']:,} of them take part in a token; {found['lookups']:,} are tables.")


def _parameter_row(part: Mapping[str, Any], name: str) -> list[object]:
    shared = next((one["shared_with"] for one in (part, *part["parts"]) if one["shared_with"]), None)
    form = f"that of {shared}" if shared and not part["total"] else part["formula"]
    return [name, form or "", part["repeat"] if part["repeat"] != 1 else "", part["total"]]


def _flops(console: Console, found: Mapping[str, Any]) -> None:
    note = "matrix products, a multiply-add is two; closed form of one forward occurrence"
    console.print(heading("FLOPs of a step", note))
    rows: list[Sequence[object]] = []
    for one in found["components"]:
        share = one["forward"] / found["forward"] if found["forward"] else 0.0
        every = one["forward"] + one["backward"] + one["recomputed"]
        name = one["name"].replace("layers.", "layers ")
        uses = one["uses"] if one["uses"] != 1 else ""
        rows.append([name, one["formula"], uses, many(one["forward"]), many(every), f"{100 * share:.1f} %"])
    rows.append(["all", "", "", many(found["forward"]), many(found["hardware"]), ""])
    columns = ["component", "closed form", "×", "forward", "step", "share"]
    console.print(indented(table(columns, rows, right=(2, 3, 4, 5), total=True)))
    others = found["conventions"]
    told = (
        f"{many(found['per_token'])} a token; {many(found['visible'])} if only visible pairs were computed; "
        f"by Kaplan's rule {many(others['kaplan'])}, by PaLM's {many(others['palm'])}."
    )
    console.print(indented(Text(told, style="dim")))


def _memory(console: Console, found: Mapping[str, Any]) -> None:
    console.print(heading("Memory of a device", "tensors; allocators and kernels' scratch space come on top"))
    rows: list[Sequence[object]] = [
        [part.replace("_", " "), size(found[part])] for part in PARTS if found[part]
    ]
    rows.append(["peak", size(found["peak"])])
    console.print(indented(table(["what", "bytes"], rows, right=(1,), total=True)))
    console.print(f"  The peak is at {found['peak_at'].replace('layers.', 'layer ')}.", style="dim")


def _time(console: Console, found: Mapping[str, Any]) -> None:
    machine = found["machine"]
    limits = f"{many(machine['flops'])}FLOP/s in {machine['dtype']}, {many(machine['bandwidth'])}B/s"
    console.print(
        heading("Time at the machine's limits", f"measured: {limits}; a floor, no real run reaches it")
    )
    rows = [
        ["step", duration(found["seconds"])],
        ["products alone", duration(found["compute_seconds"])],
        ["memory traffic alone", duration(found["bandwidth_seconds"])],
        ["tokens a second", number(round(found["tokens_per_second"]))],
    ]
    console.print(indented(table(["what", "at least"], rows, right=(1,))))
    binds = {"compute": "Matrix products bind", "bandwidth": "The memory's bandwidth binds"}[found["bound"]]
    intensity = f"{found['intensity']:.1f} FLOPs a byte, the machine is balanced at {found['balance']:.1f}"
    console.print(indented(Text(f"{binds}: {intensity}.", style="dim")))


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    return f"{1000 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def _fit(console: Console, work: Mapping[str, Any], fit: Mapping[str, Any]) -> None:
    limit, share = size(fit["limit"]), 100 * fit["peak"] / fit["limit"]
    batch, length = number(fit["largest_batch"]), number(fit["largest_length"])
    by = {"memory": "", "positions": ", where the positions end", "bound": " or more"}[fit["limited_by"]]
    if fit["fits"]:
        console.print(f"\nIt fits into {limit} and fills {share:.0f} % of it.", style="green")
    else:
        console.print(f"\nIt does not fit into {limit}; the peak is {share:,.0f} % of it.", style="bold red")
    if fit["largest_batch"]:
        console.print(f"At length {number(work['length'])} batch {batch} fits.")
    if fit["largest_length"]:
        console.print(f"At batch {number(work['batch'])} length {length} fits{by}.")
    if not fit["largest_batch"] and not fit["largest_length"]:
        console.print("Neither a single row a device nor a single token does.")
