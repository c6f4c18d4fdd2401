"""R41: each fault fails its own check and no other, with the place; the sound twin fails none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from isoform.verify import audit, example_inputs
from verify.fresh import Both, Fresh, Prefixed
from verify.small import drawn

IDS = torch.arange(36).reshape(3, 12) * 7 % 31
DECODER = {"input_ids": IDS, "attention_mask": torch.ones(3, 12, dtype=torch.long)}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 4 + [2] * 5, [0] * 12])
SOURCE = torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [1] * 9])
CROSS = {"source_ids": IDS[:, :9], "target_ids": IDS[:, 2:9], "source_mask": SOURCE}

CASES: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("ahead", {}, "causality", ["position 0 reads position 1", "blocks.1.attention.o"]),
    ("cache-position", {}, "cache", ["position 1 of row"]),
    ("beams", {}, "cache", ["after rows change places at position 6", "goes on with another past"]),
    ("dropout-in-eval", {}, "eval-determinism", ["dropout stays on"]),
    ("eps-outside", {}, "normalisation", ["non-finite gradient on a zero vector", "wrong place"]),
    ("left-padding", {}, "padding-left", ["blocks.0.attention.o"]),
    ("window-wide", {"window": 4}, "window", ["blocks.0", "4 back where its window allows 3"]),
    ("window-narrow", {"window": 4}, "window", ["no position reads 3 back at blocks.0"]),
    ("documents", {"documents": DOCUMENTS}, "documents", ["blocks.0.attention.o"]),
    ("cross-padding", CROSS, "cross-padding", ["blocks.0.cross.o"]),
    ("prefix", {"ids": IDS, "prefix_lengths": torch.tensor([4, 2, 6])}, "prefix", ["blocks.0.attention.o"]),
]


def made(fault: str, settings: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    if "prefix_lengths" in settings:
        return drawn(Prefixed(fault)), settings
    if "source_ids" in settings:
        return drawn(Both(fault)), settings
    inputs = {**DECODER, **{k: v for k, v in settings.items() if k != "window"}}
    return drawn(Fresh(fault, window=settings.get("window"))), inputs


@pytest.mark.parametrize(("fault", "settings", "check", "says"), [pytest.param(*c, id=c[0]) for c in CASES])
def test_the_fault_is_named(fault: str, settings: dict[str, Any], check: str, says: list[str]) -> None:
    found = audit(*made(fault, settings), checks=[check])[check]
    assert found.passed is False and all(words in found.statement for words in says), found.statement


@pytest.mark.long
@pytest.mark.parametrize(("fault", "settings", "check", "says"), [pytest.param(*c, id=c[0]) for c in CASES])
def test_it_fails_no_other_check(fault: str, settings: dict[str, Any], check: str, says: list[str]) -> None:
    report = audit(*made(fault, settings))
    assert [c.name for c in report.checks if c.passed is False] == [check], str(report)


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 6, 8, 9, 10)], ids=lambda case: case[2])
def test_the_sound_twin_fails_none(case: tuple[str, dict[str, Any], str, list[str]]) -> None:
    report = audit(*made("", case[1]))
    assert report.passed and report[case[2]].passed, str(report)


def test_a_window_of_which_no_configuration_speaks() -> None:
    model, inputs = made("", {"window": 4})
    del model.config.sliding_window
    assert audit(model, inputs, checks=["window"])["window"].passed is None
    for window, passed in ((3, False), (4, True), (5, False), (12, None)):
        assert audit(model, inputs, window=window, checks=["window"])["window"].passed is passed


def test_rows_that_read_each_other_are_placed() -> None:
    model, inputs = made("", {})
    model.blocks[1].down.register_forward_hook(lambda _, __, out: out + 0.1 * out.mean(0, keepdim=True))
    check = audit(model, inputs, checks=["batch-independence"])["batch-independence"]
    assert check.passed is False and "first at blocks.1.down (row 0, position" in check.statement


class Counting(Fresh):
    """Writes to the positions it is given."""

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        position_ids += 2
        x = self.dropout(self.table(input_ids) + self.places(position_ids))
        allowed = torch.ones(IDS.shape[1], IDS.shape[1]).tril().bool()[: len(x[0]), : len(x[0])]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None]
        for block in self.blocks:
            x, _ = block(x, allowed)
        return self.head(self.norm(x))


def test_a_module_that_writes_to_its_inputs() -> None:
    positions = torch.arange(12).expand(3, -1).clone()
    report = audit(drawn(Counting()), {**DECODER, "position_ids": positions})
    assert report.passed, str(report)
    assert torch.equal(positions[0], torch.arange(12))


class Masked(Fresh):
    """Its padding mask has the name that others give to a mask over positions."""

    def forward(self, ids, mask=None):
        return self.head(self.norm(self.states(ids, mask, None, None)[0]))


@pytest.mark.parametrize("length", [3, 12])  # of which one is the number of rows
def test_a_padding_mask_goes_with_its_rows(length: int) -> None:
    real = torch.arange(length) < torch.tensor([[12], [2], [9]])
    report = audit(drawn(Masked()), {"ids": IDS[:, :length], "mask": real.long()}, promise="causal")
    assert report.passed and report["batch-independence"].passed, str(report)
    assert "no row could be run alone" not in report["padding-left"].statement


class Needed(Fresh):
    """Takes no input without a mask, and counts padding where that is its fault."""

    def forward(self, ids, mask):
        counted = torch.ones_like(mask) if self.fault == "counts" else mask
        x = self.dropout(self.table(ids) + self.places((counted.cumsum(-1) - 1).clamp(min=0)))
        for block in self.blocks:
            x, _ = block(x, mask.bool()[:, None, None])
        return self.head(self.norm(x))


@pytest.mark.parametrize("fault", ["", "counts"])
def test_a_mask_that_cannot_be_left_out(fault: str) -> None:
    inputs = {"ids": IDS, "mask": torch.ones_like(IDS)}
    check = audit(drawn(Needed(fault)), inputs, checks=["padding-left"])["padding-left"]
    assert check.passed is (not fault) and "no row could be run alone" not in check.statement, check.statement


class Renamed(Fresh):
    """Late versions of transformers call the past ``cache``."""

    def forward(self, input_ids, attention_mask=None, cache=None, use_cache=False):
        x, past = self.states(input_ids, attention_mask, None, cache)
        return {"logits": self.head(self.norm(x)), "cache": past if use_cache else None}


@pytest.mark.parametrize("fault", ["", "cache-position"])
def test_a_past_of_another_name(fault: str) -> None:
    check = audit(drawn(Renamed(fault)), DECODER, checks=["cache"])["cache"]
    assert check.passed is (not fault) and "by cache, " in check.statement, check.statement


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("batch", [3, 5])
def test_as_many_rows_as_positions(batch: int) -> None:
    torch.manual_seed(0)
    model = drawn(nn.Transformer(12, 3, 1, 1, 20, batch_first=True))
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    inputs = {"src": torch.randn(batch, 5, 12), "tgt": torch.randn(batch, 5, 12)}
    masks = {"src_mask": mask, "tgt_mask": mask, "memory_mask": mask}
    report = audit(model, {**inputs, **masks}, checks=["batch-independence", "causality"])
    assert report["batch-independence"].passed and report["causality"].passed, str(report)


class Wide(nn.Module):
    """A norm over other axes, and one that takes no vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.over_rows = nn.Embedding(31, 4), nn.BatchNorm1d(4)

    def forward(self, ids):
        return self.over_rows(self.table(ids).mT).mT


class PickyNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if x.shape[0] != 3:
            raise ValueError("three rows, please")
        return x * self.gain


def test_norms_that_cannot_be_asked_are_not_passed() -> None:
    check = audit(drawn(Wide()), {"ids": IDS}, checks=["normalisation"])["normalisation"]
    assert check.passed is None and "no module looks like" in check.statement
    model = drawn(Wide())
    model.over_rows = nn.Sequential(nn.Identity())
    model.picky = PickyNorm()
    check = audit(model, {"ids": IDS}, checks=["normalisation"])["normalisation"]
    assert check.passed is None and "three rows, please" in check.statement


# Of nested tensors, and of masks of two types in one call.
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("batch_first", [False, True])
def test_single_layers_of_torch(kind: type[nn.Module], batch_first: bool) -> None:
    layer = drawn(kind(12, 3, 20, batch_first=batch_first, norm_first=True))
    report = audit(layer, example_inputs(layer))
    assert report.passed and report["reload"].passed and report["paths"].passed, str(report)
