"""Algorithm 6.2 (R31): what ends an output, what a result may depend on, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from isoform.config.protocol import Protocol
from isoform.errors import CheckError, ConfigError, ShapeError
from isoform.generation import Beam, Function, Greedy, Sample, StopSequences, generate
from isoform.tokens import Tokens

NEW = 10
SEARCHES = {
    "greedy": Greedy(),
    "beam": Beam(3, "length", n_best=3),
    "sample": Sample(temperature=1.3, top_k=9, top_p=0.95, seed=4, n=2),
}


def forced(*scores: list[float]):
    """The same scores in every row, by step; the last ones stay."""
    table = torch.tensor(scores, dtype=torch.float64).log_softmax(-1)

    def at(tokens: Tokens, source: Tokens | None):
        step = int(tokens.ids.shape[1]) - 1
        return table[min(step, len(table) - 1)].expand(tokens.batch, -1)

    return Function(at), table


def one(n: int = 1) -> Tokens:
    return Tokens(torch.zeros(n, 1, dtype=torch.long))


def everything(found):
    return [[(h.ids, h.finished) for h in hypotheses] for hypotheses in found.hypotheses]


# --- what ends an output ----------------------------------------------------------------------------------


def test_nothing_comes_after_eos_and_its_probability_counts():
    forward, table = forced([0, 5, 0, 0], [0, 0, 4, 0], [0, 0, 0, 3], [9, 0, 0, 0])
    found = generate(forward, one(), max_new_tokens=8, eos_id=3)
    assert found.ids == [[1, 2]] and found.finished == [True]
    assert found.scores[0] == pytest.approx(float(table[0, 1] + table[1, 2] + table[2, 3]), abs=1e-12)


def test_the_limit_cuts_and_says_so():
    forward, table = forced([0, 5, 0, 0])
    found = generate(forward, one(), max_new_tokens=3, eos_id=3)
    assert found.ids == [[1, 1, 1]] and found.finished == [False]
    assert found.scores[0] == pytest.approx(3 * float(table[0, 1]), abs=1e-12)


def test_eos_as_the_last_token_within_the_limit_is_an_end():
    forward, _ = forced([0, 5, 0, 0], [0, 0, 0, 5])
    assert generate(forward, one(), max_new_tokens=2, eos_id=3).finished == [True]


def test_several_eos_ids_and_the_protocol():
    forward, _ = forced([0, 5, 0, 0], [0, 0, 5, 0])
    protocol = Protocol(pad_id=0, eos_ids=(3, 2))
    assert generate(forward, one(), max_new_tokens=5, protocol=protocol).ids == [[1]]
    assert generate(forward, one(), max_new_tokens=5, eos_id=3, protocol=protocol).ids == [[1, 2, 2, 2, 2]]


def test_a_further_rule_keeps_the_token_that_met_it():
    forward, _ = forced([0, 5, 0, 0], [0, 0, 5, 0])
    stop = StopSequences(((1, 2, 2), (9,)))
    found = generate(forward, one(), max_new_tokens=8, eos_id=3, stop=stop)
    assert found.ids == [[1, 2, 2]] and found.finished == [True]
    found = generate(forward, one(), max_new_tokens=8, eos_id=3, stop=stop, search=Beam(2))
    assert found.hypotheses[0][0].finished and found.ids[0][-3:] == [1, 2, 2]


def test_min_new_tokens_forced_and_suppressed():
    forward, table = forced([0, 2, 1, 5])
    found = generate(forward, one(), max_new_tokens=9, eos_id=3, min_new_tokens=2)
    assert found.ids == [[1, 1]]
    assert found.scores[0] == pytest.approx(float(2 * table[0, 1] + table[0, 3]), abs=1e-12)
    protocol = Protocol(pad_id=0, eos_ids=(3,), forced=((1, 2),), suppressed=(1,))
    found = generate(forward, one(), max_new_tokens=9, protocol=protocol, min_new_tokens=3)
    assert found.ids == [[2, 2, 2]]
    assert found.scores[0] == pytest.approx(float(2 * table[0, 2] + table[0, 3]), abs=1e-12)


# --- what a result may depend on --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "search"), list(itertools.product(["causal", "prefix", "encoder-decoder"], SEARCHES))
)
def test_neither_batch_nor_order_nor_padding_side(network, configuration, prompts, structure, search):
    model = network(configuration("rotary-partial", window=3, structure=structure))
    search = SEARCHES[search]
    tokens, source = prompts(structure)
    eos = generate(model, tokens, source=source, max_new_tokens=NEW).ids[1][2]
    settings = {"max_new_tokens": NEW, "search": search, "eos_id": eos}
    whole = generate(model, tokens, source=source, **settings)
    left, left_source = prompts(structure, "left")
    assert everything(generate(model, left, source=left_source, **settings)) == everything(whole)
    for order in ([2, 0, 1], [1], [0, 2]):
        rows = torch.tensor(order)
        some = generate(
            model, left.select(rows), source=None if source is None else source.select(rows), **settings
        )
        assert everything(some) == [everything(whole)[i] for i in order]
        for mine, row in zip(some.hypotheses, order, strict=True):
            for h, other in zip(mine, whole.hypotheses[row], strict=True):
                assert h.log_probability == pytest.approx(other.log_probability, abs=1e-9)


def test_more_room_does_not_change_what_was_drawn(network, configuration, prompts):
    model, (tokens, _) = network(configuration()), prompts()
    short = generate(model, tokens, max_new_tokens=4, search=Sample(seed=1)).ids
    long = generate(model, tokens, max_new_tokens=9, search=Sample(seed=1)).ids
    assert [row[:4] for row in long] == short


def test_the_modes_of_all_modules_come_back(network, configuration, prompts):
    model, (tokens, _) = network(configuration()), prompts()
    model.train()
    model.decoder.layers[0].eval()
    before = [m.training for m in model.modules()]
    during = []
    model.decoder.layers[1].register_forward_hook(lambda m, *_: during.append(m.training))
    generate(model, tokens, max_new_tokens=2)
    assert during == [False, False]
    assert [m.training for m in model.modules()] == before
    with pytest.raises(ShapeError):
        generate(model, tokens, max_new_tokens=2, eos_id=99)
    assert [m.training for m in model.modules()] == before


def test_autocast(network, configuration, prompts):
    """Keys arrive in bfloat16, the cache is float32."""
    model, (tokens, _) = network(configuration("none"), dtype=torch.float32), prompts()
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model, tokens, max_new_tokens=4, return_logits=True)
        again = generate(model, tokens, max_new_tokens=4, return_logits=True, cached=False)
    torch.testing.assert_close(found.logits[0].float(), again.logits[0].float(), rtol=0, atol=0.2)


def test_half_precision(network, configuration, prompts):
    model, (tokens, _) = network(configuration(), dtype=torch.bfloat16), prompts()
    found = generate(model, tokens, max_new_tokens=4, search=Beam(2), return_logits=True)
    assert found.logits[0].dtype == torch.bfloat16


# --- drawing ----------------------------------------------------------------------------------------------


def test_sampling_follows_the_distribution():
    forward, table = forced([1.0, 0.5, -1.0, 0.2, -2.0])
    search = Sample(seed=3, n=4000)
    drawn = torch.tensor(
        [h.ids[0] for h in generate(forward, one(), max_new_tokens=1, search=search).hypotheses[0]]
    )
    share = torch.bincount(drawn, minlength=5) / len(drawn)
    torch.testing.assert_close(share, table[0].exp().float(), rtol=0, atol=0.03)


def kept(search: Sample, scores: list[float]) -> set[int]:
    forward, _ = forced(scores)
    found = generate(forward, one(), max_new_tokens=1, search=search).hypotheses[0]
    return {h.ids[0] for h in found}


def test_top_k_and_top_p_keep_the_right_tokens():
    scores = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log().tolist()
    assert kept(Sample(n=400, top_k=2), scores) == {0, 1}
    assert kept(Sample(n=400, top_p=0.69), scores) == {0, 1}
    assert kept(Sample(n=400, top_p=0.71), scores) == {0, 1, 2}
    assert kept(Sample(n=50, top_p=1e-9), scores) == {0}
    # Renormalised over the three that top_k leaves, the first two hold 0.82 of the mass.
    assert kept(Sample(n=400, top_k=3, top_p=0.8), scores) == {0, 1}
    assert kept(Sample(n=400, temperature=1e-3), scores) == {0}


def test_drafts_prompts_and_seeds_differ(network, configuration, prompts):
    model = network(configuration())
    tokens = prompts()[0]
    twice = tokens.select(torch.tensor([0, 0, 1]))
    found = generate(model, twice, max_new_tokens=NEW, search=Sample(seed=2, n=3))
    first, same, other = everything(found)
    assert first == same and first != other
    assert len({tuple(ids) for ids, _ in first}) == 3
    assert everything(generate(model, twice, max_new_tokens=NEW, search=Sample(seed=3, n=3)))[0] != first


# --- beams ------------------------------------------------------------------------------------------------


def test_a_beam_of_one_is_greedy(network, configuration, prompts):
    model, (tokens, _) = network(configuration()), prompts()
    eos = generate(model, tokens, max_new_tokens=NEW).ids[1][3]
    greedy = generate(model, tokens, max_new_tokens=NEW, eos_id=eos)
    beam = generate(model, tokens, max_new_tokens=NEW, eos_id=eos, search=Beam(1, early_stopping="when_full"))
    assert beam.ids == greedy.ids
    assert beam.scores == pytest.approx(greedy.scores, abs=1e-9)


def test_a_wide_beam_finds_the_best_of_all_outputs(network, configuration):
    """Against enumeration: with as many beams as there are prefixes nothing is lost."""
    model = network(configuration(vocab=5))
    prompt, eos, limit = [1, 3], 4, 3
    outputs = [
        [*middle, last]
        for n in range(limit)
        for middle in itertools.product(range(4), repeat=n)
        for last in (range(5) if n == limit - 1 else [4])
    ]

    def score(output):
        ids = torch.tensor([prompt + output[:-1]])
        with torch.inference_mode():
            logits = model(Tokens(ids)).logits[0, len(prompt) - 1 :].log_softmax(-1)
        return float(logits.gather(-1, torch.tensor(output)[:, None]).sum()) / ((5 + len(output)) / 6) ** 0.6

    best = sorted(outputs, key=score, reverse=True)[:4]
    search = Beam(20, "gnmt", alpha=0.6, n_best=4, early_stopping="never")
    found = generate(model, Tokens(torch.tensor([prompt])), max_new_tokens=limit, eos_id=eos, search=search)
    assert [h.ids + [eos] * h.finished for h in found.hypotheses[0]] == best
    assert [h.score for h in found.hypotheses[0]] == pytest.approx([score(o) for o in best], abs=1e-9)


def test_equal_scores_are_taken_in_the_order_of_beam_and_id():
    forward, _ = forced([1, 1, 1, 1, 0], [0, 3, 3, 3, 3])
    found = generate(forward, one(), max_new_tokens=2, search=Beam(3, n_best=3))
    assert [h.ids for h in found.hypotheses[0]] == [[0, 1], [0, 2], [0, 3]]
    assert generate(forward, one(), max_new_tokens=2).ids == [[0, 1]]


def test_ties_at_the_edge_of_the_candidates():
    """Forty equal scores, of which a partial sort may return any."""
    forward, _ = forced([0.0] * 40)
    found = generate(forward, one(), max_new_tokens=1, search=Beam(4, n_best=4))
    assert [h.ids for h in found.hypotheses[0]] == [[0], [1], [2], [3]]


def test_beams_with_less_to_choose_than_they_are_wide():
    forward, _ = forced([3, 2], [1, 2])
    protocol = Protocol(pad_id=5, eos_ids=(), forced=((0, 1),))
    found = generate(forward, one(), max_new_tokens=1, search=Beam(4, n_best=4), protocol=protocol)
    assert [h.ids for h in found.hypotheses[0]] == [[1]]
    found = generate(forward, one(), max_new_tokens=2, search=Beam(4, n_best=4), protocol=protocol)
    assert [h.ids for h in found.hypotheses[0]] == [[1, 1], [1, 0]]


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens is 4, expected 0 to max_new_tokens 3"),
        ({"max_new_tokens": 17}, "longest prompt has 5 tokens, and 17 new ones need 16 more positions"),
        ({"max_new_tokens": 2, "eos_id": 17}, "token id 17 is out of range: the network scores ids 0 to 16"),
        ({"max_new_tokens": 2, "source": Tokens(torch.zeros(3, 1).long())}, "reads one stream"),
    ],
)
def test_settings_that_cannot_be(network, configuration, prompts, settings, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        generate(network(configuration("learned")), prompts()[0], **settings)


def test_the_last_position_of_the_table_is_used(network, configuration, prompts):
    found = generate(network(configuration("learned")), prompts()[0], max_new_tokens=16)
    assert [len(ids) for ids in found.ids] == [16, 16, 16]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            Tokens(torch.ones(2, 2).long(), torch.tensor([[True, True], [False, False]])),
            "prompt 1 has no real token",
        ),
        (Tokens(torch.full((1, 2), 17)), "prompt id 17 is out of range: the table has 17 rows"),
        (Tokens(torch.ones(1, 2).long(), documents=torch.zeros(1, 2).long()), "Tokens.documents is given"),
        (
            Tokens(torch.ones(1, 2).long(), position_ids=torch.ones(1, 2).long()),
            "Tokens.position_ids is given",
        ),
        (Tokens(torch.ones(1, 2).long(), prefix=torch.tensor([3])), "prefix 3 exceeds its 2 tokens"),
    ],
)
def test_prompts_that_cannot_be(network, configuration, tokens, message):
    with pytest.raises(ShapeError, match=message):
        generate(network(configuration()), tokens, max_new_tokens=2)


def test_networks_that_cannot(network, configuration, prompts):
    tokens, source = prompts("encoder-decoder")
    both = network(configuration(structure="encoder-decoder"))
    with pytest.raises(ShapeError, match="pass source"):
        generate(both, tokens, max_new_tokens=2)
    with pytest.raises(ShapeError, match="3 prompts but 1 sources"):
        generate(both, tokens, source=source.select(torch.tensor([0])), max_new_tokens=2)
    nothing = Tokens(torch.ones(3, 2).long(), torch.tensor([[True, True], [False, False], [True, False]]))
    with pytest.raises(ShapeError, match="source 1 has no real token"):
        generate(both, tokens, source=nothing, max_new_tokens=2)
    with pytest.raises(ShapeError, match=r"a prefix decoder needs Tokens\.prefix"):
        generate(network(configuration(structure="prefix")), prompts()[0], max_new_tokens=2)
    causal = configuration()
    headless = network(causal.model_copy(update={"head": None}))
    with pytest.raises(ConfigError, match="needs a token head"):
        generate(headless, prompts()[0], max_new_tokens=2)
    stack = causal.decoder.model_copy(update={"visibility": "bidirectional"})
    with pytest.raises(ConfigError, match="no next token to generate"):
        generate(network(causal.model_copy(update={"decoder": stack})), prompts()[0], max_new_tokens=2)


def test_another_library_s_module(prompts):
    with pytest.raises(ConfigError, match=r"a Linear is neither .* wrap it in isoform\.generation\.Function"):
        generate(torch.nn.Linear(2, 2), prompts()[0], max_new_tokens=2)


def test_nan_is_named():
    forward = Function(lambda tokens, source: torch.full((tokens.batch, 4), float("nan")))
    for search in (Greedy(), Beam(2)):
        with pytest.raises(CheckError, match="sample 0: the network gave NaN"):
            generate(forward, one(2), max_new_tokens=2, search=search)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Beam(0),
        lambda: Beam(2, n_best=3),
        lambda: Beam(2, "length", alpha=float("nan")),
        lambda: Beam(2, "lenght"),
        lambda: Beam(2, early_stopping="always"),
        lambda: Sample(temperature=0.0),
        lambda: Sample(top_k=0),
        lambda: Sample(top_p=1.5),
        lambda: Sample(n=0),
        lambda: Sample(seed=-1),
    ],
)
def test_searches_that_cannot_be(make):
    with pytest.raises(ConfigError, match=r"Beam|Sample"):
        make()


def test_no_prompts_give_no_outputs(network, configuration):
    assert generate(network(configuration()), Tokens(torch.zeros(0, 3).long()), max_new_tokens=2).ids == []
