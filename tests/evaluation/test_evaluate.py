"""A network scored on files of every kind: the figures are those one gets one text at a time."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from isoform.data.config import TextData
from isoform.errors import ConfigError, DataError, IsoformError, SupervisionError
from isoform.evaluation import Bootstrap, Settings, bleu, evaluate, exact_match, row_likelihoods, side_by_side
from isoform.evaluation.files import classes_of, data_of_file, part_of
from isoform.generation import Beam
from isoform.generation.texts import generate_texts
from isoform.tokens import Tokens

PAIRS = [("abc", "cab"), ("hh", "a"), ("a b c", "d e f g"), ("abc", "dad"), ("dada", "abba")]
TSV = "".join(f"{a}\t{b}\n" for a, b in PAIRS)


def part(bundle, path: Path, **how):
    window = how.pop("window", None)
    return part_of(bundle, data_of_file(bundle, path, **how), "test", Path(), window=window)


def nll_alone(bundle, before: list[int], target: list[int], source: list[int] | None = None) -> float:
    """-log p of the target after what stands before it, in one pass over one row."""
    ids = torch.tensor([[*before, *target][:-1]])
    prefix = torch.tensor([len(before)]) if bundle.config.stack.visibility == "prefix" else None
    read = None if source is None else Tokens(torch.tensor([source]))
    with torch.inference_mode():
        logits = bundle.model(Tokens(ids, prefix=prefix), source=read).logits[0, len(before) - 1 :]
    return -float(logits.log_softmax(-1).gather(-1, torch.tensor(target)[:, None]).sum())


def test_pairs(bundle, write):
    one = bundle("pairs")
    encode, special = one.tokenizer.encode, one.tokenizer.special
    found = evaluate(one, part(one, write("test.tsv", TSV)), Settings(max_new_tokens=6))
    outputs = generate_texts(one, [a for a, _ in PAIRS], max_new_tokens=6)
    assert [(i.input, i.output, i.references) for i in found.items] == [
        (a, o, (b,)) for (a, b), o in zip(PAIRS, outputs, strict=True)
    ]
    references = [b for _, b in PAIRS]
    assert found.scores["bleu"] == bleu(outputs, references).score()
    assert found.scores["exact_match"] == exact_match(outputs, references).score()
    alone = [
        nll_alone(one, [special.bos], [*encode(b), special.eos], [*encode(a), special.eos]) for a, b in PAIRS
    ]
    tokens, words, size = sum(len(b) + 1 for b in references), 8, sum(map(len, references))
    nll = found.scores["nll"]
    assert nll.value == pytest.approx(sum(alone) / tokens, abs=1e-9) and nll.count == tokens
    assert nll.parts == pytest.approx(
        {
            "perplexity": math.exp(sum(alone) / tokens),
            "nll_per_word": sum(alone) / words,
            "perplexity_per_word": math.exp(sum(alone) / words),
            "bits_per_byte": sum(alone) / size / math.log(2),
            "perplexity_per_byte": math.exp(sum(alone) / size),
        }
    )


def test_bits_per_byte_pair_each_row_with_its_own_text(bundle, write):
    """Batches are in order of length; figures and texts are in the order of the data."""
    one = bundle("pairs")
    encode, special = one.tokenizer.encode, one.tokenizer.special
    found = evaluate(one, part(one, write("test.tsv", TSV)), Settings(metrics=["bits_per_byte"]))
    alone = [
        nll_alone(one, [special.bos], [*encode(b), special.eos], [*encode(a), special.eos]) for a, b in PAIRS
    ]
    expected = [[nats / math.log(2), len(b)] for nats, (_, b) in zip(alone, PAIRS, strict=True)]
    assert found.counted["bits_per_byte"].counts.ravel().tolist() == pytest.approx(
        [value for row in expected for value in row]
    )
    assert found.scores["bits_per_byte"].value == pytest.approx(
        sum(row[0] for row in expected) / sum(row[1] for row in expected)
    )
    causal = bundle("causal")
    stream = part(causal, write("test.txt", "abcdefgh abc"), documents="stream", window=4)
    with pytest.raises(ConfigError, match="bits_per_byte needs rows that predict a whole text"):
        evaluate(causal, stream, Settings(metrics=["bits_per_byte"]))


def test_two_networks_side_by_side(bundle, write):
    one = bundle("pairs")
    two = dataclasses.replace(one, model=copy.deepcopy(one.model))
    for parameter in two.model.parameters():
        parameter.data.neg_()
    path = write("test.tsv", TSV)
    settings = Settings(metrics=["nll", "ter", "token_error_rate", "chrf"], max_new_tokens=6)
    first, second = (evaluate(b, part(b, path), settings) for b in (one, two))
    both = side_by_side(first, second, Bootstrap(200, 1))
    assert list(both.tests) == ["ter", "token_error_rate", "chrf", "nll"] and not both.untested
    for name, test in both.tests.items():
        assert test.first.value == first.scores[name].value and test.first.interval is not None
        assert test.difference == pytest.approx(second.scores[name].value - first.scores[name].value)
        assert test.interval[0] <= test.difference <= test.interval[1]
    assert both.tests["nll"].difference != 0
    same = side_by_side(first, first, Bootstrap(200, 1)).tests["nll"]
    assert same.difference == 0 and same.p_value == 1
    # Other tokens: a figure per token means something else there.
    longer = dataclasses.replace(second.counted["nll"], counts=second.counted["nll"].counts * [1, 2])
    other = dataclasses.replace(second, counted={"nll": longer})
    found = side_by_side(first, other, Bootstrap(200, 1))
    assert not found.tests and "other tokens" in found.untested["nll"]
    assert found.untested["chrf"] == "only of the first network"
    with pytest.raises(DataError, match="not scored on the same texts"):
        side_by_side(first, dataclasses.replace(second, items=second.items[1:]), Bootstrap(200, 1))


def test_two_files_and_jsonl_are_the_same_pairs(bundle, write):
    one = bundle("pairs")
    settings = Settings(metrics=["nll", "chrf"], max_new_tokens=6)
    expected = evaluate(one, part(one, write("test.tsv", TSV)), settings)
    source, target = (
        write("in.txt", "\n".join(a for a, _ in PAIRS)),
        write("out.txt", "\n".join(b for _, b in PAIRS)),
    )
    assert evaluate(one, part(one, source, references=target), settings) == expected
    lines = "".join(f'{{"x": "{a}", "y": "{b}", "z": "no"}}\n' for a, b in PAIRS)
    assert evaluate(one, part(one, write("test.jsonl", lines), fields=["x", "y"]), settings) == expected
    swapped = "".join(f"{b}\tno\t{a}\n" for a, b in PAIRS)
    assert evaluate(one, part(one, write("test3.tsv", swapped), fields=["3", "1"]), settings) == expected


def test_references_of_one_source_can_be_pooled(bundle, write):
    one = bundle("pairs")
    output = generate_texts(one, ["abc"], max_new_tokens=3)[0]
    file = write("test.tsv", f"abc\tcab\nh\tq\nabc\t{output}\nabc\tcab\n".replace("q", "a"))
    settings = Settings(metrics=["exact_match"], max_new_tokens=3)
    assert evaluate(one, part(one, file), settings).scores["exact_match"].count == 4
    pooled = evaluate(one, part(one, file), dataclasses.replace(settings, pool_references=True))
    assert pooled.scores["exact_match"].count == 2
    assert pooled.items[0].references == ("cab", output)
    assert pooled.scores["exact_match"].value >= 0.5


def test_groups_and_intervals(bundle, write):
    one = bundle("pairs")
    settings = Settings(
        metrics=["exact_match", "nll"],
        max_new_tokens=4,
        group=lambda record: record.source[0],
        bootstrap=Bootstrap(50),
        search=Beam(2),
    )
    found = evaluate(one, part(one, write("test.tsv", TSV)), settings)
    assert {name: s.count for name, s in found.groups["exact_match"].items()} == {"a": 3, "d": 1, "h": 1}
    assert "nll" not in found.groups  # its items are rows of batches, not records
    assert all(s.interval is not None and "bs:50" in s.signature for s in found.scores.values())


def test_prompts_and_answers(bundle, write):
    one = bundle("prefix")
    encode, special = one.tokenizer.encode, one.tokenizer.special
    found = evaluate(one, part(one, write("test.tsv", TSV)), Settings(max_new_tokens=6))
    alone = [nll_alone(one, [special.bos, *encode(a)], [*encode(b), special.eos]) for a, b in PAIRS]
    assert found.scores["nll"].value == pytest.approx(
        sum(alone) / sum(len(b) + 1 for _, b in PAIRS), abs=1e-9
    )
    assert [i.output for i in found.items] == generate_texts(one, [a for a, _ in PAIRS], max_new_tokens=6)


def test_lines_of_text(bundle, write):
    one = bundle("causal")
    encode, special = one.tokenizer.encode, one.tokenizer.special
    texts = ["abc abc", "h", "dada"]
    found = evaluate(one, part(one, write("test.txt", "\n".join(texts)), documents="lines"))
    alone = [nll_alone(one, [special.bos], [*encode(t), special.eos]) for t in texts]
    score = found.scores["nll"]
    assert score.value == pytest.approx(sum(alone) / sum(len(t) + 1 for t in texts), abs=1e-9)
    assert score.parts["nll_per_word"] == pytest.approx(sum(alone) / 4)


def test_a_stream_of_text(bundle, write):
    """Windows of four: each id but the first is predicted once, from its window alone."""
    one = bundle("causal")
    text = "abcdefgh abc"
    ids = one.tokenizer.encode(text)
    found = evaluate(one, part(one, write("test.txt", text), documents="stream", window=4))
    alone = [nll_alone(one, ids[i : i + 1], ids[i + 1 : i + 5]) for i in range(0, len(ids) - 1, 4)]
    score = found.scores["nll"]
    assert score.value == pytest.approx(sum(alone) / (len(ids) - 1), abs=1e-9)
    assert score.parts["bits_per_byte"] == pytest.approx(sum(alone) / len(text) / math.log(2))
    whole = evaluate(one, part(one, write("test.txt", text), documents="stream"))
    assert whole.scores["nll"].value == pytest.approx(nll_alone(one, ids[:1], ids[1:]) / 11, abs=1e-9)


def test_labels(bundle, write):
    one = bundle("labels", labels=("no", "yes"))
    texts = ["abc", "h", "dada abba", "e", "gg", "fade"]
    special = one.tokenizer.special
    guess = []
    for text in texts:
        ids = torch.tensor([[special.bos, *one.tokenizer.encode(text), special.eos]])
        guess.append(("no", "yes")[int(one.model(Tokens(ids)).logits.argmax())])
    gold = [*guess[:4], *("no" if g == "yes" else "yes" for g in guess[4:])]
    file = write("test.tsv", "".join(f"{t}\t{g}\n" for t, g in zip(texts, gold, strict=True)))
    found = evaluate(one, part(one, file), classes=list(classes_of(one)))
    assert [(i.input, i.output, i.references) for i in found.items] == [
        (t, o, (g,)) for t, o, g in zip(texts, guess, gold, strict=True)
    ]
    assert found.scores["accuracy"].value == pytest.approx(4 / 6)
    assert found.scores["nll"].count == 6
    with pytest.raises(DataError, match="names of the labels are not known"):
        evaluate(one, part(one, file), classes=())


def test_tags(bundle, write):
    tags = ("B-x", "I-x", "O")
    one = bundle("tags", labels=tags)
    words = [["abc", "h"], ["dada", "a", "fee"]]
    ids, firsts = zip(*(one.tokenizer.encode_words(w) for w in words), strict=True)
    special, guess = one.tokenizer.special, []
    for row, first in zip(ids, firsts, strict=True):
        logits = one.model(Tokens(torch.tensor([[special.bos, *row, special.eos]]))).logits[0]
        guess.append([tags[int(logits[1 + place].argmax())] for place in first])
    gold = [guess[0], ["O" if guess[1][0] != "O" else "B-x", *guess[1][1:]]]
    lines = [
        "\n".join(f"{w} {t}" for w, t in zip(*pair, strict=True)) for pair in zip(words, gold, strict=True)
    ]
    file = write("test.conll", "\n\n".join(lines) + "\n")
    settings = Settings(metrics=["accuracy", "span_f1"])
    found = evaluate(one, part(one, file), settings, classes=tags)
    assert [i.output.split() for i in found.items] == guess
    assert found.scores["accuracy"].value == pytest.approx(4 / 5) and found.scores["accuracy"].count == 5


def test_the_network_is_as_before(bundle, write):
    one = bundle("pairs")
    one.model.train()
    before = {name: p.clone() for name, p in one.model.named_parameters()}
    evaluate(one, part(one, write("test.tsv", TSV)), Settings(max_new_tokens=2))
    assert one.model.training
    assert all(torch.equal(before[name], p) for name, p in one.model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "name", "text", "how", "message"),
    [
        ("pairs", "x.txt", "a\n", {}, "an encoder–decoder needs pairs"),
        ("causal", "x.txt", "a\n", {}, "one stream of text or a document a line"),
        ("pairs", "x.tsv", "a\tb\n", {"fields": ["one", "two"]}, "columns have numbers"),
        ("pairs", "x.tsv", "a\tb\n", {"fields": ["1"]}, "two fields are needed, 1 given"),
        ("pairs", "x.tmx", "", {}, "name the two languages"),
        ("labels", "x.txt", "a\n", {}, r"expected \.tsv or \.jsonl"),
        ("labels", "x.tsv", "a\tmaybe\n", {}, "unknown label 'maybe'"),
        ("pairs", "x.tsv", "a\n", {}, "1 tab-separated columns, column 2 is asked for"),
        ("pairs", "x.tsv", "", {}, "the file is empty"),
    ],
)
def test_files_that_cannot_be_scored(bundle, write, kind, name, text, how, message):
    one = bundle(kind, labels=("no", "yes") if kind == "labels" else ())
    with pytest.raises(IsoformError, match=message):
        part(one, write(name, text), **how)


def test_what_cannot_be_asked(bundle, write):
    one = bundle("pairs")
    ready = part(one, write("test.tsv", TSV))
    with pytest.raises(ConfigError, match="metric 'bleau' does not fit pair data; did you mean 'bleu'"):
        evaluate(one, ready, Settings(metrics=["bleau"]))
    with pytest.raises(ConfigError, match="metric 'accuracy' does not fit pair data"):
        evaluate(one, ready, Settings(metrics=["accuracy"]))
    forced = dataclasses.replace(one, protocol=one.protocol.model_copy(update={"forced": ((0, 3),)}))
    assert "nll" not in evaluate(forced, ready, Settings(max_new_tokens=2)).scores
    with pytest.raises(ConfigError, match="nll: the protocol starts or forces more than one"):
        evaluate(forced, ready, Settings(metrics=["nll"]))
    stream = TextData(documents="stream", train=Path("x"), test=write("text.txt", "abc"))
    rotary = bundle("causal")
    none = rotary.config.model_copy(
        update={"embedding": rotary.config.embedding.model_copy(update={"positions": _none()})}
    )
    with pytest.raises(ConfigError, match="give a window"):
        part_of(dataclasses.replace(rotary, config=none), stream, "test", Path())
    with pytest.raises(DataError, match="name no validation part"):
        part_of(rotary, stream, "validation", Path())


def _none():
    from isoform.config import NoPositions

    return NoPositions()


def test_nothing_supervised(bundle):
    with pytest.raises(SupervisionError, match="no position is supervised"):
        row_likelihoods(bundle("causal").model, [])
