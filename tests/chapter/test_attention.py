"""R1–R5, R42: what attention takes, computes and refuses (6.1–6.2)."""

from __future__ import annotations

import pytest
import torch

import isoform as iso
from isoform import config
from isoform.errors import ConfigError, ShapeError
from isoform.nn import Attention
from isoform.nn.feed_forward import feed_forward
from isoform.nn.norms import Norm
from isoform.nn.reading import Reading
from isoform.visibility import Bidirectional, Causal, Cross, Documents, Padding, Places, Window
from networks import attention, batch, inputs, network, preset, shake
from tolerances import TOLERANCE, close, off

D = 10


@pytest.fixture(autouse=True)
def uncompiled_flex(monkeypatch):
    """FlexAttention term by term: not traced, and without its remark that this is slow."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["eager", "sdpa", "flex"]
NORM = config.Norm(kind="rms", eps=1e-6, bias=False)


def module(*, cross=False, **settings):
    return shake(Attention(attention(**settings), D, cross=cross))


def states(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, D, dtype=torch.float64, generator=generator) for n in lengths]


def reading(rule, query, key=None):
    return Reading(rule.lower(query, query if key is None else key))


def by_hand(m, x, y, allowed):
    """(6.1)–(6.2) head by head, each with its own slices of the projections."""
    cfg = m.cfg
    w, group = cfg.head_width, cfg.n_heads // cfg.n_kv_heads

    def projected(part, source):
        if m.cross and part == "query":
            return source @ m.query.weight.T + (0 if m.query.bias is None else m.query.bias)
        packed = m.key_value if m.cross else m.qkv
        bias = packed.part_bias(part)
        return source @ packed.part(part).T + (0 if bias is None else bias)

    q, k, v = projected("query", x), projected("key", y), projected("value", y)
    heads = []
    for r in range(cfg.n_heads):
        own, shared = slice(r * w, (r + 1) * w), slice(r // group * w, (r // group + 1) * w)
        scores = q[..., own] @ k[..., shared].transpose(-1, -2) * cfg.score_scale
        if cfg.softcap is not None:
            scores = cfg.softcap * torch.tanh(scores / cfg.softcap)
        weights = torch.where(allowed, scores.exp(), 0.0)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        heads.append(weights @ v[..., shared])
    return torch.cat(heads, -1) @ m.output.weight.T + (0 if m.output.bias is None else m.output.bias)


# --- R1: shapes -------------------------------------------------------------------------------------------


def expect_both(call, *shapes):
    with pytest.raises(ShapeError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    for shape in shapes:
        assert str(shape) in message


def test_a_wrong_width_names_both_shapes():
    wrong = torch.zeros(2, 3, D + 1)
    side = Places.range(3)
    expect_both(lambda: module().float()(wrong, reading(Causal(), side)), [2, 3, 11], [40, 10])
    two = config.TwoLayer(width=7, activation="relu", bias_up=True, bias_down=True)
    expect_both(lambda: feed_forward(two, D)(wrong), [2, 3, 11], [7, 10])
    gated = config.Gated(width=7, activation="silu", bias_gate=False, bias_up=False, bias_down=False)
    expect_both(lambda: feed_forward(gated, D)(wrong), [2, 3, 11], [14, 10])
    experts = config.Experts(
        n_experts=3, top_k=1, expert=gated, router_bias=False, router_order="top_k_then_softmax"
    )
    expect_both(lambda: feed_forward(experts, D)(wrong), [6, 11], [3, 10])
    expect_both(lambda: Norm(NORM, D)(wrong), [2, 3, 11], [10])
    cross = module(cross=True).float()
    good = torch.zeros(2, 3, D)
    expect_both(lambda: cross(good, reading(Cross(), side), wrong), [2, 3, 11], [16, 10])
    expect_both(lambda: cross(good, reading(Cross(), side), good[:1]), [2, 3, 10], "1 rows")


def test_streams_of_unequal_batch_sizes_name_both_shapes():
    model = network(preset("original"))
    expect_both(lambda: model(batch(), source=batch(2, lengths=(3, 2))), [3, 9], [2, 3])


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "bloom", "t5", "mixtral", "gemma2"])
def test_every_sublayer_keeps_the_shape(name):
    model = network(preset(name))
    given = inputs(model.config)
    with iso.capture(model, "*increment", "*sum", "*output") as seen:
        model(**given)
    shapes = {tuple(t.shape) for key, t in seen.items() if "layers" in key}
    lengths = {g.length for g in given.values()}
    assert shapes == {(3, n, 24) for n in lengths}


def test_ids_outside_the_vocabulary_are_named():
    model = network(preset("gpt2"))
    with pytest.raises(ShapeError, match="token id 99 is not in a table of 23 rows"):
        model(iso.Tokens(torch.tensor([[1, 99]])))
    with pytest.raises(ShapeError, match="token id -1 is not in a table of 23 rows"):
        model(iso.Tokens(torch.tensor([[1, -1]])))
    with pytest.raises(ShapeError, match="41 positions asked for, the learned table has 40"):
        model(iso.Tokens(torch.ones(1, 41, dtype=torch.long)))
    with pytest.raises(ShapeError, match="position 77 is not in a table of 40 rows"):
        model(iso.Tokens(torch.ones(1, 2, dtype=torch.long), position_ids=torch.tensor([[0, 77]])))


# --- R2, R42: the function --------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [1, 2, 3, 6])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_self_attention_is_its_formula(kv, backend):
    """Multi-head, grouped and multi-query: consecutive query heads share a key head."""
    m, side = module(n_kv_heads=kv), Places.range(5)
    m.backend = backend
    (x,) = states(5)
    assert close(m(x, reading(Causal(), side)), by_hand(m, x, x, Causal().on(5).matrix))
    assert close(m(x, reading(Bidirectional(), side)), by_hand(m, x, x, Bidirectional().on(5).matrix))


@pytest.mark.parametrize("kv", [1, 2, 6])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_cross_attention_is_its_formula(kv, backend):
    """Two inputs of different lengths; the output has the query's."""
    m = module(cross=True, n_kv_heads=kv)
    m.backend = backend
    x, y = states(4, 7)
    out = m(x, reading(Cross(), Places.range(4), Places.range(7)), y)
    assert close(out, by_hand(m, x, y, Cross().on(4, 7).matrix))
    stored = m.project_memory(y)
    assert close(m(x, reading(Cross(), Places.range(4), Places.range(7)), stored), out)


@pytest.mark.parametrize("scale", ["inverse_sqrt_head_width", 1.0, 0.125])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scale(scale, backend):
    m, (x,) = module(scale=scale), states(5)
    m.backend = backend
    with torch.no_grad():
        assert close(m(x, reading(Causal(), Places.range(5))), by_hand(m, x, x, Causal().on(5).matrix))


def test_standard_scale_is_one_over_the_root_of_the_head_width():
    assert attention().score_scale == 4**-0.5
    assert attention(head_width=9).score_scale == 1 / 3


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex", "auto"])
def test_softcap(backend):
    """c tanh(scores / c), before the mask."""
    m, (x,) = module(softcap=0.7), states(5)
    m.backend = backend
    with torch.no_grad():
        out = m(4 * x, reading(Causal(), Places.range(5)))
        assert close(out, by_hand(m, 4 * x, 4 * x, Causal().on(5).matrix))
        assert off(out, by_hand(module(), 4 * x, 4 * x, Causal().on(5).matrix)) > 0.01


def test_packed_projections_are_separate_parameters():
    """R2: one matrix product, three independent projections; each has its own gradient and its own bias."""
    bias = config.AttentionBias(query=True, key=False, value=True, output=True)
    m, (x,) = module(bias=bias), states(3)
    packed = m.qkv
    together = packed.project(x)
    for part, found in zip(("query", "key", "value"), together, strict=True):
        own = packed.part_bias(part)
        assert (own is None) == (part == "key")
        assert close(found, x @ packed.part(part).T + (0 if own is None else own))
    (gradient,) = torch.autograd.grad(packed.project(x)[1].sum(), packed.weight)
    rows = gradient.abs().sum(-1) > 0
    assert rows.tolist() == [24 <= i < 32 for i in range(40)]
    assert packed.part("key").data_ptr() == packed.weight[24:].data_ptr()


@pytest.mark.parametrize("axis", ["head", "projection"])
@pytest.mark.parametrize("order", ["before_rotation", "after_rotation"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_query_key_norm(axis, order, kind):
    """R42: over each head's channels or over all heads together; before or after rotation."""
    norm = config.Norm(kind=kind, eps=1e-3, bias=kind == "layer")
    rotary = config.Rotary(layout="half", theta=10.0, width=4, precision="float64")
    m = module(qk_norm=config.QKNorm(norm=norm, axis=axis, order=order), positions=rotary)
    x, side = states(5)[0], Places.range(5)
    from isoform.nn.positions import rotary_table, rotate

    table = rotary_table(rotary, side.index, None, torch.float64)
    q, k, _ = m.qkv.project(x)

    def normed(t, n, gain):
        if axis == "projection":
            return gain(t).unflatten(-1, (n, 4)).transpose(1, 2)
        return gain(t.unflatten(-1, (n, 4))).transpose(1, 2)

    def normed_late(t, n, gain):
        if axis == "head":
            return gain(t)
        return gain(t.transpose(1, 2).flatten(-2)).unflatten(-1, (n, 4)).transpose(1, 2)

    if order == "before_rotation":
        q, k = (
            rotate(normed(t, n, g), table, "half") for t, n, g in ((q, 6, m.query_norm), (k, 2, m.key_norm))
        )
    else:
        q, k = (
            normed_late(rotate(t.unflatten(-1, (n, 4)).transpose(1, 2), table, "half"), n, g)
            for t, n, g in ((q, 6, m.query_norm), (k, 2, m.key_norm))
        )
    holder = torch.nn.ModuleDict({"m": m})
    with iso.capture(holder, "m.queries", "m.keys") as seen:
        m(x, Reading(Causal().lower(side, side), rotary=table))
    assert close(seen["m.queries"], q)
    assert close(seen["m.keys"], k)


def test_weights_are_a_distribution_over_keys():
    m, side = module(), Places.range(5)
    holder = torch.nn.ModuleDict({"m": m})
    with iso.capture(holder, "m.weights") as seen:
        m(states(5)[0], reading(Causal(), side))
    weights = seen["m.weights"]
    assert weights.shape == (2, 6, 5, 5)
    assert close(weights.sum(-1), torch.ones(2, 6, 5, dtype=torch.float64))
    assert (weights.triu(1) == 0).all()  # exactly


# --- R4: a row that sees nothing --------------------------------------------------------------------------


def dead_row(dtype, rule):
    """Two rows: one full, one all padding; or documents and windows around padding."""
    real = torch.tensor([[True] * 4, [False] * 4])
    side = Places(torch.arange(4)[None], real, layout="right")
    return side, rule & Padding()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rule", [Bidirectional(), Causal(), Window(2, "past") & Causal(), Bidirectional() & Documents()], ids=repr
)
def test_a_row_that_sees_nothing_gives_zeros(rule, backend, dtype):
    """In values and in gradients, never NaN, on every backend and in every precision."""
    m = module(bias=config.AttentionBias(query=True, key=True, value=True, output=False)).to(dtype)
    m.backend = backend
    side, rule = dead_row(dtype, rule)
    x = (100 * states(4)[0]).to(dtype).requires_grad_(backend != "flex")
    m.requires_grad_(backend != "flex")
    out = m(x, reading(rule, side))
    assert out.isfinite().all()
    assert (out[1] == 0).all()
    assert out[0].abs().max() > 0
    if backend == "flex":
        return
    (1e-3 * out.float().square().sum()).backward()
    assert x.grad.isfinite().all()
    assert (x.grad[1] == 0).all()
    assert x.grad[0].abs().max() > 0
    assert all(p.grad.isfinite().all() for p in m.parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_source_of_padding_alone_gives_zeros(backend, dtype):
    m = module(cross=True, bias=config.AttentionBias(query=True, key=True, value=True, output=False)).to(
        dtype
    )
    m.backend = backend
    m.requires_grad_(backend != "flex")
    key = Places(torch.arange(5)[None], torch.tensor([[True] * 3 + [False] * 2, [False] * 5]), layout="right")
    x, y = (t.to(dtype).requires_grad_(backend != "flex") for t in states(4, 5))
    out = m(x, reading(Cross() & Padding(), Places.range(4), key), y)
    assert (out[1] == 0).all() and out.isfinite().all() and out[0].abs().max() > 0
    if backend != "flex":
        (1e-3 * out.float().square().sum()).backward()
        assert all(t.grad.isfinite().all() and (t.grad[1] == 0).all() for t in (x, y))
        assert (y.grad[0, 3:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["original", "bert", "gpt2", "llama", "t5", "bloom", "gemma2"])
def test_a_network_with_an_empty_row_is_finite_and_the_others_are_untouched(name, backend):
    model = network(preset(name)).set_attention(backend)
    model.requires_grad_(backend != "flex")
    cfg = model.config
    full, source = batch(), batch(2, lengths=(5, 8, 3))
    real = full.real.clone()
    real[1] = False
    tokens = iso.Tokens(full.ids, real)
    gone = source.real.clone()
    gone[1] = False
    given = {"source": iso.Tokens(source.ids, gone)} if cfg.source is not None else {}
    out = model(tokens, **given)
    whole = model(full, **({"source": source} if given else {}))
    assert out.hidden.isfinite().all()
    for row in (0, 2):
        assert close(out.hidden[row][real[row]], whole.hidden[row][real[row]])
    if backend != "flex":
        out.hidden.square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# --- R5: state that is not trained ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["original", "llama", "bloom"])
def test_masks_and_fixed_positions_are_not_parameters(name):
    """Nothing is stored for sinusoids, rotation or slopes: the configuration rebuilds them (R5, R37)."""
    model = network(preset(name))
    assert list(model.buffers()) == []
    assert not [n for n, _ in model.named_parameters() if "position" in n or "mask" in n]


# --- backends ---------------------------------------------------------------------------------------------


FAMILIES = [
    "original",
    "gpt2",
    "llama",
    "bloom",
    "mistral",
    "gemma2",
    "t5",
    "bert",
    "falcon",
    "olmo2",
    "qwen3",
]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_eager_and_fused_are_one_function(name, side):
    """Forward and every gradient."""
    model = network(preset(name))
    given = inputs(model.config, side)
    real = given["tokens"].real
    results = []
    for backend in ("eager", "sdpa"):
        model.set_attention(backend).zero_grad()
        hidden = model(**given).hidden[real]
        (hidden * torch.arange(hidden.numel()).cos().view_as(hidden)).sum().backward()
        results.append(
            (hidden, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
    (a, ga), (b, gb) = results
    assert close(a, b)
    assert ga.keys() == gb.keys()
    assert all(close(ga[n], gb[n]) for n in ga)


@pytest.mark.parametrize(
    "name", ["gpt2", "mistral", "bloom", "t5", "gemma2", "prefix", "documents", "wait-k"]
)
def test_flex_is_the_same_function(name):
    """Uncompiled on the CPU: causal, window, ALiBi, buckets, cap, prefix, documents, a streaming source."""
    cfg = preset({"prefix": "gpt2", "documents": "llama", "wait-k": "original"}.get(name, name))
    if name == "prefix":
        cfg = preset("gpt2", visibility="prefix")
    model = network(cfg)
    for side in ("right", "left"):
        given = inputs(cfg, side)
        tokens = given["tokens"]
        if name == "documents":
            numbers = torch.tensor([[0] * 4 + [1] * 5, [0] * 9, [0] * 6 + [1] * 3])
            given["tokens"] = iso.Tokens(tokens.ids, tokens.real, documents=numbers)
        if name == "wait-k":
            from isoform.visibility import WaitK

            given["cross"] = WaitK(2) & Padding()
        with torch.no_grad():
            expected = model.set_attention("eager")(**given).hidden
            found = model.set_attention("flex")(**given).hidden
        assert close(found[tokens.real], expected[tokens.real])


def test_flex_says_what_it_cannot():
    m, (x,) = module(), states(3)
    m.backend = "flex"
    with pytest.raises(ConfigError, match="no gradient on the CPU"):
        m(x, reading(Causal(), Places.range(3)))
    dropping = module(dropout=0.1).train()
    dropping.backend = "flex"
    with torch.no_grad(), pytest.raises(ConfigError, match="cannot drop attention weights"):
        dropping(x, reading(Causal(), Places.range(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
def test_half_precision_is_near_and_keeps_its_dtype(dtype, backend):
    m, (x,) = module(), states(6)
    m.backend = backend
    exact = m(x, reading(Causal(), Places.range(6)))
    out = m.to(dtype)(x.to(dtype), reading(Causal(), Places.range(6)))
    assert out.dtype == dtype
    assert off(out, exact) < TOLERANCE[dtype]
