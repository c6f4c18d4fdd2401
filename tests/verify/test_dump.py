"""Arrays that another framework wrote: aligned by what is in them, whatever they are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from isoform.errors import DataError
from isoform.verify import compare, read_dump, record
from verify.small import IDS, Plain, drawn

INPUTS = {"ids": IDS}


def arrays(model: Plain) -> dict[str, np.ndarray]:
    """What a program in another language might keep: other names, orders and precisions."""
    kept: dict[str, torch.Tensor] = {}

    def keep(name):
        return lambda _, __, out: kept.__setitem__(name, out.detach())

    handles = [
        model.table.register_forward_hook(keep("wte")),
        model.layers[0].q.register_forward_hook(keep("h0/query")),
        model.layers[1].o.register_forward_hook(keep("h1/attention_out")),
        model.layers[1].register_forward_hook(keep("h1/out")),
        model.register_forward_hook(keep("final/logits")),
    ]
    model(IDS)
    for handle in handles:
        handle.remove()
    query = kept["h0/query"].unflatten(-1, (3, 4)).transpose(1, 2)  # [batch, heads, time, width]
    found = {**kept, "h0/query": query, "h1/out": kept["h1/out"].transpose(0, 1), "ids": IDS}
    return {name: value.contiguous().numpy() for name, value in found.items()}


@pytest.fixture
def model() -> Plain:
    return drawn(Plain())


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_the_same_function(kind: str, model: Plain, tmp_path: Path) -> None:
    place = tmp_path / f"a.{kind}"
    found = arrays(model)
    if kind == "npz":
        np.savez(place, **found)
    else:
        save_file({name: torch.from_numpy(a) for name, a in found.items()}, place)
    result = compare(model, read_dump(place), INPUTS)
    assert result.verdict == "equivalent" and not result.notes, str(result)
    assert [row.candidate for row in result.rows] == [
        "wte", "h0/query", "h1/attention_out", "h1/out", "final/logits",
    ]  # fmt: skip
    places = [row.reference for row in result.rows]
    assert places[:3] == ["table", "layers.0.q", "layers.1.o"] and places[4] == "head"
    assert compare(read_dump(place), record(model, INPUTS)).verdict == "equivalent"


def test_where_it_parts(model: Plain, tmp_path: Path) -> None:
    found = arrays(model)
    found["h1/attention_out"][1, 2, 3] += 0.05
    found["final/logits"][1, 2] += 0.01
    np.savez(tmp_path / "a.npz", **found)
    result = compare(model, read_dump(tmp_path / "a.npz"), INPUTS)
    assert result.verdict == "differs"
    assert [row.candidate for row in result.rows if row.differs] == ["h1/attention_out", "final/logits"]


def test_what_belongs_to_nothing_and_other_data(model: Plain, tmp_path: Path) -> None:
    found = arrays(model)
    found["noise"] = np.cos(np.arange(3 * 8 * 12, dtype=np.float32) ** 2).reshape(3, 8, 12)
    found["layers.0.o"] = found["noise"] + 1  # its name says what it should be
    found["ids"] = found["ids"] + 1
    np.savez(tmp_path / "a.npz", **found)
    result = compare(model, read_dump(tmp_path / "a.npz"), INPUTS)
    assert set(result.notes) == {"ids is not the same in both: not the same data", "noise: no counterpart"}
    (row,) = (row for row in result.rows if row.candidate == "layers.0.o")
    assert row.reference == "layers.0.o" and row.differs


def test_without_a_result_every_place_counts(model: Plain, tmp_path: Path) -> None:
    found = {"wte": arrays(model)["wte"]}
    np.savez(tmp_path / "a.npz", **found)
    result = compare(model, read_dump(tmp_path / "a.npz"), INPUTS)
    assert result.verdict == "equivalent" and "holds no result" in result.notes[0]
    found["wte"][0, 0] += 0.01
    np.savez(tmp_path / "a.npz", **found)
    assert compare(model, read_dump(tmp_path / "a.npz"), INPUTS).verdict == "differs"


def test_bad_files_are_one_line(model: Plain, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_dump(tmp_path / "a.npz")
    for name in ("a.npz", "a.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(DataError, match=r"not a \.safetensors or \.npz file") as caught:
            read_dump(tmp_path / name)
        assert "\n" not in str(caught.value)
    np.savez(tmp_path / "a.npz", ids=np.arange(3))
    with pytest.raises(DataError, match="no floating-point array"):
        read_dump(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", **arrays(model))
    dump = read_dump(tmp_path / "a.npz")
    with pytest.raises(DataError, match="two dumps"):
        compare(dump, dump)
    with pytest.raises(DataError, match="gradients cannot be compared with a dump"):
        compare(model, dump, INPUTS, backward=True)
