"""Encoder families. Defaults are those of the released base model that each docstring names."""

from __future__ import annotations

from typing import Literal

from isoform.config.model import (
    Layer,
    ModelConfig,
    Pooler,
    PoolingHead,
    Projection,
    Stack,
    TaggingHead,
    TokenHead,
    Transform,
)
from isoform.config.parts import ActivationName, Learned
from isoform.config.presets.build import attention, embedding, layer_norm, two_layer

EncoderHead = Literal["masked_token", "pooled", "replaced_token"] | None


def bert(
    vocab_size: int = 30_522,
    *,
    d_model: int = 768,
    embedding_width: int | None = None,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 12,
    max_positions: int = 512,
    position_offset: int = 0,
    n_token_types: int = 2,
    activation: ActivationName = "gelu",
    head_activation: ActivationName | None = None,
    dropout: float = 0.1,
    eps: float = 1e-12,
    head: EncoderHead = "masked_token",
) -> ModelConfig:
    """BERT base (Devlin et al. 2019): Post-LN, exact GELU, learned positions, embedding norm.

    Args:
        vocab_size: rows of the table.
        d_model: width of the residual stream.
        embedding_width: width of the table where it has its own; a projection then follows the norm.
        n_heads: attention heads.
        ffn_width: hidden units of the feed-forward network.
        n_layers: layers.
        max_positions: the longest sequence.
        position_offset: row of the first position.
        n_token_types: segments.
        activation: of the feed-forward network.
        head_activation: of the head's dense layer; the feed-forward's when omitted.
        dropout: on attention weights, increments and embedding.
        eps: of every norm.
        head: "masked_token" scores the vocabulary; "pooled" gives the tanh of a dense layer on the first
            state; "replaced_token" scores each token (ELECTRA's discriminator); None leaves the states.
    """
    norm = layer_norm(eps)
    dense = head_activation or activation
    heads = {
        "masked_token": TokenHead(
            tied=True, bias=True, transform=Transform(activation=dense, bias=True, norm=norm)
        ),
        "pooled": PoolingHead(pooling="first", pooler=Pooler(activation="tanh", bias=True), normalise=False),
        "replaced_token": TaggingHead(n_labels=1, dense=Pooler(activation=dense, bias=True), bias=True),
    }
    return ModelConfig(
        d_model=d_model,
        embedding=embedding(
            vocab_size,
            embedding_width or d_model,
            Learned(max_positions=max_positions, offset=position_offset),
            norm=norm,
            n_token_types=n_token_types,
            dropout=dropout,
            projection=Projection(place="after_norm", bias=True) if embedding_width else None,
        ),
        encoder=Stack(
            n_layers=n_layers,
            visibility="bidirectional",
            layer=Layer(
                placement="post",
                residual="sequential",
                norm=norm,
                attention=attention(d_model, n_heads, bias=True, dropout=dropout),
                feed_forward=two_layer(ffn_width, activation, bias=True),
                residual_dropout=dropout,
            ),
            final_norm=None,
        ),
        head=heads[head] if head else None,
    )


def roberta(
    vocab_size: int = 50_265,
    *,
    d_model: int = 768,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 12,
    max_positions: int = 512,
    dropout: float = 0.1,
    eps: float = 1e-5,
    head: Literal["masked_token", "pooled"] | None = "masked_token",
) -> ModelConfig:
    """RoBERTa base (Liu et al. 2019): BERT whose positions start at 2 and whose token types are one."""
    return bert(
        vocab_size, d_model=d_model, n_heads=n_heads, ffn_width=ffn_width, n_layers=n_layers,
        max_positions=max_positions, position_offset=2, n_token_types=1, head_activation="gelu",
        dropout=dropout, eps=eps, head=head,
    )  # fmt: skip


def distilbert(
    vocab_size: int = 30_522,
    *,
    d_model: int = 768,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 6,
    max_positions: int = 512,
    dropout: float = 0.1,
    head: Literal["masked_token"] | None = "masked_token",
) -> ModelConfig:
    """DistilBERT base (Sanh et al. 2019): BERT without token types; residual dropout on the FFN alone."""
    base = bert(
        vocab_size, d_model=d_model, n_heads=n_heads, ffn_width=ffn_width, n_layers=n_layers,
        max_positions=max_positions, n_token_types=0, dropout=dropout, head=head,
    )  # fmt: skip
    return base.replace(encoder__layer__residual_dropout_on="feed_forward")


def albert(
    vocab_size: int = 30_000,
    *,
    d_model: int = 768,
    embedding_width: int = 128,
    n_heads: int = 12,
    ffn_width: int = 3072,
    n_layers: int = 12,
    n_groups: int = 1,
    max_positions: int = 512,
    activation: ActivationName = "gelu_tanh",
    dropout: float = 0.0,
    head: Literal["masked_token", "pooled"] | None = "masked_token",
) -> ModelConfig:
    """ALBERT base v2 (Lan et al. 2020): BERT with a narrow table and layers that share their parameters.

    ``n_groups`` groups of layers in a row have parameters of their own.
    """
    base = bert(
        vocab_size, d_model=d_model, embedding_width=embedding_width, n_heads=n_heads, ffn_width=ffn_width,
        n_layers=n_layers, max_positions=max_positions, activation=activation, dropout=dropout, head=head,
    )  # fmt: skip
    groups = [i * n_groups // n_layers for i in range(n_layers)]
    return base.replace(
        encoder__layer__residual_dropout_on="attention",
        encoder__layer_sharing=tuple(groups.index(group) for group in groups),
    )


def electra(
    vocab_size: int = 30_522,
    *,
    d_model: int = 256,
    embedding_width: int | None = 128,
    n_heads: int = 4,
    ffn_width: int = 1024,
    n_layers: int = 12,
    max_positions: int = 512,
    dropout: float = 0.1,
    head: Literal["masked_token", "replaced_token"] | None = "replaced_token",
) -> ModelConfig:
    """ELECTRA small discriminator (Clark et al. 2020): BERT, often with a narrow table.

    ``head="masked_token"`` is the generator's; ``embedding_width=None`` where the table is not narrow.
    """
    return bert(
        vocab_size, d_model=d_model, embedding_width=embedding_width, n_heads=n_heads, ffn_width=ffn_width,
        n_layers=n_layers, max_positions=max_positions, head_activation="gelu", dropout=dropout, head=head,
    )  # fmt: skip
