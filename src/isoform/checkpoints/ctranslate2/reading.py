"""CTranslate2 folders in: encoder–decoders of version 2, encoder–decoders and decoders of version 6."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.ctranslate2 import binary
from isoform.checkpoints.ctranslate2.binary import Variables
from isoform.checkpoints.ctranslate2.structure import BUILT_IN, KINDS, read_config
from isoform.checkpoints.ctranslate2.tensors import ENCODINGS, mapping
from isoform.checkpoints.entries import FamilyMapping, Ignored
from isoform.checkpoints.keys import understood
from isoform.checkpoints.mapping import load_weights
from isoform.checkpoints.vocabularies import characters, read_json
from isoform.checkpoints.weights import skeleton
from isoform.config import ModelConfig, Sinusoidal, presets
from isoform.config.base import parse
from isoform.config.protocol import Protocol
from isoform.data.specials import SpecialIds
from isoform.data.tokenizer import Tokenizer
from isoform.errors import ArtifactError

FILE, CONFIG = "model.bin", "config.json"
# The key under which what the engine takes at each call is kept; the engine does not read it.
OURS = "isoform"
HEADS = {"TransformerBase": 8, "TransformerBig": 16}
SPECIALS = ("<blank>", "<s>", "</s>", "<unk>")


@dataclasses.dataclass(frozen=True)
class Words:
    """The tokens of both sides, in the order of their ids."""

    source: list[str]
    target: list[str]


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds one."""
    return (folder / FILE).is_file() and bool(
        [*folder.glob("*vocabulary.txt"), *folder.glob("*vocabulary.json")]
    )


def opened(folder: Path) -> tuple[FamilyMapping, Variables]:
    """The variables of a folder and what they correspond to, to compare a network with what it came from."""
    _, _, rules, weights = _open(folder)
    return rules, weights


def load(
    folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Bundle:
    """Open a folder with ``model.bin`` and its vocabularies. Quantised weights are turned back to float32.

    Version 2 says neither the norm's constant (1e-5) nor the activation (ReLU): both belong to its kind.

    Raises:
        ArtifactError: another version or kind, a truncated file, variables that are not understood.
    """
    settings, config, rules, weights = _open(folder)
    old = weights.kind in HEADS
    model = skeleton(config)
    load_weights(model, rules, weights, dtype=dtype, device=device)
    found = words(folder, both=config.source is not None)
    for side, tokens, table in (
        ("source", found.source, config.source),
        ("target", found.target, config.embedding),
    ):
        if table is not None and len(tokens) != table.vocab_size:
            raise ArtifactError(
                f"{folder}: the {side} vocabulary has {len(tokens)} lines, its table {table.vocab_size} rows"
            )
    protocol = _old_protocol(folder, found.target) if old else _protocol(folder, settings, found)
    target, source = _tokenizers(folder, found, both=config.source is not None)
    provenance = {"format": "ctranslate2", "folder": folder.name, "kind": weights.kind}
    return Bundle(model.eval(), config, target, source, protocol, provenance)


def _open(folder: Path) -> tuple[dict[str, Any], ModelConfig, FamilyMapping, Variables]:
    """Settings, architecture, correspondence and variables."""
    weights = binary.read(folder / FILE)
    old = weights.kind in HEADS
    if not old and weights.kind not in KINDS:
        known = ", ".join((*HEADS, *KINDS))
        raise ArtifactError(f"{weights.where}: kind {weights.kind!r} is not supported; known: {known}")
    settings = read_json(folder / CONFIG)
    with understood(str(weights.where)):
        config = _old_config(weights) if old else read_config(weights, settings.get("layer_norm_epsilon"))
    rules = mapping(config, table="encoder.embeddings" if old else "encoder.embeddings_0")
    tables = (("encoder", config.source), ("decoder", config.embedding))
    fixed = [side for side, table in tables if table and isinstance(table.positions, Sinusoidal)]
    rules = dataclasses.replace(
        rules, ignored=tuple(Ignored(ENCODINGS.format(side), "known sinusoids") for side in fixed)
    )
    return settings, config, rules, weights


def _old_config(weights: Variables) -> ModelConfig:
    names = set(weights.names())

    def layers(side: str) -> int:
        return sum(f"{side}.layer_{i}.ffn.linear_0.weight" in names for i in range(len(names)))

    target, d = weights.shape("decoder.embeddings.weight")
    base = presets.pre_ln(
        target,
        source_vocab_size=weights.shape("encoder.embeddings.weight")[0],
        d_model=d,
        n_heads=HEADS[weights.kind],
        ffn_width=weights.shape("encoder.layer_0.ffn.linear_0.weight")[0],
        n_encoder_layers=layers("encoder"),
        n_decoder_layers=layers("decoder"),
        dropout=0.0,
        eps=1e-5,
        shared_vocabulary=False,
    )
    return base.replace(
        embedding__positions=BUILT_IN,
        source__positions=BUILT_IN,
        encoder__layer__feed_forward__activation="relu",
        decoder__layer__feed_forward__activation="relu",
        head__tied=False,
        head__bias="decoder.projection.bias" in names,
    )


def _old_protocol(folder: Path, target: list[str]) -> Protocol:
    ids = {name: target.index(name) for name in SPECIALS if name in target}
    if missing := [name for name in SPECIALS[:3] if name not in ids]:
        raise ArtifactError(f"{folder}: the target vocabulary has no {missing[0]}")
    return Protocol(pad_id=ids["<blank>"], eos_ids=(ids["</s>"],), start=(ids["<s>"],))


def _protocol(folder: Path, settings: Mapping[str, Any], words: Words) -> Protocol:
    """What ``config.json`` says, and what this project wrote there for the rest."""
    if OURS in settings:
        return parse(Protocol, settings[OURS]["protocol"], where=str(folder / CONFIG))

    def one(name: str, tokens: list[str]) -> tuple[int, ...]:
        token = settings.get(name)
        if token is None:
            return ()
        if token not in tokens:
            raise ArtifactError(f"{folder}: {name} {token!r} is not in the vocabulary")
        return (tokens.index(token),)

    eos = one("eos_token", words.target)
    return Protocol(
        pad_id=next(i for i in range(len(eos) + 1) if i not in eos),
        eos_ids=eos,
        start=one("decoder_start_token", words.target),
        source_prefix=one("bos_token", words.source) if settings.get("add_source_bos") else (),
        source_suffix=one("eos_token", words.source) if settings.get("add_source_eos") else (),
    )


def words(folder: Path, *, both: bool) -> Words:
    """The tokens of both sides, in the order of their ids."""
    if not both:
        tokens = _words(folder, "vocabulary")
        return Words(tokens, tokens)
    shared = next(folder.glob("shared_vocabulary.*"), None)
    names = ("shared", "shared") if shared is not None else ("source", "target")
    source, target = (_words(folder, f"{name}_vocabulary") for name in names)
    return Words(source, target)


def _words(folder: Path, name: str) -> list[str]:
    modern, old = folder / f"{name}.json", folder / f"{name}.txt"
    path = modern if modern.is_file() else old
    try:
        text = path.read_bytes().decode("utf-8")
        if path is modern:
            return [str(token) for token in json.loads(text)]
    except (OSError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: cannot be read: {error}") from None
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    # The engine appends the unknown token where a file does not list it.
    return lines if "<unk>" in lines else [*lines, "<unk>"]


def _tokenizers(folder: Path, words: Words, *, both: bool) -> tuple[Tokenizer | None, Tokenizer | None]:
    """Those saved beside the binary; else a vocabulary of characters is one."""
    if (folder / "tokenizer.specials.json").is_file():
        target = Tokenizer.load(folder, "tokenizer")
        own = (folder / "source_tokenizer.specials.json").is_file()
        source = Tokenizer.load(folder, "source_tokenizer") if own else target
    else:
        target = _characters(words.target)
        source = target if words.source == words.target else _characters(words.source)
    return target, source if both else None


def _characters(tokens: list[str]) -> Tokenizer | None:
    """Pieces of words need the model that cut them, which the folder lacks."""
    names = {token: i for i, token in enumerate(tokens) if token in SPECIALS}
    if any(len(token) != 1 for token in tokens if token not in names):
        return None
    special = SpecialIds(
        pad=names.get("<blank>"), bos=names.get("<s>"), eos=names.get("</s>"), unk=names.get("<unk>")
    )
    return characters(tokens, special, names)
