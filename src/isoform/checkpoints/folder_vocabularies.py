"""The tokenizer of a checkpoint folder, whichever files it came in, with what it puts around a text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoform.checkpoints.vocabularies import characters, read_json
from isoform.data.specials import SpecialIds
from isoform.data.tokenizer import Template, Tokenizer
from isoform.errors import ArtifactError, IsoformError

if TYPE_CHECKING:
    import tokenizers

PARTS = ("pad", "bos", "eos", "unk")
# Only these mean a WordPiece vocabulary by ``vocab.txt``; elsewhere it is cut by rules that no file says.
WORD_PIECES = ("bert", "distilbert", "electra")


@dataclasses.dataclass(frozen=True)
class Found:
    """The vocabularies of a folder; one object where both sides share it."""

    target: Tokenizer
    source: Tokenizer


class Names:
    """The special tokens by name, as a folder's files give them."""

    def __init__(self, folder: Path, table: Mapping[str, Any]) -> None:
        self.settings = read_json(folder / "tokenizer_config.json")
        special = read_json(folder / "special_tokens_map.json")
        self.table = table
        self._given = {**self.settings, **special}
        self.extra = [_content(t) for t in self._given.get("additional_special_tokens") or []]

    def name(self, part: str) -> str | None:
        """The token that plays a part."""
        given = self._given.get(f"{part}_token")
        return None if given is None else _content(given)

    def special(self, look_up: Callable[[str], int | None], defaults: Mapping[str, str]) -> SpecialIds:
        """The ids of the parts that exist. A pad that is also another part is none."""
        ids: dict[str, Any] = {}
        for part in PARTS:
            name = self.name(part) or defaults.get(part)
            number = None if name is None else look_up(name)
            if number is None and isinstance(self.table.get(f"{part}_token_id"), int) and name is None:
                number = self.table[f"{part}_token_id"]
            if number is not None:
                ids[part] = number
        if ids.get("pad") in (ids.get("eos"), ids.get("bos"), ids.get("unk")):
            ids.pop("pad", None)
        return SpecialIds(**ids)


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
            return _marian(folder)
        one = _single(folder, model_type, names)
    except IsoformError as error:
        raise ArtifactError(str(error)) from None
    if one is not None:
        return Found(one, one)
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
    for name in ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model"):
        if (folder / name).is_file() and model_type in _PIECES:
            return _PIECES[model_type](folder / name, names)
    return None


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


def _pieces(path: Path) -> list[str]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor()
    try:
        model.Load(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise ArtifactError(f"{path}: not a SentencePiece model: {' '.join(str(error).split())}") from None
    return [model.id_to_piece(i) for i in range(model.get_piece_size())]


def _t5(path: Path, names: Names) -> Tokenizer:
    """Sentinels ``<extra_id_99>`` to ``<extra_id_0>`` follow the pieces; texts end in EOS."""
    size = len(_pieces(path))
    n = int(names.settings.get("extra_ids", 100))
    added = {f"<extra_id_{i}>": size + n - 1 - i for i in range(n)}
    special = SpecialIds(pad=0, eos=1, unk=2)
    return Tokenizer.from_sentencepiece(
        path.read_bytes(), special, Template(suffix=(1,)), added=added, pieces=None, where=str(path)
    )


def _llama(path: Path, names: Names) -> Tokenizer:
    """Prompts begin with BOS unless the settings say otherwise."""
    pieces = _pieces(path)
    places = {piece: i for i, piece in enumerate(pieces)}
    special = names.special(places.get, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"})
    if special.bos is None and "<bos>" in places:
        special = SpecialIds(
            pad=places.get("<pad>"), bos=places["<bos>"], eos=places.get("<eos>"), unk=places.get("<unk>")
        )
    prefix = (special.bos,) if names.settings.get("add_bos_token", True) and special.bos is not None else ()
    return Tokenizer.from_sentencepiece(
        path.read_bytes(), special, Template(prefix=prefix), added={}, pieces=None, where=str(path)
    )


def _fairseq(path: Path, names: Names) -> Tokenizer:
    """XLM-RoBERTa: fairseq's four special ids, then the model's pieces from its third on, one further."""
    pieces = _pieces(path)
    ids = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    ids |= {piece: i + 1 for i, piece in enumerate(pieces) if i >= 3}
    added = {"<mask>": len(pieces) + 1}
    special = SpecialIds(pad=1, bos=0, eos=2, unk=3, extra=added)
    return Tokenizer.from_sentencepiece(
        path.read_bytes(), special, Template((0,), (2,)), added=added, pieces=ids, where=str(path)
    )


def _m2m100(path: Path, names: Names) -> Tokenizer:
    """Ids from ``vocab.json``; language codes follow it. The source language has to be put before a text."""
    vocab: dict[str, int] = read_json(path.parent / "vocab.json")
    if not vocab:
        raise ArtifactError(f"{path.parent}: no vocab.json beside {path.name}")
    languages = {name: len(vocab) + i for i, name in enumerate(names.extra)}
    special = SpecialIds(
        pad=vocab["<pad>"], bos=vocab["<s>"], eos=vocab["</s>"], unk=vocab["<unk>"], extra=languages
    )
    return Tokenizer.from_sentencepiece(
        path.read_bytes(), special, Template(suffix=(vocab["</s>"],)), added=languages, pieces=vocab,
        where=str(path),
    )  # fmt: skip


_PIECES: dict[str, Callable[[Path, Names], Tokenizer]] = {
    "t5": _t5,
    "mt5": _t5,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "gemma": _llama,
    "gemma2": _llama,
    "gemma3_text": _llama,
    "xlm-roberta": _fairseq,
    "m2m_100": _m2m100,
}


def _marian(folder: Path) -> Found:
    """A model for each side, one table of ids, or one for each; targets are named by ``>>code<<``."""

    def one(model: Path, vocab_path: Path) -> Tokenizer:
        vocab: dict[str, int] = read_json(vocab_path)
        if not vocab:
            raise ArtifactError(f"{folder}: no {vocab_path.name} beside {model.name}")
        codes = {name: i for name, i in vocab.items() if re.fullmatch(">>.+<<", name)}
        pieces = {name: i for name, i in vocab.items() if name not in codes}
        special = SpecialIds(pad=vocab["<pad>"], eos=vocab["</s>"], unk=vocab["<unk>"], extra=codes)
        return Tokenizer.from_sentencepiece(
            model.read_bytes(), special, Template(suffix=(vocab["</s>"],)), added=codes, pieces=pieces,
            where=str(model),
        )  # fmt: skip

    own = folder / "target_vocab.json"
    source = one(folder / "source.spm", folder / "vocab.json")
    target = one(folder / "target.spm", own if own.is_file() else folder / "vocab.json")
    return Found(target, source)


def _alphabets(table: Mapping[str, Any]) -> Found:
    """Spelling to sound: the alphabets are in the configuration, their first four places are special."""
    ids: dict[str, Any] = {part: int(table[f"{part}_token_id"]) for part in ("pad", "bos", "eos")}
    special = SpecialIds(**ids, unk=3)
    names = {f"<{part}>": i for part, i in {**ids, "unk": 3}.items()}
    template = Template((ids["bos"],), (ids["eos"],))

    def one(key: str) -> Tokenizer:
        return characters(table[key], special, names).with_template(template)

    return Found(one("phoneme_chars"), one("grapheme_chars"))


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
