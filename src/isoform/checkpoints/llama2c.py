"""The llama2.c format: one binary file with a small header, float32, rotary pairs interleaved."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.entries import FamilyMapping, Layers, Module, Packed, Same
from isoform.checkpoints.families.llama_like import QKV
from isoform.checkpoints.keys import understood
from isoform.checkpoints.mapping import load_weights
from isoform.checkpoints.vocabularies import read_llama2c
from isoform.checkpoints.weights import skeleton
from isoform.config import ModelConfig, presets
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError

MAGIC = 0x616B3432
THETA = 10_000.0


def is_llama2c(path: Path) -> bool:
    """Whether a file can be one: its header gives its length."""
    if not path.is_file() or path.suffix != ".bin":
        return False
    with path.open("rb") as file:
        head = file.read(28)
    return len(head) == 28 and (
        struct.unpack("<I", head[:4])[0] == MAGIC or _plausible(struct.unpack("<7i", head))
    )


def load(path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Bundle:
    """Open a llama2.c file; a tokenizer of the format beside it (``tok*.bin``) comes along.

    Raises:
        ArtifactError: a quantised version, a length that does not fit the header, rotary tables of another
            base.
    """
    config, weights, length = _open(path)
    model = skeleton(config)
    load_weights(model, _mapping(), weights, dtype=dtype, device=device)
    tokenizer = _beside(path)
    provenance: Mapping[str, Any] = {
        "format": "llama2.c",
        "file": path.name,
        "config": {"max_position_embeddings": length},
        "family": "llama",
    }
    protocol = Protocol(pad_id=0, eos_ids=(2,), start=(1,))
    return Bundle(model.eval(), config, tokenizer, None, protocol, provenance)


def opened(path: Path) -> tuple[FamilyMapping, Flat]:
    """The tensors of a file and what they correspond to, to compare a network with what it came from."""
    _, weights, _ = _open(path)
    return _mapping(), weights


def _open(path: Path) -> tuple[ModelConfig, Flat, int]:
    """Architecture, tensors, and the longest text of the file's tables."""
    raw = _head(path)
    legacy = struct.unpack("<I", raw[:4])[0] != MAGIC
    if not legacy and struct.unpack("<i", raw[4:8])[0] != 1:
        raise ArtifactError(
            f"{path}: version {struct.unpack('<i', raw[4:8])[0]} is not supported; expected 0 or 1"
        )
    sizes = struct.unpack("<7i", raw[:28] if legacy else raw[8:36])
    d, hidden, n, heads, kv, vocab, length = sizes
    shared = vocab > 0 if legacy else raw[36] == 1
    with understood(str(path)):
        config = presets.llama(
            abs(vocab), d_model=d, n_heads=heads, n_kv_heads=kv, ffn_width=hidden, n_layers=n, theta=THETA,
            eps=1e-5, tied=shared,
        ).replace(decoder__layer__attention__positions__layout="interleaved")  # fmt: skip
    weights = Flat(path, _layout(sizes, shared, legacy), 28 if legacy else 256)
    if legacy:
        _check_angles(weights, path, d // heads, length)
    return config, weights, length


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(256)


class Flat:
    """Tensors of known shapes, one after the other."""

    def __init__(self, path: Path, layout: Mapping[str, tuple[int, ...]], start: int) -> None:
        self.where = path
        self._shapes = dict(layout)
        self._starts: dict[str, int] = {}
        place = start
        for name, shape in layout.items():
            self._starts[name] = place
            place += 4 * torch.Size(shape).numel()
        if place != path.stat().st_size:
            raise ArtifactError(
                f"{path}: {path.stat().st_size} bytes, its header means {place}: truncated or another format"
            )
        count = (place - start) // 4
        self._flat = torch.from_file(str(path), shared=False, size=place, dtype=torch.uint8)[start:].view(
            torch.float32
        )
        assert self._flat.numel() == count
        self._start = start

    def names(self) -> list[str]:
        """Tensors apart from the rotary tables."""
        return [name for name in self._shapes if not name.startswith("freq_")]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """float32."""
        return torch.float32

    def view(self, name: str) -> Tensor:
        """The tensor, mapped."""
        begin = (self._starts[name] - self._start) // 4
        shape = self._shapes[name]
        return self._flat[begin : begin + torch.Size(shape).numel()].view(shape)

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The tensor, mapped, or a copy in a given one."""
        return self.view(name) if into is None else into.copy_(self.view(name))


def _layout(sizes: tuple[int, ...], shared: bool, legacy: bool) -> dict[str, tuple[int, ...]]:
    """Names in the order of the file."""
    d, hidden, n, heads, kv, vocab, length = sizes
    width = d // heads
    each: dict[str, tuple[int, ...]] = {
        "attention_norm": (d,), "wq": (d, d), "wk": (kv * width, d), "wv": (kv * width, d), "wo": (d, d),
        "ffn_norm": (d,), "w1": (hidden, d), "w2": (d, hidden), "w3": (hidden, d),
    }  # fmt: skip

    def layers(*names: str) -> dict[str, tuple[int, ...]]:
        return {f"layers.{i}.{name}.weight": each[name] for name in names for i in range(n)}

    table, final = {"tok_embeddings.weight": (abs(vocab), d)}, {"norm.weight": (d,)}
    output = {} if shared else {"output.weight": (abs(vocab), d)}
    if legacy:
        angles = {"freq_cis_real": (length, width // 2), "freq_cis_imag": (length, width // 2)}
        return {
            **table, **layers("attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3"),
            **final, **angles, **output,
        }  # fmt: skip
    return {
        **layers("attention_norm", "ffn_norm"), **final, **table,
        **layers("wq", "wk", "wv", "wo", "w1", "w2", "w3"), **output,
    }  # fmt: skip


def _mapping() -> FamilyMapping:
    names = dict(zip((name for name, _ in QKV), ("wq", "wk", "wv"), strict=True))
    layer = (
        Module("attention.before", "attention_norm"),
        Packed("attention.body.qkv", tuple(names.items())),
        Module("attention.body.output", "wo"),
        Module("feed_forward.before", "ffn_norm"),
        Packed("feed_forward.body.gate_up", (("gate", "w1"), ("up", "w3"))),
        Module("feed_forward.body.down", "w2"),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "tok_embeddings"),
            Layers("decoder", "layers.{}.", layer),
            Module("decoder.final_norm", "norm"),
            Same("head.weight", "output.weight"),
        )
    )


def _check_angles(weights: Flat, path: Path, width: int, length: int) -> None:
    frequency = 1.0 / THETA ** (torch.arange(0, width, 2).float() / width)
    angles = torch.arange(length)[:, None] * frequency
    wrong = max(
        (weights.view("freq_cis_real") - angles.cos()).abs().max().item(),
        (weights.view("freq_cis_imag") - angles.sin()).abs().max().item(),
    )
    if wrong > 1e-3:
        raise ArtifactError(
            f"{path}: its rotary tables are not those of base {THETA:g} (they differ by {wrong:.2g})"
        )


def _plausible(sizes: tuple[int, ...]) -> bool:
    d, hidden, n, heads, kv, vocab, length = sizes
    return min(d, hidden, n, heads, kv, length) > 0 and vocab != 0 and d % heads == 0 and heads % kv == 0


def _beside(path: Path) -> Any:
    found = sorted(p for p in path.parent.glob("tok*.bin") if p != path)
    return read_llama2c(found[0]) if len(found) == 1 else None
