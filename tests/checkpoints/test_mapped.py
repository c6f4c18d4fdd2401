"""What lies ready in a file is mapped and not copied, also as parts of one packed parameter."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

import isoform as iso
from isoform import presets
from isoform.checkpoints import Bundle, export, load
from isoform.checkpoints.joined import Piece, joined
from isoform.config import ModelConfig
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError
from isoform.nn.products import Form, product

PAGE = mmap.PAGESIZE
LARGE = 2**19
linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are mapped into place on Linux")


def bundle_of(cfg: ModelConfig) -> Bundle:
    protocol = Protocol(pad_id=0, eos_ids=(2,), start=(1,))
    return Bundle(iso.build(cfg, seed=0).eval(), cfg, None, None, protocol, {})


def share(tensor: Tensor, path: Path) -> float:
    """How much of a tensor consists of pages of a file."""
    begin, end, found = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(side, 16) for side in line.split()[0].split("-"))
        if line.endswith(str(path)):
            found += max(0, min(end, last) - max(begin, first))
    return found / tensor.nbytes


@linux
@pytest.mark.parametrize(
    ("begins", "least", "most"),
    [
        ((8, 3 * LARGE + 8), 0.95, 1.0),
        ((8, 3 * LARGE + 12), 0.4, 0.5),
        ((8, LARGE + 8), 0.95, 1.0),
        ((4104, 8), 0.95, 1.0),
    ],
    ids=["apart", "out of step", "side by side", "overlapping"],
)
def test_pieces_of_a_file(tmp_path: Path, begins: tuple[int, int], least: float, most: float) -> None:
    path = tmp_path / "numbers"
    content = torch.arange(2**20, dtype=torch.float32)
    path.write_bytes(content.numpy().tobytes())
    found = joined([Piece(path, begin, LARGE) for begin in begins], torch.float32)
    expected = torch.cat([content[b // 4 : (b + LARGE) // 4] for b in begins])
    assert torch.equal(found, expected)
    assert least <= share(found, path) <= most
    found.add_(1.0)
    assert torch.equal(found, expected + 1)
    assert torch.equal(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32), content)


def test_pieces_of_several_files_and_small_ones(tmp_path: Path) -> None:
    content = torch.arange(50, dtype=torch.int16)
    for name in "ab":
        (tmp_path / name).write_bytes(content.numpy().tobytes())
    pieces = [Piece(tmp_path / "a", 10, 20), Piece(tmp_path / "b", 0, 6), Piece(tmp_path / "b", 6, 2)]
    assert joined(pieces, torch.int16).tolist() == [*range(5, 15), 0, 1, 2, 3]
    with pytest.raises(ArtifactError, match="truncated"):
        joined([Piece(tmp_path / "a", 90, 20)], torch.int16)


def test_copied_pieces_on_huge_pages_are_ordinary_memory(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    content = torch.arange(3 * 2**20, dtype=torch.int32)
    path.write_bytes(b"." + content.numpy().tobytes())  # no type begins at odd places
    assert torch.equal(joined([Piece(path, 1, content.nbytes)], torch.int32), content)


LIKE = {"d_model": 128, "n_heads": 2, "ffn_width": 256, "n_layers": 2}
CASES = {
    "gpt2": presets.gpt2(64, max_positions=20, **LIKE),
    "llama": presets.llama(64, tied=True, eps=1e-5, **LIKE),
    "bloom": presets.bloom(64, **{k: v for k, v in LIKE.items() if k != "ffn_width"}),
    "mixtral": presets.mixtral(64, n_kv_heads=2, n_experts=3, top_k=2, **LIKE),
}


@linux
@pytest.mark.parametrize("family", CASES)
def test_families_are_mapped(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isoform.checkpoints.joined._LEAST", PAGE)
    before = bundle_of(CASES[family])
    folder = export(before, tmp_path / family, family=family)
    bundle = load(folder)
    for (name, a), b in zip(before.model.named_parameters(), bundle.model.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() == 1 or share(b, folder / "model.safetensors") > 0.7, name
    # Trained where they lie, and saved from there.
    with torch.no_grad():
        for p in bundle.model.parameters():
            p.mul_(2.0)
    assert torch.equal(next(load(folder).model.parameters()) * 2, next(bundle.model.parameters()))
    again = load(bundle.save(tmp_path / "artifact"), check=True)
    for a, b in zip(bundle.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", get_args(Form))
def test_input_major_weights_in_another_form(form: Form) -> None:
    """They stay transposed views of their file; compiled products read rows where they lie."""
    weight = torch.linspace(-1.0, 1.0, 48).view(6, 8)
    turned, plain = product(form, weight.t(), None), product(form, weight.t().contiguous(), None)
    for name, stored in turned.stored().items():
        assert stored.is_contiguous(), name
        assert torch.equal(stored, plain.stored()[name])
