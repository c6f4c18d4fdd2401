"""A tokenizer as a file that the library of a checkpoint's format opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isoform.checkpoints.bundle import Bundle
from isoform.config.files import write_bytes, write_text
from isoform.data.backends import HuggingFace
from isoform.data.tokenizer import Template, Tokenizer
from isoform.errors import ArtifactError


def write_tokenizer(bundle: Bundle, folder: Path) -> None:
    """``tokenizer.json`` with what the protocol puts around a text, and the names of the special tokens.

    A SentencePiece model is written as ``tokenizer.model``, which the family's own class reads.

    Raises:
        ArtifactError: source and target have a vocabulary each, which these files cannot say.
    """
    tokenizer = bundle.tokenizer
    if tokenizer is None:
        return
    source = bundle.source_tokenizer
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
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


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
