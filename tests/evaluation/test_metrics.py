"""Metrics against their libraries and values worked out by hand, each with its signature (R35)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from isoform.errors import DataError
from isoform.evaluation import (
    Bootstrap,
    accuracy,
    bleu,
    chrf,
    edit_distance,
    error_rate,
    exact_match,
    macro_f1,
    paired,
    span_f1,
    tag_accuracy,
    ter,
)

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "hat", "big", "small"]


def sentences(n: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + "." for _ in range(n)]


def noisy(texts: list[str], seed: int, rate: float = 0.2) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(draw.choice(WORDS) if draw.random() < rate else w for w in text.split()) for text in texts
    ]


REFERENCES = sentences(40, 1)
OUTPUTS = noisy(REFERENCES, 2)


# --- through sacrebleu ------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_sacrebleu_gives_the_same(several):
    from sacrebleu.metrics import BLEU, CHRF, TER

    other = noisy(REFERENCES, 3)
    references = [[a, b] for a, b in zip(REFERENCES, other, strict=True)] if several else REFERENCES
    streams = [REFERENCES, other] if several else [REFERENCES]
    for mine, theirs in (
        (bleu(OUTPUTS, references), BLEU()),
        (bleu(OUTPUTS, references, tokenize="char"), BLEU(tokenize="char")),
        (chrf(OUTPUTS, references), CHRF()),
        (chrf(OUTPUTS, references, word_order=2), CHRF(word_order=2)),
        (ter(OUTPUTS, references), TER()),
    ):
        score = mine.score()
        assert score.value == pytest.approx(theirs.corpus_score(OUTPUTS, streams).score, abs=1e-9)
        assert score.signature == str(theirs.get_signature())
        assert score.count == 40


def test_unequal_numbers_of_references():
    from sacrebleu.metrics import BLEU

    references = [[r] if i % 2 else [r, "a cat ran."] for i, r in enumerate(REFERENCES)]
    streams = [REFERENCES, [None if i % 2 else "a cat ran." for i in range(40)]]
    score = bleu(OUTPUTS, references).score()
    metric = BLEU()
    assert score.value == pytest.approx(metric.corpus_score(OUTPUTS, streams).score, abs=1e-9)
    assert "nrefs:var" in score.signature


def test_unknown_tokenisation():
    with pytest.raises(DataError, match="no tokenisation '13'; did you mean '13a'"):
        bleu(OUTPUTS, REFERENCES, tokenize="13")


# --- exact match and edits --------------------------------------------------------------------------------


def test_exact_match_says_what_it_compared():
    outputs = ["a b", " a  b", "caf\u00e9", "x", ""]
    references = ["a b", "a b", "cafe\u0301", "y", ""]
    found = {n: exact_match(outputs, references, normalisation=n).score() for n in ("none", "nfc", "spaces")}
    assert [found[n].value for n in ("none", "nfc", "spaces")] == [0.4, 0.6, 0.8]
    assert found["nfc"].signature.startswith("nrefs:1|norm:nfc|case:mixed|version:")
    assert exact_match(["b"], [["a", "b"]]).score().value == 1.0


def test_edit_distance_against_the_textbook_table():
    def table(a, b):
        rows = [list(range(len(b) + 1))]
        for i, x in enumerate(a, 1):
            row = [i]
            for j, y in enumerate(b, 1):
                row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y)))
            rows.append(row)
        return rows[-1][-1]

    draw = random.Random(7)
    for _ in range(300):
        a = draw.choices("abc", k=draw.randint(0, 9))
        b = draw.choices("abc", k=draw.randint(0, 9))
        assert edit_distance(a, b) == table(a, b) == edit_distance(b, a)
    assert edit_distance("kitten", "sitting") == 3


def test_error_rates():
    # One substitution and one insertion over 5 + 2 tokens; the rates of single texts are not averaged.
    rate = error_rate(["K AE T S AH", "D AO G Z"], ["K AE T S IH", "D AO G"]).score()
    assert rate.value == pytest.approx(2 / 8)
    assert rate.better == "less" and "unit:tokens" in rate.signature
    characters = error_rate(["abc", "x"], ["abd", "xyz"], unit="characters").score()
    assert (characters.name, characters.value) == ("character_error_rate", pytest.approx(3 / 6))
    # The reference with the fewest edits per symbol counts, with its own length.
    several = error_rate(["a b c"], [["a b", "a b c d", "x"]]).score()
    assert several.value == pytest.approx(1 / 4)
    with pytest.raises(DataError, match="all references are empty"):
        error_rate(["a"], [""])


@pytest.mark.parametrize("metric", [bleu, exact_match, error_rate])
def test_lists_that_do_not_match(metric):
    with pytest.raises(DataError, match="2 outputs but 1 references"):
        metric(["a", "b"], ["a"])
    with pytest.raises(DataError, match="output 2 has no reference"):
        metric(["a", "b"], [["a"], []])
    with pytest.raises(DataError, match="nothing to score"):
        metric([], []).score()


# --- labels -----------------------------------------------------------------------------------------------


def test_accuracy_and_macro_f1_by_hand():
    gold = ["x", "x", "x", "y", "y", "z"]
    guess = ["x", "x", "y", "y", "x", "w"]
    assert accuracy(guess, gold).score().value == pytest.approx(3 / 6)
    found = macro_f1(guess, gold).score()
    # x: 2·2/(3+3); y: 2·1/(2+2); z and w: nothing right.
    assert found.parts == pytest.approx({"w": 0.0, "x": 2 / 3, "y": 1 / 2, "z": 0.0})
    assert found.value == pytest.approx((2 / 3 + 1 / 2) / 4)


def test_span_f1_by_hand():
    gold = [["B-per", "I-per", "O", "B-loc"], ["O", "B-per"]]
    guess = [["B-per", "I-per", "O", "B-per"], ["I-loc", "B-per"]]
    found = span_f1(guess, gold).score()
    assert found.parts == pytest.approx({"precision": 2 / 4, "recall": 2 / 3})
    assert found.value == pytest.approx(2 * 2 / (4 + 3)) and found.count == 3
    # A new span begins at B, and at an I of another type; one whose end is wrong is wrong.
    assert span_f1([["B-a", "B-a", "I-b"]], [["B-a", "I-a", "I-b"]]).score().parts == pytest.approx(
        {"precision": 1 / 3, "recall": 1 / 2}
    )
    assert tag_accuracy(guess, gold).score().value == pytest.approx(4 / 6)
    with pytest.raises(DataError, match="1 predictions but 2 gold"):
        span_f1(guess[:1], gold)


# --- how sure ---------------------------------------------------------------------------------------------


def test_interval_of_a_share_is_the_binomial_one():
    n, hits = 400, 100
    outputs = ["a"] * hits + ["b"] * (n - hits)
    score = exact_match(outputs, ["a"] * n).score(Bootstrap(4000, seed=1))
    half = 1.96 * (0.25 * 0.75 / n) ** 0.5
    assert score.interval == pytest.approx((0.25 - half, 0.25 + half), abs=0.006)
    assert score.signature.endswith("bs:4000|seed:1|level:0.95")
    wide = exact_match(outputs, ["a"] * n).score(Bootstrap(4000, seed=1, level=0.999)).interval
    assert wide[0] < score.interval[0] and wide[1] > score.interval[1]


def test_resampling_in_pieces_gives_as_many_sets(monkeypatch):
    monkeypatch.setattr("isoform.evaluation.score.CHUNK", 100)
    counted = exact_match(OUTPUTS, REFERENCES)
    assert counted.resampled(Bootstrap(7)).shape == (7, 2)
    assert (counted.resampled(Bootstrap(7))[:, 1] == 40).all()


def test_interval_of_bleu_holds_its_value():
    score = bleu(OUTPUTS, REFERENCES).score(Bootstrap(200))
    assert score.interval[0] < score.value < score.interval[1]
    assert np.ptp(score.interval) > 1


def test_paired_test_tells_a_difference_from_an_accident():
    worse, alike = noisy(REFERENCES, 5, rate=0.6), noisy(REFERENCES, 6)
    bootstrap = Bootstrap(500)
    for metric in (bleu, chrf, error_rate):
        found = paired(metric(OUTPUTS, REFERENCES), metric(worse, REFERENCES), bootstrap)
        assert found.p_value < 0.01
        assert found.difference == found.second.value - found.first.value
        assert found.interval[0] < found.difference < found.interval[1]
        assert (found.interval[1] < 0) == (found.first.better == "more")
    found = paired(bleu(OUTPUTS, REFERENCES), bleu(alike, REFERENCES), bootstrap)
    assert found.p_value > 0.05 and found.interval[0] < 0 < found.interval[1]
    # The same outputs: every resampled difference is the same as the real one, nil.
    assert paired(bleu(OUTPUTS, REFERENCES), bleu(OUTPUTS, REFERENCES), bootstrap).p_value == 1.0


def test_paired_resamples_the_same_items():
    """Systems that fail on the same items differ by nothing, however much the items vary."""
    outputs = ["a" if i % 3 else "b" for i in range(90)]
    one = exact_match(outputs, ["a"] * 90)
    better = exact_match(["a", *outputs[1:]], ["a"] * 90)
    found = paired(one, better, Bootstrap(500))
    assert np.ptp(found.interval) < 0.05 < np.ptp(one.score(Bootstrap(500)).interval)


def test_paired_refuses_what_cannot_be_compared():
    one = exact_match(["a"], ["a"])
    with pytest.raises(DataError, match="one metric on the same items"):
        paired(one, exact_match(["a"], ["a"], normalisation="nfc"), Bootstrap(5))
    with pytest.raises(DataError, match="one metric on the same items"):
        paired(one, exact_match(["a", "b"], ["a", "b"]), Bootstrap(5))
    with pytest.raises(DataError, match="bootstrap: 0 resamples"):
        Bootstrap(0)


def test_groups():
    groups = exact_match(["a", "b", "a", "x"], ["a"] * 4).groups(["de", "en", "de", "en"])
    assert {name: (s.value, s.count) for name, s in groups.items()} == {"de": (1.0, 2), "en": (0.0, 2)}
    by_bleu = bleu(OUTPUTS, REFERENCES).groups(["one" if i < 20 else "two" for i in range(40)])
    assert by_bleu["two"].value == pytest.approx(bleu(OUTPUTS[20:], REFERENCES[20:]).score().value)
