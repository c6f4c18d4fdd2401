"""The whole network: Tokens in, Output out."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from isoform import config
from isoform.errors import ShapeError
from isoform.nn.attention import Attention, Backend
from isoform.nn.cache import Cache
from isoform.nn.embedding import Embedding
from isoform.nn.heads import PoolingHead, SequenceHead, TaggingHead, TokenHead
from isoform.nn.initialise import initialise
from isoform.nn.stack import Memory, Sides, Stack
from isoform.places import Places
from isoform.tokens import Tokens
from isoform.visibility import Visibility


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """What a network returns.

    Args:
        hidden: ``[B, T, d]`` last hidden states, after the final norm.
        logits: ``[B, T, V]`` scores over tokens, ``[B, T, L]`` or ``[B, L]`` over labels; None: no head.
        memory: ``[B, S, d]`` what the encoder left for the decoder.
        pooled: ``[B, d]`` one vector a sequence, where the head pools.
    """

    hidden: Float[Tensor, "batch length d_model"]
    logits: Tensor | None = None
    memory: Float[Tensor, "batch source d_model"] | None = None
    pooled: Float[Tensor, "batch d_model"] | None = None


class Transformer(nn.Module):
    """Encoder, causal or prefix decoder, or encoder–decoder, as the configuration says."""

    def __init__(self, cfg: config.ModelConfig) -> None:
        super().__init__()
        self.config = cfg
        self.embedding = Embedding(cfg.embedding, cfg.d_model)
        self.source_embedding = None if cfg.source is None else Embedding(cfg.source, cfg.d_model)
        if self.source_embedding is not None and cfg.tie_source:
            self.source_embedding.weight = self.embedding.weight
        self.encoder = None if cfg.encoder is None else Stack(cfg.encoder, cfg.d_model)
        self.decoder = None if cfg.decoder is None else Stack(cfg.decoder, cfg.d_model)
        self.head = _head(cfg, self.embedding.weight)

    def forward(
        self,
        tokens: Tokens,
        source: Tokens | None = None,
        *,
        visibility: Visibility | None = None,
        cross: Visibility | None = None,
    ) -> Output:
        """One full pass.

        Args:
            tokens: the only stream, or the target side (its ids already shifted right, R30).
            source: the source side of an encoder–decoder.
            visibility: another rule for the stack that reads ``tokens`` (R18); default: the configuration's.
            cross: another rule for reading the source, e.g. wait-k; default: every real token.
        """
        if (source is not None) != (self.source_embedding is not None):
            raise ShapeError(
                "this network reads one stream, but a source was given"
                if source is not None
                else "this network is an encoder–decoder: pass source=Tokens(…)"
            )
        if source is not None and source.batch != tokens.batch:
            raise ShapeError(f"source has shape {list(source.ids.shape)}, tokens {list(tokens.ids.shape)}")
        memory = None if source is None else self.encode(source)
        hidden = self.hidden(tokens, memory=memory, visibility=visibility, cross=cross)
        left = None if memory is None else memory.hidden
        head = self.head
        if isinstance(head, SequenceHead):
            pooled, logits = head(hidden, tokens.real)
            return Output(hidden, logits, left, pooled)
        if isinstance(head, PoolingHead):
            return Output(hidden, None, left, head(hidden, tokens.real))
        return Output(hidden, None if head is None else head(hidden), left)

    def encode(self, source: Tokens) -> Memory:
        """Run the encoder of an encoder–decoder, once a source (R20, R31)."""
        if self.source_embedding is None or self.encoder is None:
            raise ShapeError("only an encoder–decoder has a source to encode")
        places = Places.of(source)
        sides = Sides(places, places, _shared(source))
        return Memory(self.encoder(self.source_embedding(source, sides.positions), sides), places)

    def hidden(
        self,
        tokens: Tokens,
        *,
        memory: Memory | None = None,
        cache: Cache | None = None,
        visibility: Visibility | None = None,
        cross: Visibility | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """The last hidden states of the stack that the head reads.

        With a cache the tokens continue what it holds, their keys and values are stored, and its lengths
        advance. Padding among them has to be on the right.

        Raises:
            ShapeError: the first tokens of a prefix decoder's cache end inside the condition, all of which
                each of its tokens reads.
        """
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None
        if cache is not None and cache.fresh and stack.cfg.visibility == "prefix":
            _check_condition(tokens)
        sides = _sides(tokens, cache)
        x = self.embedding(tokens, sides.positions)
        x = stack(x, sides, visibility=visibility, memory=memory, cross=cross, cache=cache)
        if cache is not None:
            cache.advance(tokens)
        return x

    def remember(self, cache: Cache, memory: Memory) -> None:
        """Project the memory for every decoder layer into the cache, once for all steps."""
        assert self.decoder is not None
        cache.memory = [block.project_memory(memory.hidden) for block in self.decoder.blocks()]  # pyright: ignore
        cache.memory_places = memory.places

    def set_attention(self, backend: Backend) -> Transformer:
        """Choose how attention is computed; the function stays the same. Returns the network."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.backend = backend
        return self

    def tied(self) -> list[tuple[str, ...]]:
        """Groups of parameter names that are one tensor (6.36)."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        return [tuple(names) for names in groups.values() if len(names) > 1]


def build(cfg: config.ModelConfig, *, seed: int | None = None) -> Transformer:
    """The network of a configuration, freshly initialised.

    Args:
        cfg: the architecture.
        seed: makes the initial weights reproducible; None draws from PyTorch's global generator.
    """
    model = Transformer(cfg)
    if next(model.parameters()).device.type != "meta":
        initialise(model, cfg, seed)
    return model


def _head(cfg: config.ModelConfig, table: nn.Parameter) -> nn.Module | None:
    head = cfg.head
    if isinstance(head, config.TokenHead):
        return TokenHead(head, cfg.d_model, cfg.embedding, table)
    if isinstance(head, config.SequenceHead):
        return SequenceHead(head, cfg.d_model)
    if isinstance(head, config.TaggingHead):
        return TaggingHead(head, cfg.d_model)
    return None if head is None else PoolingHead(head, cfg.d_model)


def _shared(tokens: Tokens) -> Int[Tensor, "rows length"]:
    """Positions, with one row for all where every row counts alike."""
    if tokens.position_ids is None and tokens.documents is None and tokens.layout in ("full", "right"):
        return torch.arange(tokens.length, device=tokens.device)[None]
    return tokens.positions()


def _check_condition(tokens: Tokens) -> None:
    if tokens.prefix is None or tokens.prefix.is_meta or torch.compiler.is_compiling():
        return
    lengths = tokens.lengths()
    if bool((tokens.prefix > lengths).any()):
        row = int((tokens.prefix > lengths).nonzero()[0])
        raise ShapeError(
            f"row {row}: {int(lengths[row])} tokens are read into an empty cache, its condition has "
            f"{int(tokens.prefix[row])}: every token of a condition reads all of it, so it is read at once"
        )


def _sides(tokens: Tokens, cache: Cache | None) -> Sides:
    places = Places.of(tokens)
    if cache is None:
        return Sides(places, places, _shared(tokens))
    if tokens.layout not in ("full", "right"):
        raise ShapeError(
            "tokens that continue a cache must be padded on the right: use tokens.padded('right')"
        )
    if tokens.documents is not None or tokens.position_ids is not None:
        raise ShapeError(
            "tokens that continue a cache count on from it: documents and position_ids cannot be given"
        )
    steps = torch.arange(tokens.length, device=tokens.device)[None]
    if cache.fresh:
        cache.prefix = tokens.prefix if cache.prefix is None else cache.prefix
        return Sides(places, places, steps, steps.expand(tokens.batch, -1), fresh=True)
    if cache.even is not None and tokens.real is None:
        end = cache.even + tokens.length
        slots = torch.arange(end, device=tokens.device)[None]
        index = slots[:, cache.even :]
        query = Places(index, None, None, cache.prefix, "any", cache.even)
        key = Places(slots, None, None, cache.prefix, "right", 0)
        return Sides(query, key, index, index.expand(tokens.batch, -1))
    index = cache.lengths[:, None] + steps
    visible = cache.capacity if cache.visible is None else cache.visible
    slots = torch.arange(visible, device=tokens.device)[None]
    written = slots < (cache.lengths + tokens.lengths())[:, None]
    query = Places(index, tokens.real, None, cache.prefix, tokens.layout or "any")
    key = Places(slots, written, None, cache.prefix, "right")
    return Sides(query, key, index, index)
