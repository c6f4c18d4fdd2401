"""What the causal decoders with LayerNorm share."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints.entries import Entry, FamilyMapping, Ignored, Layers, Module, Tied
from isoform.checkpoints.families.family import labels
from isoform.checkpoints.keys import NAMES
from isoform.config import (
    Embedding,
    Layer,
    ModelConfig,
    Norm,
    Stack,
    TokenHead,
    TwoLayer,
    Variant,
)


def causal(
    d: int, table: Embedding, n_layers: int, layer: Layer, final: Norm | None, head: Any,
    variants: tuple[Variant, ...] = (),
) -> ModelConfig:  # fmt: skip
    """A causal decoder."""
    stack = Stack(n_layers=n_layers, visibility="causal", layer=layer, variants=variants, final_norm=final)
    return ModelConfig(d_model=d, embedding=table, decoder=stack, head=head)


def tied_head(cfg: ModelConfig, theirs: str, table: str) -> tuple[Tied, ...]:
    """The tie of a head that is the table."""
    return (Tied(theirs, table),) if isinstance(cfg.head, TokenHead) and cfg.head.tied else ()


def other_head(cfg: ModelConfig, theirs: str) -> tuple[Ignored, ...]:
    """A language-model head in a file that is read without it."""
    return () if isinstance(cfg.head, TokenHead) else (Ignored(theirs, "of another head"),)


def is_tied(cfg: ModelConfig) -> bool:
    """Whether the head is the table."""
    return isinstance(cfg.head, TokenHead) and cfg.head.tied


def sublayers(attention: tuple[Entry, ...], feed_forward: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The same entries under the names of sequential and of parallel layers; whichever exist apply."""
    return (
        *(Under("attention.body.", entry) for entry in attention),
        *(Under("attention.", entry) for entry in attention),
        *(Under("feed_forward.body.", entry) for entry in feed_forward),
        *(Under("feed_forward.", entry) for entry in feed_forward),
    )


class Under:
    """An entry below a further prefix on our side."""

    def __init__(self, ours: str, entry: Entry) -> None:
        self.ours, self.entry = ours, entry

    def rules(self, target: Any, ours: str, theirs: str) -> Any:
        """The entry's rules."""
        return self.entry.rules(target, ours + self.ours, theirs)


def hidden(cfg: ModelConfig) -> dict[str, Any]:
    """Sizes under their most usual names."""
    stack = cfg.stack
    network = stack.layer.feed_forward
    assert isinstance(network, TwoLayer)
    return {
        "vocab_size": cfg.embedding.vocab_size,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": stack.n_layers,
        "num_attention_heads": stack.layer.attention.n_heads,
        "intermediate_size": network.width,
        "hidden_act": NAMES[network.activation],
        "attention_dropout": stack.layer.attention.dropout,
        **labels(cfg.head),
    }


def like_llama(cfg: ModelConfig, layer: tuple[Entry, ...], final: str) -> FamilyMapping:
    return FamilyMapping(
        entries=(
            Module("embedding", "model.embed_tokens"),
            Layers("decoder", "model.layers.{}.", layer),
            Module("decoder.final_norm", final),
            Module("head.labels", "score"),
            Module("head", "lm_head"),
        ),
        ties=tied_head(cfg, "lm_head.weight", "model.embed_tokens.weight"),
        ignored=(
            Ignored("*rotary_emb.inv_freq", "rebuilt from the configuration"),
            *other_head(cfg, "lm_head.*"),
        ),
        base="model.",
        heads=("lm_head.", "score."),
    )
