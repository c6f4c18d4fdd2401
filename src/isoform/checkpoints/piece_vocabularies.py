"""SentencePiece models, numbered and surrounded as each family does it.

Special tokens written out in a text become their ids, as in the transformers library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isoform.checkpoints import languages
from isoform.checkpoints.special_names import Names
from isoform.checkpoints.vocabularies import read_json
from isoform.data.sentencepiece_model import Prefix
from isoform.data.specials import SpecialIds
from isoform.data.tokenizer import Template, Tokenizer
from isoform.errors import ArtifactError

# fairseq's own four, before the pieces.
_FAIRSEQ = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
_MARIAN = ("source.spm", "target.spm", "target_vocab.json")


def read_pieces(folder: Path, model_type: str, names: Names) -> Tokenizer | None:
    """The SentencePiece vocabulary of a folder; None where there is none, or the family has none.

    Raises:
        ArtifactError: a damaged file, or one that is missing beside it.
    """
    for name in FILES:
        if (folder / name).is_file() and model_type in _READERS:
            return _READERS[model_type](folder / name, names)
    return None


def read_marian(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """Target and source: a model each, and one table of ids for both or one each.

    Targets are named by ``>>code<<`` before the source text.
    """

    def one(model: Path, vocab_path: Path) -> Tokenizer:
        vocab = _beside(model, vocab_path.name)
        codes = {name: i for name, i in vocab.items() if re.fullmatch(">>.+<<", name)}
        ids = {"pad": vocab["<pad>"], "eos": vocab["</s>"], "unk": vocab["<unk>"]}
        added = {**codes, **{name: vocab[name] for name in ("<pad>", "</s>", "<unk>")}}
        return _made(model, ids, codes, Template(suffix=(vocab["</s>"],)), added, vocab)

    own = folder / "target_vocab.json"
    source = one(folder / "source.spm", folder / "vocab.json")
    target = one(folder / "target.spm", own if own.is_file() else folder / "vocab.json")
    return target, source


def came_in(folder: Path, names: Names, target: Tokenizer) -> dict[str, Any]:
    """What has to be written again for a folder that is read as this one was; plain values."""
    models = (*_MARIAN, *FILES)
    files = [name for name in (*models, "vocab.json") if (folder / name).is_file()]
    tables = {
        "tokenizer_config.json": names.settings,
        "special_tokens_map.json": names.tokens,
        "added_tokens.json": names.added,
    }
    return {"files": files, "tables": tables, "digest": target.digest}


def _made(
    path: Path, ids: Mapping[str, int], extra: Mapping[str, int], template: Template,
    added: Mapping[str, int], pieces: Mapping[str, int] | None, prefix: Prefix = "parts",
    greedy: Sequence[str] = (),
) -> Tokenizer:  # fmt: skip
    special = SpecialIds(**ids, extra=extra)
    return Tokenizer.from_sentencepiece(
        path.read_bytes(), special, template, added=added, pieces=pieces, where=str(path), prefix=prefix,
        greedy=greedy,
    )  # fmt: skip


def _prefix(names: Names) -> Prefix:
    """``legacy`` (true where nothing is said): a word boundary after every special token, too."""
    if not names.settings.get("add_prefix_space", True):
        return "none"
    return "text" if names.settings.get("legacy") is False else "parts"


def _pieces(path: Path) -> list[str]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor()
    try:
        model.Load(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise ArtifactError(f"{path}: not a SentencePiece model: {' '.join(str(error).split())}") from None
    return [model.id_to_piece(i) for i in range(model.get_piece_size())]


def _beside(path: Path, name: str) -> dict[str, int]:
    vocab: dict[str, int] = read_json(path.parent / name)
    if not vocab:
        raise ArtifactError(f"{path.parent}: no {name} beside {path.name}")
    if missing := [token for token in ("<pad>", "</s>", "<unk>") if token not in vocab]:
        raise ArtifactError(f"{path.parent / name}: no token {missing[0]}")
    return vocab


def _own(path: Path, places: Mapping[str, int], *tokens: str) -> dict[str, int]:
    if missing := [token for token in tokens if token not in places]:
        raise ArtifactError(f"{path}: no piece {missing[0]}")
    return {token: places[token] for token in tokens}


def _t5(path: Path, names: Names) -> Tokenizer:
    """Sentinels ``<extra_id_99>`` to ``<extra_id_0>`` follow the pieces; texts end in EOS."""
    pieces = _pieces(path)
    own = _own(path, {p: i for i, p in enumerate(pieces)}, "<pad>", "</s>", "<unk>")
    n = int(names.settings.get("extra_ids", 100))
    sentinels = {f"<extra_id_{i}>": len(pieces) + n - 1 - i for i in range(n)}
    ids = {"pad": own["<pad>"], "eos": own["</s>"], "unk": own["<unk>"]}
    prefix = _prefix(names)
    greedy = () if prefix == "parts" else tuple(sentinels)  # with a boundary of its own no space is missed
    template = Template(suffix=(own["</s>"],))
    return _made(path, ids, {}, template, {**own, **sentinels}, None, prefix, greedy)


def _llama(path: Path, names: Names) -> Tokenizer:
    """Prompts begin with BOS unless the settings say otherwise; Gemma calls its specials otherwise."""
    pieces = _pieces(path)
    places = {piece: i for i, piece in enumerate(pieces)}
    beyond = {name: i for name, i in names.added.items() if i >= len(pieces)}
    known = {**places, **beyond}
    special = names.special(known.get, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"})
    if special.bos is None and "<bos>" in places:
        special = SpecialIds(
            pad=places.get("<pad>"), bos=places["<bos>"], eos=places.get("<eos>"), unk=places.get("<unk>")
        )
    prefix = (special.bos,) if names.settings.get("add_bos_token", True) and special.bos is not None else ()
    parts = {"pad": special.pad, "bos": special.bos, "eos": special.eos, "unk": special.unk}
    ids = {part: number for part, number in parts.items() if number is not None}
    own = {pieces[number]: number for number in ids.values() if number < len(pieces)}
    return _made(path, ids, beyond, Template(prefix=prefix), {**own, **beyond}, None, _prefix(names))


def _albert(path: Path, names: Names) -> Tokenizer:
    """``[CLS]`` and ``[SEP]`` around a text; small letters, no accents and other rules before it is cut."""
    settings = names.settings
    places = {piece: i for i, piece in enumerate(_pieces(path))}
    own = _own(path, places, "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
    rules = {
        "lowercase": bool(settings.get("do_lower_case", True)),
        "spaces": bool(settings.get("remove_space", True)),
        "accents": bool(settings.get("keep_accents", False)),
    }
    extra = {name: own[name] for name in ("[CLS]", "[SEP]", "[MASK]")}
    special = SpecialIds(pad=own["<pad>"], bos=own["[CLS]"], eos=own["[SEP]"], unk=own["<unk>"], extra=extra)
    return Tokenizer.from_sentencepiece(
        path.read_bytes(), special, Template((own["[CLS]"],), (own["[SEP]"],)), added=own, pieces=None,
        where=str(path), albert=rules,
    )  # fmt: skip


def _fairseq(path: Path, extra: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of the pieces, from the model's third on one further than there; and of what follows them."""
    pieces = _pieces(path)
    ids = _FAIRSEQ | {piece: i + 1 for i, piece in enumerate(pieces) if i >= 3}
    return ids, {name: len(pieces) + 1 + i for i, name in enumerate(extra)}


def _of_fairseq(path: Path, pieces: Mapping[str, int], extra: Mapping[str, int], template: Template) -> Any:
    ids = {"pad": 1, "bos": 0, "eos": 2, "unk": 3}
    return _made(path, ids, extra, template, {**_FAIRSEQ, **extra}, pieces)


def _xlm_roberta(path: Path, names: Names) -> Tokenizer:
    """``<s>`` and ``</s>`` around a text."""
    pieces, extra = _fairseq(path, ("<mask>",))
    return _of_fairseq(path, pieces, extra, Template((0,), (2,)))


def _mbart(path: Path, names: Names) -> Tokenizer:
    """The source language follows EOS; in mBART-50 it stands before the text."""
    size = len(_pieces(path)) + 1
    codes, many = languages.MBART, languages.MBART + languages.MBART_50_MORE
    kind, rows = names.settings.get("tokenizer_class"), names.table.get("vocab_size")
    fifty = kind.startswith("MBart50") if isinstance(kind, str) else rows == size + len(many) + 1
    pieces, extra = _fairseq(path, (*(many if fifty else codes), "<mask>"))
    language = _language(path, names, "en_XX", extra)
    template = Template((language,), (2,)) if fifty else Template((), (2, language))
    return _of_fairseq(path, pieces, extra, template)


def _m2m100(path: Path, names: Names) -> Tokenizer:
    """M2M100: ids from ``vocab.json``, languages after them. Without that file it is NLLB."""
    if not (path.parent / "vocab.json").is_file():
        return _nllb(path, names)
    vocab = _beside(path, "vocab.json")
    kind = names.settings.get("language_codes", "m2m100")
    if kind not in ("m2m100", "wmt21"):
        raise ArtifactError(f"{path.parent}: language_codes {kind!r} is not supported")
    codes = languages.M2M100 if kind == "m2m100" else languages.WMT21
    extra = {f"__{code}__": len(vocab) + i for i, code in enumerate(codes)}
    language = _language(path, names, "en", extra, "__{}__")
    ids = {"pad": vocab["<pad>"], "bos": vocab["<s>"], "eos": vocab["</s>"], "unk": vocab["<unk>"]}
    own = {name: vocab[name] for name in _FAIRSEQ}
    return _made(path, ids, extra, Template((language,), (ids["eos"],)), {**own, **extra}, vocab)


def _nllb(path: Path, names: Names) -> Tokenizer:
    """The source language before a text, or after its EOS where the settings ask for the first releases'."""
    pieces, extra = _fairseq(path, (*languages.NLLB, "<mask>"))
    extra = {name: i for name, i in names.added.items() if i > max(pieces.values())} or extra
    language = _language(path, names, "eng_Latn", extra)
    last = bool(names.settings.get("legacy_behaviour", False))
    return _of_fairseq(
        path, pieces, extra, Template((), (2, language)) if last else Template((language,), (2,))
    )


def _language(path: Path, names: Names, default: str, ids: Mapping[str, int], form: str = "{}") -> int:
    code = form.format(names.settings.get("src_lang") or default)
    if code not in ids:
        raise ArtifactError(f"{path.parent}: no token {code} for the source language (src_lang)")
    return ids[code]


def _pegasus(path: Path, names: Names) -> Tokenizer:
    """Ids of pretraining tokens before those of the pieces; texts end in EOS."""
    offset = int(names.settings.get("offset", 103))
    sentence = names.settings.get("mask_token_sent", "<mask_1>")
    if sentence is None:
        raise ArtifactError(f"{path.parent}: a Pegasus tokenizer without mask_token_sent is not supported")
    first = ["<pad>", "</s>", str(sentence), names.name("mask") or "<mask_2>"]
    first += [f"<unk_{i}>" for i in range(2, offset)]
    added = {name: i for i, name in enumerate(first)}
    pieces = {piece: i + offset for i, piece in enumerate(_pieces(path)) if piece not in added}
    if "<unk>" not in pieces or pieces["<unk>"] < len(first):
        raise ArtifactError(f"{path}: its first pieces are not <pad>, </s> and <unk>, as Pegasus has them")
    ids = {"pad": 0, "eos": 1, "unk": pieces["<unk>"]}
    extra = {name: i for name, i in added.items() if i > 1}
    own = {"<unk>": pieces["<unk>"]}
    return _made(path, ids, extra, Template(suffix=(1,)), {**added, **own}, {**added, **pieces})


_READERS: dict[str, Callable[[Path, Names], Tokenizer]] = {
    "t5": _t5,
    "mt5": _t5,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "gemma": _llama,
    "gemma2": _llama,
    "gemma3_text": _llama,
    "albert": _albert,
    "xlm-roberta": _xlm_roberta,
    "mbart": _mbart,
    "m2m_100": _m2m100,
    "pegasus": _pegasus,
}
