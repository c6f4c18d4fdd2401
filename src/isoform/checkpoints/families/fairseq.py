"""BART and the encoder–decoders of its build: mBART, Pegasus, Marian (OPUS-MT), M2M100 (NLLB)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from isoform.checkpoints import operations as op
from isoform.checkpoints.entries import Computed, FamilyMapping, Ignored, Layers, Module, Packed, Same, Tied
from isoform.checkpoints.families.family import Family, HeadKind, token_ids
from isoform.checkpoints.families.llama_like import QKV
from isoform.checkpoints.keys import NAMES, Keys
from isoform.config import (
    Embedding,
    Layer,
    Learned,
    ModelConfig,
    Sinusoidal,
    Stack,
    TokenHead,
    TwoLayer,
)
from isoform.config.positions import AddedPositions
from isoform.config.presets.build import attention, layer_norm, two_layer
from isoform.nn.positions import Sinusoidal as SinusoidalModule


@dataclasses.dataclass(frozen=True)
class Build:
    """What separates the five.

    Attributes:
        placement: of the norms.
        embedding_norm: whether the embedding has one.
        positions: "learned", "sinusoidal" (its table is a parameter that is not trained) or "counted"
            (fairseq's sinusoids, which start behind the padding id).
        head_bias: whether there is a ``final_logits_bias``.
        activation: the class's default.
        scaled: the class's default of ``scale_embedding``.
        attention_dropout: the class's default.
        separate: whether source and target may have a vocabulary each.
    """

    placement: Literal["pre", "post"]
    embedding_norm: bool
    positions: Literal["learned", "sinusoidal", "counted"]
    head_bias: bool
    activation: str
    scaled: bool = False
    attention_dropout: float = 0.0
    separate: bool = False


BART = Build("post", True, "learned", True, "gelu")
MBART = Build("pre", True, "learned", True, "gelu")
PEGASUS = Build("pre", False, "sinusoidal", True, "gelu")
MARIAN = Build("post", False, "sinusoidal", True, "gelu", separate=True)
M2M100 = Build("pre", False, "counted", False, "relu", scaled=True, attention_dropout=0.1)
NORM = layer_norm(1e-5)
SHARED = "one tensor in the class of transformers 4; what version 5 leaves untied is not supported"


def _positions(keys: Keys, build: Build) -> AddedPositions:
    length = keys.integer("max_position_embeddings", 1024)
    if build.positions == "learned":
        return Learned(max_positions=length, offset=2)
    if build.positions == "sinusoidal":
        return Sinusoidal(
            layout="concatenated",
            spacing="half_width",
            offset=0,
            base=10_000.0,
            precision="float64_to_float32",
        )
    return Sinusoidal(
        layout="concatenated",
        spacing="half_width_minus_one",
        offset=int(keys.data.get("pad_token_id", 1)) + 1,
        base=10_000.0,
        precision="float32",
    )


def _reader(build: Build) -> Callable[[Keys, HeadKind], ModelConfig]:
    def read(keys: Keys, kind: HeadKind) -> ModelConfig:
        pre = build.placement == "pre"
        # Left-overs of the converters; where they are, they have to say what the class does.
        keys.must("normalize_before", pre)
        keys.must("add_final_layer_norm", pre)
        keys.must("normalize_embedding", build.embedding_norm)
        keys.must("static_position_embeddings", build.positions != "learned")
        keys.must("add_bias_logits", False)
        keys.skip("extra_pos_embeddings", "classif_dropout", "classifier_dropout", "save_step")
        keys.skip(
            "force_bos_token_to_be_generated", "num_hidden_layers", "num_beams", "do_blenderbot_90_layernorm"
        )
        keys.skip("encoder_layerdrop", "decoder_layerdrop", "grapheme_chars", "phoneme_chars")
        d = keys.integer("d_model", 1024)
        target_size = keys.integer("vocab_size")
        shared = True
        source_size = target_size
        if build.separate:
            shared = keys.flag("share_encoder_decoder_embeddings", True)
            given = keys.take("decoder_vocab_size", None) or target_size
            target_size = target_size if shared else given
        drop = keys.real("dropout", 0.1)
        target = Embedding(
            vocabulary="shared" if shared else "target",
            vocab_size=target_size,
            width=d,
            scale="sqrt_d_model" if keys.flag("scale_embedding", build.scaled) else 1.0,
            positions=_positions(keys, build),
            norm=NORM if build.embedding_norm else None,
            dropout=drop,
        )
        tied = keys.flag("tie_word_embeddings", True)
        head = TokenHead(tied=tied, bias=build.head_bias) if kind == "tokens" else None
        inner = keys.real("activation_dropout", 0.0)
        on_weights = keys.real("attention_dropout", build.attention_dropout)
        activation = keys.activation("activation_function", build.activation)

        def stack(side: str, cross: bool) -> Stack:
            reads = attention(d, keys.integer(f"{side}_attention_heads", 16), bias=True, dropout=on_weights)
            layer = Layer(
                placement=build.placement,
                residual="sequential",
                norm=NORM,
                attention=reads,
                cross_attention=reads if cross else None,
                feed_forward=two_layer(
                    keys.integer(f"{side}_ffn_dim", 4096), activation, bias=True, dropout=inner
                ),
                residual_dropout=drop,
            )
            return Stack(
                n_layers=keys.integer(f"{side}_layers", 12),
                visibility="causal" if cross else "bidirectional",
                layer=layer,
                final_norm=NORM if pre else None,
            )

        encoder, decoder = stack("encoder", False), stack("decoder", True)
        keys.done()
        return ModelConfig(
            d_model=d,
            embedding=target,
            source=target.replace(vocabulary="shared" if shared else "source", vocab_size=source_size),
            tie_source=shared,
            encoder=encoder,
            decoder=decoder,
            head=head,
        )

    return read


def _writer(build: Build) -> Callable[[ModelConfig], dict[str, Any]]:
    def write(cfg: ModelConfig) -> dict[str, Any]:
        assert cfg.encoder is not None
        assert cfg.decoder is not None
        assert cfg.source is not None
        layer = cfg.decoder.layer
        network = layer.feed_forward
        assert isinstance(network, TwoLayer)
        result: dict[str, Any] = {
            "vocab_size": cfg.source.vocab_size,
            "d_model": cfg.d_model,
            "dropout": layer.residual_dropout,
            "attention_dropout": layer.attention.dropout,
            "activation_dropout": network.dropout,
            "activation_function": NAMES[network.activation],
            "scale_embedding": cfg.embedding.scale == "sqrt_d_model",
            "tie_word_embeddings": cfg.head is None or (isinstance(cfg.head, TokenHead) and cfg.head.tied),
        }
        for side, stack in (("encoder", cfg.encoder), ("decoder", cfg.decoder)):
            feed_forward = stack.layer.feed_forward
            assert isinstance(feed_forward, TwoLayer)
            result[f"{side}_layers"] = stack.n_layers
            result[f"{side}_attention_heads"] = stack.layer.attention.n_heads
            result[f"{side}_ffn_dim"] = feed_forward.width
        if build.separate:
            result["share_encoder_decoder_embeddings"] = cfg.tie_source
            result["decoder_vocab_size"] = cfg.embedding.vocab_size
        positions = cfg.embedding.positions
        if isinstance(positions, Learned):
            result["max_position_embeddings"] = positions.max_positions
        elif build.positions == "counted":
            assert isinstance(positions, Sinusoidal)
            result["pad_token_id"] = positions.offset - 1
        return result

    return write


def _mapper(build: Build) -> Callable[[ModelConfig], FamilyMapping]:
    cross = tuple((part, name.replace("self_attn", "encoder_attn")) for part, name in QKV)

    def norms(ours: str, theirs: str) -> tuple[Module, ...]:
        return tuple(Module(f"{ours}.{place}", theirs) for place in ("before", "after_sum"))

    reads = (
        Packed("attention.body.qkv", QKV),
        Module("attention.body.output", "self_attn.out_proj"),
        *norms("attention", "self_attn_layer_norm"),
        Module("feed_forward.body.up", "fc1"),
        Module("feed_forward.body.down", "fc2"),
        *norms("feed_forward", "final_layer_norm"),
    )
    crosses = (
        Module("cross_attention.body.query", "encoder_attn.q_proj"),
        Packed("cross_attention.body.key_value", cross[1:]),
        Module("cross_attention.body.output", "encoder_attn.out_proj"),
        *norms("cross_attention", "encoder_attn_layer_norm"),
    )

    def mapping(cfg: ModelConfig) -> FamilyMapping:
        shared = cfg.tie_source
        table = "model.shared" if shared else "model.decoder.embed_tokens"
        tied = isinstance(cfg.head, TokenHead) and cfg.head.tied
        sides = ("encoder", "decoder") if shared else ()
        # With an untied head the library does not restore these ties by itself.
        copies = isinstance(cfg.head, TokenHead) and not tied
        ties = [Tied(f"model.{s}.embed_tokens.weight", "model.shared.weight", copies, SHARED) for s in sides]
        if tied:
            ties.append(Tied("lm_head.weight", f"{table}.weight"))
        vocab = cfg.embedding.vocab_size
        return FamilyMapping(
            entries=(
                Module("embedding", table),
                Module("source_embedding", "model.encoder.embed_tokens"),
                Module("embedding.positions", "model.decoder.embed_positions"),
                Module("source_embedding.positions", "model.encoder.embed_positions"),
                Module("embedding.norm", "model.decoder.layernorm_embedding"),
                Module("source_embedding.norm", "model.encoder.layernorm_embedding"),
                Layers("encoder", "model.encoder.layers.{}.", reads),
                Layers("decoder", "model.decoder.layers.{}.", (*reads, *crosses)),
                Module("encoder.final_norm", "model.encoder.layer_norm"),
                Module("decoder.final_norm", "model.decoder.layer_norm"),
                Same("head.weight", "lm_head.weight"),
                Same("head.bias", "final_logits_bias", (op.Reshape((vocab,), (1, vocab)),)),
            ),
            ties=tuple(ties),
            ignored=(
                Ignored("*coder.version", "a version number"),
                *_stored_sinusoids(cfg),
                *(() if cfg.head is not None else (Ignored("final_logits_bias", "of another head"),)),
            ),
            computed=_written_sinusoids(cfg)
            if build.positions == "sinusoidal" and (cfg.head is None or not build.separate)
            else (),
            base="model.",
            heads=("lm_head.", "final_logits_bias"),
        )

    return mapping


def _written_sinusoids(cfg: ModelConfig) -> tuple[Computed, ...]:
    positions = cfg.embedding.positions
    assert isinstance(positions, Sinusoidal)

    def make(keys: Mapping[str, Any]) -> Tensor:
        rows = torch.arange(int(keys.get("max_position_embeddings", 1024)))
        return SinusoidalModule(positions, cfg.d_model)(rows[None], torch.float64)[0]

    return tuple(Computed(f"model.{side}.embed_positions.weight", make) for side in ("encoder", "decoder"))


def _stored_sinusoids(cfg: ModelConfig) -> tuple[Ignored, ...]:
    """A sinusoidal table in the file must be the one that the configuration gives."""
    positions = cfg.embedding.positions
    if not isinstance(positions, Sinusoidal):
        return ()

    def check(stored: Tensor) -> str | None:
        rows = torch.arange(stored.shape[0]) - (positions.offset if positions.spacing != "half_width" else 0)
        table = SinusoidalModule(positions, stored.shape[1])(rows[None], torch.float64)[0]
        # A row for padding may be blank.
        used = stored.abs().sum(-1) > 0
        wrong = (table - stored.double())[used].abs().max().item() if used.any() else 0.0
        limit = 1e-2 if stored.dtype in (torch.float16, torch.bfloat16) else 1e-5
        return f"not the sinusoids of the configuration: differs by {wrong:.2g}" if wrong > limit else None

    return (Ignored("*embed_positions.weight*", "rebuilt from the configuration", check),)


def _family(model_type: str, name: str, build: Build, ids: Mapping[str, Any]) -> Family:
    classes: dict[str, HeadKind] = {f"{name}ForConditionalGeneration": "tokens", f"{name}Model": "states"}
    if build.separate:
        classes = {f"{name}MTModel": "tokens", f"{name}Model": "states"}
    return Family(model_type, classes, _reader(build), _writer(build), _mapper(build), defaults=ids)


FAMILIES = (
    _family("bart", "Bart", BART, token_ids(0, 2, 1, decoder_start=2, forced_eos=2)),
    _family("mbart", "MBart", MBART, token_ids(0, 2, 1, forced_eos=2)),
    _family("pegasus", "Pegasus", PEGASUS, token_ids(None, 1, 0, decoder_start=0, forced_eos=1)),
    _family("marian", "Marian", MARIAN, token_ids(None, 0, 58_100, decoder_start=58_100, forced_eos=0)),
    _family("m2m_100", "M2M100", M2M100, token_ids(0, 2, 1, decoder_start=2)),
)
