"""What a checkpoint's files say about which token may come where."""

from __future__ import annotations

from typing import Any

import pytest

from isoform.checkpoints.protocol import read_protocol, write_protocol
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError, ConfigError

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}


def read(config: dict[str, Any], generation: dict[str, Any] | None = None) -> Protocol:
    return read_protocol(config, generation or {}, encoder_decoder=True, bos=False)


def test_rules_are_understood_and_come_back() -> None:
    rules = {"forced_bos_token_id": 5, "forced_eos_token_id": 2, "suppress_tokens": [7]}
    protocol = read({**IDS, **rules, "bad_words_ids": [[8], [2]]})
    assert protocol.start == (2,)
    assert protocol.forced == ((0, 5),)
    assert protocol.forced_last == 2
    assert protocol.suppressed == (7, 8), "an end is no bad word"
    assert read(write_protocol(protocol, encoder_decoder=True)) == protocol


def test_generation_config_alone_says_the_rules() -> None:
    config = {**IDS, "forced_bos_token_id": 5, "forced_eos_token_id": 2, "suppress_tokens": [7]}
    protocol = read(config, {"eos_token_id": 3})
    assert protocol.eos_ids == (3,)
    assert protocol.start == (2,)
    assert (protocol.forced, protocol.forced_last, protocol.suppressed) == ((), None, ())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"begin_suppress_tokens": [4]}, "begin_suppress_tokens is .4., which is not supported"),
        ({"forced_decoder_ids": [[1, 4]]}, "forced_decoder_ids"),
        ({"sequence_bias": [[[1], 0.5]]}, "sequence_bias"),
        ({"bad_words_ids": [[4], [5, 6]]}, "bad_words_ids holds .5, 6., expected one token in each"),
        ({"decoder_start_token_id": [1, 2]}, "decoder_start_token_id is .1, 2., expected one id"),
        ({"forced_bos_token_id": [1, 2]}, "forced_bos_token_id is .1, 2., expected one id"),
        ({"forced_eos_token_id": [1, 2]}, "forced_eos_token_id is .1, 2., expected one id"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "neither decoder_start_token_id nor"),
    ],
)
def test_what_is_not_understood_is_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**IDS, **rule})
    if len(rule) == 1:
        with pytest.raises(ConfigError, match=message):
            read(IDS, {**IDS, **rule})


def test_only_the_first_token_can_be_forced_there() -> None:
    protocol = Protocol(pad_id=0, eos_ids=(2,), start=(1,), forced=((1, 4),))
    with pytest.raises(ArtifactError, match="forces the first token only"):
        write_protocol(protocol, encoder_decoder=True)
