"""R32: cached and uncached generation are one function, for every position kind and mask."""

from __future__ import annotations

import itertools

import pytest
import torch

from isoform.config import presets
from isoform.cost import Workload, kv_cache, memory, parameters
from isoform.cost.counters import measure_memory
from isoform.generation import Beam, Cached, Generated, Greedy, Sample, Uncached, generate
from isoform.nn import build
from isoform.nn.capture import capture
from isoform.nn.lanes import Lanes
from isoform.nn.step import prepare
from isoform.tokens import Tokens
from isoform.visibility import WaitK

KINDS = [
    "none",
    "sinusoidal-interleaved",
    "sinusoidal-concatenated",
    "learned",
    "rotary-half",
    "rotary-interleaved",
    "rotary-partial",
    "rotary-linear",
    "rotary-dynamic",
    "rotary-llama3",
    "rotary-yarn",
    "alibi",
    "relative-buckets",
]
HEADS, WINDOWS, SIDES = (6, 2, 1), (None, 3), ("right", "left")
STRUCTURES, SEARCHES = ("causal", "prefix", "encoder-decoder"), ("greedy", "beam")
NEW = 13  # with prompts of 2 to 5 tokens: several windows, and beyond dynamic NTK's original length of 7

GRID = list(itertools.product(KINDS, HEADS, WINDOWS, SIDES, STRUCTURES, SEARCHES))
# Every kind with both searches; the other axes go round, each at its own pace.
SLICE = [
    (
        kind,
        HEADS[(i + j) % 3],
        WINDOWS[(i // 2 + j) % 2],
        SIDES[(i + j) % 2],
        STRUCTURES[(i + 2 * j) % 3],
        search,
    )
    for i, kind in enumerate(KINDS)
    for j, search in enumerate(SEARCHES)
]


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9


def same(a: Generated, b: Generated) -> None:
    """Identical tokens, scores and step logits, of every hypothesis."""
    assert len(a.hypotheses) == len(b.hypotheses)
    for mine, other in zip(a.hypotheses, b.hypotheses, strict=True):
        assert [h.ids for h in mine] == [h.ids for h in other]
        assert [h.finished for h in mine] == [h.finished for h in other]
        for x, y in zip(mine, other, strict=True):
            assert close(x.score, y.score) and close(x.log_probability, y.log_probability)
            assert x.logits is not None and y.logits is not None
            torch.testing.assert_close(x.logits, y.logits, rtol=0, atol=1e-9)


def check(network, configuration, prompts, kind, kv, window, side, structure, search):
    model = network(configuration(kind, kv=kv, window=window, structure=structure))
    tokens, source = prompts(structure, side)
    search = (
        Greedy() if search == "greedy" else Beam(3, "length", alpha=0.7, n_best=3, early_stopping="never")
    )
    # An id that a middle row chooses early ends it, so that rows leave the batch at different times.
    free = generate(model, tokens, source=source, max_new_tokens=NEW, cached=False)
    eos = free.ids[1][3]
    given = {"source": source, "max_new_tokens": NEW, "search": search, "eos_id": eos, "return_logits": True}
    cached = generate(model, tokens, **given)
    same(cached, generate(model, tokens, **given, cached=False))
    assert cached.finished[1] if isinstance(search, Greedy) else True
    against_full_pass(model, tokens, source, cached, eos, stepwise=kind == "rotary-dynamic")


def against_full_pass(model, tokens, source, found, eos, stepwise):
    """Not through any part of generation: the network on prompt and output in one pass (or one a step)."""
    for row, hypotheses in enumerate(found.hypotheses):
        for h in hypotheses:
            prompt, new = tokens.rows()[row], [*h.ids, eos] if h.finished else h.ids
            whole = prompt + new[:-1]
            lengths = range(len(prompt), len(whole) + 1) if stepwise else [len(whole)]
            with torch.inference_mode():
                passes = [
                    model(
                        Tokens(
                            torch.tensor([whole[:n]]),
                            prefix=None if tokens.prefix is None else tokens.prefix[row : row + 1],
                        ),
                        source=None if source is None else Tokens(torch.tensor([source.rows()[row]])),
                    ).logits[0]
                    for n in lengths
                ]
            logits = torch.stack([p[-1] for p in passes]) if stepwise else passes[0][len(prompt) - 1 :]
            torch.testing.assert_close(h.logits, logits, rtol=0, atol=1e-9)
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])
            assert close(float(chosen.sum()), h.log_probability)


@pytest.mark.parametrize(("kind", "kv", "window", "side", "structure", "search"), SLICE)
def test_slice(network, configuration, prompts, kind, kv, window, side, structure, search):
    check(network, configuration, prompts, kind, kv, window, side, structure, search)


@pytest.mark.parametrize("kind", ["rotary-half", "alibi", "learned"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_slice_through_the_modules(network, configuration, prompts, monkeypatch, kind, structure):
    """The step that is used where a flat one cannot be."""
    monkeypatch.setattr("isoform.generation.forward.prepare", lambda model: None)
    check(network, configuration, prompts, kind, 2, None, "right", structure, "beam")


@torch.inference_mode()
def test_where_the_step_is_flat_and_where_it_is_not(network, configuration):
    for kind in KINDS:
        assert (prepare(network(configuration(kind, window=3))) is None) == (kind == "rotary-dynamic")
    model = network(configuration())
    assert prepare(network(configuration()).bfloat16()) is None
    assert prepare(network(configuration()).set_attention("eager")) is None
    with torch.inference_mode(False):
        assert prepare(model) is None  # a gradient would need what is overwritten
    with torch.autocast("cpu", torch.bfloat16):
        assert prepare(model) is None
    with capture(model):
        assert prepare(model) is None
    model.decoder.register_forward_pre_hook(lambda *_: None)
    assert prepare(model) is None


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("search", [Beam(3, n_best=3), Sample(n=3, temperature=2.0, seed=1)])
def test_outputs_of_one_prompt_share_it(
    network, configuration, prompts, monkeypatch, structure, side, search
):
    """Beams that move and leave, drafts that end one by one."""
    shared = []
    share = Lanes._share
    monkeypatch.setattr("isoform.nn.lanes.SHARED_FROM", 2)
    monkeypatch.setattr(Lanes, "_share", lambda self, *given: shared.append(1) or share(self, *given))
    tokens, source = prompts(structure, side)
    if structure == "encoder-decoder":  # a start of one token is not worth sharing
        tokens = Tokens(torch.tensor([[3, 4], [5, 1], [2, 2]]), layout="full")
    for kind, kv in (("learned", 2), ("rotary-half", 6), ("sinusoidal-interleaved", 1)):
        model = network(configuration(kind, kv=kv, structure=structure))
        eos = generate(model, tokens, source=source, max_new_tokens=NEW).ids[1][3]
        given = {"source": source, "max_new_tokens": NEW, "search": search, "eos_id": eos}
        found = generate(model, tokens, **given, return_logits=True)
        same(found, generate(model, tokens, **given, return_logits=True, cached=False))
    assert shared


def test_what_a_bias_or_a_window_changes_is_not_shared(network, configuration, prompts, monkeypatch):
    monkeypatch.setattr("isoform.nn.lanes.SHARED_FROM", 2)
    given = {"max_new_tokens": NEW, "search": Beam(3), "return_logits": True}
    for kind, window in (("alibi", None), ("relative-buckets", None), ("learned", 3)):
        model = network(configuration(kind, window=window))
        same(generate(model, prompts()[0], **given), generate(model, prompts()[0], **given, cached=False))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["learned", "rotary-half", "alibi", "rotary-dynamic"])
def test_a_long_prompt_in_pieces(network, configuration, prompts, monkeypatch, kind, side):
    """Rows that end in different pieces; dynamic NTK reads it at once, its keys turn with the length."""
    widths = []
    model = network(configuration(kind, window=4))
    tokens, _ = prompts(side=side)
    given = {"max_new_tokens": 4, "return_logits": True}
    whole = generate(model, tokens, **given)
    monkeypatch.setattr("isoform.generation.forward.CHUNK", 2)
    hidden = type(model).hidden

    def spy(self, part, **more):
        widths.append(part.length)
        return hidden(self, part, **more)

    monkeypatch.setattr(type(model), "hidden", spy)
    same(generate(model, tokens, **given), whole)
    assert widths[:3] == ([5, 1, 1] if kind == "rotary-dynamic" else [2, 2, 1])


@torch.inference_mode()
def test_the_memory_of_a_long_prompt(monkeypatch):
    """In pieces: weights, the cache, and what one piece needs, of which its mask alone grows."""
    config = presets.gpt2(
        50, d_model=32, n_heads=2, ffn_width=512, n_layers=2, max_positions=1100, dropout=0.0
    )
    model, piece = build(config, seed=0).eval(), 32
    monkeypatch.setattr("isoform.generation.forward.CHUNK", piece)
    beside: list[int] = []
    for length in (512, 1024):
        tokens = Tokens(torch.arange(length)[None] % 50)
        with measure_memory(model) as use:
            Cached(model, compile="never").begin(tokens, None, 2)
        held = parameters(config).total * 4 + kv_cache(config, Workload("prefill", 1, length + 1))
        beside.append(use.peak - held)
    whole = memory(config, Workload("prefill", 1, 1024)).transient
    assert beside[1] < 2.2 * beside[0] and beside[1] < whole / 3
    assert beside[1] - beside[0] <= 3 * 4 * piece * 512 + 3 * 8 * 512  # a mask, in two types, and places


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kv"), list(itertools.product(KINDS, HEADS)))
def test_grid(network, configuration, prompts, kind, kv):
    for _, _, window, side, structure, search in [g for g in GRID if g[:2] == (kind, kv)]:
        check(network, configuration, prompts, kind, kv, window, side, structure, search)


def test_beams_change_places_and_rows_leave(network, configuration, prompts, monkeypatch):
    """The grid is only worth something if these happen."""
    calls = {"reorder": 0, "select": 0}
    for name in calls:
        whole = getattr(Lanes, name)

        def spy(self, rows, name=name, whole=whole, **given):
            calls[name] += 1
            return whole(self, rows, **given)

        monkeypatch.setattr(Lanes, name, spy)
    model = network(configuration(structure="encoder-decoder"))
    tokens, source = prompts("encoder-decoder")
    free = generate(model, tokens, source=source, max_new_tokens=NEW).ids
    eos = next(t for row in free for t in row[:-2] if sum(t in other for other in free) == 1)
    calls["select"] = 0
    generate(model, tokens, source=source, max_new_tokens=NEW, search=Beam(3), eos_id=eos)
    assert calls["reorder"] >= 2
    assert calls["select"] >= 1  # one row a prompt becomes three
    calls["select"] = 0
    found = generate(model, tokens, source=source, max_new_tokens=NEW, eos_id=eos)
    assert found.finished.count(True) == calls["select"] == 1


def test_the_source_is_read_once_and_finished_rows_are_not(network, configuration, prompts):
    """Rows that reach the output matrix at each step, and runs of the encoder (R20, Algorithm 6.2)."""
    model = network(configuration(structure="encoder-decoder"))
    tokens, source = prompts("encoder-decoder")
    eos = generate(model, tokens, source=source, max_new_tokens=NEW).ids[1][3]
    rows, runs = [], []
    model.head.register_forward_hook(lambda module, given, out: rows.append(given[0].shape[0]))
    model.encoder.register_forward_hook(lambda *_: runs.append(1))
    lengths = generate(model, tokens, source=source, max_new_tokens=NEW, eos_id=eos)
    steps = [len(ids) + done for ids, done in zip(lengths.ids, lengths.finished, strict=True)]
    assert len(runs) == 1
    assert rows == [sum(step <= s for s in steps) for step in range(1, max(steps) + 1)]
    rows.clear()
    generate(model, tokens, source=source, max_new_tokens=NEW, search=Beam(4))
    assert rows[:2] == [3, 12]  # the beams of a sample share its prompt


def test_the_cache_grows_in_blocks_without_changing_anything(network, configuration, prompts, monkeypatch):
    monkeypatch.setattr("isoform.generation.forward.BLOCK", 4)
    model = network(configuration("alibi", window=3))
    tokens, _ = prompts()
    given = {"max_new_tokens": NEW, "search": Beam(3), "return_logits": True}
    same(generate(model, tokens, **given), generate(model, tokens, **given, cached=False))


def test_dynamic_ntk_reads_the_rows_again_beyond_its_length_and_not_before(
    network, configuration, prompts, monkeypatch
):
    reads = []
    resume = Uncached.resume
    monkeypatch.setattr(Uncached, "resume", lambda self, *given: reads.append(1) or resume(self, *given))
    model = network(configuration("rotary-dynamic"))
    tokens = prompts()[0].select(torch.tensor([1]))  # two tokens; the original length is seven
    generate(model, tokens, max_new_tokens=6)  # the sixth token is chosen after seven are read
    assert not reads
    generate(model, tokens, max_new_tokens=7)
    assert reads


def test_streaming_source(network, configuration, prompts):
    """wait-k through the cache is wait-k in a full pass."""
    model = network(configuration("sinusoidal-interleaved", structure="encoder-decoder"))
    tokens, source = prompts("encoder-decoder")
    one = {"max_new_tokens": 6, "source": source, "return_logits": True}
    cached = generate(Cached(model, cross=WaitK(1)), tokens, **one)
    same(cached, generate(Uncached(model, cross=WaitK(1)), tokens, **one))
    assert cached.logits[1].sub(generate(model, tokens, **one).logits[1])[0].abs().max() > 1e-3


@pytest.mark.long
def test_compiled_step(network, configuration, prompts):
    model = network(configuration("rotary-half", window=3), dtype=torch.float32)
    tokens, _ = prompts()
    given = {"max_new_tokens": 5, "return_logits": True}
    plain, compiled = generate(model, tokens, **given), generate(model, tokens, **given, compile="always")
    assert plain.ids == compiled.ids
    for a, b in zip(plain.logits, compiled.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
