"""CTranslate2 binaries, version 2, of the encoder–decoder kind (``TransformerBase``, ``TransformerBig``)."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from torch import Tensor

from isoform.checkpoints import operations as op
from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.entries import Entry, FamilyMapping, Fused, Layers, Module, Rule, Same, Target
from isoform.checkpoints.mapping import load_weights
from isoform.checkpoints.vocabularies import characters
from isoform.checkpoints.weights import skeleton
from isoform.config import ModelConfig, Sinusoidal, presets
from isoform.config.protocol import Protocol
from isoform.data.specials import SpecialIds
from isoform.data.tokenizer import Tokenizer
from isoform.errors import ArtifactError

FILE, VERSION = "model.bin", 2
HEADS = {"TransformerBase": 8, "TransformerBig": 16}
SPECIALS = ("<blank>", "<s>", "</s>", "<unk>")
# sin and cos of 10000^(-i/(d/2 - 1)), all sines first, from position 1, in float32.
POSITIONS = Sinusoidal(
    layout="concatenated", spacing="half_width_minus_one", offset=1, base=10_000.0, precision="float32"
)


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds one."""
    return (folder / FILE).is_file() and any(folder.glob("*_vocabulary.txt"))


def load(
    folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Bundle:
    """Open a folder with ``model.bin`` and its vocabularies. Quantised weights are turned back to float32.

    The format says neither the norm's constant (1e-5) nor the activation (ReLU): both belong to its kind.

    Raises:
        ArtifactError: another version or kind, a truncated file, variables that are not understood.
    """
    weights = Binary(folder / FILE)
    config = _config(weights)
    model = skeleton(config)
    load_weights(model, MAPPING, weights, dtype=dtype, device=device)
    source, target = _vocabularies(folder)
    for side, tokens, table in (("source", source, config.source), ("target", target, config.embedding)):
        assert table is not None
        if len(tokens) != table.vocab_size:
            raise ArtifactError(
                f"{folder}: the {side} vocabulary has {len(tokens)} lines, its table {table.vocab_size} rows"
            )
    ids = {name: target.index(name) for name in SPECIALS if name in target}
    if missing := [name for name in SPECIALS[:3] if name not in ids]:
        raise ArtifactError(f"{folder}: the target vocabulary has no {missing[0]}")
    protocol = Protocol(pad_id=ids["<blank>"], eos_ids=(ids["</s>"],), start=(ids["<s>"],))
    provenance = {"format": "ctranslate2", "folder": folder.name, "kind": weights.kind}
    return Bundle(model.eval(), config, _tokenizer(target), _tokenizer(source), protocol, provenance)


class Binary:
    """The variables of a file. Names are turned to dots, gamma and beta to weight and bias."""

    def __init__(self, path: Path) -> None:
        self.where = path
        raw = path.read_bytes()
        place = 0

        def take(form: str) -> int:
            nonlocal place
            (value,) = struct.unpack_from(f"<{form}", raw, place)
            place += struct.calcsize(f"<{form}")
            return value

        def text() -> str:
            nonlocal place
            length = take("H")
            place += length
            return raw[place - length : place - 1].decode("utf-8")

        try:
            version = take("I")
            if version != VERSION:
                raise ArtifactError(f"{path}: binary version {version} is not supported; expected {VERSION}")
            self.kind, self.revision = text(), take("I")
            found: dict[str, Tensor] = {}
            for _ in range(take("I")):
                name = text()
                shape = [take("I") for _ in range(take("B"))]
                size, count = take("B"), take("I")
                kind = {1: torch.int8, 2: torch.int16, 4: torch.float32}[size]
                if place + size * count > len(raw):
                    raise struct.error("it ends within a tensor")
                tensor = torch.frombuffer(bytearray(raw[place : place + size * count]), dtype=kind)
                found[name.replace("/", ".")] = tensor.view(shape)
                place += size * count
        except (struct.error, KeyError, UnicodeDecodeError, RuntimeError) as error:
            raise ArtifactError(f"{path}: truncated, or not a CTranslate2 binary: {error}") from None
        if place != len(raw):
            raise ArtifactError(f"{path}: {len(raw) - place} bytes are left after the last variable")
        if self.kind not in HEADS:
            raise ArtifactError(f"{path}: kind {self.kind!r} is not supported; known: {', '.join(HEADS)}")
        self._tensors = {_renamed(name): tensor for name, tensor in _dequantised(found).items()}

    def names(self) -> list[str]:
        """All variables."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A variable's shape."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """A variable's type."""
        return self._tensors[name].dtype

    def view(self, name: str) -> Tensor:
        """The variable."""
        return self._tensors[name]

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The variable, or a copy in a given tensor."""
        return self._tensors[name] if into is None else into.copy_(self._tensors[name])


class Gathered:
    """The memory's key and value projections, which are one matrix on both sides."""

    def rules(self, target: Target, ours: str, theirs: str) -> list[Rule]:
        """One rule each for weight and bias."""
        module, fused = f"{ours}cross_attention.body.key_value", f"{theirs}attention.linear_1"
        names = ((f"{module}.{part}", f"{fused}.{part}") for part in ("weight", "bias"))
        return [Rule((mine,), (theirs,)) for mine, theirs in names if mine in target.names]


def _layer(cross: bool) -> tuple[Entry, ...]:
    reads: tuple[Entry, ...] = (
        Module("attention.before", "self_attention.layer_norm"),
        Fused("attention.body", "self_attention.linear_0", op.thirds),
        Module("attention.body.output", "self_attention.linear_1"),
        Module("feed_forward.before", "ffn.layer_norm"),
        Module("feed_forward.body.up", "ffn.linear_0"),
        Module("feed_forward.body.down", "ffn.linear_1"),
    )
    if not cross:
        return reads
    return (
        *reads,
        Module("cross_attention.before", "attention.layer_norm"),
        Module("cross_attention.body.query", "attention.linear_0"),
        Gathered(),
        Module("cross_attention.body.output", "attention.linear_2"),
    )


MAPPING = FamilyMapping(
    entries=(
        Module("source_embedding", "encoder.embeddings"),
        Module("embedding", "decoder.embeddings"),
        Layers("encoder", "encoder.layer_{}.", _layer(False)),
        Layers("decoder", "decoder.layer_{}.", _layer(True)),
        Module("encoder.final_norm", "encoder.layer_norm"),
        Module("decoder.final_norm", "decoder.layer_norm"),
        Same("head.weight", "decoder.projection.weight"),
        Same("head.bias", "decoder.projection.bias"),
    )
)


def _config(weights: Binary) -> ModelConfig:
    names = set(weights.names())

    def layers(side: str) -> int:
        return sum(f"{side}.layer_{i}.ffn.linear_0.weight" in names for i in range(len(names)))

    def shape(name: str) -> tuple[int, ...]:
        if name not in names:
            raise ArtifactError(f"{weights.where}: missing: {name}")
        return weights.shape(name)

    target, d = shape("decoder.embeddings.weight")
    base = presets.pre_ln(
        target,
        source_vocab_size=shape("encoder.embeddings.weight")[0],
        d_model=d,
        n_heads=HEADS[weights.kind],
        ffn_width=shape("encoder.layer_0.ffn.linear_0.weight")[0],
        n_encoder_layers=layers("encoder"),
        n_decoder_layers=layers("decoder"),
        dropout=0.0,
        eps=1e-5,
        shared_vocabulary=False,
    )
    return base.replace(
        embedding__positions=POSITIONS,
        source__positions=POSITIONS,
        encoder__layer__feed_forward__activation="relu",
        decoder__layer__feed_forward__activation="relu",
        head__tied=False,
        head__bias="decoder.projection.bias" in names,
    )


def _dequantised(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Integer weights divided by their scales, one a row or one for all."""
    result: dict[str, Tensor] = {}
    for name, tensor in found.items():
        scale = found.get(f"{name}_scale")
        if name.endswith("_scale") and name.removesuffix("_scale") in found:
            continue
        if scale is None:
            result[name] = tensor
        else:
            result[name] = tensor.float() / (scale[:, None] if scale.numel() > 1 else scale)
    return result


def _renamed(name: str) -> str:
    stem, _, last = name.rpartition(".")
    modern = {"gamma": "weight", "beta": "bias"}.get(last, last)
    return f"{stem}.{modern}"


def _vocabularies(folder: Path) -> tuple[list[str], list[str]]:
    shared = folder / "shared_vocabulary.txt"
    paths = [
        shared if shared.is_file() else folder / f"{side}_vocabulary.txt" for side in ("source", "target")
    ]
    sides: list[list[str]] = []
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}: cannot be read: {error}") from None
        lines = text.split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines
        # The engine appends the unknown token where a file does not list it.
        sides.append(lines if "<unk>" in lines else [*lines, "<unk>"])
    return sides[0], sides[1]


def _tokenizer(tokens: list[str]) -> Tokenizer | None:
    """A vocabulary of characters is a tokenizer; pieces of words need the model that cut them."""
    names = {token: i for i, token in enumerate(tokens) if token in SPECIALS}
    if any(len(token) != 1 for token in tokens if token not in names):
        return None
    special = SpecialIds(
        pad=names.get("<blank>"), bos=names.get("<s>"), eos=names.get("</s>"), unk=names.get("<unk>")
    )
    return characters(tokens, special, names)
