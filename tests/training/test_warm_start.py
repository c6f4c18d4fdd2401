"""Going on from trained weights, and adapters on them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from isoform import cli
from isoform.checkpoints import load
from isoform.checkpoints.adapter import is_adapter
from isoform.checkpoints.transplant import transplant
from isoform.errors import ArtifactError, ConfigError, IsoformError
from isoform.nn import Transformer, build
from isoform.nn.linear import Linear, Packed
from isoform.nn.lora import attach, factors, merge, projections
from isoform.tokens import Tokens
from isoform.training import read_run, train
from training import toys

PAIRS = """
[model]
preset = "pre_ln"
d_model = 12
n_heads = 2
ffn_width = 20
n_encoder_layers = 1
n_decoder_layers = 1
[data]
kind = "parallel"
format = { kind = "tsv", source = 1, target = 2 }
train = "pairs.tsv"
validation = "pairs.tsv"
[tokenizer.shared]
kind = "characters"
[training]
seed = 3
steps = 3
batches = { kind = "tokens", max_tokens = 120 }
schedule = { kind = "constant", lr = 1e-2 }
"""
ON = PAIRS.replace(
    PAIRS[PAIRS.index("[model]") : PAIRS.index("[data]")], '[model]\ncheckpoint = "one/artifact"\n'
)
ON = ON.replace('[tokenizer.shared]\nkind = "characters"\n', "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with data and a small run that has ended."""
    words = [f"{a}{b}" for a in "abcde" for b in "fgh"]
    (tmp_path / "pairs.tsv").write_text("".join(f"{w}\t{w[::-1]}\n" for w in words))
    (tmp_path / "labels.tsv").write_text("".join(f"{w}\t{w[0]}\n" for w in words))
    run(tmp_path, PAIRS, "one")
    return tmp_path


def run(folder: Path, text: str, name: str, *overrides: str):
    path = folder / f"{name}.toml"
    path.write_text(text)
    return train(read_run(path, overrides), folder / name, base=folder, quiet=True)


def weights(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_run_goes_on_from_an_artifact_with_its_tokenizer(folder: Path) -> None:
    first = load(folder / "one" / "artifact")
    result = run(
        folder, ON, "two", "training.schedule.lr=1e-12", "model.change={'decoder.layer.residual_dropout'=0.1}"
    )
    second = load(folder / "two" / "artifact", check=True)
    for name, value in weights(first.model).items():
        torch.testing.assert_close(weights(second.model)[name], value, rtol=0, atol=1e-9)
    assert second.tokenizer is not None and first.tokenizer is not None
    assert second.tokenizer.digest == first.tokenizer.digest and second.protocol == first.protocol
    assert second.config.decoder is not None and second.config.decoder.layer.residual_dropout == 0.1
    start = second.provenance["start"]
    assert start["new"] == [] == start["dropped"] and start["checkpoint"].endswith("one/artifact")
    assert (
        run(
            folder,
            ON,
            "two",
            "training.schedule.lr=1e-12",
            "model.change={'decoder.layer.residual_dropout'=0.1}",
        ).test
        == result.test
    )


def test_a_new_head_on_an_encoder(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    encoder = """
[model]
preset = "bert"
d_model = 12
n_heads = 2
ffn_width = 20
n_layers = 1
max_positions = 8
n_token_types = 0
[data]
kind = "text"
documents = "lines"
train = "words.txt"
validation = "words.txt"
[tokenizer.shared]
kind = "characters"
specials = { extra = ["<mask>"] }
[training]
seed = 3
steps = 2
masking = { rate = 0.5 }
batches = { kind = "tokens", max_tokens = 60 }
schedule = { kind = "constant", lr = 1e-2 }
"""
    (folder / "words.txt").write_text("abc\nbca\ncab\nabcab\n")
    run(folder, encoder, "mlm")
    on = """
[model]
checkpoint = "mlm/artifact"
head = { kind = "sequence_labels", pooling = "mean", pooler = "none", bias = true }
[data]
kind = "labelled"
format = { kind = "tsv", text = 1, label = 2 }
train = "labels.tsv"
validation = "labels.tsv"
[training]
seed = 3
steps = 2
batches = { kind = "tokens", max_tokens = 60 }
schedule = { kind = "constant", lr = 1e-9 }
"""
    (folder / "labels.tsv").write_text("abc\tx\nbca\ty\ncab\tz\n")
    path = folder / "cls.toml"
    path.write_text(on)
    train(read_run(path), folder / "cls", base=folder)
    found, mlm = load(folder / "cls" / "artifact"), load(folder / "mlm" / "artifact")
    assert found.config.head is not None and found.config.head.kind == "sequence_labels"
    for name, value in weights(mlm.model).items():
        if not name.startswith("head."):
            torch.testing.assert_close(weights(found.model)[name], value, rtol=0, atol=1e-7)
    start = found.provenance["start"]
    assert set(start["new"]) == {"head.labels.weight", "head.labels.bias"} and start["dropped"]
    assert all(name.startswith("head.") for name in start["dropped"])
    assert "new, with random values: head.labels.weight" in capfd.readouterr().err
    assert found.provenance["labels"] == ["x", "y", "z"]
    # With adapters, a head that would stay random is refused.
    lora = 'training.lora={rank=2, alpha=4.0, targets=["*.feed_forward.body.up"]}'
    with pytest.raises(ConfigError, match=r"head.labels.* would stay random"):
        run(folder, on, "idle", lora)
    result = run(folder, on, "adapted", lora.replace("]}", '], learn_whole=["head.*"]}'))
    assert result.artifact is not None
    state = json.loads((result.artifact / "adapter.json").read_text())
    assert state["learnt_whole"] == ["head.labels.weight", "head.labels.bias"]
    load(result.artifact)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.checkpoint=nowhere",), "nowhere: no such file"),
        (("model.change={d_model=16}",), "model: one/artifact"),
        (("model.change={'encoder.n_layers'=2}",), "the checkpoint has nothing, .* only the head may differ"),
        (('tokenizer={shared={kind="characters"}}',), "it comes with model.checkpoint"),
        (('training.lora={rank=2, alpha=1.0, targets=["*.upp"]}',), r"no linear map is named '\*.upp'"),
        (
            ('training.lora={rank=2, alpha=1.0, targets=["*.up"]}', 'training.freeze=["head.*"]'),
            "beside lora",
        ),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(IsoformError, match=message):
        run(folder, ON, "two", *overrides)


def test_only_factors_learn_and_the_merged_network_is_the_adapted_one(folder: Path) -> None:
    base = load(folder / "one" / "artifact")
    lora = 'training.lora={rank=3, alpha=6.0, targets=["*.feed_forward.body.*", "decoder.*.query"]}'
    result = run(folder, ON, "two", lora, "training.seed=5", "training.ema=0.5")
    assert result.artifact == folder / "two" / "adapter" and is_adapter(result.artifact)
    assert not (folder / "two" / "artifact").exists()
    merged, state = load(result.artifact), json.loads((result.artifact / "adapter.json").read_text())
    changed = {
        name
        for name, value in weights(base.model).items()
        if not torch.equal(value, weights(merged.model)[name])
    }
    maps = {
        f"{side}.layers.0.feed_forward.body.{way}.weight"
        for side in ("encoder", "decoder")
        for way in ("up", "down")
    }
    assert maps < changed and len(changed) > len(maps)
    assert all("query" in name or "qkv" in name for name in changed - maps)
    assert all(".query" in name or "feed_forward" in name for name in state["projections"])
    size = sum(f.stat().st_size for f in result.artifact.glob("*.safetensors"))
    assert 0 < size < (folder / "one" / "artifact" / "model.safetensors").stat().st_size
    # Of a packed map only the chosen rows move.
    for name, module in merged.model.named_modules():
        if isinstance(module, Packed) and f"{name}.weight" in changed:
            old = base.model.get_submodule(name)
            assert isinstance(old, Packed)
            for part in module.parts:
                assert torch.equal(module.part(part), old.part(part)) == (part != "query")
    again = run(folder, ON, "two", lora, "training.seed=5", "training.ema=0.5")
    assert again.artifact == result.artifact
    # A network of its own is made of both on request.
    assert cli.main(["import", str(result.artifact), str(folder / "merged")]) == 0
    whole = weights(load(folder / "merged", check=True).model)
    assert all(torch.equal(value, whole[name]) for name, value in weights(merged.model).items())
    # Another base is refused.
    run(folder, PAIRS, "other", "training.seed=9")
    state["base"]["path"] = str(folder / "other" / "artifact")
    (result.artifact / "adapter.json").write_text(json.dumps(state))
    with pytest.raises(ArtifactError, match="learnt on other weights"):
        load(result.artifact)
    state["base"]["path"] = str(folder / "one" / "artifact")
    for change, message in (
        ({"base": "x"}, "base: expected a table"),
        ({"rank": "a"}, "rank: should be a valid integer"),
        ({"protocol": [1]}, "protocol: expected a table"),
        ({"learnt_whole": ["nope"]}, "no parameter 'nope'"),
    ):
        (result.artifact / "adapter.json").write_text(json.dumps({**state, **change}))
        with pytest.raises(ArtifactError, match=message):
            load(result.artifact)


def test_adapters_are_their_formula_and_merge_to_the_bit() -> None:
    model = toys.pair_model(dropout=0.0)
    plain = copy.deepcopy(model)
    names = attach(model, rank=2, alpha=3.0, targets=["*.up", "*.output", "*.value"], seed=1)
    assert {n.rpartition(".")[2] for n in names} == {"up", "output", "value"}
    ids = Tokens(torch.tensor([[4, 5, 6]])), Tokens(torch.tensor([[7, 8]]))
    assert torch.equal(model(ids[1], source=ids[0]).logits, plain(ids[1], source=ids[0]).logits)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if ".parametrizations.weight.0." in n
    }
    generator = torch.Generator().manual_seed(2)
    for name, factor in factors(model).items():
        with torch.no_grad():
            factor.copy_(torch.rand(factor.shape, generator=generator) - 0.5)
        assert factor.shape[name.endswith(".up")] != 0
    adapted = model(ids[1], source=ids[0]).logits
    assert not torch.allclose(adapted, plain(ids[1], source=ids[0]).logits)
    given = {name: value.detach().clone() for name, value in factors(model).items()}
    merge(model)
    assert torch.equal(model(ids[1], source=ids[0]).logits, adapted)
    assert weights(model).keys() == weights(plain).keys() and all(p.requires_grad for p in model.parameters())
    for name, (owner, part) in projections(model):
        one, two = model.get_submodule(owner), plain.get_submodule(owner)
        assert isinstance(one, Linear | Packed) and isinstance(two, Linear | Packed)
        mine = one.part(part) if isinstance(one, Packed) else one.weight
        before = two.part(part) if isinstance(two, Packed) else two.weight
        expected = before
        if f"{name}.up" in given:
            expected = before + 1.5 * given[f"{name}.up"] @ given[f"{name}.down"]
        torch.testing.assert_close(mine, expected)
    x = torch.rand(3, 12, generator=generator)
    assert F.linear(x, next(model.parameters())).isfinite().all()


def test_only_heads_may_differ() -> None:
    model = toys.pair_model()
    wide = build(toys.pair_config().replace(**{"encoder.layer.feed_forward.width": 21}), seed=1)
    with pytest.raises(ArtifactError, match=r"feed_forward.*the checkpoint has \[20, 12\], .* \[21, 12\]"):
        transplant(model, wide)
