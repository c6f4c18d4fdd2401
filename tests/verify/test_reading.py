"""Texts become the rows that a network's protocol asks for."""

from __future__ import annotations

import pytest

from isoform.checkpoints import Bundle
from isoform.config import ModelConfig, presets
from isoform.config.protocol import Protocol
from isoform.data import Tokenizer
from isoform.data.tokenizer_config import Characters
from isoform.errors import DataError, TokenizerError
from isoform.generation import generate
from isoform.nn import build
from isoform.tokens import Tokens
from isoform.verify.reading import reading

TOKENIZER = Tokenizer.train(Characters(), ["abc xyz"], where="test")
PAD, BOS, EOS = TOKENIZER.special.pad, TOKENIZER.special.bos, TOKENIZER.special.eos
SMALL = {"vocab_size": TOKENIZER.vocab_size, "d_model": 8, "n_heads": 2, "ffn_width": 12}


def bundle(config: ModelConfig, **protocol) -> Bundle:
    settings = {"pad_id": PAD, "eos_ids": (EOS,), "start": (BOS,), **protocol}
    return Bundle(build(config, seed=4), config, TOKENIZER, TOKENIZER, Protocol(**settings))


def ids(*tokens: str) -> list[int]:
    return [TOKENIZER.id(token) for token in tokens]


def test_an_encoder_reads_between_its_marks():
    made = bundle(presets.bert(**SMALL, n_layers=1), source_prefix=(BOS,), source_suffix=(EOS,))
    tokens, source = reading(made, "ab")
    assert source is None and tokens.rows() == [[BOS, *ids("a", "b"), EOS]]
    with pytest.raises(DataError, match="nothing a target could follow"):
        reading(made, "ab", "c")


def test_a_decoder_reads_from_its_start_and_a_prefix_is_the_text():
    config = presets.gpt2(**SMALL, n_layers=1)
    tokens, _ = reading(bundle(config), "ab", "c")
    assert tokens.rows() == [[BOS, *ids("a", "b", "c")]] and tokens.prefix is None
    tokens, _ = reading(bundle(config.replace(decoder__visibility="prefix")), "ab", "c")
    assert tokens.rows() == [[BOS, *ids("a", "b", "c")]] and tokens.prefix.tolist() == [3]


def test_an_encoder_decoder_reads_its_own_output_or_the_one_given():
    made = bundle(presets.pre_ln(**SMALL, n_encoder_layers=1, n_decoder_layers=1), source_suffix=(EOS,))
    tokens, source = reading(made, "ab", "cz")
    assert source.rows() == [[*ids("a", "b"), EOS]] and tokens.rows() == [[BOS, *ids("c", "z")]]
    tokens, source = reading(made, "ab", max_new_tokens=5)
    own = generate(
        made.model, Tokens.from_lists([[BOS]], pad_id=PAD), source=source, max_new_tokens=5, eos_id=EOS
    ).ids[0]
    assert tokens.rows() == [[BOS, *own]] and own


def test_its_own_output_stays_within_the_positions():
    config = presets.bart(**SMALL, n_layers=1, max_positions=4)
    tokens, _ = reading(bundle(config), "ab")
    assert 1 <= tokens.length <= 5


def test_what_cannot_be_read():
    made = bundle(presets.gpt2(**SMALL, n_layers=1), start=())
    with pytest.raises(DataError, match="a text without tokens"):
        reading(made, "")
    bare = Bundle(made.model, made.config, None, None, made.protocol)
    with pytest.raises(TokenizerError, match="no tokenizer with these weights"):
        reading(bare, "ab")
