"""Random valid configurations, tiny, for tests that must hold for every architecture.

``model_configs()`` draws whole networks of any structure; narrow it by keyword. Every draw validates, and
every field of the configuration is varied somewhere in it.
"""

from __future__ import annotations

from typing import Literal, get_args

from hypothesis import strategies as st

from isoform import config
from isoform.config.parts import ActivationName

LONGEST = 24  # positions a learned table has at least
ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)
Structure = Literal["encoder", "decoder", "encoder-decoder"]
STRUCTURES: tuple[Structure, ...] = get_args(Structure)

shares = st.sampled_from([0.0, 0.1, 0.25])
activations = st.sampled_from(ACTIVATIONS)
caps = st.sampled_from([None, 2.0, 5.0])


@st.composite
def norms(draw: st.DrawFn) -> config.Norm:
    """LayerNorm and RMSNorm in all their forms."""
    kind = draw(st.sampled_from(["layer", "rms"]))
    gain = draw(st.integers(0, 4)) > 0
    return config.Norm(
        kind=kind,
        eps=draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        gain=gain,
        bias=kind == "layer" and gain and draw(st.booleans()),
        gain_offset=draw(st.sampled_from([0.0, 1.0])) if gain else 0.0,
        gain_after_cast=draw(st.booleans()),
    )


optional_norms = st.none() | norms()


@st.composite
def added_positions(draw: st.DrawFn, width: int) -> config.NoPositions | config.Sinusoidal | config.Learned:
    """Positions for an embedding of the given width."""
    kind = draw(st.sampled_from(["none", "sinusoidal", "learned"]))
    if kind == "none":
        return config.NoPositions()
    offset = draw(st.integers(0, 3))
    if kind == "learned":
        return config.Learned(max_positions=LONGEST + draw(st.integers(0, 2)), offset=offset)
    spacings = ["half_width", "half_width_minus_one"] if width >= 4 else ["half_width"]
    return config.Sinusoidal(
        layout=draw(st.sampled_from(["interleaved", "concatenated"])),
        spacing=draw(st.sampled_from(spacings)),
        offset=offset,
        base=draw(st.sampled_from([100.0, 10_000.0])),
        precision=draw(st.sampled_from(["float32", "float64", "float64_to_float32"])),
    )


@st.composite
def scalings(draw: st.DrawFn, width: int) -> config.parts.RotaryScaling:
    """What is done to the frequencies of a rotary embedding of the given width."""
    kinds = ["none", "linear", "llama3", "yarn", "longrope"] + (["dynamic_ntk"] if width > 2 else [])
    kind = draw(st.sampled_from(kinds))
    factor = draw(st.sampled_from([1.5, 4.0]))
    length = draw(st.sampled_from([4, 8]))
    if kind == "linear":
        return config.LinearScaling(factor=factor)
    if kind == "dynamic_ntk":
        return config.DynamicNtkScaling(factor=factor, original_length=length)
    if kind == "llama3":
        low = draw(st.sampled_from([0.5, 1.0]))
        return config.Llama3Scaling(
            factor=factor, low_frequency_factor=low, high_frequency_factor=4.0, original_length=length
        )
    if kind == "yarn":
        return config.YarnScaling(
            factor=factor,
            original_length=length,
            beta_fast=draw(st.sampled_from([2.0, 32.0])),
            beta_slow=draw(st.sampled_from([0.5, 1.0])),
            attention_factor=draw(st.sampled_from([1.0, 1.2])),
            truncate=draw(st.booleans()),
        )
    if kind == "longrope":
        divisors = st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=width // 2, max_size=width // 2)
        return config.LongRopeScaling(
            short=tuple(draw(divisors)),
            long=tuple(draw(divisors)),
            original_length=length,
            attention_factor=draw(st.sampled_from([1.0, 1.2])),
        )
    return config.NoScaling()


@st.composite
def attention_positions(draw: st.DrawFn, head_width: int) -> config.parts.AttentionPositions:
    """Positions inside attention of the given head width."""
    kinds = ["none", "alibi", "relative_buckets"] + (["rotary"] if head_width >= 2 else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "rotary":
        width = 2 * draw(st.integers(1, head_width // 2))
        return config.Rotary(
            layout=draw(st.sampled_from(["half", "interleaved"])),
            theta=draw(st.sampled_from([10.0, 10_000.0])),
            width=width,
            scaling=draw(scalings(width)),
            precision=draw(st.sampled_from(["float32", "float64"])),
        )
    if kind == "alibi":
        return config.Alibi(
            factor=draw(st.sampled_from([1.0, 0.5])),
            rounding=draw(st.sampled_from(["none", "none", "float32", "bfloat16"])),
        )
    if kind == "relative_buckets":
        return config.RelativeBuckets(
            n_buckets=draw(st.sampled_from([4, 8])),
            max_distance=draw(st.sampled_from([6, 16])),
            bidirectional=draw(st.booleans()),
        )
    return config.NoPositions()


@st.composite
def attentions(draw: st.DrawFn, *, cross: bool = False) -> config.Attention:
    """Self-attention, or cross-attention, which has neither positions nor a window."""
    n_kv_heads = draw(st.integers(1, 3))
    head_width = draw(st.integers(1, 4))
    flags = {name: draw(st.booleans()) for name in ("query", "key", "value", "output")}
    qk_norm = st.builds(
        config.QKNorm,
        norm=norms(),
        axis=st.sampled_from(["head", "projection"]),
        order=st.sampled_from(["before_rotation", "after_rotation"]),
    )
    return config.Attention(
        n_heads=n_kv_heads * draw(st.integers(1, 2)),
        n_kv_heads=n_kv_heads,
        head_width=head_width,
        scale=draw(st.sampled_from(["inverse_sqrt_head_width", 1.0, 0.3])),
        bias=config.AttentionBias(**flags),
        positions=config.NoPositions() if cross else draw(attention_positions(head_width)),
        qk_norm=draw(st.none() | qk_norm),
        softcap=draw(caps),
        window=None if cross else draw(st.none() | st.integers(1, 4)),
        dropout=draw(shares),
    )


two_layers = st.builds(
    config.TwoLayer,
    width=st.integers(1, 9),
    activation=activations,
    bias_up=st.booleans(),
    bias_down=st.booleans(),
    dropout=shares,
)
gated = st.builds(
    config.Gated,
    width=st.integers(1, 9),
    activation=activations,
    bias_gate=st.booleans(),
    bias_up=st.booleans(),
    bias_down=st.booleans(),
    dropout=shares,
)


@st.composite
def experts(draw: st.DrawFn) -> config.Experts:
    """Two to four experts."""
    n_experts = draw(st.integers(2, 4))
    return config.Experts(
        n_experts=n_experts,
        top_k=draw(st.integers(1, n_experts)),
        expert=draw(two_layers | gated),
        router_bias=draw(st.booleans()),
        router_order=draw(st.sampled_from(get_args(config.Experts.model_fields["router_order"].annotation))),
        router_scale=draw(st.sampled_from([1.0, 2.5])),
        load_balance=draw(st.sampled_from([0.0, 0.01])),
    )


feed_forwards = two_layers | gated | experts()


@st.composite
def layers(draw: st.DrawFn, *, cross: bool = False) -> config.Layer:
    """A layer, with cross-attention or without."""
    placement = draw(st.sampled_from(["post", "pre", "sandwich", "res_post"]))
    residual, source = "sequential", "input"
    if placement == "pre":
        residuals = ["sequential"] if cross else ["sequential", "parallel", "parallel_shared_norm"]
        residual = draw(st.sampled_from(residuals))
        if residual == "sequential":
            source = draw(st.sampled_from(["input", "input", "normalised"]))
    return config.Layer(
        placement=placement,
        residual=residual,
        residual_source=source,
        residual_scale=draw(st.sampled_from([1.0, 0.5])),
        norm=draw(norms()),
        attention=draw(attentions()),
        cross_attention=draw(attentions(cross=True)) if cross else None,
        memory_norm=draw(optional_norms) if cross else None,
        feed_forward=draw(feed_forwards),
        residual_dropout=draw(shares),
        residual_dropout_on=draw(st.sampled_from(["all", "attention", "feed_forward"])),
    )


@st.composite
def variants(draw: st.DrawFn, layer: config.Layer, n_layers: int) -> tuple[config.Variant, ...]:
    """One variant on some of the layers; heads and kind of positions stay, for the tables a stack shares."""
    attention, feed_forward = None, None
    if draw(st.booleans()):
        attention = layer.attention.replace(
            window=draw(st.none() | st.integers(1, 4)),
            softcap=draw(caps),
            scale=draw(st.sampled_from([1.0, 0.7])),
        )
        if isinstance(attention.positions, config.Rotary):
            attention = attention.replace(positions__theta=draw(st.sampled_from([10.0, 50.0])))
    if attention is None or draw(st.booleans()):
        feed_forward = draw(feed_forwards)
    chosen = draw(st.sets(st.integers(0, n_layers - 1), min_size=1))
    return (config.Variant(layers=tuple(sorted(chosen)), attention=attention, feed_forward=feed_forward),)


@st.composite
def stacks(
    draw: st.DrawFn,
    *,
    cross: bool = False,
    visibilities: tuple[str, ...] = ("bidirectional", "causal", "prefix"),
) -> config.Stack:
    """One to three layers."""
    n_layers = draw(st.integers(1, 3))
    layer = draw(layers(cross=cross))
    visibility = draw(st.sampled_from(visibilities))
    if isinstance(layer.attention.positions, config.Alibi) and visibility != "causal":
        layer = layer.replace(attention__positions__rounding="none")
    special = draw(st.sampled_from(["none", "none", "variants", "sharing"]))
    owners = sorted(draw(st.lists(st.integers(0, n_layers - 1), min_size=n_layers, max_size=n_layers)))
    return config.Stack(
        n_layers=n_layers,
        visibility=visibility,
        layer=layer,
        variants=draw(variants(layer, n_layers)) if special == "variants" else (),
        final_norm=draw(optional_norms),
        final_dropout=draw(shares),
        layer_sharing=tuple(owners.index(owner) for owner in owners) if special == "sharing" else None,
    )


@st.composite
def embeddings(
    draw: st.DrawFn,
    d_model: int,
    *,
    vocabulary: str = "shared",
    vocab_size: int | None = None,
    width: int | None = None,
) -> config.Embedding:
    """An embedding into the given width, now and then through a narrower table."""
    width = width or draw(st.sampled_from([d_model, d_model, d_model // 2]))
    projection = None
    if width != d_model or draw(st.integers(0, 5)) == 0:
        place = draw(st.sampled_from(["before_positions", "after_norm"]))
        projection = config.Projection(place=place, bias=draw(st.booleans()))
    inner = width if projection and projection.place == "after_norm" else d_model
    return config.Embedding(
        vocabulary=vocabulary,
        vocab_size=vocab_size or draw(st.integers(7, 13)),
        width=width,
        projection=projection,
        scale=draw(st.sampled_from(["sqrt_d_model", 1.0, 0.5])),
        positions=draw(added_positions(inner)),
        n_token_types=draw(st.sampled_from([0, 0, 2])),
        norm=draw(optional_norms),
        dropout=draw(shares),
    )


@st.composite
def token_heads(draw: st.DrawFn, d_model: int, width: int) -> config.TokenHead:
    """Scores over a vocabulary whose table has the given width."""
    tied = draw(st.booleans())
    transform = None
    if (tied and width != d_model) or draw(st.booleans()):
        transform = config.Transform(
            activation=draw(activations), bias=draw(st.booleans()), norm=draw(optional_norms)
        )
    return config.TokenHead(
        tied=tied,
        bias=draw(st.booleans()),
        transform=transform,
        scale=draw(st.sampled_from([1.0, 0.5, "inverse_sqrt_d_model"])),
        softcap=draw(caps),
    )


poolers = st.builds(config.Pooler, activation=activations, bias=st.booleans())
poolings = st.sampled_from(["mean", "first", "last"])
sequence_heads = st.builds(
    config.SequenceHead,
    n_labels=st.integers(1, 4),
    pooling=poolings,
    input_dropout=shares,
    pooler=st.none() | poolers,
    bias=st.booleans(),
    dropout=shares,
)
tagging_heads = st.builds(
    config.TaggingHead,
    n_labels=st.integers(1, 4),
    dense=st.none() | poolers,
    bias=st.booleans(),
    dropout=shares,
)
pooling_heads = st.builds(
    config.PoolingHead, pooling=poolings, pooler=st.none() | poolers, normalise=st.booleans()
)


@st.composite
def model_configs(
    draw: st.DrawFn,
    *,
    structures: tuple[Structure, ...] = STRUCTURES,
    token_head: bool = False,
    decoder_visibilities: tuple[str, ...] = ("causal", "prefix"),
) -> config.ModelConfig:
    """A whole network.

    Args:
        draw: hypothesis' own.
        structures: which structures may come.
        token_head: whether there must be scores over tokens; else any head that fits, or none.
        decoder_visibilities: what decoders may be.
    """
    structure = draw(st.sampled_from(structures))
    both = structure == "encoder-decoder"
    d_model = draw(st.sampled_from([4, 6, 8, 12]))
    shared = both and draw(st.booleans())
    target = draw(embeddings(d_model, vocabulary="shared" if shared or not both else "target"))
    source = None
    if both:
        size, width = (target.vocab_size, target.width) if shared else (None, None)
        name = "shared" if shared else "source"
        source = draw(embeddings(d_model, vocabulary=name, vocab_size=size, width=width))
    heads = token_heads(d_model, target.width)
    if not token_head:
        heads = (
            st.none() | heads if both else st.none() | heads | sequence_heads | tagging_heads | pooling_heads
        )
    return config.ModelConfig(
        d_model=d_model,
        embedding=target,
        source=source,
        tie_source=shared and draw(st.booleans()),
        encoder=draw(stacks()) if structure != "decoder" else None,
        decoder=None
        if structure == "encoder"
        else draw(stacks(cross=both, visibilities=decoder_visibilities)),
        head=draw(heads),
    )
