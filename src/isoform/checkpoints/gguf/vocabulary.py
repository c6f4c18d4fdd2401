"""The vocabulary inside a GGUF file, as a tokenizer."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints.gguf.file import File
from isoform.checkpoints.vocabularies import byte_fallback_bpe, merges
from isoform.data.specials import SpecialIds
from isoform.data.tokenizer import Template, Tokenizer
from isoform.errors import ArtifactError

CONTROL, USER_DEFINED = 3, 4
# How text is cut before pieces are merged, by the format's names for it (llama.cpp, llama-vocab.cpp).
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS: dict[str, tuple[str | None, bool]] = {
    "default": (None, False),
    "gpt-2": (None, False),
    "smollm": (None, True),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST, False),
    "qwen2": (_WORDS + r"\p{N}" + _REST, False),
}
"""A pattern, None for GPT-2's own; and whether digits stand alone."""


def read_tokenizer(file: File, rows: int) -> Tokenizer | None:
    """The tokenizer; None where the file has none, or cuts text in a way that is not known here.

    Args:
        file: the file.
        rows: of the embedding table.

    Raises:
        ArtifactError: more tokens than rows, or special ids outside the vocabulary.
    """
    model, tokens = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.tokens")
    if model not in ("gpt2", "llama") or tokens is None:
        return None
    if len(tokens) > rows:
        raise ArtifactError(f"{file.where}: the vocabulary has {len(tokens)} tokens, its table {rows} rows")
    vocab = {token: i for i, token in enumerate(tokens)}
    cut = str(file.get("tokenizer.ggml.pre", "default"))
    if model == "gpt2":
        if cut not in CUTS:
            return None
        inner = _byte_level(vocab, file.require("tokenizer.ggml.merges"), *CUTS[cut])
    else:
        scores = dict(zip(tokens, file.require("tokenizer.ggml.scores"), strict=True))
        pairs = merges(vocab, lambda piece: -scores[piece])
        unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
        spaced = bool(file.get("tokenizer.ggml.add_space_prefix", True))
        inner = byte_fallback_bpe(vocab, pairs, unk=tokens[unknown], space_before=spaced)
    _mark_special(inner, file, tokens)
    special = _special(file, len(tokens))
    ends = model == "llama", False
    begin, end = (
        bool(file.get(f"tokenizer.ggml.add_{part}_token", default))
        for part, default in zip(("bos", "eos"), ends, strict=True)
    )
    template = Template(
        (special.bos,) if begin and special.bos is not None else (),
        (special.eos,) if end and special.eos is not None else (),
    )
    return Tokenizer.from_huggingface(inner, special, template, specials_in_text="tokens")


def _byte_level(vocab: dict[str, int], lines: list[str], pattern: str | None, digits: bool) -> Any:
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    pairs = [(a, b) for a, _, b in (line.partition(" ") for line in lines)]
    inner = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=pattern is not None))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    return inner


def _mark_special(inner: Any, file: File, tokens: list[str]) -> None:
    import tokenizers

    kinds = file.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    named = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    controls = {t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL}
    inner.add_special_tokens(
        [tokenizers.AddedToken(t, normalized=False, special=True) for t in named if t in controls]
    )
    inner.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in named if t not in controls])


def _special(file: File, size: int) -> SpecialIds:
    names = {"pad": "padding", "bos": "bos", "eos": "eos", "unk": "unknown"}
    ids: dict[str, Any] = {}
    for part, name in names.items():
        number = file.get(f"tokenizer.ggml.{name}_token_id")
        if number is None:
            continue
        if not 0 <= number < size:
            raise ArtifactError(
                f"{file.where}: tokenizer.ggml.{name}_token_id is {number}, there are {size} tokens"
            )
        ids[part] = int(number)
    if ids.get("pad") in (ids.get("eos"), ids.get("bos"), ids.get("unk")):
        ids.pop("pad", None)
    return SpecialIds(**ids)
