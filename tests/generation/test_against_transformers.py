"""Greedy and beam search choose what `transformers` chooses on the same scores, token by token (R40)."""

from __future__ import annotations

import itertools

import pytest
import torch

from isoform.config.protocol import Protocol
from isoform.generation import Beam, Function, Greedy, generate
from isoform.tokens import Tokens

transformers = pytest.importorskip("transformers")

NEW, PAD, VOCAB = 9, 0, 23
PROMPTS = [[5, 6, 7, 8], [9, 3], [11, 12, 4]]
SOURCES = [[5, 6, 7, 1], [9, 1], [2, 4, 6, 8, 10, 1]]


def shaken(model, scale, seed):
    """Uniform double weights, the same to the last bit on every machine (normal ones are not), so that
    the choices, ends among them, are the same too."""
    noise = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.rand(parameter.shape, generator=noise, dtype=torch.float64)
            gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(gain + scale * 3**0.5 * (2 * drawn - 1))
    return model


@pytest.fixture(scope="module")
def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    return shaken(transformers.GPT2LMHeadModel(config), 0.25, 2)


@pytest.fixture(scope="module")
def bart():
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=40,
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=1,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return shaken(transformers.BartForConditionalGeneration(config), 0.25, 3)


def gpt2_scores(model):
    def scores(tokens: Tokens, source: Tokens | None):
        mask = tokens.real_or_ones()
        out = model(input_ids=tokens.ids, attention_mask=mask.long(), position_ids=tokens.positions())
        return out.logits[:, -1]

    return Function(scores)


def bart_scores(model):
    def scores(tokens: Tokens, source: Tokens):
        mask = source.real_or_ones().long()
        return model(input_ids=source.ids, attention_mask=mask, decoder_input_ids=tokens.ids).logits[:, -1]

    return Function(scores)


def theirs(model, tokens: Tokens, source: Tokens | None, eos, **settings):
    """What `generate` gives, as (ids without padding and EOS, score) for each sample."""
    read = tokens if source is None else source
    start = {} if source is None else {"decoder_input_ids": tokens.ids}
    n = settings.get("num_return_sequences", 1)
    out = model.generate(
        input_ids=read.ids,
        attention_mask=read.real_or_ones().long(),
        max_new_tokens=NEW,
        eos_token_id=eos,
        pad_token_id=PAD,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_scores=True,
        **start,
        **settings,
    )
    found = []
    for row in out.sequences[:, tokens.length :].tolist():
        end = next((i for i, t in enumerate(row) if t in eos), None)
        found.append(row if end is None else row[:end])
    scores = [None] * len(found) if settings["num_beams"] == 1 else out.sequences_scores.tolist()
    pairs = list(zip(found, scores, strict=True))
    return [pairs[i : i + n] for i in range(0, len(pairs), n)]


def given(kind):
    if kind == "gpt2":
        return Tokens.from_lists(PROMPTS, pad_id=PAD, side="left"), None
    return Tokens(torch.tensor([[2], [2], [2]])), Tokens.from_lists(SOURCES, pad_id=PAD)


def agree(model, kind, search, eos, protocol=None, at_least=0, **settings):
    tokens, source = given(kind)
    expected = theirs(model, tokens, source, eos, **settings)
    forward = gpt2_scores(model) if kind == "gpt2" else bart_scores(model)
    found = generate(
        forward,
        tokens,
        source=source,
        max_new_tokens=NEW,
        search=search,
        eos_id=eos,
        protocol=protocol,
        min_new_tokens=at_least,
    )
    for mine, other in zip(found.hypotheses, expected, strict=True):
        assert [h.ids for h in mine] == [ids for ids, _ in other]
        for h, (_, score) in zip(mine, other, strict=True):
            assert score is None or h.score == pytest.approx(score, abs=1e-5)
    return found


PENALTIES, EARLY = [0.0, 1.0, -0.7, 1.6], ["when_full", "heuristic", "never"]
EOS = {"gpt2": [[22], [5, 22]], "bart": [[4], [9, 14]]}
SETTINGS = list(itertools.product(["gpt2", "bart"], [2, 4], PENALTIES, EARLY, [0, 1]))
STOP = {"when_full": True, "heuristic": False, "never": "never"}


def beam(request, kind, width, alpha, early, eos):
    search = Beam(width, "none" if alpha == 0 else "length", alpha=alpha, n_best=width, early_stopping=early)
    return agree(
        request.getfixturevalue(kind),
        kind,
        search,
        EOS[kind][eos],
        num_beams=width,
        length_penalty=alpha,
        early_stopping=STOP[early],
        num_return_sequences=width,
    )


@pytest.mark.parametrize(("kind", "alpha", "early"), list(itertools.product(EOS, PENALTIES, EARLY)))
def test_beam(request, kind, alpha, early):
    found = beam(request, kind, 4, alpha, early, int(alpha > 0))
    finished = {h.finished for hypotheses in found.hypotheses for h in hypotheses}
    assert finished >= ({True} if alpha <= 1 else set())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "width", "alpha", "early", "eos"), SETTINGS)
def test_beam_grid(request, kind, width, alpha, early, eos):
    beam(request, kind, width, alpha, early, eos)


@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_greedy(request, kind):
    found = agree(request.getfixturevalue(kind), kind, Greedy(), EOS[kind][0], num_beams=1)
    assert any(found.finished)


@pytest.mark.parametrize("width", [1, 3])
def test_forced_suppressed_and_minimum(bart, width):
    protocol = Protocol(pad_id=PAD, eos_ids=(1,), forced=((0, 9),), suppressed=(4, 17))
    search = Greedy() if width == 1 else Beam(width, "length", n_best=1)
    found = agree(
        bart,
        "bart",
        search,
        [1],
        protocol,
        at_least=4,
        num_beams=width,
        forced_bos_token_id=9,
        suppress_tokens=[4, 17],
        min_new_tokens=4,
    )
    assert all(len(ids) >= 4 and ids[0] == 9 and not {4, 17} & set(ids) for ids in found.ids)
