"""How CTranslate2 names and lays out a network's tensors."""

from __future__ import annotations

from isoform.checkpoints import operations as op
from isoform.checkpoints.entries import (
    Entry,
    FamilyMapping,
    Fused,
    Layers,
    Module,
    Packed,
    Rule,
    Same,
    Target,
    Tied,
)
from isoform.config import ModelConfig, RelativeBuckets, Stack, TokenHead

ENCODINGS = "{}.position_encodings.encodings"
BUCKETS = "{}.layer_{}.self_attention.relative_attention_bias"


class Gathered:
    """The memory's key and value projections, which are one matrix on both sides."""

    def rules(self, target: Target, ours: str, theirs: str) -> list[Rule]:
        """One rule each for weight and bias."""
        module, fused = f"{ours}cross_attention.body.key_value", f"{theirs}attention.linear_1"
        names = ((f"{module}.{part}", f"{fused}.{part}") for part in ("weight", "bias"))
        return [Rule((mine,), (theirs,)) for mine, theirs in names if mine in target.names]


LAYER: tuple[Entry, ...] = (
    Fused("attention.body", "self_attention.linear_0", op.thirds),
    Module("attention.body.output", "self_attention.linear_1"),
    Module("attention.body.query_norm", "self_attention.q_norm"),
    Module("attention.body.key_norm", "self_attention.k_norm"),
    Module("cross_attention.body.query", "attention.linear_0"),
    Gathered(),
    Module("cross_attention.body.output", "attention.linear_2"),
    Module("feed_forward.body.up", "ffn.linear_0"),
    Packed("feed_forward.body.gate_up", (("gate", "ffn.linear_0"), ("up", "ffn.linear_0_noact"))),
    Module("feed_forward.body.down", "ffn.linear_1"),
    # One name for the norm of a sublayer, wherever it stands.
    *(
        Module(f"{ours}.{place}", f"{theirs}.layer_norm")
        for ours, theirs in (
            ("attention", "self_attention"), ("cross_attention", "attention"), ("feed_forward", "ffn"),
        )
        for place in ("before", "after_sum")
    ),
)  # fmt: skip

PARALLEL: tuple[Entry, ...] = (
    Fused("attention", "self_attention.linear_0", op.thirds),
    Module("attention.output", "self_attention.linear_1"),
    Module("attention.query_norm", "self_attention.q_norm"),
    Module("attention.key_norm", "self_attention.k_norm"),
    Module("feed_forward.up", "ffn.linear_0"),
    Packed("feed_forward.gate_up", (("gate", "ffn.linear_0"), ("up", "ffn.linear_0_noact"))),
    Module("feed_forward.down", "ffn.linear_1"),
    Module("feed_forward_norm", "post_attention_layer_norm"),
)


def mapping(cfg: ModelConfig, *, table: str) -> FamilyMapping:
    """The tensors of a configuration.

    Args:
        cfg: the architecture.
        table: the name of the source's table, which gained a number between the versions.
    """
    entries: list[Entry] = [
        Module("source_embedding", table),
        Module("embedding", "decoder.embeddings"),
        Module("source_embedding.norm", "encoder.layernorm_embedding"),
        Module("embedding.norm", "decoder.layernorm_embedding"),
        Same("head.weight", "decoder.projection.weight"),
        Same("head.bias", "decoder.projection.bias"),
    ]
    ties: list[Tied] = []
    for side, stack in (("encoder", cfg.encoder), ("decoder", cfg.decoder)):
        if stack is None:
            continue
        entries += [
            Layers(side, f"{side}.layer_{{}}.", _layer(stack)),
            Module(f"{side}.final_norm", f"{side}.layer_norm"),
            Same(f"{side}.relative_bias.weight", BUCKETS.format(side, 0)),
        ]
        if isinstance(stack.layer.attention.positions, RelativeBuckets):
            first = BUCKETS.format(side, 0)
            ties += [Tied(BUCKETS.format(side, i), first, written=True) for i in range(1, stack.n_layers)]
    for name, shown in (("embedding", "decoder"), ("source_embedding", "encoder")):
        entries.append(Same(f"{name}.positions.weight", ENCODINGS.format(shown)))
    if isinstance(cfg.head, TokenHead) and cfg.head.tied:
        ties.append(Tied("decoder.projection.weight", "decoder.embeddings.weight", written=True))
    if cfg.tie_source:
        ties.append(Tied(f"{table}.weight", "decoder.embeddings.weight", written=True))
    return FamilyMapping(entries=tuple(entries), ties=tuple(ties))


def _layer(stack: Stack) -> tuple[Entry, ...]:
    if stack.layer.residual == "sequential":
        return LAYER
    shared = stack.layer.residual == "parallel_shared_norm"
    return (*PARALLEL, Module("attention_norm", "shared_layer_norm" if shared else "input_layer_norm"))
