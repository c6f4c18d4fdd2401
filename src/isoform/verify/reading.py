"""A text as the tokens that a bundle's network reads, by its own protocol."""

from __future__ import annotations

import torch

from isoform.checkpoints import Bundle
from isoform.data import Tokenizer
from isoform.errors import DataError, TokenizerError
from isoform.generation import generate
from isoform.tokens import Tokens


def reading(
    bundle: Bundle, text: str, target: str | None = None, *, max_new_tokens: int = 32
) -> tuple[Tokens, Tokens | None]:
    """One row for the network: ``(tokens, source)``.

    Args:
        bundle: the network, its tokenizers and its protocol.
        text: the only text; the prompt, or condition of a prefix decoder; the source of an encoder–decoder.
        target: what follows it. For an encoder–decoder the default is the network's own greedy output.
        max_new_tokens: how long that output may become.

    Raises:
        TokenizerError: the bundle has no tokenizer.
        DataError: a target for an encoder, or a text without tokens.
    """
    config, protocol = bundle.config, bundle.protocol
    own = _tokenizer(bundle.tokenizer)
    if config.structure == "encoder":
        if target is not None:
            raise DataError("an encoder reads one text; there is nothing a target could follow")
        return _row([*protocol.source_prefix, *own.encode(text), *protocol.source_suffix]), None
    after = [] if target is None else own.encode(target)
    if config.structure == "decoder":
        before = [*protocol.start, *own.encode(text)]
        prefix = torch.tensor([len(before)]) if config.stack.visibility == "prefix" else None
        return _row([*before, *after], prefix), None
    other = _tokenizer(bundle.source_tokenizer or bundle.tokenizer)
    source = _row([*protocol.source_prefix, *other.encode(text), *protocol.source_suffix])
    if target is None:
        start, room = _row(list(protocol.start)), config.max_positions()
        limit = max_new_tokens if room is None else min(max_new_tokens, room)
        after = generate(bundle.model, start, source=source, max_new_tokens=limit, protocol=protocol).ids[0]
    return _row([*protocol.start, *after]), source


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise TokenizerError("there is no tokenizer with these weights; give token ids instead")
    return tokenizer


def _row(ids: list[int], prefix: torch.Tensor | None = None) -> Tokens:
    if not ids:
        raise DataError("a text without tokens; there is nothing to read")
    return Tokens(torch.tensor([ids]), prefix=prefix, layout="full")
