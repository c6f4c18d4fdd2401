"""The words say everything: whatever changes the function changes the text."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings

from isoform.config import Frozen, ModelConfig, describe, difference, difference_in_words, presets
from isoform.config.phrases import number
from isoform.config.subjects import SUBJECTS
from mutations import mutations
from strategies import model_configs

# They say nothing of the function.
SILENT = {"ModelConfig.format", "ModelConfig.zero_eps"}
TINY = {"d_model": 8, "n_heads": 2, "ffn_width": 6, "n_layers": 2}
SLOW = [HealthCheck.too_slow]
YARN = {
    "kind": "yarn",
    "factor": 2.0,
    "original_length": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.1,
    "truncate": True,
}
LONGROPE = {
    "kind": "longrope", "short": (1.0, 1.5), "long": (2.0, 3.0), "original_length": 8,
    "attention_factor": 1.2,
}  # fmt: skip


@functools.cache
def examples() -> list[ModelConfig]:
    """Configurations that have every class of the package somewhere."""
    llama = presets.llama(50, **TINY, n_kv_heads=1)
    bert = presets.bert(50, **TINY)
    pooler = {"activation": "tanh", "bias": True}
    labels = {"n_labels": 2, "bias": True}
    scale = "decoder__layer__attention__positions__scaling"
    return [
        presets.pre_ln(50, d_model=8, n_heads=2, ffn_width=6, n_encoder_layers=2, n_decoder_layers=2).replace(
            decoder__layer__memory_norm=llama.decoder.layer.norm, source__n_token_types=1
        ),
        presets.t5(50, d_model=8, n_heads=2, head_width=4, ffn_width=6, n_layers=2),
        bert,
        bert.replace(head={"kind": "sequence_labels", "pooling": "mean", "pooler": pooler, **labels}),
        bert.replace(head={"kind": "token_labels", "dense": pooler, **labels}),
        bert.replace(head={"kind": "pooled", "pooling": "mean", "pooler": pooler, "normalise": True}),
        presets.albert(50, **TINY, embedding_width=4),
        presets.bloom(50, d_model=8, n_heads=2, n_layers=2),
        presets.mixtral(50, **TINY, n_kv_heads=1, n_experts=3, top_k=2),
        presets.gemma3(50, **TINY, n_kv_heads=1, head_width=4, window=3, full_every=2),
        llama,
        presets.llama3(50, **TINY, n_kv_heads=1),
        llama.replace(**{scale: {"kind": "linear", "factor": 2.0}}),
        llama.replace(**{scale: {"kind": "dynamic_ntk", "factor": 2.0, "original_length": 8}}),
        llama.replace(**{scale: YARN}),
        llama.replace(**{scale: LONGROPE}),
    ]


@pytest.mark.parametrize("index", range(16))
def test_every_field_changes_the_description_and_is_one_difference(index):
    config = examples()[index]
    text = describe(config)
    for field, path, changed in mutations(config):
        found = difference(config, changed)
        where = path.rpartition(".")[0] if field == "Norm.kind" else path
        assert [d.path.replace("[", ".").replace("]", "") for d in found] == [where], path
        assert found[0].first != found[0].second, path
        if field not in SILENT:
            assert describe(changed) != text, f"{path}: the description does not say it"


def test_the_examples_have_every_field():
    said = {field for config in examples() for field, _, _ in mutations(config)}
    parts = {"Norm", "Embedding", "Projection", "QKNorm", "Transform", "Layer", "Stack", "Variant", "Experts"}
    whole = {  # fields that hold a part: what is in it is mutated, not the field
        f"{kind}.{field}"
        for kind, fields in SUBJECTS.items()
        for field in fields
        if field in ("embedding", "source", "encoder", "decoder", "head", "positions", "norm", "attention")
        or field in ("cross_attention", "feed_forward", "memory_norm", "layer", "variants", "final_norm")
        or field in ("bias", "expert", "scaling", "qk_norm", "transform", "pooler", "dense", "projection")
    }
    known = {f"{kind}.{field}" for kind, fields in SUBJECTS.items() for field in fields}
    # "format" has one value only
    assert known - whole - said == {"ModelConfig.format"}
    assert parts <= {field.partition(".")[0] for field in said}


def test_every_field_has_its_words():
    classes, queue = set(), [ModelConfig]
    while queue:
        kind = queue.pop()
        if kind in classes:
            continue
        classes.add(kind)
        fields = {name for name in kind.model_fields if name != "kind" or kind.__name__ == "Norm"}
        assert set(SUBJECTS[kind.__name__]) == fields, kind.__name__
        queue += [c for f in kind.model_fields.values() for c in _classes(f.annotation)]
    assert {kind.__name__ for kind in classes} == set(SUBJECTS)


def _classes(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return [annotation]
    return [c for part in getattr(annotation, "__args__", ()) for c in _classes(part)]


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(a=model_configs(), b=model_configs())
def test_two_random_configurations_never_read_the_same(a, b):
    if a.replace(zero_eps=False) != b.replace(zero_eps=False):
        assert describe(a) != describe(b)
    found = difference(a, b)
    assert bool(found) == (a != b)
    for item in found:
        assert item.first != item.second
        assert "\n" not in item.sentence
    assert difference(a, a) == ()
    assert len(difference_in_words(a, b)) <= len(found)


def test_the_description_reads_well():
    config = presets.pre_ln(8000, n_decoder_layers=2)
    assert describe(config)[0] == (
        "Pre-LN encoder–decoder, 6 + 2 layers of width 512, LayerNorm (eps 1e-5, gain and bias), exact GELU"
    )
    gemma = describe(presets.gemma2(n_layers=4))
    assert gemma[0].startswith(
        "sandwich-norm causal decoder, 4 layers of width 2304, RMSNorm (eps 1e-6, gain 1 + w"
    )
    assert gemma[-2:] == [
        "decoder layers 0, 2: self-attention window 4096",
        "head: scores by the embedding table (tied), no bias, scores capped at 30",
    ]
    assert describe(presets.mixtral())[0].endswith("SwiGLU experts")
    mixed = config.replace(encoder__layer__placement="post", encoder__layer__norm__eps=1e-6)
    assert describe(mixed)[0] == (
        "Post-LN / Pre-LN encoder–decoder, 6 + 2 layers of width 512, "
        "LayerNorm (eps 1e-6, gain and bias) / LayerNorm (eps 1e-5, gain and bias), exact GELU"
    )


def test_a_difference_reads_well():
    base = presets.original(8000)
    (found,) = difference(base.replace(decoder__layer__placement="pre"), base)
    assert found.sentence == (
        "decoder layers: norm before the sublayer (pre) in the first, "
        "after the residual sum (post) in the second"
    )
    assert (found.path, found.a, found.b) == ("decoder.layer.placement", "pre", "post")
    alibi = base.replace(decoder__layer__attention__positions={"kind": "alibi"})
    (found,) = difference(base, alibi)
    assert (
        found.sentence == "decoder self-attention: positions no positions in the first, ALiBi in the second"
    )
    assert found.b == {"kind": "alibi", "factor": 1.0, "rounding": "none"}
    (found,) = difference(base, base.replace(embedding__positions__offset=1, source__positions__offset=0))
    assert found.sentence == "target embedding positions: first position 0 in the first, 1 in the second"


def test_a_difference_that_repeats_itself_is_said_once_and_listed_in_full():
    a, b = presets.original(8000), presets.pre_ln(8000)
    assert len(difference(a, b)) == 6
    assert difference_in_words(a, b) == [
        "encoder layers and decoder layers: norm after the residual sum (post) in the first, "
        "before the sublayer (pre) in the second",
        "encoder feed-forward and decoder feed-forward: activation ReLU in the first, "
        "exact GELU in the second",
        "encoder and decoder: final norm none in the first, "
        "LayerNorm (eps 1e-5, gain and bias) in the second",
    ]


def test_other_configurations_differ_by_path():
    class Run(Frozen):
        steps: int
        model: ModelConfig

    config = presets.gpt2(50, **TINY)
    a, b = Run(steps=1, model=config), Run(steps=2, model=config.replace(d_model=8, decoder__n_layers=3))
    assert [d.sentence for d in difference(a, b)] == [
        "steps 1 in the first, 2 in the second",
        "model decoder: layers 2 in the first, 3 in the second",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-5, "1e-5"),
        (1e-12, "1e-12"),
        (10000.0, "10000"),
        (0.1, "0.1"),
        (1, "1"),
        (1e22, "1e22"),
        (2.5e-7, "2.5e-7"),
    ],
)
def test_numbers_are_short_and_exact(value, text):
    assert number(value) == text
    assert float(text) == value


def test_numbers_that_are_nearly_equal_read_differently():
    assert number(1e-5) != number(1.0000000000000002e-5)
