from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isoform.config.base import Frozen, parse
from isoform.config.files import read, write
from isoform.data import BatchingConfig, DataConfig, Specials, TokenizerConfig, TokenizersConfig
from isoform.errors import ConfigError


class Run(Frozen):
    data: DataConfig
    tokenizers: TokenizersConfig
    batching: BatchingConfig


class OneTokenizer(Frozen):
    tokenizer: TokenizerConfig


class OneData(Frozen):
    data: DataConfig


TSV = {"kind": "tsv", "source": 1, "target": 2}


def test_a_run_file_survives_writing_and_reading(tmp_path: Path) -> None:
    run = parse(
        Run,
        {
            "data": {
                "kind": "parallel",
                "format": {"kind": "lines"},
                "train": {"source": "a.en", "target": "a.de"},
                "split": {"validation": 0.1, "order": "random", "seed": 3},
                "max_source": 40,
                "over_long": "drop",
            },
            "tokenizers": {
                "source": {"kind": "characters"},
                "target": {"kind": "bytes_bpe", "vocab_size": 300, "specials": {"extra": [">>x<<"]}},
            },
            "batching": {"kind": "tokens", "max_tokens": 100},
        },
    )
    assert run.tokenizers.target.specials.unk is None
    assert run.tokenizers.target.specials.pad == "<pad>"
    for suffix in (".toml", ".yaml", ".json"):
        write(run, tmp_path / f"run{suffix}")
        assert read(Run, tmp_path / f"run{suffix}") == run


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "parallel", "format": TSV, "train": "a", "trian": "b"}, "trian.*did you mean 'train'"),
        ({"kind": "paralel", "format": TSV, "train": "a"}, "paralel"),
        ({"kind": "parallel", "format": TSV, "train": {"source": "a", "target": "b"}}, "takes one path"),
        ({"kind": "parallel", "format": {"kind": "lines"}, "train": "a"}, "takes {source"),
        ({"kind": "parallel", "format": {**TSV, "source": 0}, "train": "a"}, "source"),
        (
            {
                "kind": "parallel",
                "format": TSV,
                "train": "a",
                "validation": "b",
                "split": {"validation": 0.1, "order": "random", "seed": 1},
            },
            "either split or files",
        ),
        (
            {
                "kind": "text",
                "documents": "stream",
                "train": "a",
                "split": {"validation": 0.1, "order": "random", "seed": 1},
            },
            "contiguous",
        ),
        (
            {"kind": "text", "documents": "stream", "train": "a", "max_length": 3},
            "max_length limits documents",
        ),
        ({"kind": "text", "documents": "lines", "train": "a", "over_long": "cut"}, "cut"),
        (
            {
                "kind": "text",
                "documents": "lines",
                "train": "a",
                "split": {"validation": 0.1, "order": "random"},
            },
            "seed",
        ),
        (
            {
                "kind": "text",
                "documents": "stream",
                "train": "a",
                "split": {"validation": 0.6, "test": 0.4, "order": "contiguous"},
            },
            "nothing to train on",
        ),
    ],
)
def test_refused_data(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(OneData, {"data": data})


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"kind": "characters", "specials": {"pad": "</s>"}}, "pad is never eos"),
        ({"kind": "words", "specials": {"unk": "none"}}, "unk is needed"),
        ({"kind": "unigram", "vocab_size": 9, "specials": {"unk": "<s>"}}, "another special"),
        ({"kind": "bytes_bpe", "vocab_size": 300, "specials": {"unk": "<unk>"}}, "knows every text"),
        ({"kind": "bytes_bpe", "vocab_size": 200}, "257"),
        ({"kind": "characters", "specials": {"extra": ["<s>"]}}, "given twice"),
        ({"kind": "characters", "specials": {"bos": " "}}, "blank"),
        ({"kind": "file", "path": "x.json"}, "specials"),
    ],
)
def test_refused_tokenizers(tokenizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(OneTokenizer, {"tokenizer": tokenizer})


def test_shared_or_one_a_side() -> None:
    one = {"kind": "characters"}
    for data in (
        {},
        {"source": one},
        {"shared": one, "source": one, "target": one},
        {"shared": one, "target": one},
    ):
        with pytest.raises(ConfigError, match="either shared, or source and target"):
            parse(TokenizersConfig, data)


def test_pad_may_not_be_another_special() -> None:
    with pytest.raises(ConfigError, match="so is another"):
        parse(Specials, {"pad": "<unk>"})
