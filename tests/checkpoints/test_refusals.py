"""A checkpoint that is not understood in full is refused, in one line that names what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isoform import config as c
from isoform.checkpoints import Bundle, export, load
from isoform.checkpoints.families import FAMILIES
from isoform.checkpoints.huggingface import read_config
from isoform.checkpoints.weights import skeleton
from isoform.config import presets
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError
from isoform.nn import build


def llama(**changes: Any) -> c.ModelConfig:
    base = presets.llama(
        40, d_model=16, n_heads=4, n_kv_heads=2, ffn_width=12, n_layers=2, tied=True, eps=1e-5
    )
    return base.replace(**changes) if changes else base


def bundle_of(cfg: c.ModelConfig) -> Bundle:
    return Bundle(
        build(cfg, seed=0).eval(), cfg, None, None, Protocol(pad_id=0, eos_ids=(2,), start=(1,)), {}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export(bundle_of(llama()), tmp_path / "hf", family="llama")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**table, **changes}), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_it_is_fine_before(folder: Path) -> None:
    assert load(folder).config == llama()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not supported; did you mean 'llama'"),
        ({"model_type": None}, "config.json: no model_type, so no checkpoint of a known family"),
        ({"architectures": ["LlamaForCausalLMs"]}, "class 'LlamaForCausalLMs' is not supported"),
        ({"hidden_act": "gelu_10"}, "hidden_act 'gelu_10' is not supported"),
        ({"hidden_size": "16"}, "hidden_size is '16', expected a whole number"),
        ({"logit_scale": 2.0}, "not understood, and possibly a change of the function: logit_scale = 2.0"),
        ({"rope_scaling": {"rope_type": "longest", "factor": 2.0}}, "rope_scaling of type 'longest'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "config.json: short_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "power": 1}},
            "rope_scaling: not understood: power",
        ),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"head_dim": 3}, "config.json: Rotary: rotary width 3 must be even: channels rotate in pairs"),
        ({"num_key_value_heads": 3}, "config.json: Attention: n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"num_hidden_layers": -1}, "config.json: Stack: Input should be greater than 0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.json: factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "could not convert string to float"),
        ({"rope_scaling": 3}, "config.json: cannot be understood"),
        ({"num_attention_heads": 0}, "config.json: "),
        ({"architectures": 5}, "config.json: cannot be understood"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_configurations(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize("ids", ["end", [-3], {"a": 1}])
def test_token_ids(folder: Path, ids: Any) -> None:
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=ids)
    refused(folder, "token ids: ")


@pytest.mark.parametrize("name", [["llama"], 3, "lama"])
def test_model_type(folder: Path, name: Any) -> None:
    edit_config(folder, model_type=name)
    refused(folder, "model_type .* is not supported")


def test_unknown_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(2)}))
    refused(folder, r"unknown: model\.layers\.0\.extra\.weight")


def test_missing_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    refused(folder, r"missing: model\.layers\.1\.self_attn\.k_proj\.weight")


def test_wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.zeros(17)}))
    refused(folder, r"model\.norm\.weight is \[17\], expected \[16\]")


def test_integers(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.zeros(16, dtype=torch.int8)}))
    refused(folder, r"model\.norm\.weight has dtype torch\.int8")


def test_tied_copies_may_be_there_but_must_agree(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(folder)
    edit_tensors(folder, lambda t: t["lm_head.weight"][3].add_(1e-6))
    refused(folder, r"lm_head\.weight differs from model\.embed_tokens\.weight")


def test_the_table_alone_may_be_called_by_its_other_name(folder: Path) -> None:
    before = load(folder).model.embedding.weight.clone()
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(load(folder).model.embedding.weight, before)


def test_base_model_names(folder: Path) -> None:
    """Files of the bare model lack its prefix."""
    before = load(folder).model.state_dict()
    path = folder / "model.safetensors"
    tensors = {n.removeprefix("model."): t.clone() for n, t in load_file(path).items()}
    save_file(tensors, path)
    after = load(folder).model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)


class TestShards:
    @pytest.fixture
    def sharded(self, folder: Path) -> Path:
        tensors = load_file(folder / "model.safetensors")
        names = sorted(tensors)
        parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
        for file, content in parts.items():
            save_file({n: tensors[n].clone() for n in content}, folder / file)
        index = {"weight_map": {n: file for file, content in parts.items() for n in content}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        (folder / "model.safetensors").unlink()
        return folder

    def edit(self, folder: Path, change: Callable[[dict[str, str]], object]) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text(encoding="utf-8"))
        change(index["weight_map"])
        path.write_text(json.dumps(index), encoding="utf-8")

    def test_whole(self, sharded: Path) -> None:
        expected = build(llama(), seed=0).state_dict()
        found = load(sharded).model.state_dict()
        assert all(torch.equal(expected[n], found[n]) for n in expected)

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "b.safetensors").unlink()
        refused(sharded, r"names shards that are not there: b\.safetensors")

    def test_truncated_shard(self, sharded: Path) -> None:
        path = sharded / "b.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        refused(sharded, r"b\.safetensors: truncated or damaged")

    def test_index_names_a_tensor_that_is_nowhere(self, sharded: Path) -> None:
        self.edit(sharded, lambda m: m.update(ghost="a.safetensors"))
        refused(sharded, "names tensors that are in no shard: ghost")

    def test_shard_with_more_than_the_index_says(self, sharded: Path) -> None:
        self.edit(sharded, lambda m: m.pop("model.norm.weight"))
        refused(sharded, r"does not say that b\.safetensors holds model\.norm\.weight")

    @pytest.mark.parametrize(
        "text", ["{}", "[]", "no", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', '{"weight_map": 3}']
    )
    def test_not_an_index(self, sharded: Path, text: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        refused(sharded, "not an index of shards")


class TestPickles:
    @pytest.fixture
    def pickled(self, folder: Path) -> Path:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        return folder

    def test_refused_unless_asked_for(self, pickled: Path) -> None:
        refused(pickled, "a pickle, which can run code; ask for it with unpickle")
        expected = build(llama(), seed=0).state_dict()
        found = load(pickled, unpickle=True).model.state_dict()
        assert all(torch.equal(expected[n], found[n]) for n in expected)

    def test_files_of_old_versions(self, pickled: Path) -> None:
        path = pickled / "pytorch_model.bin"
        torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
        expected = build(llama(), seed=0).state_dict()
        found = load(pickled, unpickle=True).model.state_dict()
        assert all(torch.equal(expected[n], found[n]) for n in expected)

    def test_code_is_never_run(self, pickled: Path) -> None:
        torch.save({"x": Trap()}, pickled / "pytorch_model.bin")
        with pytest.raises(ArtifactError, match="not a file of tensors"):
            load(pickled, unpickle=True)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        raise_it: Any = exec
        return raise_it, ("raise SystemExit",)


class TestTypes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_stays(self, folder: Path, dtype: torch.dtype) -> None:
        edit_tensors(folder, lambda t: t.update({n: v.to(dtype) for n, v in t.items()}))
        assert {p.dtype for p in load(folder).model.parameters()} == {dtype}
        assert {p.dtype for p in load(folder, dtype=torch.float32).model.parameters()} == {torch.float32}

    def test_mixed_types_are_widened(self, folder: Path) -> None:
        edit_tensors(
            folder,
            lambda t: t.update({n: v.to(torch.bfloat16) for n, v in t.items() if "norm" not in n}),
        )
        assert {p.dtype for p in load(folder).model.parameters()} == {torch.float32}


class TestExport:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"decoder__layer__residual_scale": 0.5}, r"decoder\.layer\.residual_scale"),
            ({"decoder__layer__attention__softcap": 5.0}, r"decoder\.layer\.attention\.softcap"),
            ({"decoder__visibility": "prefix"}, r"decoder\.visibility"),
            ({"embedding__scale": 3.0}, r"embedding\.scale"),
        ],
    )
    def test_what_the_format_cannot_say(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(
            ArtifactError, match=f"the llama format cannot say this configuration: .*{message}"
        ):
            export(bundle_of(llama(**changes)), tmp_path / "out", family="llama")
        assert not (tmp_path / "out").exists()

    def test_a_family_is_found(self, tmp_path: Path) -> None:
        cfg = presets.gpt2(40, d_model=16, n_heads=4, ffn_width=12, n_layers=2, max_positions=20)
        export(bundle_of(cfg), tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"
        assert load(tmp_path / "out").config == cfg

    def test_no_family_fits(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match="no known family says this configuration"):
            export(bundle_of(llama(embedding__scale=3.0)), tmp_path / "out")

    def test_unknown_family_and_format(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match="no family 'lama'"):
            export(bundle_of(llama()), tmp_path / "out", family="lama")
        with pytest.raises(ArtifactError, match="a family is for the format hf, not for 'onnx'"):
            export(bundle_of(llama()), tmp_path / "out", to="onnx", family="llama")
        with pytest.raises(
            ArtifactError, match="cannot export to 'gguf'; expected one of hf, torch, ctranslate2, onnx"
        ):
            export(bundle_of(llama()), tmp_path / "out", to="gguf")  # type: ignore[arg-type]


def test_rope_parameters_of_both_generations(folder: Path) -> None:
    edit_config(folder, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    first = load(folder).config
    path = folder / "config.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    for key in ("rope_theta", "rope_scaling"):
        table.pop(key)
    table["rope_parameters"] = {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(table), encoding="utf-8")
    assert load(folder).config == first
    rotary = first.stack.layer.attention.positions
    assert rotary.theta == 500.0
    assert rotary.scaling == c.LinearScaling(factor=2.0)


LEFT_OVERS = {
    "gpt2": {"_num_labels": 1, "n_special": 0, "predict_special_tokens": True},
    "gpt_neox": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "custom_pipelines": {}},
    "falcon": {"ff_factor": 4},
    "starcoder2": {"activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5},
    "llama": {"max_sequence_length": 2048, "is_llama_config": True, "transformers.js_config": {}},
    "qwen2": {"use_mrope": False, "_attn_implementation_autoset": True},
    "marian": {"_num_labels": 3, "extra_pos_embeddings": 61},
}


@pytest.mark.parametrize("family", LEFT_OVERS)
def test_left_overs_of_published_files(family: str, tmp_path: Path) -> None:
    """Keys that files of the family hold, and that its class does not read."""
    config = getattr(presets, family)(vocab_size=61)
    table = {**FAMILIES[family].write(config), "model_type": family}
    for name, more in (("plain", {}), ("published", LEFT_OVERS[family])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**table, **more}))
    assert read_config(tmp_path / "published")[2] == read_config(tmp_path / "plain")[2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 8}},
            "write it beside the table",
        ),
        ({"rope_scaling": {"original_max_position_embeddings": 64}}, "factor is missing"),
        ({"rope_scaling": {"factor": 2.0}}, (64, 2.0)),
        ({"rope_scaling": {"factor": 2.0}, "original_max_position_embeddings": 16}, (16, 4.0)),
        ({"rope_parameters": {"factor": 2.0, "original_max_position_embeddings": 8}}, (8, 2.0)),
        ({"rope_parameters": {"original_max_position_embeddings": 8}}, (8, 8.0)),
    ],
)
def test_longrope_of_both_generations(
    folder: Path, changes: dict[str, Any], expected: str | tuple[int, float]
) -> None:
    """They look for the original length in different places, and take the factor from different ones."""
    lists = {"rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 2.5]}
    tables = {k: {**v, **lists} if isinstance(v, dict) else v for k, v in changes.items()}
    edit_config(folder, max_position_embeddings=64, **tables)
    if isinstance(expected, str):
        refused(folder, expected)
        return
    rotary = load(folder).config.stack.layer.attention.positions
    original, factor = expected
    assert rotary.scaling.original_length == original
    assert rotary.scaling.attention_factor == pytest.approx(
        (1 + math.log(factor) / math.log(original)) ** 0.5
    )


def test_peak_memory_of_rearranged_weights(tmp_path: Path) -> None:
    """Weights that are rearranged are read one rule at a time, so little is ever held twice."""
    import subprocess
    import sys

    cfg = presets.llama(2000, d_model=512, n_heads=8, ffn_width=1024, n_layers=24, tied=True)
    folder = export(bundle_of(cfg), tmp_path / "big", family="llama")
    weights = (folder / "model.safetensors").stat().st_size
    script = (
        "import sys, isoform\n"
        "from isoform.checkpoints import huggingface, load\n"
        "def peak():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith('VmHWM'))\n"
        "load(sys.argv[2]); before = peak()\n"
        "bundle = load(sys.argv[1])\n"
        "total = sum(float(p.sum()) for p in bundle.model.parameters())\n"
        "print(peak() - before)\n"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    small = export(bundle_of(llama()), tmp_path / "small", family="llama")
    out = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(small)], capture_output=True, text=True, check=True
    )
    assert int(out.stdout) <= 1.15 * weights + 20e6, f"{int(out.stdout) / weights:.2f} × the weights"


def test_sizes_that_no_tensor_can_have_are_one_line() -> None:
    """They come from damaged files; nothing is allocated before they are looked at."""
    config = presets.llama(vocab_size=2**40, d_model=2**32, n_heads=2, n_kv_heads=2, ffn_width=8, n_layers=1)
    with pytest.raises(ArtifactError, match="no network has the sizes") as caught:
        skeleton(config)
    assert "\n" not in str(caught.value)
