"""Tokenizers as checkpoints bring them along, with their special ids and what they put around a text."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoform.data.specials import SpecialIds
from isoform.data.tokenizer import Template, Tokenizer
from isoform.errors import ArtifactError

if TYPE_CHECKING:
    import tokenizers


def read_llama2c(path: Path) -> Tokenizer:
    """The llama2.c format: scores and pieces, merged by the highest score, bytes where there is no piece.

    Raises:
        ArtifactError: it ends too early.
    """
    raw = path.read_bytes()
    pieces: list[str] = []
    place = 4
    try:
        while place < len(raw):
            _, length = struct.unpack_from("<fi", raw, place)
            piece = raw[place + 8 : place + 8 + length]
            if len(piece) != length:
                raise struct.error("short")
            pieces.append(piece.decode("utf-8"))
            place += 8 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: truncated, or not a tokenizer of llama2.c: {error}") from None
    for i, name in enumerate(("<unk>", "<s>", "</s>")):
        pieces[i] = name
    vocab = {piece.replace(" ", "▁"): i for i, piece in enumerate(pieces)}
    inner = byte_fallback_bpe(
        vocab, merges(vocab, lambda piece: vocab[piece]), unk="<unk>", space_before=True
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    special = SpecialIds(bos=1, eos=2, unk=0)
    return Tokenizer.from_huggingface(inner, special, Template(prefix=(1,)), specials_in_text="text")


def merges(vocab: Mapping[str, int], rank: Any) -> list[tuple[str, str]]:
    """The merges that a score-ordered vocabulary stands for: for each piece all ways to make it of two."""
    found: list[tuple[str, str]] = []
    for piece in sorted(vocab, key=rank):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
        found += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return found


def byte_fallback_bpe(
    vocab: dict[str, int], pairs: list[tuple[str, str]], *, unk: str, space_before: bool
) -> tokenizers.Tokenizer:
    """Llama's kind of SentencePiece model: merged pieces, bytes where there is no piece.

    Args:
        vocab: ids by piece, a space written ▁.
        pairs: merges, the most urgent first.
        unk: the unknown token.
        space_before: whether a space is put before each text.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    model = models.BPE(vocab, pairs, byte_fallback=True, fuse_unk=True, unk_token=unk)
    inner = tokenizers.Tokenizer(model)
    spaces: list[Any] = [normalizers.Prepend("▁")] if space_before else []
    inner.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if space_before else [])])
    return inner


def characters(alphabet: Sequence[str], special: SpecialIds, names: Mapping[str, int]) -> Tokenizer:
    """One id a character, its place in the alphabet; places of special tokens are named apart."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    taken = set(names.values())
    vocab = {char: i for i, char in enumerate(alphabet) if i not in taken}
    vocab.update(names)
    unk = next((name for name, i in names.items() if i == special.unk), None)
    model = models.WordLevel(vocab, unk_token=unk) if unk is not None else models.WordLevel(vocab)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return Tokenizer.from_huggingface(inner, special, specials_in_text="text")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON table, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path}: not a JSON file: {error}") from None
    return data if isinstance(data, dict) else {}
