"""Causal decoders with LayerNorm: GPT-2, GPT-NeoX, OPT, BLOOM, Phi, StarCoder2."""

from __future__ import annotations

from typing import Any, Literal

from isoform.checkpoints import operations as op
from isoform.checkpoints.families.family import Family, HeadKind, decoder_head, labels
from isoform.checkpoints.families.llama_like import QKV, classes
from isoform.checkpoints.families.rotary import read_rotary, write_rotary
from isoform.checkpoints.keys import NAMES, Keys
from isoform.checkpoints.mapping import (
    Entry,
    FamilyMapping,
    Fused,
    Ignored,
    Layers,
    Module,
    Packed,
    Tied,
)
from isoform.config import (
    Alibi,
    Embedding,
    Layer,
    Learned,
    ModelConfig,
    Norm,
    Projection,
    QKNorm,
    Rotary,
    Stack,
    TokenHead,
    Transform,
    TwoLayer,
    Variant,
)
from isoform.config.presets.build import attention, embedding, layer_norm, two_layer
from isoform.errors import ArtifactError


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


# --- GPT-2 ------------------------------------------------------------------------------------------------


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
    keys.skip("summary_proj_to_labels", "reorder_and_upcast_attn")
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


# --- GPT-NeoX ---------------------------------------------------------------------------------------------


def read_gpt_neox(keys: Keys, kind: HeadKind) -> ModelConfig:
    """GPT-NeoX, Pythia."""
    d, heads = keys.integer("hidden_size", 6144), keys.integer("num_attention_heads", 64)
    norm = layer_norm(keys.real("layer_norm_eps", 1e-5))
    rotary = read_rotary(
        keys,
        head_width=d // heads,
        theta=keys.real("rotary_emb_base", 10_000.0),
        max_positions=2048,
        share=keys.real("rotary_pct", 0.25),
        share_key=True,
    )
    bias = keys.flag("attention_bias", True)
    keys.skip("classifier_dropout")
    layer = Layer(
        placement="pre",
        residual="parallel" if keys.flag("use_parallel_residual", True) else "sequential",
        norm=norm,
        attention=attention(
            d, heads, bias=bias, positions=rotary, dropout=keys.real("attention_dropout", 0.0)
        ),
        feed_forward=two_layer(
            keys.integer("intermediate_size", 24_576), keys.activation("hidden_act", "gelu"), bias=True
        ),
        residual_dropout=keys.real("hidden_dropout", 0.0),
    )
    table = embedding(keys.integer("vocab_size"), d, dropout=layer.residual_dropout)
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", False))
    n = keys.integer("num_hidden_layers", 44)
    keys.done()
    return causal(d, table, n, layer, norm, head)


def write_gpt_neox(cfg: ModelConfig) -> dict[str, Any]:
    """GPT-NeoX."""
    layer = cfg.stack.layer
    rotary = layer.attention.positions
    assert isinstance(rotary, Rotary)
    written = write_rotary(rotary, share_key=True, head_width=layer.attention.head_width)
    share = written.pop("partial_rotary_factor")
    return {
        **written,
        **hidden(cfg),
        "rotary_pct": share,
        "rotary_emb_base": written["rope_theta"],
        "attention_bias": layer.attention.bias.query,
        "use_parallel_residual": layer.residual == "parallel",
        "layer_norm_eps": layer.norm.eps,
        "hidden_dropout": layer.residual_dropout,
        "tie_word_embeddings": is_tied(cfg),
    }


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


def map_gpt_neox(cfg: ModelConfig) -> FamilyMapping:
    """GPT-NeoX fuses query, key and value head by head."""
    layer = (
        *(Module(name, "input_layernorm") for name in ("attention_norm", "attention.before")),
        *(Module(name, "post_attention_layernorm") for name in ("feed_forward_norm", "feed_forward.before")),
        Fused("attention.body", "attention.query_key_value", op.per_head),
        Fused("attention", "attention.query_key_value", op.per_head),
        *sublayers(
            (Module("output", "attention.dense"),),
            (Module("up", "mlp.dense_h_to_4h"), Module("down", "mlp.dense_4h_to_h")),
        ),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "gpt_neox.embed_in"),
            Layers("decoder", "gpt_neox.layers.{}.", layer),
            Module("decoder.final_norm", "gpt_neox.final_layer_norm"),
            Module("head.labels", "score"),
            Module("head", "embed_out"),
        ),
        ties=tied_head(cfg, "embed_out.weight", "gpt_neox.embed_in.weight"),
        ignored=(
            Ignored("gpt_neox.layers.*.attention.bias", "the causal triangle"),
            Ignored("gpt_neox.layers.*.attention.masked_bias", "the mask's constant"),
            Ignored("*rotary_emb.inv_freq", "rebuilt from the configuration"),
            *other_head(cfg, "embed_out.weight"),
        ),
        base="gpt_neox.",
        heads=("embed_out.", "score."),
    )


# --- OPT --------------------------------------------------------------------------------------------------


def read_opt(keys: Keys, kind: HeadKind) -> ModelConfig:
    """OPT."""
    d, heads = keys.integer("hidden_size", 768), keys.integer("num_attention_heads", 12)
    width = keys.take("word_embed_proj_dim", None) or d
    if width != d and kind != "tokens":
        raise ArtifactError(
            f"{keys.where}: a narrow table (word_embed_proj_dim) is read with its own head only"
        )
    affine = keys.flag("layer_norm_elementwise_affine", True)
    norm = Norm(kind="layer", eps=1e-5, gain=affine, bias=affine)
    before = keys.flag("do_layer_norm_before", True)
    placement: Literal["pre", "post"] = "pre" if before else "post"
    final = not keys.flag("_remove_final_layer_norm", False) and before
    bias = keys.flag("enable_bias", True)
    keys.skip("layerdrop", "activation_dropout")
    layer = Layer(
        placement=placement,
        residual="sequential",
        norm=norm,
        attention=attention(d, heads, bias=bias, dropout=keys.real("attention_dropout", 0.0)),
        feed_forward=two_layer(
            keys.integer("ffn_dim", 3072), keys.activation("activation_function", "relu"), bias=bias
        ),
        residual_dropout=keys.real("dropout", 0.1),
    )
    positions = Learned(max_positions=keys.integer("max_position_embeddings", 2048), offset=2)
    table = embedding(
        keys.integer("vocab_size", 50_272), width, positions,
        projection=Projection(place="before_positions", bias=False) if width != d else None,
    )  # fmt: skip
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", True))
    if isinstance(head, TokenHead) and width != d:
        head = head.replace(transform=Transform(activation="identity", bias=False, norm=None))
    n = keys.integer("num_hidden_layers", 12)
    keys.done()
    return causal(d, table, n, layer, norm if final else None, head)


def write_opt(cfg: ModelConfig) -> dict[str, Any]:
    """OPT."""
    layer, positions = cfg.stack.layer, cfg.embedding.positions
    assert isinstance(positions, Learned)
    assert isinstance(layer.feed_forward, TwoLayer)
    sizes = hidden(cfg)
    return {
        **{k: v for k, v in sizes.items() if k not in ("intermediate_size", "hidden_act")},
        "ffn_dim": layer.feed_forward.width,
        "activation_function": NAMES[layer.feed_forward.activation],
        "word_embed_proj_dim": cfg.embedding.width,
        "max_position_embeddings": positions.max_positions,
        "do_layer_norm_before": layer.placement == "pre",
        "_remove_final_layer_norm": layer.placement == "pre" and cfg.stack.final_norm is None,
        "layer_norm_elementwise_affine": layer.norm.gain,
        "enable_bias": layer.attention.bias.query,
        "dropout": layer.residual_dropout,
        "tie_word_embeddings": is_tied(cfg),
    }


def map_opt(cfg: ModelConfig) -> FamilyMapping:
    """OPT."""
    layer = (
        Packed("attention.body.qkv", QKV),
        Module("attention.body.output", "self_attn.out_proj"),
        *(Module(f"attention.{place}", "self_attn_layer_norm") for place in ("before", "after_sum")),
        *(Module(f"feed_forward.{place}", "final_layer_norm") for place in ("before", "after_sum")),
        Module("feed_forward.body.up", "fc1"),
        Module("feed_forward.body.down", "fc2"),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "model.decoder.embed_tokens"),
            Module("embedding.positions", "model.decoder.embed_positions"),
            Module("embedding.projection", "model.decoder.project_in"),
            Layers("decoder", "model.decoder.layers.{}.", layer),
            Module("decoder.final_norm", "model.decoder.final_layer_norm"),
            Module("head.transform.dense", "model.decoder.project_out"),
            Module("head.labels", "score"),
            Module("head", "lm_head"),
        ),
        ties=tied_head(cfg, "lm_head.weight", "model.decoder.embed_tokens.weight"),
        ignored=other_head(cfg, "lm_head.weight"),
        base="model.",
        heads=("lm_head.", "score."),
    )


# --- BLOOM ------------------------------------------------------------------------------------------------


def read_bloom(keys: Keys, kind: HeadKind) -> ModelConfig:
    """BLOOM."""
    d = keys.take("hidden_size", None) or keys.integer("n_embed", 64)
    heads = keys.take("num_attention_heads", None) or keys.integer("n_head", 8)
    n = keys.take("num_hidden_layers", None) or keys.integer("n_layer", 2)
    keys.skip("n_embed", "n_head", "n_layer")
    keys.skip("slow_but_exact", "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion")
    keys.skip("offset_alibi", "seq_length", "skip_bias_add", "skip_bias_add_qkv")
    keys.must("n_inner", None, 4 * d)
    norm = layer_norm(keys.real("layer_norm_epsilon", 1e-5))
    after = keys.flag("apply_residual_connection_post_layernorm", False)
    layer = Layer(
        placement="pre",
        residual="sequential",
        residual_source="normalised" if after else "input",
        norm=norm,
        attention=attention(
            d, heads, bias=True, positions=Alibi(), dropout=keys.real("attention_dropout", 0.0)
        ),
        feed_forward=two_layer(4 * d, "gelu_tanh", bias=True),
        residual_dropout=keys.real("hidden_dropout", 0.0),
    )
    table = embedding(keys.integer("vocab_size"), d, norm=norm)
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", True))
    keys.done()
    return causal(d, table, n, layer, norm, head)


def write_bloom(cfg: ModelConfig) -> dict[str, Any]:
    """BLOOM."""
    layer = cfg.stack.layer
    return {
        "vocab_size": cfg.embedding.vocab_size,
        "hidden_size": cfg.d_model,
        "n_layer": cfg.stack.n_layers,
        "n_head": layer.attention.n_heads,
        "layer_norm_epsilon": layer.norm.eps,
        "apply_residual_connection_post_layernorm": layer.residual_source == "normalised",
        "attention_dropout": layer.attention.dropout,
        "hidden_dropout": layer.residual_dropout,
        "tie_word_embeddings": is_tied(cfg),
        **labels(cfg.head),
    }


def map_bloom(cfg: ModelConfig) -> FamilyMapping:
    """BLOOM fuses query, key and value head by head."""
    layer = (
        Module("attention.before", "input_layernorm"),
        Fused("attention.body", "self_attention.query_key_value", op.per_head),
        Module("attention.body.output", "self_attention.dense"),
        Module("feed_forward.before", "post_attention_layernorm"),
        Module("feed_forward.body.up", "mlp.dense_h_to_4h"),
        Module("feed_forward.body.down", "mlp.dense_4h_to_h"),
    )
    return FamilyMapping(
        entries=(
            Module("embedding", "transformer.word_embeddings"),
            Module("embedding.norm", "transformer.word_embeddings_layernorm"),
            Layers("decoder", "transformer.h.{}.", layer),
            Module("decoder.final_norm", "transformer.ln_f"),
            Module("head.labels", "score"),
            Module("head", "lm_head"),
        ),
        ties=tied_head(cfg, "lm_head.weight", "transformer.word_embeddings.weight"),
        ignored=other_head(cfg, "lm_head.weight"),
        base="transformer.",
        heads=("lm_head.", "score."),
    )


# --- Phi --------------------------------------------------------------------------------------------------


def read_phi(keys: Keys, kind: HeadKind) -> ModelConfig:
    """Phi 1, 1.5 and 2."""
    d, heads = keys.integer("hidden_size", 2048), keys.integer("num_attention_heads", 32)
    norm = layer_norm(keys.real("layer_norm_eps", 1e-5))
    rotary = read_rotary(
        keys, head_width=d // heads, theta=10_000.0, max_positions=2048, share=0.5, share_key=True
    )
    normed = keys.flag("qk_layernorm", False)
    layer = Layer(
        placement="pre",
        residual="parallel_shared_norm",
        norm=norm,
        attention=attention(
            d, heads, n_kv_heads=keys.take("num_key_value_heads", None), bias=True, positions=rotary,
            qk_norm=QKNorm(norm=norm, axis="head", order="before_rotation") if normed else None,
            dropout=keys.real("attention_dropout", 0.0),
        ),
        feed_forward=two_layer(
            keys.integer("intermediate_size", 8192), keys.activation("hidden_act", "gelu_new"), bias=True
        ),
        residual_dropout=keys.real("resid_pdrop", 0.0),
    )  # fmt: skip
    table = embedding(keys.integer("vocab_size"), d, dropout=keys.real("embd_pdrop", 0.0))
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", False), bias=True)
    n = keys.integer("num_hidden_layers", 24)
    keys.done()
    return causal(d, table, n, layer, norm, head)


def write_phi(cfg: ModelConfig) -> dict[str, Any]:
    """Phi."""
    layer = cfg.stack.layer
    rotary = layer.attention.positions
    assert isinstance(rotary, Rotary)
    return {
        **hidden(cfg),
        **write_rotary(rotary, share_key=True, head_width=layer.attention.head_width),
        "num_key_value_heads": layer.attention.n_kv_heads,
        "qk_layernorm": layer.attention.qk_norm is not None,
        "layer_norm_eps": layer.norm.eps,
        "resid_pdrop": layer.residual_dropout,
        "embd_pdrop": cfg.embedding.dropout,
        "tie_word_embeddings": is_tied(cfg),
    }


def map_phi(cfg: ModelConfig) -> FamilyMapping:
    """Phi."""
    layer = (
        Module("attention_norm", "input_layernorm"),
        Packed("attention.qkv", QKV),
        Module("attention.output", "self_attn.dense"),
        Module("attention.query_norm", "self_attn.q_layernorm"),
        Module("attention.key_norm", "self_attn.k_layernorm"),
        Module("feed_forward.up", "mlp.fc1"),
        Module("feed_forward.down", "mlp.fc2"),
    )
    return _like_llama(cfg, layer, "model.final_layernorm")


def _like_llama(cfg: ModelConfig, layer: tuple[Entry, ...], final: str) -> FamilyMapping:
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


# --- StarCoder2 -------------------------------------------------------------------------------------------


def read_starcoder2(keys: Keys, kind: HeadKind) -> ModelConfig:
    """StarCoder2."""
    d, heads = keys.integer("hidden_size", 3072), keys.integer("num_attention_heads", 24)
    norm = layer_norm(keys.real("norm_epsilon", 1e-5))
    rotary = read_rotary(keys, head_width=d // heads, theta=10_000.0, max_positions=4096)
    bias = keys.flag("use_bias", True)
    keys.must("norm_type", "layer_norm")
    keys.must("mlp_type", "default")
    keys.skip("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    keys.must("scale_attn_weights", True)
    layer = Layer(
        placement="pre",
        residual="sequential",
        norm=norm,
        attention=attention(
            d, heads, n_kv_heads=keys.integer("num_key_value_heads", 2), bias=bias, positions=rotary,
            window=keys.take("sliding_window", None), dropout=keys.real("attention_dropout", 0.0),
        ),
        feed_forward=two_layer(
            keys.integer("intermediate_size", 12_288), keys.activation("hidden_act", "gelu_pytorch_tanh"),
            bias=bias,
        ),
        residual_dropout=keys.real("residual_dropout", 0.0),
    )  # fmt: skip
    table = embedding(keys.integer("vocab_size"), d, dropout=keys.real("embedding_dropout", 0.0))
    head = decoder_head(keys, kind, tied=keys.flag("tie_word_embeddings", True))
    n = keys.integer("num_hidden_layers", 30)
    keys.done()
    return causal(d, table, n, layer, norm, head)


def write_starcoder2(cfg: ModelConfig) -> dict[str, Any]:
    """StarCoder2."""
    layer = cfg.stack.layer
    rotary = layer.attention.positions
    assert isinstance(rotary, Rotary)
    return {
        **hidden(cfg),
        **write_rotary(rotary),
        "num_key_value_heads": layer.attention.n_kv_heads,
        "norm_epsilon": layer.norm.eps,
        "use_bias": layer.attention.bias.query,
        "sliding_window": layer.attention.window,
        "residual_dropout": layer.residual_dropout,
        "embedding_dropout": cfg.embedding.dropout,
        "tie_word_embeddings": is_tied(cfg),
    }


def map_starcoder2(cfg: ModelConfig) -> FamilyMapping:
    """StarCoder2."""
    layer = (
        Module("attention.before", "input_layernorm"),
        Packed("attention.body.qkv", QKV),
        Module("attention.body.output", "self_attn.o_proj"),
        Module("feed_forward.before", "post_attention_layernorm"),
        Module("feed_forward.body.up", "mlp.c_fc"),
        Module("feed_forward.body.down", "mlp.c_proj"),
    )
    return _like_llama(cfg, layer, "model.norm")


GPT2: dict[str, HeadKind] = {
    "GPT2LMHeadModel": "tokens",
    "GPT2Model": "states",
    "GPT2ForSequenceClassification": "sequence",
}
FAMILIES = (
    Family("gpt2", GPT2, read_gpt2, write_gpt2, map_gpt2),
    Family("gpt_neox", classes("GPTNeoX"), read_gpt_neox, write_gpt_neox, map_gpt_neox),
    Family("opt", classes("OPT"), read_opt, write_opt, map_opt, bos=True),
    Family("bloom", classes("Bloom"), read_bloom, write_bloom, map_bloom),
    Family("phi", classes("Phi"), read_phi, write_phi, map_phi),
    Family("starcoder2", classes("Starcoder2"), read_starcoder2, write_starcoder2, map_starcoder2),
)
