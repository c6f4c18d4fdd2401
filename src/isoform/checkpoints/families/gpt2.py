"""GPT-2: Pre-LN, learned positions, input-major linear layers."""

from __future__ import annotations

from typing import Any

from isoform.checkpoints import operations as op
from isoform.checkpoints.entries import FamilyMapping, Fused, Ignored, Layers, Module
from isoform.checkpoints.families.decoders import (
    causal,
    is_tied,
    other_head,
    tied_head,
)
from isoform.checkpoints.families.family import Family, HeadKind, decoder_head, labels, token_ids
from isoform.checkpoints.keys import NAMES, Keys
from isoform.config import (
    Layer,
    Learned,
    ModelConfig,
    TwoLayer,
    Variant,
)
from isoform.config.presets.build import attention, embedding, layer_norm, two_layer


def read_gpt2(keys: Keys, kind: HeadKind) -> ModelConfig:
    """GPT-2."""
    d, heads, n = keys.integer("n_embd", 768), keys.integer("n_head", 12), keys.integer("n_layer", 12)
    norm = layer_norm(keys.real("layer_norm_epsilon", 1e-5))
    scaled = keys.flag("scale_attn_weights", True)
    plain = attention(
        d, heads, bias=True, scale="inverse_sqrt_head_width" if scaled else 1.0,
        dropout=keys.real("attn_pdrop", 0.1),
    )  # fmt: skip
    variants: tuple[Variant, ...] = ()
    if keys.flag("scale_attn_by_inverse_layer_idx", False):
        variants = tuple(
            Variant(layers=(i,), attention=plain.replace(scale=plain.score_scale / (i + 1)))
            for i in range(1, n)
        )
    keys.skip("n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout")
    keys.skip("summary_proj_to_labels", "reorder_and_upcast_attn", "n_special", "predict_special_tokens")
    table = embedding(
        keys.integer("vocab_size"), d, Learned(max_positions=keys.integer("n_positions", 1024), offset=0),
        dropout=keys.real("embd_pdrop", 0.1),
    )  # fmt: skip
    layer = Layer(
        placement="pre",
        residual="sequential",
        norm=norm,
        attention=plain,
        feed_forward=two_layer(
            keys.take("n_inner", None) or 4 * d, keys.activation("activation_function", "gelu_new"), bias=True
        ),
        residual_dropout=keys.real("resid_pdrop", 0.1),
    )
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", True))
    keys.done()
    return causal(d, table, n, layer, norm, head, variants)


def write_gpt2(cfg: ModelConfig) -> dict[str, Any]:
    """GPT-2."""
    stack = cfg.stack
    layer, positions = stack.layer, cfg.embedding.positions
    assert isinstance(layer.feed_forward, TwoLayer)
    assert isinstance(positions, Learned)
    return {
        "vocab_size": cfg.embedding.vocab_size,
        "n_embd": cfg.d_model,
        "n_head": layer.attention.n_heads,
        "n_layer": stack.n_layers,
        "n_positions": positions.max_positions,
        "n_inner": layer.feed_forward.width,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(
            layer.feed_forward.activation, NAMES[layer.feed_forward.activation]
        ),
        "layer_norm_epsilon": layer.norm.eps,
        "scale_attn_weights": layer.attention.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": bool(stack.variants),
        "attn_pdrop": layer.attention.dropout,
        "embd_pdrop": cfg.embedding.dropout,
        "resid_pdrop": layer.residual_dropout,
        "tie_word_embeddings": is_tied(cfg),
        **labels(cfg.head),
    }


def map_gpt2(cfg: ModelConfig) -> FamilyMapping:
    """GPT-2 stores its linear layers input-major."""
    layer = (
        Module("attention.before", "ln_1"),
        Fused("attention.body", "attn.c_attn", op.thirds, transposed=True),
        Module("attention.body.output", "attn.c_proj", transposed=True),
        Module("feed_forward.before", "ln_2"),
        Module("feed_forward.body.up", "mlp.c_fc", transposed=True),
        Module("feed_forward.body.down", "mlp.c_proj", transposed=True),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "transformer.wte"),
            Module("embedding.positions", "transformer.wpe"),
            Layers("decoder", "transformer.h.{}.", layer),
            Module("decoder.final_norm", "transformer.ln_f"),
            Module("head.labels", "score"),
            Module("head", "lm_head"),
        ),
        ties=tied_head(cfg, "lm_head.weight", "transformer.wte.weight"),
        ignored=(
            Ignored("transformer.h.*.attn.bias", "the causal triangle"),
            Ignored("transformer.h.*.attn.masked_bias", "the mask's constant"),
            *other_head(cfg, "lm_head.weight"),
        ),
        base="transformer.",
        heads=("lm_head.", "score."),
    )


GPT2: dict[str, HeadKind] = {
    "GPT2LMHeadModel": "tokens",
    "GPT2Model": "states",
    "GPT2ForSequenceClassification": "sequence",
}
FAMILIES = (Family("gpt2", GPT2, read_gpt2, write_gpt2, map_gpt2, defaults=token_ids(50_256, 50_256)),)
