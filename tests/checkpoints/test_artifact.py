"""The artifact comes back as it went, and nothing else is taken for it (R37–R38)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isoform import config as c
from isoform.checkpoints import Bundle, load
from isoform.checkpoints.artifact import MARK
from isoform.config import folders, presets
from isoform.config.protocol import Protocol
from isoform.data import Characters, Tokenizer
from isoform.errors import ArtifactError, CheckError
from isoform.nn import build
from isoform.tokens import Tokens


def perturbed(cfg: c.ModelConfig, seed: int = 0) -> torch.nn.Module:
    model = build(cfg, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.2)
    return model.eval()


def translation(**changes: object) -> c.ModelConfig:
    base = presets.original(
        60, d_model=16, n_heads=4, ffn_width=24, n_encoder_layers=2, n_decoder_layers=2, dropout=0.1
    )
    return base.replace(**changes) if changes else base


PROTOCOL = Protocol(pad_id=0, eos_ids=(2,), start=(1,))


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return Tokenizer.train(
        Characters(vocab_size=60), ["hello wide world", "a few more letters"], where="here"
    )


@pytest.fixture
def bundle(vocabulary: Tokenizer) -> Bundle:
    cfg = translation()
    return Bundle(perturbed(cfg), cfg, vocabulary, vocabulary, PROTOCOL, {"data": {"train": "made up"}})


@pytest.fixture
def saved(bundle: Bundle, tmp_path: Path) -> Path:
    return bundle.save(tmp_path / "model")


def edit(folder: Path, change: object) -> None:
    path = folder / MARK
    state = json.loads(path.read_text(encoding="utf-8"))
    change(state)
    path.write_text(json.dumps(state), encoding="utf-8")


def rewrite(folder: Path, change: object) -> None:
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_round_trip(bundle: Bundle, saved: Path) -> None:
    back = load(saved, check=True)
    assert back.config == bundle.config
    assert back.protocol == bundle.protocol
    assert back.provenance == bundle.provenance
    assert back.tokenizer is back.source_tokenizer
    assert back.tokenizer is not None and back.tokenizer.digest == bundle.tokenizer.digest
    assert back.model.tied() == bundle.model.tied() != []
    before, after = bundle.model.state_dict(), back.model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert back.model.embedding.weight is back.model.head.weight
    assert back.report is not None and back.report.tokens > 0 and back.report.worst_layer[1] == 0.0
    assert any("greedy" in line for line in back.report.lines())


def test_tied_tensors_are_stored_once(saved: Path) -> None:
    names = load_file(saved / "model.safetensors").keys()
    assert "embedding.weight" in names
    assert not {"head.weight", "source_embedding.weight"} & names


def test_a_loaded_network_learns(saved: Path) -> None:
    model = load(saved).model
    tokens = Tokens(torch.tensor([[1, 2, 3]]))
    model(tokens, tokens).logits.sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    assert load(saved, check=True).report is not None, "the file must not change with the network"


@pytest.mark.parametrize(
    ("part", "cut"),
    [
        ("layers", lambda probe: next(iter(probe["layers"].values()))["samples"].pop()),
        ("logits", lambda probe: probe["logits"]["values"][0].pop()),
        ("greedy", lambda probe: probe["greedy"]["ids"].append(3)),
    ],
)
def test_a_probe_of_another_length_is_named(saved: Path, part: str, cut: object) -> None:
    edit(saved, lambda state: cut(state["probe"]))
    with pytest.raises(CheckError, match="another count of numbers"):
        load(saved, check=True)


@pytest.mark.parametrize(
    "name", ["bert", "albert", "gpt2", "gpt_neox", "t5", "gemma2", "qwen3_moe", "falcon", "bloom", "m2m100"]
)
def test_every_kind_of_network_has_a_probe(name: str, tmp_path: Path) -> None:
    cfg = tiny(name)
    bundle = Bundle(perturbed(cfg), cfg, None, None, Protocol(pad_id=0, eos_ids=(2,)), {})
    report = load(bundle.save(tmp_path / "m"), check=True).report
    assert report is not None
    assert report.worst_layer[1] <= 1e-12
    assert report.layers >= 4


def tiny(name: str) -> c.ModelConfig:
    """A family's preset made small."""
    cfg = presets.PRESETS[name](64)
    data = cfg.model_dump()

    def shrink(node: object) -> object:
        if isinstance(node, list | tuple):
            return [shrink(x) for x in node]
        if not isinstance(node, dict):
            return node
        node = {k: shrink(v) for k, v in node.items()}
        for key, value in {"d_model": 16, "n_layers": 2, "max_positions": 40}.items():
            if key in node:
                node[key] = value
        if "visibility" in node:
            node["variants"] = ()
            if node.get("layer_sharing"):
                node["layer_sharing"] = (0, 0)
        if "n_kv_heads" in node:
            node["n_heads"], node["n_kv_heads"], node["head_width"] = 4, 2, 8
        if node.get("kind") == "rotary":
            node["width"] = 4
        if node.get("kind") in ("two_layer", "gated"):
            node["width"] = 12
        if node.get("kind") == "experts":
            node["n_experts"], node["top_k"] = 4, 2
        if "n_token_types" in node:
            node["width"] = 16
        return node

    return c.ModelConfig.model_validate(shrink(data))


class TestRefusals:
    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match="nowhere: no such"):
            load(tmp_path / "nowhere")

    def test_no_artifact(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match=r"not an Isoform artifact|not a checkpoint"):
            load(tmp_path)

    def test_unknown_format(self, saved: Path) -> None:
        edit(saved, lambda s: s.update(format=99))
        with pytest.raises(ArtifactError, match="format 99"):
            load(saved)

    def test_missing_section(self, saved: Path) -> None:
        edit(saved, lambda s: s.pop("sharing"))
        with pytest.raises(ArtifactError, match="missing: sharing"):
            load(saved)

    @pytest.mark.parametrize(
        ("section", "value"),
        [
            ("dtypes", 5),
            ("vocabularies", {}),
            ("provenance", "x"),
            ("probe", None),
            ("probe.layers", {}),
            ("probe.precision", "float8"),
            ("probe.logits", {}),
            ("probe.texts", 3),
        ],
    )
    def test_misshapen_section(self, saved: Path, section: str, value: object) -> None:
        state = json.loads((saved / "isoform.json").read_text(encoding="utf-8"))
        *outer, last = section.split(".")
        (state[outer[0]] if outer else state)[last] = value
        (saved / "isoform.json").write_text(json.dumps(state), encoding="utf-8")
        with pytest.raises(ArtifactError, match=rf"isoform\.json: {section}.*damaged"):
            load(saved)

    def test_missing_tensor(self, saved: Path) -> None:
        rewrite(saved, lambda t: t.pop("decoder.layers.1.feed_forward.body.up.weight"))
        with pytest.raises(
            ArtifactError, match=r"missing: decoder\.layers\.1\.feed_forward\.body\.up\.weight"
        ):
            load(saved)

    def test_unknown_tensor(self, saved: Path) -> None:
        rewrite(saved, lambda t: t.update(surplus=torch.zeros(2)))
        with pytest.raises(ArtifactError, match="unknown: surplus"):
            load(saved)

    def test_misshaped_tensor(self, saved: Path) -> None:
        rewrite(saved, lambda t: t.update({"embedding.weight": torch.zeros(60, 15)}))
        with pytest.raises(ArtifactError, match=r"embedding\.weight is \[60, 15\], expected \[60, 16\]"):
            load(saved)

    def test_integers(self, saved: Path) -> None:
        rewrite(saved, lambda t: t.update({"embedding.weight": torch.zeros(60, 16, dtype=torch.int32)}))
        with pytest.raises(ArtifactError, match=r"embedding\.weight has dtype torch\.int32"):
            load(saved)

    def test_another_floating_type(self, saved: Path) -> None:
        rewrite(saved, lambda t: t.update({n: v.half() for n, v in t.items()}))
        with pytest.raises(ArtifactError, match="holds float16"):
            load(saved)

    def test_broken_tie(self, saved: Path) -> None:
        rewrite(saved, lambda t: t.update({"head.weight": t["embedding.weight"].clone()}))
        with pytest.raises(ArtifactError, match=r"broken tie: head\.weight"):
            load(saved)

    def test_other_sharing(self, saved: Path) -> None:
        edit(saved, lambda s: s.update(sharing=[]))
        with pytest.raises(ArtifactError, match="shared"):
            load(saved)

    def test_truncated(self, saved: Path) -> None:
        path = saved / "model.safetensors"
        os.truncate(path, path.stat().st_size - 9)
        with pytest.raises(ArtifactError, match="truncated or damaged"):
            load(saved)

    def test_weights_gone(self, saved: Path) -> None:
        (saved / "model.safetensors").unlink()
        with pytest.raises(ArtifactError, match="no such file"):
            load(saved)

    def test_foreign_tokenizer(self, saved: Path, tmp_path: Path) -> None:
        other = Tokenizer.train(Characters(vocab_size=60), ["another alphabet: xyz"], where="there")
        other.save(saved, "tokenizer")
        with pytest.raises(ArtifactError, match="foreign target vocabulary"):
            load(saved)

    def test_tokenizer_gone(self, saved: Path) -> None:
        (saved / "tokenizer.json").unlink()
        with pytest.raises(ArtifactError, match=r"target vocabulary: .*tokenizer\.json"):
            load(saved)

    def test_vocabulary_too_large(self, bundle: Bundle, tmp_path: Path) -> None:
        cfg = translation(embedding__vocab_size=10, source__vocab_size=10)
        bad = Bundle(perturbed(cfg), cfg, bundle.tokenizer, bundle.tokenizer, PROTOCOL, {})
        with pytest.raises(ArtifactError, match=r"vocabulary has \d+ tokens, its table 10 rows"):
            bad.save(tmp_path / "bad")
        assert not (tmp_path / "bad").exists()

    def test_protocol_beyond_the_table(self, bundle: Bundle, tmp_path: Path) -> None:
        bad = Bundle(bundle.model, bundle.config, None, None, Protocol(pad_id=0, eos_ids=(60,)), {})
        with pytest.raises(ArtifactError, match=r"protocol\.eos_ids has id 60"):
            bad.save(tmp_path / "bad")

    def test_another_configuration(self, saved: Path) -> None:
        path = saved / "config.json"
        path.write_text(
            path.read_text(encoding="utf-8").replace('"eps": 1e-05', '"eps": 1e-06'), encoding="utf-8"
        )
        with pytest.raises(ArtifactError, match="not the configuration"):
            load(saved)
        with pytest.raises(CheckError, match=r"source_embedding|encoder\.layers\.0"):
            load(saved, check=True)

    def test_moved_positions(self, saved: Path) -> None:
        path = saved / "config.json"
        text = path.read_text(encoding="utf-8")
        assert '"offset": 0' in text
        path.write_text(text.replace('"offset": 0', '"offset": 1'), encoding="utf-8")
        with pytest.raises(CheckError, match=r"positions differ at embedding\.positions"):
            load(saved, check=True)

    def test_altered_weight_is_named(self, saved: Path) -> None:
        name = "decoder.layers.1.cross_attention.body.output.bias"
        rewrite(saved, lambda t: t[name][3].add_(1e-4))
        load(saved)  # nothing about names and shapes is wrong
        with pytest.raises(CheckError, match=r"decoder\.layers\.1\.cross_attention\.output is the first"):
            load(saved, check=True)

    def test_half_precision_is_checked_with_its_own_tolerance(self, saved: Path) -> None:
        report = load(saved, check=True, dtype=torch.bfloat16).report
        assert report is not None
        assert 1e-4 < report.worst_layer[1] < report.tolerance


class TestWholeOrNotAtAll:
    def test_replaced(self, bundle: Bundle, saved: Path) -> None:
        (saved / "left-over").write_text("from before", encoding="utf-8")
        other = Bundle(perturbed(bundle.config, 5), bundle.config, None, None, PROTOCOL, {})
        other.save(saved)
        assert load(saved, check=True).tokenizer is None
        assert not (saved / "left-over").exists()
        assert [p.name for p in saved.parent.iterdir()] == ["model"]

    def test_without_exchange(self, bundle: Bundle, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(folders.sys, "platform", "other")
        bundle.save(saved)
        load(saved, check=True)
        assert [p.name for p in saved.parent.iterdir()] == ["model"]

    def test_failure_leaves_the_old_one(
        self, bundle: Bundle, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr("isoform.checkpoints.artifact.write_tokenizers", fail)
        other = Bundle(perturbed(bundle.config, 5), bundle.config, None, None, PROTOCOL, {})
        with pytest.raises(OSError, match="disk full"):
            other.save(saved)
        load(saved, check=True)
        assert [p.name for p in saved.parent.iterdir()] == ["model"]

    def test_failing_rename_is_undone(
        self, bundle: Bundle, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folders.sys, "platform", "other")
        rename = Path.rename

        def fail(self: Path, target: Path) -> Path:
            if self.suffix == ".tmp":
                raise OSError("no")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="no"):
            bundle.save(saved)
        load(saved, check=True)
        assert [p.name for p in saved.parent.iterdir()] == ["model"]

    def test_somebody_elses_folder(self, bundle: Bundle, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")
        with pytest.raises(ArtifactError, match="not empty"):
            bundle.save(tmp_path)
        assert (tmp_path / "thesis.tex").exists()

    def test_mapped_weights_survive_replacement(self, bundle: Bundle, saved: Path) -> None:
        before = load(saved)
        Bundle(perturbed(bundle.config, 5), bundle.config, None, None, PROTOCOL, {}).save(saved)
        shutil.rmtree(saved)
        assert torch.equal(before.model.embedding.weight, bundle.model.embedding.weight)
