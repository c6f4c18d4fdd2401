"""One factor at a time: what a factor changes, what is refused, and what is said of the figures."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from isoform import cli
from isoform.errors import ConfigError
from isoform.training import ablation, read_run
from isoform.training.contrast import Spread, paired_difference, sentence, student_quantile
from isoform.training.factors import expanded, parse_factor, varied

RUN = """
[model]
preset = "pre_ln"
d_model = 12
n_heads = 2
ffn_width = 24
n_encoder_layers = 1
n_decoder_layers = 1
dropout = 0.1
[data]
kind = "parallel"
format = { kind = "tsv", source = 1, target = 2 }
train = "pairs.tsv"
split = { validation = 0.2, test = 0.1, order = "random", seed = 0 }
[tokenizer.shared]
kind = "characters"
[training]
seed = 3
steps = 2
batches = { kind = "tokens", max_tokens = 120 }
schedule = { kind = "constant", lr = 1e-2 }
validate_every = 2
checkpoint_every = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    words = [f"{a}{b}" for a in "abcdef" for b in "ghijk"]
    (tmp_path / "pairs.tsv").write_text("".join(f"{w}\t{w[::-1]}\n" for w in words))
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def changed(config: Path, key: str, value: object, *, matched: bool = False) -> list[str]:
    run, found = varied(config, (), read_run(config), key, value, matched=matched)
    assert expanded(run) == expanded(read_run(config)) or found
    return [d.path for d in found]


def test_a_factor_changes_its_field_wherever_it_stands(config: Path) -> None:
    both = ["encoder.layer.feed_forward.activation", "decoder.layer.feed_forward.activation"]
    assert changed(config, "feed_forward.activation", "relu") == both
    assert changed(config, "decoder.layer.feed_forward.activation", "relu") == both[1:]
    assert changed(config, "training.label_smoothing", 0.1) == ["training.label_smoothing"]
    assert changed(config, "model.n_encoder_layers", 2) == ["encoder.n_layers"]
    assert changed(config, "feed_forward.activation", "gelu") == []


def test_post_ln_loses_the_final_norm_and_pre_ln_gets_it_back(config: Path) -> None:
    base = read_run(config)
    post, found = varied(config, (), base, "norm.placement", "post", matched=False)
    assert {d.path.rpartition(".")[2] for d in found} == {"placement", "final_norm"}
    network = expanded(post)
    assert network.decoder is not None and network.decoder.final_norm is None
    again, _ = varied(config, (), post, "norm.placement", "pre", matched=False)
    assert expanded(again) == expanded(base)


def test_rms_norms_lose_their_biases_everywhere(config: Path) -> None:
    run, _ = varied(config, (), read_run(config), "norm.kind", "rms", matched=False)
    stack = expanded(run).decoder
    assert stack is not None and stack.final_norm is not None
    assert {n.kind for n in (stack.layer.norm, stack.final_norm)} == {"rms"}


@pytest.mark.parametrize("form", ["swiglu", "geglu", "glu", "reglu", "bilinear"])
def test_gated_widths_cost_what_two_layers_do(config: Path, form: str) -> None:
    """2 d 24 = 3 d 16 (R10)."""
    for matched, width in ((True, 16), (False, 24)):
        run, _ = varied(config, (), read_run(config), "feed_forward", form, matched=matched)
        stack = expanded(run).decoder
        assert stack is not None
        found = stack.layer.feed_forward
        assert found.kind == "gated" and found.width == width
    names = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid", "reglu": "relu", "bilinear": "identity"}
    assert found.activation == names[form]
    back, _ = varied(config, (), run, "feed_forward.kind", "two_layer", matched=False)
    stack = expanded(back).decoder
    assert stack is not None and stack.layer.feed_forward.kind == "two_layer"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.d_model", 16, r"changes \d settings at once"),
        ("model.preset", "original", r"changes \d settings at once"),
        ("feed_forwrd.activation", "relu", r"neither a setting .*did you mean 'feed_forward.activation'"),
        ("feed_forward", "swigloo", "no such form; did you mean 'swiglu'"),
        ("feed_forward.kind", "triple", "expected two_layer or gated"),
        ("feed_forward.activation", "rela", "did you mean 'relu'"),
        ("training.seed", 4, "seeds are no factor"),
        ("tokenizer.shared.vocab_size", 9, "another NLL, which cannot be compared"),
    ],
)
def test_two_settings_at_once_and_unknown_ones_are_refused(
    config: Path, key: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(config, key, value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.max_seconds=9"], "unequal numbers of updates"),
        (["data.split={validation=0.0, test=0.1, order='contiguous'}"], "no such part"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(config: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ablation.plan(config, overrides, [parse_factor("n_heads=1,2")], matched=False)


def test_values_are_split_at_commas_outside_of_brackets() -> None:
    assert parse_factor("a.b=relu,2,0.5").values == ("relu", 2, 0.5)
    assert parse_factor('a={x = [1,2], y = "p,q"},true').values == ({"x": [1, 2], "y": "p,q"}, True)
    for bad in ("a", "=1", "a=1,,2", "a=1,1"):
        with pytest.raises(ConfigError, match="--vary"):
            parse_factor(bad)


def test_the_whole_experiment_and_none_of_it_twice(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config.parent / "out"
    given = ["ablate", str(config), "training.log_every=1", "-o", str(folder), "--seeds", "5,6", "--json"]
    given += ["--vary", "feed_forward=gelu", "--vary", "norm.placement=pre,post"]
    assert cli.main(given) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert [line for line in err.splitlines() if line.startswith("run 4 of 4: ")]
    names = ["base", "feed_forward=gelu", "norm.placement=pre", "norm.placement=post"]
    assert [v["name"] for v in answer["variants"]] == names
    assert [v["is_base"] for v in answer["variants"]] == [True, True, True, False]
    # Runs of one seed read the same batches; the test part was not read.
    logs = [(folder / name / "seed-5" / "log.csv").read_text() for name in (names[0], names[3])]
    epochs = [[line.split(",")[1] for line in log.splitlines()] for log in logs]
    assert epochs[0] == epochs[1] and logs[0] != logs[1]
    for seed in (5, 6):
        run = read_run(folder / "base" / f"seed-{seed}" / "request.toml")
        assert run.training.data_seed == 3 and run.training.seed == seed
        assert json.loads((folder / "base" / f"seed-{seed}" / "result.json").read_text())["test"] is None
    base, post = ({o["seed"]: o["nll"] for o in answer["variants"][i]["runs"]} for i in (0, 3))
    differences = [post[seed] - base[seed] for seed in (5, 6)]
    assert base[5] != base[6] and differences[0] != 0
    found = answer["variants"][3]["difference"]
    assert found["mean"] == pytest.approx(statistics.fmean(differences))
    assert found["deviation"] == pytest.approx(statistics.stdev(differences))
    assert len(answer["may_be_concluded"]) == 1 and "tuned" in answer["may_not_be_concluded"]
    assert (folder / "ablation.png").is_file() and json.loads((folder / "ablation.json").read_text())

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a run that is done was begun again")

    monkeypatch.setattr(ablation, "train", never)
    assert cli.main(given) == 0
    assert json.loads(capsys.readouterr().out) == answer
    assert cli.main([*given, "training.steps=5"]) == 2
    assert "steps" in capsys.readouterr().err


@pytest.mark.long
def test_two_processes_share_every_run_of_an_experiment(config: Path) -> None:
    """One of the runs diverges; begun again, all is found done."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "isoform"]
    given = ["ablate", str(config), "training.accumulation=2", "training.device=cpu", "--seeds", "5", "-q"]
    given += ["-o", str(config.parent / "out"), "--vary", "training.schedule.lr=2e-2,1e30", "--json"]
    first, again = (
        subprocess.run([*launch, *given], capture_output=True, check=True, timeout=300).stdout
        for _ in range(2)
    )
    found = json.loads(first)
    assert json.loads(again) == found and found["finished"]
    assert [v["diverged"] for v in found["variants"]] == [0, 0, 1]


def test_a_run_that_diverges_is_a_result(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config.parent / "out"
    given = ["ablate", str(config), "-o", str(folder), "--seeds", "5", "--json", "training.clip_norm=1e30"]
    given += ["--vary", 'training.schedule={kind="constant",lr=1e30}']
    for _ in range(2):  # the second time from what the first has written down
        assert cli.main(given) == 0
        answer = json.loads(capsys.readouterr().out)
        assert [v["diverged"] for v in answer["variants"]] == [0, 1]
        assert answer["variants"][1]["difference"] is None
        assert "diverged" in answer["may_be_concluded"][0]


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622)])
def test_student_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(expected, abs=5e-5)


def test_only_a_difference_beyond_the_scatter_is_called_one() -> None:
    clear = paired_difference({1: 1.0, 2: 2.0, 3: 3.0}, {1: 0.9, 2: 1.9, 3: 2.91, 4: 7.0})
    unclear = Spread.of([-0.1, 0.2, -0.15])
    assert clear is not None and clear.count == 3
    assert "better than the base" in sentence("x", clear, 0, 3)
    assert "not told apart" in sentence("x", unclear, 1, 4) and "1 of 4" in sentence("x", unclear, 1, 4)
    assert "nothing of chance" in sentence("x", Spread.of([0.3]), 0, 1)
