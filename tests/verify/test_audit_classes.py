"""R41: audits of other people's classes: nothing is held against them; what is planted in them is found."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isoform.verify import audit, example_inputs
from verify.small import Plain

# Of nested tensors, and of masks of two types in one call.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

HIDDEN = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 40,
}  # fmt: skip
BART = {
    "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {
    "vocab_size": 61, "d_model": 24, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 3,
    "decoder_start_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40}

BLOOM = {"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 3}

NEVER = {"prefix", "documents"}  # only inputs of ours say what these need
PLAIN = NEVER | {"window", "cross-padding"}
NO_LOSS = {"ties", "loss-shift", "loss-average"}
NO_STEPS = {"cache", "decode-protocol"}


def theirs(name: str, settings: dict[str, Any], kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**settings))


def x_transformer(kind: str, **settings: Any) -> nn.Module:
    x = pytest.importorskip("x_transformers")
    stack = getattr(x, kind)(dim=24, depth=2, heads=3, **settings)
    absolute = "rotary_pos_emb" not in settings
    return x.TransformerWrapper(num_tokens=61, max_seq_len=40, use_abs_pos_emb=absolute, attn_layers=stack)


# name: how it is made, what cannot be checked on it, what fails on it as it is
CLASSES: dict[str, tuple[Any, set[str], set[str]]] = {
    "torch-encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 6, 40, batch_first=True), 2),
        PLAIN | NO_LOSS | {"causality"} | NO_STEPS, set(),
    ),
    "torch-both-time-first": (
        lambda: nn.Transformer(24, 6, 2, 2, 40), NEVER | NO_LOSS | {"window"} | NO_STEPS, set(),
    ),
    "torch-both": (
        lambda: nn.Transformer(24, 6, 2, 2, 40, batch_first=True),
        NEVER | NO_LOSS | {"window"} | NO_STEPS, set(),
    ),
    "gpt2": (lambda: theirs("GPT2", GPT2, "LMHeadModel"), PLAIN, set()),
    "llama": (lambda: theirs("Llama", HIDDEN, "ForCausalLM"), PLAIN | {"train-dropout", "ties"}, set()),
    "mistral": (
        lambda: theirs("Mistral", {**HIDDEN, "num_key_value_heads": 3, "sliding_window": 4}, "ForCausalLM"),
        NEVER | {"cross-padding", "train-dropout", "ties"}, set(),
    ),
    "bert": (lambda: theirs("Bert", HIDDEN, "ForMaskedLM"), PLAIN | {"causality"} | NO_STEPS, set()),
    "t5": (lambda: theirs("T5", T5, "ForConditionalGeneration"), NEVER | {"window"}, set()),
    # Its decoder numbers places, not tokens, and takes no position ids.
    "bart": (
        lambda: theirs("Bart", BART, "ForConditionalGeneration"), NEVER | {"window"}, {"padding-left"},
    ),
    # Its absolute positions count places too; with positions in the attention alone it keeps the promise.
    "x-relative": (
        lambda: x_transformer("Decoder", attn_dim_head=16, rotary_pos_emb=True),
        PLAIN | NO_LOSS | {"train-dropout"} | NO_STEPS, set(),
    ),
    "x-decoder": (
        lambda: x_transformer("Decoder"), PLAIN | NO_LOSS | {"train-dropout"} | NO_STEPS, {"padding-left"},
    ),
    "x-encoder": (
        lambda: x_transformer("Encoder"), PLAIN | NO_LOSS | {"causality", "train-dropout"} | NO_STEPS,
        {"padding-left"},
    ),
    # Layers of two kinds: each is held to its own window.
    "gemma2": (
        lambda: theirs(
            "Gemma2", {**HIDDEN, "num_key_value_heads": 3, "head_dim": 8, "sliding_window": 4}, "ForCausalLM"
        ),
        NEVER | {"cross-padding", "train-dropout"}, set(),
    ),
    "gpt-neo": (
        lambda: theirs("GPTNeo", {
            "vocab_size": 61, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "window_size": 4,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 40,
        }, "ForCausalLM"),
        NEVER | {"cross-padding", "train-dropout"}, set(),
    ),
    "modernbert": (
        lambda: theirs("ModernBert", {**HIDDEN, "pad_token_id": 0, "local_attention": 4}, "ForMaskedLM"),
        NEVER | {"causality", "cross-padding", "train-dropout"} | NO_STEPS, set(),
    ),
    "bloom": (
        lambda: theirs("Bloom", BLOOM, "ForCausalLM"),
        PLAIN | {"train-dropout"}, set(),
    ),
    # Begins its decoder inputs with the last label, a language.
    "mbart": (
        lambda: theirs("MBart", BART, "ForConditionalGeneration"), NEVER | {"window"}, {"padding-left"},
    ),
    # Counts tokens by the padding id, whatever the mask says; leaves layers out in training.
    "m2m": (lambda: theirs("M2M100", BART, "ForConditionalGeneration"), NEVER | {"window"}, set()),
    # Adds to the positions it is given, in place.
    "xglm": (
        lambda: theirs("XGLM", {
            "vocab_size": 61, "d_model": 24, "num_layers": 2, "attention_heads": 3, "ffn_dim": 20,
            "max_position_embeddings": 40,
        }, "ForCausalLM"),
        PLAIN, set(),
    ),
    # A language model by its name that reads both ways.
    "xlnet": (
        lambda: theirs("XLNet", {
            "vocab_size": 61, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 20,
        }, "LMHeadModel"),
        PLAIN | {"causality"} | NO_STEPS, set(),
    ),
    "x-alibi": (
        lambda: x_transformer("Decoder", alibi_pos_bias=True, rotary_pos_emb=False),
        PLAIN | NO_LOSS | {"train-dropout"} | NO_STEPS, set(),
    ),
    "plain": (
        Plain,
        PLAIN | NO_LOSS | {"padding-left", "padding-right", "train-dropout", "masked-rows"} | NO_STEPS, set(),
    ),
}  # fmt: skip
ALWAYS = ("torch-encoder", "torch-both-time-first", "gpt2", "t5", "plain")


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = CLASSES[name][0]()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * (torch.rand(parameter.shape, generator=noise) - 0.5)
    return model.eval()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else [pytest.mark.long]) for n in CLASSES]
)
def test_sound_classes(name: str) -> None:
    model = made(name)
    report = audit(model, example_inputs(model))
    _, unchecked, failed = CLASSES[name]
    assert {c.name for c in report.checks if c.passed is None} == unchecked, str(report)
    assert {c.name for c in report.checks if c.passed is False} == failed, str(report)


def ahead(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


def far(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :9]), x[:, :-9]], 1)


def only(when: bool) -> float:
    return 1.01 if when else 1.0


CHANGES: dict[str, Any] = {
    "causality": lambda x: x + 0.01 * ahead(x),
    "padding": lambda x: x + 0.01 * x.cumsum(1).roll(1, 0).mean() + 0.01 * x.mean(1, keepdim=True),
    "batch": lambda x: x + 0.01 * x.mean(0, keepdim=True),
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "path": lambda x: x * only(not torch.is_grad_enabled()),
    "step": lambda x: x * only(x.shape[1] == 1),
    "window": lambda x: x + 0.01 * far(x),
    "trim": lambda x: x if torch.is_grad_enabled() else x[:, :-1],
}
PLANTED = [
    ("gpt2", "causality", "transformer.h.1.mlp", "causality"),
    ("llama", "causality", "model.layers.0.self_attn.o_proj", "causality"),
    ("t5", "causality", "decoder.block.0.layer.2", "causality"),
    ("bart", "causality", "model.decoder.layers.1", "causality"),
    ("x-decoder", "causality", "attn_layers.layers.1.1", "causality"),
    ("plain", "causality", "layers.1.down", "causality"),
    ("torch-both", "causality", "decoder.layers.1", "causality"),
    ("bert", "padding", "bert.encoder.layer.0", "padding-right"),
    ("torch-encoder", "padding", "layers.1", "padding-left"),
    ("x-encoder", "padding", "attn_layers.layers.1.1", "padding-right"),
    ("bart", "padding", "model.encoder.layers.0", "cross-padding"),
    ("t5", "padding", "encoder", "cross-padding"),
    ("bert", "batch", "bert.encoder.layer.1", "batch-independence"),
    ("torch-encoder", "batch", "", "batch-independence"),
    ("llama", "dropout", "model.layers.1.mlp", "eval-determinism"),
    ("gpt2", "path", "lm_head", "paths"),
    ("torch-encoder", "trim", "", "paths"),
    ("gpt2", "step", "transformer.h.0.mlp", "cache"),
    ("bart", "step", "model.decoder.layers.1.fc1", "cache"),
    ("mistral", "window", "model.layers.1.mlp", "window"),
]


def first(change: Any) -> Any:
    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return change(out)
        if isinstance(out, tuple):
            return (change(out[0]), *out[1:])
        out[0 if isinstance(out, list) else next(iter(out))] = change(next(iter(out.values())))
        return out

    return hook


@pytest.mark.parametrize(
    ("name", "change", "path", "check"),
    [pytest.param(*case, marks=[pytest.mark.long] if i % 3 else []) for i, case in enumerate(PLANTED)],
)
def test_planted_in_a_class(name: str, change: str, path: str, check: str) -> None:
    model = made(name)
    with contextlib.closing(_Hook(model.get_submodule(path), CHANGES[change])):
        found = audit(model, example_inputs(model), checks=[check])[check]
    assert found.passed is False, found.statement
    if check == "causality":
        assert found.evidence["changed_leaks"][0]["module"].startswith(path), found.statement
    elif check == "window":
        assert path.startswith(found.evidence["module"]), found.statement
    elif check.startswith("padding"):
        assert path in found.statement


class _Hook:
    def __init__(self, module: nn.Module, change: Any) -> None:
        self._handle = module.register_forward_hook(first(change))

    def close(self) -> None:
        self._handle.remove()


def test_a_mask_that_is_not_passed_on() -> None:
    model = made("torch-both-time-first")

    def drop(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "memory_key_padding_mask": None}

    model.decoder.register_forward_pre_hook(drop, with_kwargs=True)  # pyright: ignore
    check = audit(model, example_inputs(model), checks=["cross-padding"])["cross-padding"]
    assert check.passed is False and "multihead_attn" in check.statement


def test_a_tie_that_is_claimed_and_not_there() -> None:
    model: Any = made("gpt2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert audit(model, example_inputs(model), checks=["ties"])["ties"].passed is False


def test_dropout_that_is_configured_and_never_acts() -> None:
    model = made("torch-encoder")
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.forward = lambda x: x
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    check = audit(model, example_inputs(model), checks=["train-dropout"])["train-dropout"]
    assert check.passed is False


class Unmasked(nn.Module):
    """Takes a mask of a kind of its own, which no padding can be made for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.dim() != 4:
            raise ValueError("mask: expected [B, 1, T, T]")
        return self.inner(ids)


def test_what_cannot_be_run_is_not_passed() -> None:
    report = audit(Unmasked(), example_inputs(Unmasked()))
    for name in ("padding-left", "padding-right", "masked-rows"):
        assert report[name].passed is None and "expected [B, 1, T, T]" in report[name].statement


def _starts_elsewhere(model: Any) -> None:
    model.generation_config.decoder_start_token_id = 5


def _forces_the_first(model: Any) -> None:
    model.generation_config.forced_bos_token_id = 7


def _counts_from_one(model: Any) -> None:
    forward = model.forward
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(20 * torch.eye(40, 24, dtype=torch.float64))

    def late(input_ids: Tensor, past_key_values: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        past = past_key_values is not None and position_ids is not None and input_ids.shape[1] == 1
        position_ids = position_ids + 1 if past else position_ids
        return forward(input_ids, past_key_values=past_key_values, position_ids=position_ids, **rest)

    model.forward = late


@pytest.mark.parametrize(
    ("name", "change", "passed", "says"),
    [
        pytest.param("t5", _starts_elsewhere, False, "generation starts with 5", id="start"),
        pytest.param("gpt2", _counts_from_one, False, "where the full pass scores", id="positions"),
        pytest.param("t5", _forces_the_first, True, "greedy choices", id="forced"),
    ],
)
def test_generation_follows_the_full_pass(name: str, change: Any, passed: bool, says: str) -> None:
    model = made(name).double()
    change(model)
    check = audit(model, example_inputs(model), checks=["decode-protocol"])["decode-protocol"]
    assert check.passed is passed and says in check.statement, check.statement


def tiny(name: str, attention: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**{**HIDDEN, **more})
    config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


WINDOWED = {"num_key_value_heads": 1, "sliding_window": 4}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_a_padded_query_reads_is_nobodys(attention: str) -> None:
    """Behind a row's end a window holds padding alone, and eager attention then reads everything alike."""
    report = audit(model := tiny("Mistral", attention, **WINDOWED), example_inputs(model))
    assert report.passed and report["causality"].passed and report["window"].passed, str(report)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_format_survives_save_and_load(kind: torch.dtype, tmp_path: Any) -> None:
    """Rotary frequencies stay in float32 where a class loads itself in half precision."""
    model = tiny("Llama", "eager").to(kind)
    model.lm_head.weight.data += 1e-9  # which float32 does not hold
    model.save_pretrained(tmp_path)
    for one in (model, type(model).from_pretrained(tmp_path, torch_dtype=kind)):
        check = audit(one, example_inputs(one), checks=["reload"])["reload"]
        assert check.passed, check.statement


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_saved(kind: torch.dtype) -> None:
    model = tiny("Llama", "eager").to(kind)
    model.model.norm.register_parameter("more", nn.Parameter(torch.ones(24, dtype=kind)))
    model.model.norm.register_forward_hook(lambda m, _, out: out * m.more)
    model.model.norm.more.data[3] = 1.01
    check = audit(model, example_inputs(model), checks=["reload"])["reload"]
    assert check.passed is False and "the output differs" in check.statement


def test_noise_that_is_no_dropout_is_not_held_against_a_model() -> None:
    model = made("torch-encoder")
    inputs = example_inputs(model)

    def jitter(m: nn.Module, _: Any, out: Tensor) -> Tensor:
        return out * torch.empty_like(out).uniform_(0.9, 1.1) if m.training else out

    model.layers[0].linear1.register_forward_hook(jitter)
    check = audit(model, inputs, checks=["paths"])["paths"]
    assert check.passed and "training mode" in check.does_not_show
    assert "training mode, dropout 0" not in check.statement


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_was_changed_after_it_was_built_is_no_other_path(name: str) -> None:
    model: Any = made(name)
    layer = model.transformer.h[1].mlp if name == "gpt2" else model.model.layers[1].mlp
    with contextlib.closing(_Hook(layer, lambda x: 1.1 * x)):
        check = audit(model, example_inputs(model), checks=["paths"])["paths"]
    assert check.passed and "attention eager, attention sdpa" in check.does_not_show, check
    assert "attention sdpa" in audit(model, example_inputs(model), checks=["paths"])["paths"].statement


def test_other_peoples_errors_are_one_line() -> None:
    from isoform.errors import DataError
    from isoform.verify import compare

    class Fails(Plain):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.gone

    class Narrow(Plain):
        def forward(self, ids: Tensor) -> Tensor:
            assert self.table.weight.dtype == torch.float32, "one format alone"
            return super().forward(ids) * {2: 1.0}[len(ids)]

    class Picky(Plain):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * {132: 1.0}[int(ids.sum())]

    ids = torch.arange(24).reshape(2, 12) % 12
    report = audit(Picky(), {"ids": ids}, promise="causal")
    assert report["causality"].passed is None and "it could not be run" in report["causality"].statement
    report = audit(Narrow(), {"ids": ids}, promise="causal")
    assert report["causality"].passed, str(report)
    assert "cannot be run with row 0 alone" in report["batch-independence"].statement
    for run in (lambda: audit(Fails(), {"ids": ids}), lambda: compare(Plain(), Fails(), {"ids": ids})):
        with pytest.raises(DataError, match=r"Fails.forward fails on these inputs: AttributeError: .*gone"):
            run()
