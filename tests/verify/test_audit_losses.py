"""R30: losses asked through ``labels`` and ``targets``: where the shift is, and what is averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isoform.verify import audit
from verify.leaky import Leaky
from verify.small import drawn

IDS = torch.arange(36).reshape(3, 12) * 7 % 29
NEXT = torch.cat([IDS[:, 1:], torch.full((3, 1), -1)], 1)


class Pairs(Leaky):
    """``forward(idx, targets)`` gives logits and loss, or the loss alone; −1 is not supervised."""

    alone, moved, average = False, 0, "tokens"

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(idx)["logits"]
        if targets is None:
            return logits if self.alone else (logits, None)
        ends = targets.shape[1] - self.moved
        flat, wanted = logits[:, :ends].flatten(0, 1), targets[:, self.moved :].flatten()
        losses = F.cross_entropy(flat, wanted, ignore_index=-1, reduction="none")
        if self.average == "rows":
            rows = losses.view(len(idx), -1), (wanted != -1).view(len(idx), -1)
            loss = (rows[0].sum(1) / rows[1].sum(1).clamp(min=1)).mean()
        else:
            loss = losses.mean() if self.average == "positions" else losses.sum() / (wanted != -1).sum()
        return loss if self.alone else (logits, loss)


def asked(inputs: dict[str, Any], **changes: Any) -> Any:
    model = drawn(Pairs())
    for name, value in changes.items():
        setattr(model, name, value)
    return audit(model, inputs, checks=["loss-shift", "loss-average"])


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("targets", "moved", "passed", "says"),
    [
        (None, 0, True, "so targets must be the next tokens"),
        (None, 1, True, "exactly one shift, inside the model"),
        (None, 2, False, "two shifts"),
        (NEXT, 0, True, "in the labels that were given"),
        (NEXT, 1, False, "shifted by 1 and the loss shifts by 1 again"),
        (IDS, 0, False, "no shift"),
        (IDS, 1, True, "inside the model"),
    ],
)
def test_shifts_of_targets(targets: Tensor | None, moved: int, passed: bool, says: str, alone: bool) -> None:
    inputs = {"idx": IDS} if targets is None else {"idx": IDS, "targets": targets}
    check = asked(inputs, moved=moved, alone=alone)["loss-shift"]
    assert check.passed is passed and says in check.statement, check.statement


@pytest.mark.parametrize("targets", [None, NEXT])
@pytest.mark.parametrize("average", ["tokens", "rows", "positions"])
def test_averages_over_targets(average: str, targets: Tensor | None) -> None:
    inputs = {"idx": IDS} if targets is None else {"idx": IDS, "targets": targets}
    check = asked(inputs, average=average)["loss-average"]
    assert check.passed is (average == "tokens"), check.statement
    assert average in check.statement


@pytest.mark.parametrize("fault", ["", "no-shift"])
def test_labels_that_are_shifted_where_the_data_is_made(fault: str) -> None:
    labels = torch.cat([IDS[:, 1:], torch.full((3, 1), -100)], 1)
    check = audit(drawn(Leaky(fault)), {"ids": IDS, "labels": labels}, checks=["loss-shift"])["loss-shift"]
    assert check.passed is (fault == "no-shift"), check.statement
    other = (IDS * 5 + 3) % 29  # labels that are no shift of the inputs say nothing of the data
    check = audit(drawn(Leaky(fault)), {"ids": IDS, "labels": other}, checks=["loss-shift"])["loss-shift"]
    assert check.passed is (fault == ""), check.statement


def test_what_is_predicted_at_padding_does_not_hide_a_shift() -> None:
    real = torch.ones_like(IDS)
    real[0, 8:] = 0
    labels = torch.cat([IDS[:, 1:], torch.full((3, 1), -100)], 1)
    labels[0, 7:] = 2  # the end of its row, where no token follows
    inputs = {"ids": IDS, "attention_mask": real, "labels": labels}
    check = audit(drawn(Leaky()), inputs, checks=["loss-shift"])["loss-shift"]
    assert check.passed is False and "shifts by 1 again" in check.statement


class Crossed(Leaky):
    """Labels beside the decoder's own inputs are paired with them as they are."""

    def forward(
        self, input_ids: Tensor, decoder_input_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        assert decoder_input_ids is not None
        return super().forward(decoder_input_ids, labels=labels)


@pytest.mark.parametrize(("fault", "passed"), [("no-shift", True), ("double-shift", False)])
def test_labels_beside_decoder_inputs(fault: str, passed: bool) -> None:
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)}
    check = audit(drawn(Crossed(fault)), inputs, checks=["loss-shift"])["loss-shift"]
    assert check.passed is passed, check.statement


class Lossless(Leaky):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        return super().forward(idx)["logits"], None


def test_a_loss_that_is_not_there() -> None:
    report = audit(drawn(Lossless()), {"idx": IDS}, checks=["loss-shift", "loss-average"])
    for name in ("loss-shift", "loss-average"):
        assert report[name].passed is None and "holds no loss" in report[name].statement
    report = audit(drawn(Leaky()), {"ids": IDS}, checks=["decode-protocol"])
    assert "no generate of its own" in report["decode-protocol"].statement
