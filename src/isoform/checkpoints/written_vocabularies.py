"""A tokenizer as a file that the library of a checkpoint's format opens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoform.checkpoints.bundle import Bundle
from isoform.config.files import write_bytes, write_text
from isoform.data.backends import HuggingFace
from isoform.data.tokenizer import Template, Tokenizer
from isoform.errors import ArtifactError


def write_tokenizer(bundle: Bundle, folder: Path, family: str) -> None:
    """``tokenizer.json`` with what the protocol puts around a text, and the names of the special tokens.

    A SentencePiece model is written in the files it came in where it came from a folder of this family,
    else as ``tokenizer.model``.

    Raises:
        ArtifactError: source and target have a vocabulary each, which these files cannot say.
    """
    tokenizer = bundle.tokenizer
    if tokenizer is None:
        return
    source = bundle.source_tokenizer
    came = bundle.provenance.get("tokenizer")
    if came is not None and family == bundle.provenance["family"] and came["digest"] == tokenizer.digest:
        _write_again(bundle, folder, came)
        return
    if source is not None and source.digest != tokenizer.digest:
        raise ArtifactError(
            "source and target have a vocabulary each, which the files of this format cannot say; "
            "export the network without tokenizers"
        )
    names = {
        f"{part}_token": tokenizer.token(number)
        for part in ("pad", "bos", "eos", "unk")
        if (number := getattr(tokenizer.special, part)) is not None
    }
    settings: dict[str, Any] = {**names, "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer.backend, HuggingFace):
        write_bytes(folder / "tokenizer.json", _with_template(tokenizer, _template(bundle)))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    else:
        write_bytes(folder / "tokenizer.model", tokenizer.backend.serialise())
    _write_json(folder / "tokenizer_config.json", settings)


def _write_again(bundle: Bundle, folder: Path, came: Mapping[str, Any]) -> None:
    """The files that a SentencePiece vocabulary came in, with the source language that the protocol has."""
    assert bundle.tokenizer is not None
    source = bundle.source_tokenizer or bundle.tokenizer
    sides = {"source.spm": source, "vocab.json": source}
    for name in came["files"]:
        backend = sides.get(name, bundle.tokenizer).backend
        if name.endswith(".json"):
            _write_json(folder / name, backend.settings()["pieces"])
        else:
            write_bytes(folder / name, backend.serialise())
    tables = {name: dict(content) for name, content in came["tables"].items()}
    around = (*bundle.protocol.source_prefix, *bundle.protocol.source_suffix)
    named = [name for name, number in bundle.tokenizer.special.extra.items() if number in around]
    if len(named) == 1 and "sentencepiece.bpe.model" in came["files"]:
        tables["tokenizer_config.json"]["src_lang"] = named[0].strip("_")
    for name, content in tables.items():
        if content:
            _write_json(folder / name, content)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _template(bundle: Bundle) -> Template:
    protocol = bundle.protocol
    if bundle.config.structure == "decoder":
        return Template(protocol.start)
    return Template(protocol.source_prefix, protocol.source_suffix)


def _with_template(tokenizer: Tokenizer, template: Template) -> bytes:
    """The tokenizer with a post-processor that adds the template."""
    state = json.loads(tokenizer.backend.serialise())
    ids = (*template.prefix, *template.suffix)
    around = [{"SpecialToken": {"id": tokenizer.token(i), "type_id": 0}} for i in ids]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*around[: len(template.prefix)], text, *around[len(template.prefix) :]]
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            tokenizer.token(i): {"id": tokenizer.token(i), "ids": [i], "tokens": [tokenizer.token(i)]}
            for i in ids
        },
    }
    return json.dumps(state, ensure_ascii=False).encode("utf-8")
