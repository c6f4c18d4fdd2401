from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isoform.config import ModelConfig, difference, difference_in_words, presets
from isoform.config.base import parse
from isoform.config.files import dumps, read_table, schema, write
from isoform.errors import ConfigError
from isoform.training import PresetModel, RunConfig, Vocabularies, apply_overrides, read_run

RUN = """
[model]
preset = "pre_ln"
d_model = 12
n_heads = 3
ffn_width = 20
n_encoder_layers = 1
n_decoder_layers = 2

[model.change]
decoder.layer.attention.dropout = 0.25
"encoder.layer.placement" = "post"

[data]
kind = "parallel"
format = { kind = "tsv", source = 1, target = 2 }
train = "train.tsv"

[tokenizer.shared]
kind = "bytes_bpe"
vocab_size = 300

[training]
seed = 0
steps = 10
batches = { kind = "tokens", max_tokens = 100 }
schedule = { kind = "constant", lr = 1e-3 }
"""
SIZES = Vocabularies(target=31, source=31, shared=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_a_preset_is_expanded_once_with_the_tokenizers_sizes(file: Path) -> None:
    run = read_run(file)
    cfg = run.architecture(SIZES)
    assert isinstance(run.model, PresetModel)
    assert cfg.embedding.vocab_size == 31 and cfg.d_model == 12
    assert cfg.decoder is not None and cfg.encoder is not None
    assert cfg.decoder.n_layers == 2 and cfg.decoder.layer.attention.dropout == 0.25
    assert cfg.encoder.layer.placement == "post" and cfg.encoder.layer.attention.dropout == 0.1
    written = run.model_copy(update={"model": cfg})
    again = parse(RunConfig, read_table(_write(file, dumps(written))))
    assert again == written and again.architecture(SIZES) == cfg


def _write(file: Path, text: str) -> Path:
    other = file.with_name("expanded.toml")
    other.write_text(text)
    return other


def test_before_there_is_a_tokenizer_the_file_says_the_size(file: Path) -> None:
    assert read_run(file).architecture().embedding.vocab_size == 300
    with pytest.raises(ConfigError, match="not known before the tokenizer"):
        read_run(file, ['tokenizer.shared={kind="characters"}']).architecture()


def test_two_tokenizers_make_two_tables(file: Path) -> None:
    cfg = read_run(file).architecture(Vocabularies(target=31, source=17, shared=False))
    assert cfg.source is not None and cfg.source.vocab_size == 17 and not cfg.tie_source


def test_a_preset_with_one_table_needs_one_tokenizer() -> None:
    model = parse(
        PresetModel, {"preset": "marian", "d_model": 12, "n_heads": 3, "ffn_width": 8, "n_layers": 1}
    )
    assert model.expand(SIZES).source is not None
    with pytest.raises(ConfigError, match=r"give tokenizer\.shared"):
        model.expand(Vocabularies(target=31, source=17, shared=False))


def test_the_number_of_labels_comes_from_the_data() -> None:
    size = {"d_model": 12, "n_heads": 3, "ffn_width": 8, "n_layers": 1}
    head = {"kind": "sequence_labels", "pooling": "mean", "pooler": "none", "bias": True}
    model = parse(PresetModel, {"preset": "bert", **size, "change": {"head": head}})
    made = model.expand(SIZES.replace(labels=5)).head
    assert made is not None and made.n_labels == 5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.preset=pre_lm", r"run\.toml.*no preset 'pre_lm'; did you mean 'pre_ln'\?"),
        ("model.n_head=3", r"n_head: pre_ln takes no such argument; did you mean 'n_heads'\?"),
        ("training.step=3", r"training\.step: unknown key; did you mean 'steps'\?"),
        ("training.schedule.kind=cosin", r"training\.schedule\.kind: 'cosin' is not one of"),
        ("trainin.seed=3", r"trainin: unknown key; did you mean 'training'\?"),
        ("data.trian=x", r"data\.trian: unknown key; did you mean 'train'\?"),
        ("evaluation.metrics=['blue']", r"'blue'"),
        ("training.label_smoothing=1.0", r"training\.label_smoothing: should be less than 1"),
        ("training.seed=true", r"training\.seed"),
        ('training.lora={rank=2, alpha=4.0, targets=["*"]}', "adapters on random weights have no base"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_run(file, [override])
    assert "\n" not in str(caught.value)


def test_changes_that_make_no_network_are_refused(file: Path) -> None:
    run = read_run(file, ["model.change.decoder.layer.placment=pre"])
    with pytest.raises(ConfigError, match=r"model\.change: .*placment"):
        run.architecture(SIZES)
    with pytest.raises(ConfigError, match="model: pre_ln"):
        read_run(file, ["model.d_model=twelve"]).architecture(SIZES)
    with pytest.raises(ConfigError, match="model: pre_ln: n_heads 5 does not divide"):
        read_run(file, ["model.n_heads=5"]).architecture(SIZES)
    with pytest.raises(ConfigError, match="leave it out"):
        read_run(file, ["model.vocab_size=30"]).architecture(SIZES)


def test_arguments_of_a_preset_differ_one_by_one(file: Path) -> None:
    a, b = read_run(file), read_run(file, ["model.d_model=24", "model.dropout=0.5"])
    assert [(d.path, d.b) for d in difference(a, b)] == [
        ("model.arguments.d_model", 24),
        ("model.arguments.dropout", 0.5),
    ]
    assert "model.arguments: dropout none in the first, 0.5 in the second" in difference_in_words(a, b)


def test_something_has_to_end_the_training(file: Path) -> None:
    table = read_table(file)
    del table["training"]["steps"]
    with pytest.raises(ConfigError, match="steps, epochs or max_seconds"):
        parse(RunConfig, table)
    table["training"] |= {"max_seconds": 3.0, "schedule": {"kind": "cosine", "lr": 0.1}}
    with pytest.raises(ConfigError, match="ends at the last update"):
        parse(RunConfig, table)


def test_a_network_written_out_must_fit_the_tokenizers(file: Path) -> None:
    full = presets.pre_ln(31, d_model=12, n_heads=3, ffn_width=8, n_encoder_layers=1, n_decoder_layers=1)
    run = read_run(file).model_copy(update={"model": full})
    assert run.architecture(SIZES) is full
    with pytest.raises(
        ConfigError, match=r"embedding\.vocab_size is 31, the tokenizer has 32 tokens; write 32"
    ):
        run.architecture(Vocabularies(target=32, source=32, shared=True))
    with pytest.raises(ConfigError, match="tie_source"):
        run.architecture(SIZES.replace(shared=False))


def test_faults_of_a_network_written_out_are_told_by_its_keys(file: Path) -> None:
    full = presets.pre_ln(31, d_model=12, n_heads=3, ffn_width=8, n_encoder_layers=1, n_decoder_layers=1)
    table: dict[str, Any] = {**read_table(file), "model": full.model_dump(mode="json")}
    assert isinstance(parse(RunConfig, table).model, ModelConfig)
    table["model"]["decoder"]["layer"]["plcement"] = "pre"
    with pytest.raises(ConfigError, match=r"model: decoder\.layer\.plcement: unknown key"):
        parse(RunConfig, table)


def test_overrides_are_toml_values_or_text() -> None:
    table = {"a": {"b": 1, "list": [{"c": 1}]}}
    changed = apply_overrides(
        table, ["a.b=2.5", "a.new.deep=[1, 2]", "a.word=hello world", "a.flag=true", "a.list.0.c=7", "d=x=y"]
    )
    assert changed == {
        "a": {"b": 2.5, "list": [{"c": 7}], "new": {"deep": [1, 2]}, "word": "hello world", "flag": True},
        "d": "x=y",
    }
    assert table["a"]["b"] == 1
    for wrong in ("a.b", "=3", "a..b=3"):
        with pytest.raises(ConfigError, match=r"expected dotted\.name=value"):
            apply_overrides(table, [wrong])
    with pytest.raises(ConfigError, match="has no 'c'"):
        apply_overrides(table, ["a.b.c=3"])


def test_the_word_none_unsets_whatever_may_be_unset_and_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN + "max_seconds = 5.0\n")
    settings = ["training.clip_norm=none", "training.max_seconds=none", "data.test=none", "data.store=none"]
    run = read_run(path, settings)
    assert run.training.clip_norm is None and run.training.max_seconds is None
    assert run.data.kind == "parallel" and run.data.test is None
    write(run, tmp_path / "again.toml")
    assert read_run(tmp_path / "again.toml") == run
    with pytest.raises(ConfigError, match=r"training\.seed: should be a valid integer, got 'none'"):
        read_run(path, ["training.seed=none"])
    known = schema(RunConfig)["$defs"]["Training"]["properties"]
    assert {"const": "none"} in known["clip_norm"]["anyOf"] and "anyOf" not in known["seed"]
