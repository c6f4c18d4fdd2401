"""T5: pre-norm without means, unscaled scores, distance buckets shared by each stack; version 1.1 and mT5."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints.entries import Entry, FamilyMapping, Ignored, Layers, Module, Packed, Same, Tied
from isoform.checkpoints.families.family import Family, HeadKind, token_ids
from isoform.checkpoints.families.llama_like import rms
from isoform.checkpoints.keys import ACTIVATIONS, NAMES, Keys
from isoform.config import (
    FeedForward,
    Gated,
    Layer,
    ModelConfig,
    RelativeBuckets,
    Stack,
    TokenHead,
    TwoLayer,
)
from isoform.config.presets.build import attention, embedding, gated, two_layer
from isoform.errors import ArtifactError


def read_t5(keys: Keys, kind: HeadKind) -> ModelConfig:
    """T5, T5 1.1, mT5."""
    d, heads, width = keys.integer("d_model", 512), keys.integer("num_heads", 8), keys.integer("d_kv", 64)
    drop = keys.real("dropout_rate", 0.1)
    norm = rms(keys.real("layer_norm_epsilon", 1e-6))
    network = _read_network(keys, drop)
    n_buckets = keys.integer("relative_attention_num_buckets", 32)
    distance = keys.integer("relative_attention_max_distance", 128)
    keys.skip("n_positions", "classifier_dropout")
    tied = keys.flag("tie_word_embeddings", True)
    scaled = keys.flag("scale_decoder_outputs", tied)  # a key of its own since version 5
    table = embedding(keys.integer("vocab_size", 32_128), d, dropout=drop)
    reads = attention(d, heads, head_width=width, bias=False, scale=1.0, dropout=drop)

    def stack(n: int, decoder: bool) -> Stack:
        buckets = RelativeBuckets(n_buckets=n_buckets, max_distance=distance, bidirectional=not decoder)
        layer = Layer(
            placement="pre",
            residual="sequential",
            norm=norm,
            attention=reads.replace(positions=buckets),
            cross_attention=reads if decoder else None,
            feed_forward=network,
            residual_dropout=drop,
        )
        return Stack(
            n_layers=n,
            visibility="causal" if decoder else "bidirectional",
            layer=layer,
            final_norm=norm,
            final_dropout=drop,
        )

    n = keys.integer("num_layers", 6)
    encoder, decoder = stack(n, False), stack(keys.take("num_decoder_layers", None) or n, True)
    keys.done()
    head = TokenHead(tied=tied, bias=False, scale="inverse_sqrt_d_model" if scaled else 1.0)
    return ModelConfig(
        d_model=d,
        embedding=table,
        source=table,
        tie_source=True,
        encoder=encoder,
        decoder=decoder,
        head=head if kind == "tokens" else None,
    )


def _read_network(keys: Keys, drop: float) -> FeedForward:
    projection = str(keys.take("feed_forward_proj", "relu"))
    is_gated = projection.startswith("gated-")
    name = projection.removeprefix("gated-")
    # The class takes "gated-gelu" to mean the tanh form.
    name = "gelu_new" if projection == "gated-gelu" else name
    if name not in ACTIVATIONS:
        raise ArtifactError(f"{keys.where}: feed_forward_proj {projection!r} is not supported")
    keys.must("is_gated_act", is_gated)
    keys.must("dense_act_fn", name, None)
    width = keys.integer("d_ff", 2048)
    if is_gated:
        return gated(width, ACTIVATIONS[name], dropout=drop)
    return two_layer(width, ACTIVATIONS[name], bias=False, dropout=drop)


def write_t5(cfg: ModelConfig) -> dict[str, Any]:
    """T5."""
    assert cfg.encoder is not None
    assert cfg.decoder is not None
    layer = cfg.decoder.layer
    network, buckets = layer.feed_forward, layer.attention.positions
    assert isinstance(network, TwoLayer | Gated)
    assert isinstance(buckets, RelativeBuckets)
    name = NAMES[network.activation]
    if isinstance(network, Gated):  # "gated-gelu" means the tanh form
        name = {"gelu_tanh": "gelu", "gelu": "gelu_python"}.get(network.activation, name)
        name = f"gated-{name}"
    tied = cfg.head is None or (isinstance(cfg.head, TokenHead) and cfg.head.tied)
    scaled = isinstance(cfg.head, TokenHead) and cfg.head.scale != 1.0
    return {
        # Understood since version 5; before, a head is scaled when it is the table.
        **({} if cfg.head is None or scaled == tied else {"scale_decoder_outputs": scaled}),
        "vocab_size": cfg.embedding.vocab_size,
        "d_model": cfg.d_model,
        "d_kv": layer.attention.head_width,
        "d_ff": network.width,
        "num_layers": cfg.encoder.n_layers,
        "num_decoder_layers": cfg.decoder.n_layers,
        "num_heads": layer.attention.n_heads,
        "relative_attention_num_buckets": buckets.n_buckets,
        "relative_attention_max_distance": buckets.max_distance,
        "dropout_rate": layer.residual_dropout,
        "layer_norm_epsilon": layer.norm.eps,
        "feed_forward_proj": name,
        "tie_word_embeddings": tied,
    }


def map_t5(cfg: ModelConfig) -> FamilyMapping:
    """The distance table belongs to the first layer there, to the stack here."""

    def layer(cross: bool) -> tuple[Entry, ...]:
        last = 2 if cross else 1
        parts = (("query", "q"), ("key", "k"), ("value", "v"))
        reads = tuple((ours, f"layer.0.SelfAttention.{theirs}") for ours, theirs in parts)
        crosses = tuple((ours, f"layer.1.EncDecAttention.{theirs}") for ours, theirs in parts)
        wi = f"layer.{last}.DenseReluDense.wi"
        return (
            Module("attention.before", "layer.0.layer_norm"),
            Packed("attention.body.qkv", reads),
            Module("attention.body.output", "layer.0.SelfAttention.o"),
            Module("cross_attention.before", "layer.1.layer_norm"),
            Module("cross_attention.body.query", "layer.1.EncDecAttention.q"),
            Packed("cross_attention.body.key_value", crosses[1:]),
            Module("cross_attention.body.output", "layer.1.EncDecAttention.o"),
            Module("feed_forward.before", f"layer.{last}.layer_norm"),
            Module("feed_forward.body.up", wi),
            Packed("feed_forward.body.gate_up", (("gate", f"{wi}_0"), ("up", f"{wi}_1"))),
            Module("feed_forward.body.down", f"layer.{last}.DenseReluDense.wo"),
        )

    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    ties = [Tied(f"{side}.embed_tokens.weight", "shared.weight") for side in ("encoder", "decoder")]
    if isinstance(cfg.head, TokenHead) and cfg.head.tied:
        ties.append(Tied("lm_head.weight", "shared.weight"))
    return FamilyMapping(
        entries=(
            Module("embedding", "shared"),
            Layers("encoder", "encoder.block.{}.", layer(False)),
            Layers("decoder", "decoder.block.{}.", layer(True)),
            Same("encoder.relative_bias.weight", f"encoder.{bias}"),
            Same("decoder.relative_bias.weight", f"decoder.{bias}"),
            Module("encoder.final_norm", "encoder.final_layer_norm"),
            Module("decoder.final_norm", "decoder.final_layer_norm"),
            Module("head", "lm_head"),
        ),
        ties=tuple(ties),
        ignored=(
            Ignored(
                "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
                "left over; cross-attention has no distances",
            ),
            *(() if cfg.head is not None else (Ignored("lm_head.weight", "of another head"),)),
        ),
    )


def _classes(name: str) -> dict[str, HeadKind]:
    return {f"{name}ForConditionalGeneration": "tokens", f"{name}Model": "states"}


IDS = token_ids(None, 1, 0, decoder_start=0)  # outputs begin with the padding
MT5: dict[str, Any] = {
    **IDS, "vocab_size": 250_112, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = (
    Family("t5", {**_classes("T5"), "T5WithLMHeadModel": "tokens"}, read_t5, write_t5, map_t5, defaults=IDS),
    Family("mt5", _classes("MT5"), read_t5, write_t5, map_t5, defaults=MT5),
)
