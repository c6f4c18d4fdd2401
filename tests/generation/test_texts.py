"""Texts in, texts out: the protocol, the order, the limits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from isoform.errors import ConfigError, DataError, TokenizerError
from isoform.generation import Beam, Greedy, generate
from isoform.generation.texts import TextGenerator, generate_texts
from isoform.tokens import Tokens

TEXTS = ["abc", "h", "", "abba cafe", "dada", "a b c d e f g"]


def by_hand(bundle, text, limit, search=None):
    """One text alone, its ids put together here."""
    encode, special = bundle.tokenizer.encode, bundle.tokenizer.special
    if bundle.config.source is None:
        prompt, source = torch.tensor([[special.bos, *encode(text)]]), None
        prefix = torch.tensor([prompt.shape[1]]) if bundle.config.stack.visibility == "prefix" else None
        tokens = Tokens(prompt, prefix=prefix)
    else:
        tokens = Tokens(torch.tensor([[special.bos]]))
        source = Tokens(torch.tensor([[*encode(text), special.eos]]))
    search = Greedy() if search is None else search
    given = {"source": source, "max_new_tokens": limit, "search": search, "eos_id": special.eos}
    return generate(bundle.model, tokens, **given).hypotheses[0]


@pytest.mark.parametrize("structure", ["causal", "prefix", "encoder-decoder"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_text_as_if_alone_and_in_order(bundle, structure, side):
    one = bundle(structure, padding_side=side)
    search = Beam(3, "length", n_best=2)
    found = TextGenerator(one, search=search, max_new_tokens=7, batch_size=2).write(TEXTS)
    assert [o.text for o in found[2]] == [""] and found[2][0].finished
    for text, outputs in zip(TEXTS, found, strict=True):
        if not text:
            continue
        alone = by_hand(one, text, 7, search)
        assert [o.ids for o in outputs] == [h.ids for h in alone]
        assert [o.score for o in outputs] == pytest.approx([h.score for h in alone], abs=1e-9)
        assert [o.text for o in outputs] == [one.tokenizer.decode(h.ids) for h in alone]
    assert generate_texts(one, TEXTS, search=search, max_new_tokens=7) == [o[0].text for o in found]
    assert one.generate(TEXTS, search=search, max_new_tokens=7) == [o[0].text for o in found]


def test_stream_gives_lines_as_they_come(bundle):
    writer = TextGenerator(bundle("causal"), max_new_tokens=3)
    read = []

    def lines():
        for text in TEXTS:
            read.append(text)
            yield text

    stream = writer.stream(lines(), window=2)
    assert next(stream)[0] == "abc" and read == TEXTS[:2]
    assert [line for line, _ in stream] == TEXTS[1:]
    streamed = [outputs[0].text for _, outputs in writer.stream(TEXTS, window=4)]
    assert streamed == [outputs[0].text for outputs in writer.write(TEXTS)]


def test_a_fault_in_a_stream_names_the_line(bundle):
    stream = TextGenerator(bundle("causal", "learned")).stream(["a", "b", "c", "abcdefgh" * 3], window=2)
    assert [next(stream)[0] for _ in range(2)] == ["a", "b"]
    with pytest.raises(DataError, match="text 4: 25 tokens"):
        list(stream)


def test_the_default_limit_is_what_the_positions_leave_to_each_text(bundle):
    """20 positions: a prompt of n tokens leaves 21 - n, whatever else is in the batch."""
    one = bundle("causal", "learned", eos_ids=())
    found = TextGenerator(one).write(["a", "abcdefgh"])
    assert [len(outputs[0].ids) for outputs in found] == [19, 12]
    assert not found[0][0].finished
    assert len(TextGenerator(bundle("causal", eos_ids=())).write(["a"])[0][0].ids) == 256
    assert len(TextGenerator(one, max_new_tokens=3).write(["a"])[0][0].ids) == 3


def test_a_shortest_output(bundle):
    eos = bundle().tokenizer.special.eos
    ended = TextGenerator(bundle(eos_ids=(eos, 4, 5)), max_new_tokens=9).write(TEXTS)
    longer = TextGenerator(bundle(eos_ids=(eos, 4, 5)), max_new_tokens=9, min_new_tokens=5).write(TEXTS)
    assert min(len(o[0].ids) for t, o in zip(TEXTS, ended, strict=True) if t) < 5
    assert min(len(o[0].ids) for t, o in zip(TEXTS, longer, strict=True) if t) >= 5


def test_a_continuation_is_seen_in_the_whole_text(bundle):
    """A tokenizer whose decoding drops a leading space, as SentencePiece's does."""
    one = bundle("causal")
    words = one.tokenizer

    class Stripping:
        def __getattr__(self, name):
            return getattr(words, name)

        def decode(self, ids):
            return words.decode(ids).removeprefix(" ")

    space = words.encode(" ")[0]
    forced = one.protocol.model_copy(update={"forced": ((0, space), (1, words.encode("b")[0]))})
    changed = dataclasses.replace(one, tokenizer=Stripping(), protocol=forced)
    assert generate_texts(changed, ["a"], max_new_tokens=2) == [" b"]


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        (["a", "abcdefgh" * 3], {}, "text 2: 25 tokens, the network has 20 positions"),
        (["a", "abcdefgh"], {"max_new_tokens": 13}, "text 2: max_new_tokens 13 exceeds the 12"),
    ],
)
def test_too_long(bundle, texts, settings, message):
    with pytest.raises(DataError, match=message):
        TextGenerator(bundle("causal", "learned"), **settings).write(texts)


def test_too_long_a_source(bundle):
    with pytest.raises(DataError, match="text 1: 25 tokens, the network has 20 positions"):
        TextGenerator(bundle("encoder-decoder", "learned")).write(["abcdefgh" * 3])


def test_what_is_missing_is_said(bundle):
    one = bundle()
    with pytest.raises(TokenizerError, match="no tokenizer for the input"):
        TextGenerator(dataclasses.replace(one, source_tokenizer=None))
    with pytest.raises(TokenizerError, match="no tokenizer for the output"):
        TextGenerator(dataclasses.replace(one, tokenizer=None))
    with pytest.raises(ConfigError, match="no start token"):
        TextGenerator(bundle(start=()))
    with pytest.raises(ConfigError, match="batch_size is 0"):
        TextGenerator(one, batch_size=0)
