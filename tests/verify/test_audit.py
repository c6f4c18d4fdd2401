"""R41: every promise that a model breaks is found and placed, and none is held against a sound one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isoform.config import presets
from isoform.errors import ConfigError
from isoform.nn import build
from isoform.tokens import Tokens
from isoform.verify import audit
from verify.leaky import Leaky, step

BROKEN = {
    "off-by-one": "causality",
    "unmasked": "causality",
    "head-merge": "causality",
    "mask-ignored": "padding-left",
    "position-padding": "padding-left",
    "batch-mixing": "batch-independence",
    "dropout-mode": "eval-determinism",
    "dropout-off": "train-dropout",
    "path-difference": "paths",
    "masked-row-nan": "masked-rows",
    "norm-eps": "normalisation",
    "untied": "ties",
    "double-shift": "loss-shift",
    "no-shift": "loss-shift",
    "mean-of-means": "loss-average",
}


def small(fault: str = "") -> tuple[Leaky, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = Leaky(fault)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, {"ids": torch.randint(1, 29, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.long)}


def test_a_sound_decoder_passes_everything() -> None:
    model, inputs = small()
    report = audit(model, inputs, step=step(model))
    assert [c.name for c in report.checks if c.passed is False] == []
    unchecked = {c.name for c in report.checks if c.passed is None}
    assert unchecked == {
        "prefix", "documents", "window", "cross-padding", "train-dropout", "decode-protocol"
    }  # fmt: skip
    assert all(c.statement for c in report.checks)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_promise_is_found(fault: str) -> None:
    model, inputs = small(fault)
    report = audit(model, inputs)
    assert report[BROKEN[fault]].passed is False, str(report)
    if fault not in ("dropout-mode", "batch-mixing", "head-merge", "mask-ignored"):  # which break others too
        assert [c.name for c in report.checks if c.passed is False] in (
            [BROKEN[fault]],
            ["padding-left", "masked-rows"],  # a left-padded row starts with queries that read nothing
        ), str(report)


def test_the_leak_is_placed() -> None:
    model, inputs = small("off-by-one")
    check = audit(model, inputs, checks=["causality"])["causality"]
    leak = check.evidence["changed_leaks"][0]
    assert leak["module"] == "blocks.1.out"
    assert leak["key"] == leak["query"] + 1
    assert "blocks.1.out" in check.statement
    assert check.evidence["changed_leaking"] == 6  # one place ahead, from each of six positions
    assert check.evidence["gradient_leaks"][0]["module"] == "blocks.1.out"


def test_a_wrong_step_is_placed() -> None:
    model, inputs = small()
    check = audit(model, inputs, step=step(model, ahead=1), checks=["cache"])["cache"]
    assert check.passed is False
    assert check.evidence["position"] == 1


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", ["", "path-difference", "mean-of-means", "double-shift", "ahead", "untied"])
def test_half_precision_hides_nothing(fault: str, kind: torch.dtype) -> None:
    model, inputs = small(fault)
    model = model.to(kind)
    if fault == "ahead":
        model.places.weight.data.mul_(8)
    report = audit(model, inputs, step=step(model, ahead=int(fault == "ahead")))
    expected = {"ahead": "cache"}.get(fault) or BROKEN.get(fault)
    assert [c.name for c in report.checks if c.passed is False] == [expected] * bool(fault), str(report)
    assert report["loss-shift"].passed is not None and report["loss-average"].passed is not None


def test_weights_mode_and_gradients_are_left_alone() -> None:
    model, inputs = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.train()
    model.blocks[0].eval()
    audit(model, inputs)
    assert model.training and not model.blocks[0].training and model.blocks[1].training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_unknown_check() -> None:
    model, inputs = small()
    with pytest.raises(ConfigError, match="did you mean 'causality'"):
        audit(model, inputs, checks=["causalty"])


class TwoWide(nn.Module):
    """Exercise 6.9: with two features and eps 0 the last norm hides what attention leaked."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.attend = nn.Identity()
        self.register_buffer("w1", torch.tensor([[1.0, 0, 1], [0, 1, -1]]))
        self.register_buffer("w2", torch.tensor([[1.0, 0], [0, 1], [1, -1]]))
        self.register_buffer("head", torch.tensor([[1.0, 0, -1], [0, 1, 1]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def ln(v: torch.Tensor) -> torch.Tensor:
            c = v - v.mean(-1, keepdim=True)
            return c / c.square().mean(-1, keepdim=True).sqrt()

        h = ln(x)
        scores = h @ h.transpose(-1, -2) / 2**0.5
        if self.causal:
            scores = scores.masked_fill(~torch.ones(2, 2, dtype=torch.bool).tril(), float("-inf"))
        u = x + self.attend(scores.softmax(-1) @ h)
        return ln(u + torch.relu(ln(u) @ self.w1) @ self.w2) @ self.head


def test_a_leak_that_the_output_hides() -> None:
    x = torch.tensor([[[1.0, 3], [4, 2]]])
    assert torch.allclose(TwoWide(True)(x), TwoWide(False)(x), atol=1e-6)
    check = audit(TwoWide(False), {"x": x}, promise="causal", checks=["causality"])["causality"]
    assert check.passed is False
    assert "final output does not show it" in check.statement
    assert audit(TwoWide(True), {"x": x}, promise="causal", checks=["causality"])["causality"].passed


def test_what_nobody_promised_is_not_held_against_a_model() -> None:
    x = torch.tensor([[[1.0, 3], [4, 2]]])
    check = audit(TwoWide(False), {"x": x}, checks=["causality"])["causality"]
    assert check.passed is None and "promise='causal'" in check.statement


ROWS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 10, 11], [12, 13, 14, 15, 16]]


def test_our_own_networks() -> None:
    tokens = Tokens.from_lists(ROWS, pad_id=28)
    source = Tokens.from_lists([[3, 4], [5, 6, 7, 8], [9]], pad_id=28)
    cfg = presets.original(29, d_model=24, n_heads=6, ffn_width=40, n_encoder_layers=2, n_decoder_layers=2)
    report = audit(build(cfg, seed=1), {"tokens": tokens, "source": source})
    assert report.passed, str(report)
    for name in (
        "causality",
        "padding-left",
        "padding-right",
        "cross-padding",
        "cache",
        "reload",
        "ties",
        "paths",
    ):
        assert report[name].passed, str(report)


def test_window_prefix_and_documents() -> None:
    cfg = presets.mistral(29, d_model=24, n_heads=6, n_kv_heads=2, ffn_width=40, n_layers=2, window=3)
    report = audit(
        build(cfg, seed=1), {"tokens": Tokens(torch.randint(0, 29, (2, 9)))}, checks=["window", "causality"]
    )
    assert report["window"].passed and report["causality"].passed
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    packed = Tokens(torch.randint(0, 29, (1, 9)), documents=documents)
    assert audit(build(cfg, seed=1), {"tokens": packed}, checks=["documents"])["documents"].passed
    prefixed = presets.gpt2(
        29, d_model=24, n_heads=6, ffn_width=40, n_layers=2, max_positions=16, visibility="prefix"
    )
    tokens = Tokens(torch.randint(0, 29, (2, 6)), prefix=torch.tensor([3, 2]))
    assert audit(build(prefixed, seed=1), {"tokens": tokens}, checks=["prefix"])["prefix"].passed


@pytest.mark.parametrize(("claimed", "check"), [(2, "window"), (None, "documents"), (None, "prefix")])
def test_a_rule_that_is_not_kept(claimed: int | None, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration claims a rule; the stack runs under another."""
    from isoform.nn import stack
    from isoform.visibility import Bidirectional, Causal, Padding

    cfg = presets.mistral(29, d_model=24, n_heads=6, n_kv_heads=2, ffn_width=40, n_layers=2, window=3)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)
    tokens = Tokens(torch.randint(0, 29, (2, 9)), documents=documents if check == "documents" else None)
    model = build(cfg, seed=1)
    if check == "window":
        model.decoder.kinds = [(5, *kind[1:]) for kind in model.decoder.kinds]
    elif check == "documents":
        monkeypatch.setitem(stack.RULES, "causal", Causal() & Padding())
    else:
        cfg = presets.gpt2(
            29, d_model=24, n_heads=6, ffn_width=40, n_layers=2, max_positions=16, visibility="prefix"
        )
        model = build(cfg, seed=1)
        tokens = Tokens(torch.randint(0, 29, (2, 6)), prefix=torch.tensor([3, 2]))
        monkeypatch.setitem(stack.RULES, "prefix", Bidirectional() & Padding())
    assert audit(model, {"tokens": tokens}, checks=[check])[check].passed is False


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_stands_at_padding_is_not_compared() -> None:
    """Without gradients `nn.TransformerEncoder` leaves zeros at padding, with them something else."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 6, 40, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 5] = True
    x = torch.randn(2, 6, 24)
    with torch.no_grad():
        fast = encoder(x, src_key_padding_mask=padding)
    assert not torch.allclose(fast[:, 5], encoder(x, src_key_padding_mask=padding)[:, 5], atol=1e-3)
    assert audit(encoder, {"src": x, "src_key_padding_mask": padding}, checks=["paths"])["paths"].passed


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fused_path_that_hooks_would_turn_off_is_run() -> None:
    """A mean over all positions reads the zeros that the fused path leaves at padding."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(24, 6, 40, batch_first=True)
            self.table, self.encoder = nn.Embedding(11, 24), nn.TransformerEncoder(layer, 2)

        def forward(self, ids: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
            return self.encoder(self.table(ids), src_key_padding_mask=padding_mask).mean(1, keepdim=True)

    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    ids = torch.arange(12).view(2, 6) % 11
    check = audit(Mean().eval(), {"ids": ids, "padding_mask": padding}, checks=["paths"])["paths"]
    assert check.passed is False
    assert "no gradient" in check.statement


def _softmax(scores: Tensor, value: Tensor) -> Tensor:
    return scores.softmax(-1) @ value


def _flat(scores: Tensor, value: Tensor) -> Tensor:
    weights = F.dropout(scores.softmax(-1), 0.1, training=False)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view_as(value)


def _labelled(scores: Tensor, value: Tensor) -> Tensor:
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value.transpose(1, 2)).transpose(1, 2)


def _fused(scores: Tensor, value: Tensor) -> Tensor:
    places = torch.eye(scores.shape[-1], dtype=scores.dtype).expand_as(scores)
    return F.scaled_dot_product_attention(places, places, value, attn_mask=scores, scale=0.0)


def _divided_last(scores: Tensor, value: Tensor) -> Tensor:
    """The largest score, masked ones included, is in both the product and the sum."""
    weights = (scores.nan_to_num(neginf=-100) - 10 * scores.nan_to_num(neginf=0).amax(-1, keepdim=True)).exp()
    return torch.matmul(weights, value) / weights.sum(-1, keepdim=True)


class _Inline(nn.Module):
    """Two layers without a module; nothing of what the second one's attention gives is left in the output."""

    def __init__(self, attend: Any, ahead: int, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(11.0 * width).view(11, width).sin())
        self.attend, self.ahead = attend, ahead

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids]
        for ahead in (0, self.ahead):
            h = x.unflatten(-1, (2, -1)).transpose(1, 2)
            allowed = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril(ahead)
            scores = (h @ h.mT).masked_fill(~allowed, -torch.inf)
            x = torch.tanh(self.attend(scores, h).transpose(1, 2).flatten(2))
        return torch.where(x.abs() > 2, x, 1.0)


@pytest.mark.parametrize("attend", [_softmax, _flat, _labelled, _fused, _divided_last])
@pytest.mark.parametrize("ahead", [0, 1])
def test_attention_that_nothing_else_shows(attend: Any, ahead: int) -> None:
    ids = torch.tensor([[1, 5, 2, 8, 3], [4, 4, 9, 0, 6]])
    model = _Inline(attend, ahead).eval()
    check = audit(model, {"ids": ids}, promise="causal", checks=["causality"])["causality"]
    assert check.passed is not bool(ahead), check.statement
    if ahead:
        leak = check.evidence["changed_leaks"][0]
        assert leak["key"] == leak["query"] + 1 and check.evidence["changed_leaking"] == 4
        assert "test_audit.py" in leak["module"] and "time 2 of 2" in leak["module"]
        assert "the final output does not show it" in check.statement


@pytest.mark.parametrize("attend", [_softmax, _flat, _labelled, _fused])
def test_as_many_heads_or_features_as_positions(attend: Any) -> None:
    for width, length in ((10, 5), (8, 2), (4, 2)):
        ids = torch.arange(3 * length).view(3, length) * 3 % 11
        check = audit(_Inline(attend, 0, width), {"ids": ids}, promise="causal", checks=["causality"])
        assert check["causality"].passed, check["causality"].statement


class _Summed(nn.Module):
    """Weights that are no averages; the sum with the stream is too small a step to turn a sign."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(22.0).view(11, 2).sin() + 0.1)
        self.hidden = hidden

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids]
        square = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        y = (x @ x.mT).tanh() * (square if self.hidden else square.tril()) @ x
        return (x + 1e-3 * y).sign() @ self.table.t()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_sum_between_modules_shows_a_leak(hidden: bool) -> None:
    ids = torch.tensor([[1, 5, 2, 8, 3], [4, 4, 9, 0, 6]])
    check = audit(_Summed(hidden).eval(), {"ids": ids}, promise="causal", checks=["causality"])["causality"]
    assert check.passed is not hidden, check.statement
    assert not hidden or ("test_audit.py" in check.statement and "does not show it" in check.statement)


class _Scores(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class _Apart(nn.Module):
    """Scores come out of a module of their own and are masked behind it; heads as many as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores, self.split = nn.Embedding(11, 10), _Scores(), nn.Unflatten(-1, (5, 2))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.split(self.table(ids)).transpose(1, 2)
        scores = self.scores(h, h).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ h).transpose(1, 2).flatten(2)


def test_scores_before_they_are_masked_are_no_leak() -> None:
    ids = torch.tensor([[1, 5, 2, 8, 3], [4, 4, 9, 0, 6]])
    check = audit(_Apart().eval(), {"ids": ids}, promise="causal", checks=["causality"])["causality"]
    assert check.passed, check.statement
