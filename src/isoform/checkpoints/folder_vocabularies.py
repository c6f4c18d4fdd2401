"""The tokenizer of a checkpoint folder, whichever files it came in, with what it puts around a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoform.checkpoints.piece_vocabularies import came_in, read_marian, read_pieces
from isoform.checkpoints.special_names import PARTS, Names
from isoform.checkpoints.vocabularies import characters
from isoform.data.specials import SpecialIds
from isoform.data.tokenizer import Template, Tokenizer
from isoform.errors import ArtifactError, IsoformError

if TYPE_CHECKING:
    import tokenizers

# Only these mean a WordPiece vocabulary by ``vocab.txt``; elsewhere it is cut by rules that no file says.
WORD_PIECES = ("bert", "distilbert", "electra")


@dataclasses.dataclass(frozen=True)
class Found:
    """The vocabularies of a folder; one object where both sides share it."""

    target: Tokenizer
    source: Tokenizer
    came: Mapping[str, Any] | None = None
    """Of SentencePiece models: the files and settings that they came in, to be written again."""


def find(folder: Path, model_type: str, table: Mapping[str, Any]) -> Found | None:
    """Open whatever tokenizer is there; None where there is none, or none that is known.

    Args:
        folder: the checkpoint.
        model_type: its family, for files that do not say what is put around a text.
        table: its ``config.json``.

    Raises:
        ArtifactError: a damaged file.
    """
    names = Names(folder, table)
    try:
        if (folder / "source.spm").is_file() and (folder / "target.spm").is_file():
            target, source = read_marian(folder)
            return Found(target, source, came_in(folder, names, target))
        one = _single(folder, model_type, names)
    except IsoformError as error:
        raise ArtifactError(str(error)) from None
    if one is not None:
        return Found(one, one, came_in(folder, names, one) if one.backend.suffix == ".model" else None)
    if "grapheme_chars" in table and "phoneme_chars" in table:
        return _alphabets(table)
    return None


def _single(folder: Path, model_type: str, names: Names) -> Tokenizer | None:
    if (folder / "tokenizer.json").is_file():
        return _fast(folder / "tokenizer.json", names)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _byte_level(folder, model_type, names)
    if (folder / "vocab.txt").is_file() and model_type in WORD_PIECES:
        return _word_pieces(folder / "vocab.txt", names)
    return read_pieces(folder, model_type, names)


def _fast(path: Path, names: Names) -> Tokenizer:
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise ArtifactError(f"{path}: not a tokenizer.json: {' '.join(str(error).split())}") from None
    inner.no_truncation()
    inner.no_padding()
    template = _template(inner)
    special = names.special(inner.token_to_id, {})
    return Tokenizer.from_huggingface(inner, special, template, specials_in_text="tokens")


def _template(inner: tokenizers.Tokenizer) -> Template:
    """What the post-processor puts around a text, found by encoding one."""
    plain = inner.encode("a", add_special_tokens=False).ids
    full = inner.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return Template(tuple(full[:start]), tuple(full[start + len(plain) :]))
    return Template()


def _byte_level(folder: Path, model_type: str, names: Names) -> Tokenizer:
    """GPT-2's files. RoBERTa and BART put ``<s>`` and ``</s>`` around a text, OPT its BOS before it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    around = model_type in ("roberta", "bart", "xlm-roberta", "longformer", "led")
    prefix_space = bool(names.settings.get("add_prefix_space", False))
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises plain exceptions
        raise ArtifactError(f"{folder}: vocab.json and merges.txt: {' '.join(str(error).split())}") from None
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    inner.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    defaults: dict[str, str] = {"bos": end, "eos": end}
    if around:
        defaults = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    listed = {names.name(part) or defaults.get(part) for part in PARTS}
    inner.add_special_tokens([n for n in sorted(filter(None, listed)) if inner.token_to_id(n) is not None])
    if around and inner.token_to_id("<mask>") is not None:
        inner.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, special=True)])
    special = names.special(inner.token_to_id, defaults)
    template = Template()
    if around and special.bos is not None and special.eos is not None:
        template = Template((special.bos,), (special.eos,))
    elif names.settings.get("add_bos_token", model_type == "opt") and special.bos is not None:
        template = Template((special.bos,))
    return Tokenizer.from_huggingface(inner, special, template, specials_in_text="tokens")


def _word_pieces(path: Path, names: Names) -> Tokenizer:
    """BERT's vocabulary, with its normaliser and its cut at spaces, punctuation and Chinese characters."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    parts = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    called = {part: names.name(part) or default for part, default in parts.items()}
    settings = names.settings
    model = models.WordPiece.from_file(str(path), unk_token=called["unk"], max_input_chars_per_word=100)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),
        lowercase=bool(settings.get("do_lower_case", True)),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([name for name in called.values() if inner.token_to_id(name) is not None])
    ids = {part: inner.token_to_id(name) for part, name in called.items()}
    extra = {called[p]: ids[p] for p in ("cls", "sep", "mask") if ids[p] is not None}
    special = SpecialIds(pad=ids["pad"], unk=ids["unk"], extra=extra)
    template = Template()
    if ids["cls"] is not None and ids["sep"] is not None:
        template = Template((ids["cls"],), (ids["sep"],))
    return Tokenizer.from_huggingface(inner, special, template, specials_in_text="tokens")


def _alphabets(table: Mapping[str, Any]) -> Found:
    """Spelling to sound: the alphabets are in the configuration, their first four places are special."""
    ids: dict[str, Any] = {part: int(table[f"{part}_token_id"]) for part in ("pad", "bos", "eos")}
    special = SpecialIds(**ids, unk=3)
    names = {f"<{part}>": i for part, i in {**ids, "unk": 3}.items()}
    template = Template((ids["bos"],), (ids["eos"],))

    def one(key: str) -> Tokenizer:
        return characters(table[key], special, names).with_template(template)

    return Found(one("phoneme_chars"), one("grapheme_chars"))
