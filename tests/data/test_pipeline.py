from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoform.data import (
    Batch,
    BytesBpe,
    Characters,
    Conll,
    DatesData,
    LabelledBatch,
    LabelledData,
    LabelTsv,
    Masking,
    Packed,
    ParallelData,
    PrefixData,
    Sides,
    Specials,
    Split,
    TaggedData,
    Task,
    TextData,
    TokenBudget,
    TokenizerFile,
    TokenizersConfig,
    Tsv,
    TwoFiles,
    Windows,
    Words,
    check,
    prepare,
)
from isoform.data.dates import tags
from isoform.data.encode import _stream_parts, encode_stream
from isoform.data.tokenizer import Tokenizer
from isoform.errors import ConfigError, DataError, TokenizerError

BUDGET = TokenBudget(max_tokens=200)
SHARED = TokenizersConfig(shared=Characters())
SPELLING = TokenizersConfig(source=Characters(), target=Words())
PAIRS = Tsv(source=1, target=2)


def write(folder: Path, name: str, lines: list[str]) -> Path:
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Path(name)


def pair_files(folder: Path) -> ParallelData:
    return ParallelData(
        format=PAIRS,
        train=write(folder, "train.tsv", ["cat\tK AE T", "dog\tD AO G", "a\tAH", "cats\tK AE T S"]),
        validation=write(folder, "dev.tsv", ["god\tG AO D", "cat\tK AE T"]),
        test=write(folder, "test.tsv", ["tag\tT AE G", "dog\tD AA G"]),
    )


def test_pairs_with_a_tokenizer_a_side(tmp_path: Path) -> None:
    made = prepare(Task(pair_files(tmp_path), BUDGET, tmp_path, seed=1), SPELLING)
    source, target = made.tokenizers.source, made.tokenizers.target
    assert not made.tokenizers.shared
    batch = next(iter(made.train.batches.epoch(0)))
    assert isinstance(batch, Batch)
    assert batch.source is not None
    for i, row in enumerate(batch.rows.tolist()):
        pair = made.train.records.items[row]
        assert batch.source.rows()[i] == [*source.encode(pair.source), source.special.eos]  # type: ignore[union-attr]
        assert batch.decoder_input.rows()[i] == [target.special.bos, *target.encode(pair.target)]  # type: ignore[union-attr]
    assert source.template.suffix == (source.special.eos,)
    assert made.validation is not None
    assert sum(len(b.rows) for b in made.validation.batches.epoch(0)) == 2
    test = made.test()
    assert test is not None
    assert len(test.records) == 2


def test_shared_tokenizers_are_one(tmp_path: Path) -> None:
    made = prepare(Task(pair_files(tmp_path), BUDGET, tmp_path, seed=1), SHARED)
    assert made.tokenizers.source is made.tokenizers.target
    assert made.tokenizers.shared
    again = prepare(Task(pair_files(tmp_path), BUDGET, tmp_path, seed=1, start_id=2), made.tokenizers)
    batch = next(iter(again.train.batches.epoch(0)))
    assert isinstance(batch, Batch)
    assert set(batch.decoder_input.ids[:, 0].tolist()) == {2}


def test_preflight_tells_what_is_there(tmp_path: Path) -> None:
    made = prepare(Task(pair_files(tmp_path), BUDGET, tmp_path, seed=1), SPELLING)
    report = made.preflight
    assert report.ok
    train, dev, test = (report.parts[name] for name in ("train", "validation", "test"))
    assert (train.records, train.same_records.count, train.same_sources) == (4, 0, 0)
    assert train.sides["source"].tokens == len("catdogacats")
    assert sum(count for _, _, count in train.sides["source"].histogram) == 4
    assert train.sides["source"].lengths["max"] == 4
    assert (dev.same_records.count, dev.same_sources) == (1, 1)
    assert dev.same_records.first == (f"{tmp_path / 'dev.tsv'}, line 2",)
    assert (test.same_records.count, test.same_sources) == (0, 1)
    assert test.sides["target"].unknown == 1
    assert test.sides["target"].unknown_rate == 1 / 6
    assert train.batches == made.train.batches.report(0)
    assert any("1 of 2 records also stand in train" in remark for remark in report.remarks)
    assert any("source of 1 of 2" in remark for remark in report.remarks)
    assert any("16.7% of the target tokens are unknown" in remark for remark in report.remarks)
    assert report.samples[0].sides["target"][1] == ("K", "AE", "T")
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["parts"]["train"]["batches"]["share"] == train.batches.share
    assert plain["samples"][0]["sides"]["source"]["tokens"] == ["c", "a", "t"]


def test_preflight_lists_faults_and_prepare_refuses_them(tmp_path: Path) -> None:
    data = ParallelData(
        format=PAIRS,
        train=write(tmp_path, "a.tsv", ["cat\tK AE T", "\tD", "elephant\tEH L", "mammoth\tM"]),
        max_source=6,
    )
    task = Task(data, BUDGET, tmp_path, seed=1)
    report = check(task, SPELLING).preflight
    assert not report.ok
    assert report.parts["train"].empty.first == (f"{tmp_path / 'a.tsv'}, line 2",)
    assert report.parts["train"].over_long.count == 2
    assert "line 3: source of 9 tokens, the limit is 6" in report.parts["train"].over_long.first[0]
    assert len(report.problems) == 2
    assert "no validation part" in report.remarks[0]
    with pytest.raises(DataError, match="1 record is without one side"):
        prepare(task, SPELLING)
    with pytest.raises(DataError, match=r"line 3: source of 9 tokens, the limit is 6 .*over_long = 'error'"):
        prepare(Task(data.replace(empty="drop"), BUDGET, tmp_path, seed=1), SPELLING)


def test_over_long_records_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", ["cat\tK AE T", "elephant\tEH L", "mammoth\tM"])
    data = ParallelData(format=PAIRS, train=path, max_source=6, over_long="drop")
    made = prepare(Task(data, BUDGET, tmp_path, seed=1), SPELLING)
    assert made.train.fit is not None
    assert (made.train.fit.dropped, made.train.fit.truncated, made.train.fit.kept.tolist()) == (2, 0, [0])
    assert any("2 records are over-long" in remark for remark in made.preflight.remarks)
    cut = prepare(Task(data.replace(over_long="truncate"), BUDGET, tmp_path, seed=1), SPELLING)
    assert cut.train.fit is not None
    assert (cut.train.fit.dropped, cut.train.fit.truncated) == (0, 2)
    batch = next(iter(cut.train.batches.epoch(0)))
    assert isinstance(batch, Batch)
    assert batch.source is not None
    row = batch.source.rows()[batch.rows.tolist().index(1)]
    assert cut.tokenizers.source.decode(row) == "elepha"
    assert cut.tokenizers.source.special.eos not in row
    with pytest.raises(DataError, match="every record of train is over the limit"):
        prepare(Task(data.replace(max_source=1), BUDGET, tmp_path, seed=1), SPELLING)


def test_a_pair_over_the_budget_is_named_after_dropping(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", ["\tx", "ab\tA", "abcdefgh\tB"])
    data = ParallelData(format=PAIRS, train=path, empty="drop")
    with pytest.raises(DataError, match=r"a\.tsv, line 3: 11 tokens, more than a whole batch"):
        prepare(Task(data, TokenBudget(max_tokens=8), tmp_path, seed=1), SPELLING)


def test_empty_records_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", ["\tx", "ab\tA", "c\t ", "d\tB"])
    made = prepare(
        Task(ParallelData(format=PAIRS, train=path, empty="drop"), BUDGET, tmp_path, seed=1), SPELLING
    )
    (batch,) = made.train.batches.epoch(0)
    assert isinstance(batch, Batch)
    assert batch.source is not None
    texts = {made.tokenizers.source.decode(row) for row in batch.source.rows()}
    assert texts == {"ab", "d"}
    assert made.preflight.parts["train"].empty.count == 2
    assert made.train.records.where(1).endswith("line 4")


def test_a_row_that_would_be_all_padding(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", ["a b\tA", "\u0301\tB"])
    tokenizer = Tokenizer.train(Characters(specials=Specials(eos=None)), ["ab "], where="")
    tokenizer.save(tmp_path)
    # Without an end of sequence, a text that the tokenizer leaves nothing of has no tokens at all.
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["normalizer"] = {"type": "StripAccents"}
    (tmp_path / "own.json").write_text(json.dumps(state))
    brought = TokenizerFile(path=Path("own.json"), specials=Specials(eos=None))
    data = ParallelData(format=PAIRS, train=path)
    with pytest.raises(
        DataError, match=r"a\.tsv, line 2: the source has no tokens: its row would be all padding"
    ):
        prepare(Task(data, BUDGET, tmp_path, seed=1), TokenizersConfig(source=brought, target=Words()))


def test_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", ["1+1=\t2", "12+1=\t13"])
    data = PrefixData(format=PAIRS, train=path, validation=path, max_length=20)
    made = prepare(Task(data, BUDGET, tmp_path, seed=1), SHARED)
    special = made.tokenizers.source.special
    batch = next(iter(made.train.batches.epoch(0)))
    assert isinstance(batch, Batch)
    assert batch.decoder_input.prefix is not None
    for i, row in enumerate(batch.rows.tolist()):
        record = made.train.records.items[row]
        encode = made.tokenizers.source.encode
        prompt = [special.bos, *encode(record.prompt)]  # type: ignore[union-attr]
        answer = [*encode(record.answer), special.eos]  # type: ignore[union-attr]
        assert batch.decoder_input.rows()[i] == [*prompt, *answer[:-1]]
        assert batch.decoder_input.prefix[i] == len(prompt)
        assert batch.labels[i][batch.supervised[i]].tolist() == answer
    with pytest.raises(DataError, match="line 2: the prompt alone fills max_length = 6"):
        prepare(Task(data.replace(max_length=6, over_long="truncate"), BUDGET, tmp_path, seed=1), SHARED)
    short = prepare(Task(data.replace(max_length=7, over_long="truncate"), BUDGET, tmp_path, seed=1), SHARED)
    assert short.train.fit is not None
    assert short.train.fit.truncated == 1


def test_a_prompt_that_nothing_stands_for(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", ["a\tb", "\u0301\tb"])
    tokenizer = Tokenizer.train(Characters(specials=Specials(bos=None)), ["ab"], where="")
    tokenizer.save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["normalizer"] = {"type": "StripAccents"}
    (tmp_path / "own.json").write_text(json.dumps(state))
    brought = TokenizerFile(path=Path("own.json"), specials=Specials(bos=None))
    data = PrefixData(format=PAIRS, train=path)
    with pytest.raises(DataError, match="line 2: the prompt has no tokens, and no bos stands for it"):
        prepare(Task(data, BUDGET, tmp_path, seed=1), TokenizersConfig(shared=brought))


def test_streams(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 40)
    data = TextData(documents="stream", train=Path("a.txt"), split=Split(validation=0.2, order="contiguous"))
    made = prepare(Task(data, Windows(length=16, batch_size=4), tmp_path, seed=1), SHARED)
    decode = made.tokenizers.source.decode
    batch = next(iter(made.train.batches.epoch(0)))
    assert isinstance(batch, Batch)
    assert decode(batch.decoder_input.ids[0].tolist())[1:] == decode(batch.labels[0].tolist())[:-1]
    assert made.validation is not None
    scored = [int(i) for b in made.validation.batches.epoch(0) for i in b.labels[b.supervised]]
    assert decode(scored) == made.validation.records.items[0].text[1:]  # type: ignore[union-attr]


def test_lines_as_rows_and_packed(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", ["to be", "or not", "to be", "that is"])
    data = TextData(documents="lines", train=path, validation=path)
    rows = prepare(Task(data, BUDGET, tmp_path, seed=1), SHARED)
    batch = next(iter(rows.train.batches.epoch(0)))
    assert isinstance(batch, Batch)
    special = rows.tokenizers.source.special
    assert all(row[0] == special.bos and row.count(special.bos) == 1 for row in batch.decoder_input.rows())
    assert all(special.eos in row.tolist() for row in batch.labels)
    packed = prepare(Task(data, Packed(length=20, batch_size=2), tmp_path, seed=1), SHARED)
    batch = next(iter(packed.train.batches.epoch(0)))
    assert isinstance(batch, Batch)
    assert batch.decoder_input.documents is not None


@pytest.mark.parametrize("documents", ["lines", "stream"])
def test_masked_text(tmp_path: Path, documents: Any) -> None:
    path = write(tmp_path, "a.txt", ["to be", "or not", "to be", "that is"] * 5)
    data = TextData(documents=documents, train=path, validation=path)
    batching = BUDGET if documents == "lines" else Windows(length=10, batch_size=4)
    tokenizers = TokenizersConfig(shared=Characters(specials=Specials(extra=("<mask>",))))
    made = prepare(Task(data, batching, tmp_path, seed=1, masking=Masking(rate=0.5)), tokenizers)
    special = made.tokenizers.source.special
    batch = next(iter(made.train.batches.epoch(0)))
    assert isinstance(batch, LabelledBatch)
    assert all(row[0] == special.bos and row[-1] == special.eos for row in batch.tokens.rows())
    assert special.extra["<mask>"] in batch.tokens.ids
    if documents == "stream":
        assert batch.tokens.ids.shape == (4, 10)
    with pytest.raises(TokenizerError, match="no <mask> token"):
        prepare(Task(data, batching, tmp_path, seed=1, masking=Masking()), SHARED)


def test_labels(tmp_path: Path) -> None:
    train = write(tmp_path, "a.tsv", ["good\tyes", "bad\tno", "fine\tyes"])
    data = LabelledData(format=LabelTsv(text=1, label=2), train=train)
    made = prepare(Task(data, BUDGET, tmp_path, seed=1), SHARED)
    assert made.classes == {"no": 0, "yes": 1}
    assert made.preflight.parts["train"].classes == {"no": 1, "yes": 2}
    batch = next(iter(made.train.batches.epoch(0)))
    assert isinstance(batch, LabelledBatch)
    special = made.tokenizers.source.special
    for i, row in enumerate(batch.rows.tolist()):
        text, label = ["good", "bad", "fine"][row], [1, 0, 1][row]
        assert batch.tokens.rows()[i] == [special.bos, *made.tokenizers.source.encode(text), special.eos]
        assert batch.labels[i] == label
    short = data.replace(max_length=5, over_long="drop")  # "good" and "fine" have six ids with their specials
    (batch,) = prepare(Task(short, BUDGET, tmp_path, seed=1), SHARED).train.batches.epoch(0)
    assert (batch.rows.tolist(), batch.labels.tolist()) == ([1], [0])
    foreign = data.replace(validation=str(write(tmp_path, "b.tsv", ["odd\tperhaps"])))
    with pytest.raises(DataError, match="validation: label 'perhaps' does not occur in train"):
        prepare(Task(foreign, BUDGET, tmp_path, seed=1), SHARED)


def test_tagged_words(tmp_path: Path) -> None:
    train = write(tmp_path, "a.conll", ["the DT", "cat NN", "", "cats NN"])
    data = TaggedData(format=Conll(word=1, tag=2), train=train)
    made = prepare(Task(data, BUDGET, tmp_path, seed=1), SHARED)
    batch = next(iter(made.train.batches.epoch(0)))
    assert isinstance(batch, LabelledBatch)
    i = batch.rows.tolist().index(0)
    assert batch.labels[i][batch.supervised[i]].tolist() == [0, 1]
    assert batch.supervised[i].nonzero().ravel().tolist() == [1, 5]  # bos, "the", space, "cat"


def test_the_dates(tmp_path: Path) -> None:
    data = DatesData(seed=3, train=300, validation=20, test=30, languages=("en", "de", "ja", "ar"))
    specials = Specials(unk=None, extra=tags(("en", "de", "ja", "ar")))
    made = prepare(
        Task(data, BUDGET, tmp_path, seed=1),
        TokenizersConfig(shared=BytesBpe(vocab_size=400, specials=specials)),
    )
    batch = next(iter(made.train.batches.epoch(0)))
    assert isinstance(batch, Batch)
    assert batch.source is not None
    assert set(batch.source.ids[:, 0].tolist()) <= set(made.tokenizers.source.special.extra.values())
    test = made.test()
    assert test is not None
    assert len(test.records) == 30


def test_sections_that_do_not_go_together(tmp_path: Path) -> None:
    pairs = pair_files(tmp_path)
    text = TextData(documents="lines", train=Path("train.tsv"))
    stream = text.replace(documents="stream")
    for task, tokenizers, message in [
        (Task(pairs, Windows(length=3, batch_size=1), tmp_path, 1), SHARED, "expected tokens"),
        (Task(stream, BUDGET, tmp_path, 1), SHARED, 'documents = "stream"; expected windows'),
        (Task(text, Windows(length=3, batch_size=1), tmp_path, 1), SHARED, "expected tokens or packed"),
        (
            Task(text, Packed(length=3, batch_size=1), tmp_path, 1, masking=Masking()),
            SHARED,
            "expected tokens",
        ),
        (Task(pairs, BUDGET, tmp_path, 1, masking=Masking()), SHARED, "masking needs data of kind"),
        (Task(text, BUDGET, tmp_path, 1), SPELLING, "take one tokenizer: give shared"),
    ]:
        with pytest.raises(ConfigError, match=message):
            prepare(task, tokenizers)


def test_bad_files_are_named_through_the_whole_way(tmp_path: Path) -> None:
    en, de = write(tmp_path, "a.en", ["one", "two"]), write(tmp_path, "a.de", ["eins"])
    data = ParallelData(format=TwoFiles(), train=Sides(source=en, target=de))
    with pytest.raises(DataError, match=r"2 lines and .* has 1"):
        prepare(Task(data, BUDGET, tmp_path, seed=1), SHARED)
    (tmp_path / "a.de").write_bytes(b"eins\nzw\xf6lf\n")
    with pytest.raises(DataError, match=r"a\.de, line 2: byte 0xf6"):
        prepare(Task(data, BUDGET, tmp_path, seed=1), SHARED)
    with pytest.raises(TokenizerError, match="no bos token"):
        one = TokenizersConfig(shared=Characters(specials=Specials(bos=None)))
        prepare(Task(pair_files(tmp_path), BUDGET, tmp_path, seed=1), one)


def test_long_streams_are_cut_without_changing_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "  It is so.\n\nNo, it's not\n  so\u00e9\ttoo\n12\n\n\nx \n" * 20
    monkeypatch.setattr("isoform.data.encode.STREAM_CHUNK", 7)
    assert len(_stream_parts(text)) > 20
    assert "".join(_stream_parts(text)) == text
    for config in (Characters(), Words(), BytesBpe(vocab_size=330)):
        tokenizer = Tokenizer.train(config, [text], where="")  # type: ignore[arg-type]
        assert tokenizer.backend.line_ends_cut()
        assert encode_stream(text, tokenizer).tolist() == tokenizer.encode(text)
    assert np.concatenate([encode_stream(text, tokenizer)]).dtype == np.int32
