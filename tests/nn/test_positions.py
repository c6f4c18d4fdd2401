"""R43: every position kind against an independent formula, and the transformers library where it has one."""

from __future__ import annotations

import math

import pytest
import torch

from isoform import config
from isoform.errors import ShapeError
from isoform.nn.biases import AlibiBias, RelativeBias, alibi_slopes, relative_buckets
from isoform.nn.positions import Learned, Sinusoidal, rotary_frequencies, rotary_table, rotate
from tolerances import close, off

POSITIONS = torch.tensor([[0, 1, 2, 7, 30], [3, 3, 0, 1, 100]])
WIDE = torch.float64


# --- sinusoids --------------------------------------------------------------------------------------------


def sinusoids(**settings):
    base = {
        "layout": "interleaved",
        "spacing": "half_width",
        "offset": 0,
        "base": 10_000.0,
        "precision": "float64",
    }
    return config.Sinusoidal(**{**base, **settings})


@pytest.mark.parametrize("width", [2, 6, 7, 8])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("spacing", ["half_width", "half_width_minus_one"])
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
def test_sinusoids_by_formula(layout, spacing, offset, width):
    """sin and cos of p · base^(-i/n), i = 0 … ; two spacings; the first number is `offset`."""
    if spacing == "half_width_minus_one" and width < 4:
        pytest.skip("a single frequency has no spacing")
    cfg = sinusoids(layout=layout, spacing=spacing, offset=offset, base=100.0)
    table = Sinusoidal(cfg, width)(POSITIONS, WIDE)
    half = (width + 1) // 2
    n = half - 1 if spacing == "half_width_minus_one" else width / 2
    for b, t in ((0, 3), (1, 4), (1, 2)):
        p = int(POSITIONS[b, t]) + offset
        angles = [p * 100.0 ** (-i / n) for i in range(half)]
        pairs = [f(a) for a in angles for f in (math.sin, math.cos)]
        if layout == "interleaved":
            expected = pairs[:width]
        else:
            expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles[: width // 2]]
        assert close(table[b, t], torch.tensor(expected, dtype=WIDE))


def test_marians_table():
    """Concatenated, half_width, float64 rounded to float32: as Marian's and BART's sinusoids are made."""
    marian = pytest.importorskip("transformers.models.marian.modeling_marian")
    theirs = marian.MarianSinusoidalPositionalEmbedding(40, 12)
    theirs._init_weight()
    cfg = sinusoids(layout="concatenated", precision="float64_to_float32")
    ours = Sinusoidal(cfg, 12)(torch.arange(40)[None], torch.float32)[0]
    assert torch.equal(ours, theirs.weight.detach())


def test_m2m100s_table():
    """Concatenated, half_width_minus_one, offset 2, all in float32: fairseq's, in M2M100."""
    m2m = pytest.importorskip("transformers.models.m2m_100.modeling_m2m_100")
    theirs = m2m.M2M100SinusoidalPositionalEmbedding(30, 12, padding_idx=1)
    cfg = sinusoids(layout="concatenated", spacing="half_width_minus_one", offset=2, precision="float32")
    ours = Sinusoidal(cfg, 12)(torch.arange(28)[None], torch.float32)[0]
    assert torch.equal(ours, theirs.weights[2:30])


def test_precisions_differ_only_by_rounding():
    wide, rounded, narrow = (
        Sinusoidal(sinusoids(precision=p), 16)(POSITIONS, WIDE)
        for p in ("float64", "float64_to_float32", "float32")
    )
    assert torch.equal(rounded, wide.float().double())
    assert 0 < off(narrow, wide) < 1e-4


# --- learned ----------------------------------------------------------------------------------------------


def test_learned_positions_read_the_row_behind_their_offset():
    table = Learned(config.Learned(max_positions=9, offset=2), 3)
    assert table.weight.shape == (11, 3)
    torch.nn.init.normal_(table.weight)
    positions = torch.tensor([[0, 1, 8]])
    assert torch.equal(table(positions, torch.float32)[0], table.weight[[2, 3, 10]])
    with pytest.raises(ShapeError, match="10 positions asked for, the learned table has 9"):
        table(torch.arange(10)[None], torch.float32)
    anew = torch.arange(10)[None] % 9  # a second document begins
    assert torch.equal(table(anew, torch.float32)[0, 9], table.weight[2])
    with pytest.raises(ShapeError, match="position 11 is not in a table of 11 rows"):
        table(torch.tensor([[9]]), torch.float32)


# --- rotation ---------------------------------------------------------------------------------------------


def rotary(**settings):
    return config.Rotary(**{"layout": "half", "theta": 100.0, "width": 6, "precision": "float64", **settings})


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("head", "width"), [(6, 6), (8, 4), (5, 2)])
def test_rotation_is_a_complex_product(layout, head, width):
    """(a + i b) e^{i p θ_j} for every pair; channels beyond the width pass."""
    cfg = rotary(layout=layout, width=width)
    x = torch.randn(2, 3, 5, head, dtype=WIDE, generator=torch.Generator().manual_seed(0))
    found = rotate(x, rotary_table(cfg, POSITIONS, None, WIDE), layout)
    turned = x[..., :width]
    if layout == "half":
        pairs = torch.complex(turned[..., : width // 2].clone(), turned[..., width // 2 :].clone())
    else:
        pairs = torch.view_as_complex(turned.reshape(2, 3, 5, width // 2, 2).contiguous())
    frequency = torch.tensor([100.0 ** (-2 * j / width) for j in range(width // 2)], dtype=WIDE)
    angle = POSITIONS[:, None, :, None] * frequency
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    parts = [pairs.real, pairs.imag]
    expected = torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)
    assert close(found[..., :width], expected)
    assert torch.equal(found[..., width:], x[..., width:])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotated_scores_depend_on_the_distance_alone(layout):
    cfg = rotary(layout=layout)
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=WIDE, generator=torch.Generator().manual_seed(1))

    def score(i, j):
        a, b = (
            rotate(x, rotary_table(cfg, torch.tensor([[p]]), None, WIDE), layout) for x, p in ((q, i), (k, j))
        )
        return (a * b).sum()

    assert close(score(9, 4), score(25, 20))
    assert off(score(4, 9), score(9, 4)) > 0.01  # the direction counts


def test_layouts_are_a_permutation_of_channels():
    x = torch.randn(1, 2, 5, 6, dtype=WIDE)
    order = [0, 2, 4, 1, 3, 5]
    half = rotate(x[..., order], rotary_table(rotary(), POSITIONS[:1], None, WIDE), "half")
    interleaved = rotary(layout="interleaved")
    both = rotate(x, rotary_table(interleaved, POSITIONS[:1], None, WIDE), "interleaved")
    assert close(half, both[..., order])


SCALINGS = {
    "none": (config.NoScaling(), {"rope_type": "default"}),
    "linear": (config.LinearScaling(factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    "llama3": (
        config.Llama3Scaling(
            factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=64
        ),
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (
        config.YarnScaling(
            factor=4.0, original_length=64, beta_fast=32.0, beta_slow=1.0, truncate=True,
            attention_factor=0.1 * math.log(4.0) + 1.0,
        ),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn, not truncated": (
        config.YarnScaling(
            factor=4.0, original_length=64, beta_fast=16.0, beta_slow=2.0, truncate=False,
            attention_factor=1.3,
        ),
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
            "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3,
        },
    ),
}  # fmt: skip


def theirs(scaling, width=16, theta=10_000.0, length=64, **more):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    cfg = transformers.LlamaConfig(
        hidden_size=width * 2, num_attention_heads=2, head_dim=width, max_position_embeddings=length,
        rope_theta=theta, rope_scaling=None if scaling["rope_type"] == "default" else scaling,
    )  # fmt: skip
    return utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](cfg, torch.device("cpu"), **more)


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_transformers(name):
    ours, scaling = SCALINGS[name]
    expected, factor = theirs(scaling)
    cfg = rotary(width=16, theta=10_000.0, scaling=ours, precision="float32")
    frequency, found = rotary_frequencies(cfg, None, torch.device("cpu"))
    assert torch.allclose(frequency[0], expected, rtol=1e-6, atol=0)
    assert abs(found - factor) < 1e-12
    wide = rotary_frequencies(cfg.replace(precision="float64"), None, torch.device("cpu"))[0]
    assert torch.allclose(frequency.double(), wide, rtol=1e-5, atol=0)


@pytest.mark.parametrize("length", [5, 64, 65, 200])
def test_dynamic_ntk_is_transformers(length):
    expected, _ = theirs({"rope_type": "dynamic", "factor": 2.0}, seq_len=length)
    cfg = rotary(
        width=16, theta=10_000.0, precision="float32",
        scaling=config.DynamicNtkScaling(factor=2.0, original_length=64),
    )  # fmt: skip
    found, _ = rotary_frequencies(cfg, torch.tensor([length, 3]), torch.device("cpu"))
    assert torch.allclose(found[0], expected, rtol=1e-5, atol=0)
    plain, _ = rotary_frequencies(cfg.replace(scaling=config.NoScaling()), None, torch.device("cpu"))
    assert torch.allclose(found[1], plain[0], rtol=1e-5, atol=0)  # each row has its own length


def test_yarn_scales_cosines_and_sines():
    cfg = rotary(width=16, scaling=SCALINGS["yarn"][0])
    cos, sin = rotary_table(cfg, POSITIONS, None, WIDE)
    assert close((cos.square() + sin.square()), torch.full_like(cos, (0.1 * math.log(4.0) + 1.0) ** 2))


# --- ALiBi ------------------------------------------------------------------------------------------------


def alibi(n_heads, query, key=None, **settings):
    key = query if key is None else key
    return AlibiBias(config.Alibi(**settings), n_heads, query[None], key[None]).dense(WIDE)[0]


@pytest.mark.parametrize("n_heads", [1, 2, 4, 6, 8, 12, 71])
def test_alibi_is_blooms_up_to_a_constant_a_row(n_heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    expected = bloom.build_alibi_tensor(torch.ones(1, 7), n_heads, torch.float32).double()  # [h, 1, keys]
    ours = alibi(n_heads, torch.arange(7))
    difference = (ours - expected).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), 0)
    spread = difference - difference[..., :1]
    assert spread.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), 0).abs().max() < 1e-5


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def test_alibi_counts_distance_both_ways_and_has_a_factor():
    bias = alibi(2, torch.arange(3), factor=0.5)
    expected = (
        -0.5
        * torch.tensor([2**-4, 2**-8]).double()[:, None, None]
        * torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]])
    )
    assert torch.equal(bias, expected)
    later = alibi(2, torch.tensor([5]), torch.arange(6), factor=0.5)
    assert later[0, 0].tolist() == [-0.5 * 2**-4 * (5 - j) for j in range(6)]


@pytest.mark.parametrize("rounding", ["bfloat16", "float32"])
def test_rounded_alibi(rounding):
    """Slope · j with every step in the narrow type: the same softmax but for the rounding."""
    dtype = getattr(torch, rounding)
    bias = alibi(6, torch.arange(5), rounding=rounding, factor=0.25)
    slopes = torch.tensor(alibi_slopes(6)).to(dtype)
    expected = (slopes[:, None] * torch.arange(5).to(dtype)).double() * 0.25
    assert off(bias[:, 0], expected) < 1e-6
    assert torch.equal(bias[:, 0], bias[:, 4])
    exact = alibi(6, torch.arange(5), factor=0.25)
    assert off((bias[:, 4] - bias[:, 4, 4:]), exact[:, 4]) < 1e-2


# --- T5 buckets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n", "furthest"), [(32, 128), (8, 20), (10, 17)])
def test_buckets_are_t5s(bidirectional, n, furthest):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    ahead = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(ahead, bidirectional, n, furthest)
    cfg = config.RelativeBuckets(n_buckets=n, max_distance=furthest, bidirectional=bidirectional)
    assert torch.equal(relative_buckets(cfg, ahead), expected)


def test_bucket_bias_reads_key_minus_query_of_each_head():
    cfg = config.RelativeBuckets(n_buckets=8, max_distance=20, bidirectional=True)
    table = RelativeBias(cfg, 3)
    torch.nn.init.normal_(table.weight)
    query, key = torch.tensor([[4, 5]]), torch.arange(9)[None]
    bias = table(query, key).dense(torch.float32)
    assert bias.shape == (1, 3, 2, 9)
    for i, j, h in ((0, 0, 0), (0, 8, 1), (1, 3, 2), (1, 5, 0)):
        bucket = int(relative_buckets(cfg, key[0, j] - query[0, i]))
        assert bias[0, h, i, j] == table.weight[bucket, h]


@pytest.mark.parametrize("kind", ["alibi", "rounded", "buckets"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_form_by_pair_is_the_dense_one(kind, rows):
    query, key = torch.tensor([[2, 3], [7, 1]])[:rows], torch.tensor([[0, 1, 2, 3], [5, 4, 2, 9]])[:rows]
    if kind == "buckets":
        table = RelativeBias(config.RelativeBuckets(n_buckets=8, max_distance=20, bidirectional=False), 3)
        torch.nn.init.normal_(table.weight)
        bias = table(query, key)
    else:
        rounding = "bfloat16" if kind == "rounded" else "none"
        bias = AlibiBias(config.Alibi(rounding=rounding), 3, query, key)
    dense = bias.dense(torch.float32)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in dense.shape), indexing="ij")
    assert torch.equal(bias.by_pair(torch.float32)(b, h, i, j), dense)
