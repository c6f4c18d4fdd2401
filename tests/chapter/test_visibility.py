"""R18–R24: structures and visibility (6.24–6.33)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import isoform as iso
from isoform.errors import ShapeError
from isoform.visibility import Bidirectional, Causal, Cross, Padding, Places, Prefix, WaitK, Window
from networks import VOCAB, batch, network, preset
from tolerances import close, off

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["visibility"]


@pytest.mark.parametrize(
    ("name", "rule", "places"),
    [
        ("bidirectional_4", Bidirectional(), Places.range(4)),
        ("causal_4", Causal(), Places.range(4)),
        ("prefix_4_of_2", Prefix(), Places.range(4, prefix=2)),
        ("prefix_6_of_3", Prefix(), Places.range(6, prefix=3)),
    ],
)
def test_matrices_are_the_chapters(name, rule, places):
    """(6.32), (6.33), exercise 6.7."""
    assert rule.on(places).matrix[0].int().tolist() == GOLDEN[name]


def test_cross_visibility_has_no_triangle():
    """R21: T × S, every target reads every source."""
    assert Cross().on(2, 5).matrix.tolist() == [[[True] * 5] * 2]


# --- R18: structures --------------------------------------------------------------------------------------


def test_the_same_stack_runs_under_any_mask():
    """Modules and visibility are two dimensions: gpt2's parameters as an encoder, and the other way round."""
    decoder, encoder = network(preset("gpt2")), network(preset("bert"))
    tokens = batch()
    changed = dataclasses.replace(tokens, prefix=torch.tensor([3, 2, 4]))
    causal = decoder(tokens).hidden
    assert torch.equal(causal, decoder(tokens, visibility=Causal() & Padding()).hidden)
    both = decoder(tokens, visibility=Bidirectional() & Padding()).hidden
    prefix = decoder(changed, visibility=Prefix() & Padding()).hidden
    real = tokens.real
    assert off(both[real], causal[real]) > 0.01
    assert off(prefix[real], causal[real]) > 0.01
    assert off(prefix[real], both[real]) > 0.01
    assert (
        off(encoder(tokens, visibility=Causal() & Padding()).hidden[real], encoder(tokens).hidden[real])
        > 0.01
    )


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_streams_must_fit_the_structure(name):
    model, tokens = network(preset(name)), batch()
    both = model.config.source is not None
    with pytest.raises(ShapeError, match="encoder–decoder" if both else "reads one stream"):
        model(tokens) if both else model(tokens, source=tokens)


# --- R19, R20: layers -------------------------------------------------------------------------------------


def test_post_ln_decoder_layer():
    """(6.26)–(6.28), and the encoder's (6.24)–(6.25), composed by hand from the layer's own parts."""
    model = network(preset("original", n_encoder_layers=1, n_decoder_layers=1))
    seen, _, x, c = run(model)
    layer = model.decoder.layers[0]
    u = layer.attention.after_sum(x + seen["decoder.layers.0.attention.increment"])
    z = layer.cross_attention.after_sum(u + seen["decoder.layers.0.cross_attention.increment"])
    inner = layer.feed_forward.body
    out = layer.feed_forward.after_sum(z + inner(z))
    assert close(seen["decoder.layers.0.attention.normalised"], x)
    assert close(seen["decoder.layers.0.cross_attention.normalised"], u)
    assert close(seen["decoder.layers.0.feed_forward.output"], out)
    assert close(memory_read(layer, u, c), seen["decoder.layers.0.cross_attention.increment"])
    encoder = model.encoder.layers[0]
    s = seen["source_embedding.output"]
    u = encoder.attention.after_sum(s + seen["encoder.layers.0.attention.increment"])
    assert close(encoder.feed_forward.after_sum(u + encoder.feed_forward.body(u)), c)


def test_pre_ln_decoder_layer():
    """(6.29)–(6.31): only the query side is normalised, the memory is not normalised again."""
    model = network(preset("pre_ln", n_encoder_layers=1, n_decoder_layers=1))
    seen, _, x, c = run(model)
    layer = model.decoder.layers[0]
    u = x + seen["decoder.layers.0.attention.increment"]
    z = u + seen["decoder.layers.0.cross_attention.increment"]
    inner = layer.feed_forward
    out = z + inner.body(inner.before(z))
    assert close(seen["decoder.layers.0.attention.normalised"], layer.attention.before(x))
    assert close(seen["decoder.layers.0.feed_forward.output"], out)
    query = layer.cross_attention.before(u)
    assert close(memory_read(layer, query, c), seen["decoder.layers.0.cross_attention.increment"])
    assert close(seen["decoder.output"], model.decoder.final_norm(out))


def test_normalising_the_memory_is_its_own_option():
    plain = preset("pre_ln")
    normed = plain.replace(**{"decoder.layer.memory_norm": plain.decoder.layer.norm})
    a, b = network(plain), network(normed)
    names = dict(a.named_parameters())
    extra = [n for n, _ in b.named_parameters() if n not in names]
    assert [n for n in extra if "memory_norm" not in n] == []
    assert len(extra) == 2 * len(b.decoder.layers)
    layer, c = b.decoder.layers[0], torch.randn(3, 8, 24, dtype=torch.float64)
    key, _ = layer.project_memory(c)
    assert close(key, layer.cross_attention.body.project_memory(layer.memory_norm(c))[0])
    assert off(key, layer.cross_attention.body.project_memory(c)[0]) > 0.01


def test_layers_have_their_own_parameters_and_one_memory():
    """R20: nothing is shared; every decoder layer reads the last memory through its own projections."""
    model = network(preset("original"))
    named = list(model.decoder.named_parameters(remove_duplicate=False))
    assert len({id(p) for _, p in named}) == len(named)
    tokens, source = batch(), batch(2, lengths=(5, 8, 3))
    calls = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    out = model(tokens, source=source)
    assert calls == [1]
    with iso.capture(model, "decoder.layers.*.cross_attention.body.keys") as seen:
        model(tokens, source=source)
    for i, layer in enumerate(model.decoder.layers):
        expected, _ = layer.project_memory(out.memory)
        assert torch.equal(seen[f"decoder.layers.{i}.cross_attention.body.keys"], expected)


def run(model):
    tokens, source = batch(), batch(2, lengths=(5, 8, 3))
    with iso.capture(model, "*") as seen:
        out = model(tokens, source=source)
    return seen, out, seen["embedding.output"], seen["encoder.output"]


def memory_read(layer, query, c):
    """softmax(Q Kᵀ/√d_h + M) V Wo by hand, padding of the source left out (6.1)–(6.2)."""
    body = layer.cross_attention.body
    h, w = body.cfg.n_heads, body.cfg.head_width
    rows = []
    for b, (n, t) in enumerate(zip((5, 8, 3), (9, 4, 7), strict=True)):
        q = (query[b] @ body.query.weight.T + body.query.bias).view(-1, h, w)
        k = (c[b, :n] @ body.key_value.part("key").T + body.key_value.part_bias("key")).view(-1, h, w)
        v = (c[b, :n] @ body.key_value.part("value").T + body.key_value.part_bias("value")).view(-1, h, w)
        weights = torch.einsum("ihc,jhc->hij", q, k).div(w**0.5).softmax(-1)
        read = torch.einsum("hij,jhc->ihc", weights, v).flatten(-2)
        read[t:] = 0  # padding reads nothing
        rows.append(read @ body.output.weight.T + body.output.bias)
    return torch.stack(rows)


# --- R24: causality at every layer ------------------------------------------------------------------------

CAUSAL = ["gpt2", "llama", "bloom", "mistral", "t5", "gemma2", "original", "phi", "mixtral"]


def layer_outputs(model, tokens, source):
    with iso.capture(model, "decoder.*") as seen:
        model(tokens, **({} if source is None else {"source": source}))
    return {name: value for name, value in seen.items() if value.dim() == 3}


def setting(name, side):
    model = network(preset(name))
    source = batch(2, side, (5, 8, 3)) if model.config.source is not None else None
    return model, batch(1, side), source


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_no_layer_depends_on_later_tokens(name, side):
    """Perturb one token: nothing before it changes, at any layer; it and something after it do change."""
    model, tokens, source = setting(name, side)
    place = 3 if side == "right" else tokens.length - 2
    ids = tokens.ids.clone()
    ids[:, place] = ids[:, place] % (VOCAB - 1) + 1
    before = layer_outputs(model, tokens, source)
    after = layer_outputs(model, dataclasses.replace(tokens, ids=ids), source)
    assert sum(name.endswith("output") for name in before) > len(model.decoder.layers)
    for key, value in before.items():
        assert close(after[key][:, :place], value[:, :place]), key  # experts regroup: not bit for bit
    last = after["decoder.output"] - before["decoder.output"]
    assert last[:, place].abs().max() > 1e-5
    assert last[0, place + 1].abs().max() > 1e-6


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_no_layer_has_a_gradient_to_later_tokens(name, side):
    """The same by gradient, from every intermediate with a time axis to the embedded input."""
    model, tokens, source = setting(name, side)
    with iso.capture(model, "decoder.*", "embedding.output") as seen:
        model(tokens, **({} if source is None else {"source": source}))
    first, place = seen.pop("embedding.output"), 3 if side == "right" else tokens.length - 3
    for key, value in seen.items():
        if value.dim() != 3:
            continue
        (gradient,) = torch.autograd.grad(value[:, place].square().sum(), first, retain_graph=True)
        assert gradient[:, place + 1 :].abs().max() == 0, key
        assert gradient[0, : place + 1].abs().max() > 0, key


def test_a_bidirectional_network_does_depend_on_later_tokens():
    """The two tests above can fail: they do for an encoder."""
    model, tokens = network(preset("bert")), batch()
    ids = tokens.ids.clone()
    ids[0, 5] = ids[0, 5] % (VOCAB - 1) + 1
    assert off(model(dataclasses.replace(tokens, ids=ids)).hidden[0, :5], model(tokens).hidden[0, :5]) > 1e-3


def test_prefix_reads_all_of_its_condition_and_nothing_of_the_future():
    """(6.33) in a network: within the condition both ways, after it only backwards."""
    model = network(preset("gpt2", visibility="prefix"))
    tokens = iso.Tokens(torch.arange(1, 8)[None], prefix=torch.tensor([3]))
    with iso.capture(model, "embedding.output") as seen:
        hidden = model(tokens).hidden
    reach = torch.stack(
        [
            torch.autograd.grad(hidden[0, i].square().sum(), seen["embedding.output"], retain_graph=True)[0][
                0
            ]
            .abs()
            .sum(-1)
            > 0
            for i in range(7)
        ]
    )
    assert torch.equal(reach, Prefix().on(Places.range(7, prefix=3)).matrix[0])


# --- R21: what combines with it ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "mistral", "bert", "t5"])
def test_padding_changes_nothing(name):
    """Rows alone, right-padded and left-padded give the same states, whatever the pad ids are."""
    model, right, left = network(preset(name)), batch(1, "right"), batch(1, "left")
    source = {side: batch(2, side, (5, 8, 3)) for side in ("right", "left")}

    def hidden(tokens, side):
        given = {"source": source[side]} if model.config.source is not None else {}
        return model(tokens, **given).hidden[tokens.real_or_ones()]

    expected = hidden(right, "right")
    assert close(hidden(left, "left"), expected)
    assert torch.equal(
        hidden(dataclasses.replace(right, ids=right.ids.masked_fill(~right.real, 17)), "right"), expected
    )
    assert torch.equal(
        hidden(dataclasses.replace(right, ids=right.ids.masked_fill(~right.real, 10**6)), "right"), expected
    )
    for i, row in enumerate(right.rows()):
        given = (
            {"source": iso.Tokens(torch.tensor([source["right"].rows()[i]]))} if model.config.source else {}
        )
        alone = model(iso.Tokens(torch.tensor([row])), **given).hidden[0]
        assert close(
            alone, model(right, **({"source": source["right"]} if given else {})).hidden[i, : len(row)]
        )


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "mistral", "gemma2", "bert"])
def test_packed_documents_are_as_if_alone(name):
    """Isolation and positions that start anew, with padding behind."""
    model = network(preset(name))
    first, second = [3, 5, 7, 2], [9, 4, 6, 8, 1]
    ids = torch.tensor([first + second + [0], second + [0] * 5])
    real = ids != 0
    documents = torch.tensor([[1] * 4 + [2] * 5 + [0], [1] * 5 + [0] * 5])
    hidden = model(iso.Tokens(ids, real, documents=documents)).hidden
    a, b = (model(iso.Tokens(torch.tensor([row]))).hidden[0] for row in (first, second))
    assert close(hidden[0, :4], a)
    assert close(hidden[0, 4:9], b)
    assert close(hidden[1, :5], b)
    mixed = model(iso.Tokens(ids, real)).hidden
    assert off(mixed[0, 4:9], b) > 0.01


def test_window_reaches_as_far_as_it_says():
    """One layer sees window positions, n layers n (window - 1) + 1; nothing beyond."""
    for n in (1, 2):
        model = network(preset("mistral", n_layers=n, window=3))
        with iso.capture(model, "embedding.output") as seen:
            hidden = model(iso.Tokens(torch.arange(1, 12)[None])).hidden
        (g,) = torch.autograd.grad(hidden[0, 9].square().sum(), seen["embedding.output"])
        reached = (g[0].abs().sum(-1) > 0).nonzero().flatten().tolist()
        assert reached == list(range(9 - 2 * n, 10))


def test_streaming_source():
    """Wait-k over the source: target i depends on the first i + k source tokens; padding stays hidden."""
    model = network(preset("original", n_encoder_layers=1))
    tokens, source = batch(1, lengths=(4, 3)), batch(2, lengths=(8, 6))
    with iso.capture(model, "encoder.output", replace={"encoder.output": torch.Tensor.detach}) as seen:
        model(tokens, source=source, cross=WaitK(2) & Padding())
    memory = seen["encoder.output"].requires_grad_()
    with iso.capture(model, replace={"encoder.output": lambda _: memory}):
        hidden = model(tokens, source=source, cross=WaitK(2) & Padding()).hidden
    for i in range(4):
        (g,) = torch.autograd.grad(hidden[0, i].square().sum(), memory, retain_graph=True)
        assert (g[0].abs().sum(-1) > 0).tolist() == [j < i + 2 for j in range(8)]
    # The triangle of the targets is below: target i may use what its predecessors read.


def test_bidirectional_window_is_on_both_sides():
    cfg = preset("bert", n_layers=1)
    model = network(cfg.replace(**{"encoder.layer.attention.window": 3}))
    with iso.capture(model, "embedding.output") as seen:
        hidden = model(iso.Tokens(torch.arange(1, 12)[None])).hidden
    (g,) = torch.autograd.grad(hidden[0, 5].square().sum(), seen["embedding.output"])
    assert (g[0].abs().sum(-1) > 0).nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    assert Window(3, "both").on(11).matrix[0, 5].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
