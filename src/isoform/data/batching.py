"""What a training step reads, and the one shift there is (Algorithm 6.1, R30)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from isoform.errors import ShapeError, SupervisionError
from isoform.tokens import Tokens


def shift_right(
    targets: Int[Tensor, "batch length"], start: int | Int[Tensor, " batch"]
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """The decoder's input and its labels: ``(A, B, EOS)`` gives ``(BOS, A, B)`` and ``(A, B, EOS)``.

    This is the only shift in the system: position t reads the target before it and predicts target t.

    Args:
        targets: what is to be predicted.
        start: what stands before the first of them: one id, or one for each row (a window of running
            text starts with the id before it).

    Returns:
        Inputs and labels, each of the targets' shape.
    """
    first = targets.new_full((len(targets), 1), start) if isinstance(start, int) else start[:, None]
    return torch.cat((first.to(targets.dtype), targets[:, :-1]), dim=1), targets


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A step of sequence prediction. Contents are checked on the CPU, where batches are made.

    Args:
        decoder_input: what the decoder (or the only stack) reads, already shifted.
        labels: ``[B, T]`` what each position is to predict.
        supervised: ``[B, T]`` True where the prediction counts. A row may have none.
        rows: ``[B]`` which record each row comes from.
        source: what the encoder reads; None for a single stack.

    Raises:
        ShapeError: shapes that do not fit.
        SupervisionError: a row of padding only, a label on padding, or one inside a prefix, where it
            leaks (R23); the row and the positions are named.
    """

    decoder_input: Tokens
    labels: Int[Tensor, "batch length"]
    supervised: Bool[Tensor, "batch length"]
    rows: Int[Tensor, " batch"]
    source: Tokens | None = None

    def __post_init__(self) -> None:
        _same_shape("labels", self.labels, self.decoder_input.ids)
        _same_shape("supervised", self.supervised, self.decoder_input.ids)
        if self.labels.device.type != "cpu":
            return  # contents were checked where the batch was made; looking again would stall the device
        for name, tokens in (("decoder input", self.decoder_input), ("source", self.source)):
            if tokens is not None:
                _refuse_empty_rows(tokens, self.rows, name)
        _refuse_labels_on_padding(self.supervised, self.decoder_input, self.rows)
        if self.decoder_input.prefix is not None:
            refuse_leaks(self.supervised, self.decoder_input)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        source = None if self.source is None else self.source.to(device)
        moved = (self.decoder_input.to(device), self.labels.to(device), self.supervised.to(device))
        return Batch(*moved, rows=self.rows, source=source)

    def unsupervised_rows(self) -> int:
        """How many rows have no supervised position: allowed, and counted."""
        return int((~self.supervised.any(-1)).sum())

    def padded_tokens(self) -> int:
        """Ids in the batch, padding included, both sides."""
        return self.decoder_input.ids.numel() + (0 if self.source is None else self.source.ids.numel())


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledBatch:
    """A step of labelling what is read. Contents are checked on the CPU, where batches are made.

    Args:
        tokens: what the encoder reads.
        labels: ``[B]`` classes (sequence classification), or ``[B, T]`` tags or masked-out ids.
        supervised: of the labels' shape; True where the prediction counts.
        rows: ``[B]`` which record each row comes from.

    Raises:
        ShapeError: shapes that do not fit.
        SupervisionError: a row of padding only, or a label on padding.
    """

    tokens: Tokens
    labels: Int[Tensor, "batch *length"]
    supervised: Bool[Tensor, "batch *length"]
    rows: Int[Tensor, " batch"]

    def __post_init__(self) -> None:
        expected = self.tokens.ids if self.labels.dim() == 2 else self.tokens.ids[:, 0]
        _same_shape("labels", self.labels, expected)
        _same_shape("supervised", self.supervised, expected)
        if self.labels.device.type != "cpu":
            return
        _refuse_empty_rows(self.tokens, self.rows, "row")
        if self.labels.dim() == 2:
            _refuse_labels_on_padding(self.supervised, self.tokens, self.rows)

    def to(self, device: torch.device | str) -> LabelledBatch:
        """The same batch on another device."""
        moved = (self.tokens.to(device), self.labels.to(device), self.supervised.to(device))
        return LabelledBatch(*moved, rows=self.rows)

    def unsupervised_rows(self) -> int:
        """How many rows have no supervised position: allowed, and counted."""
        return int((~self.supervised.reshape(len(self.rows), -1).any(-1)).sum())

    def padded_tokens(self) -> int:
        """Ids in the batch, padding included."""
        return self.tokens.ids.numel()


def refuse_leaks(supervised: Bool[Tensor, "batch length"], tokens: Tokens) -> None:
    """With a prefix mask, the positions before the last one of the prefix see what they predict (R23).

    Raises:
        SupervisionError: such a position is supervised; row and positions (from 1) are named.
    """
    if tokens.prefix is None:
        return
    leaks = supervised & (tokens.places() < tokens.prefix[:, None] - 1) & tokens.real_or_ones()
    if bool(leaks.any()):
        row = int(leaks.any(-1).nonzero()[0])
        positions = (tokens.places()[row][leaks[row]] + 1).tolist()
        raise SupervisionError(
            f"batch row {row}: positions {positions} lie inside the prefix of {int(tokens.prefix[row])}"
            " and see what they are to predict; only its last one and those after it can be supervised"
        )


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands in its data: all that is needed to go on from there exactly."""

    epoch: int = 0
    batch: int = 0


@dataclasses.dataclass(frozen=True)
class BucketReport:
    """How well an epoch's batches are filled.

    Attributes:
        batches: number of batches.
        sentences: number of rows.
        real_tokens: ids that are read.
        padding_tokens: ids that only fill up rows.
    """

    batches: int
    sentences: int
    real_tokens: int
    padding_tokens: int

    @property
    def share(self) -> float:
        """Padding as a share of all ids in the batches."""
        total = self.real_tokens + self.padding_tokens
        return self.padding_tokens / total if total else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Plain numbers, the share included."""
        return {**dataclasses.asdict(self), "share": self.share}


B = TypeVar("B", covariant=True)


class Batches(Protocol[B]):
    """The batches of one part of the data. The same epoch always gives the same batches."""

    def count(self, epoch: int) -> int:
        """How many batches an epoch has."""
        ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[B]:
        """The batches of an epoch, from the given one on."""
        ...

    def report(self, epoch: int) -> BucketReport:
        """How well the epoch's batches are filled."""
        ...

    def largest(self) -> B:
        """The batch of epoch 0 with the most ids, padding included."""
        ...


def _same_shape(name: str, tensor: Tensor, ids: Tensor) -> None:
    if tensor.shape != ids.shape:
        raise ShapeError(f"{name} has shape {list(tensor.shape)}, expected {list(ids.shape)}")


def _refuse_empty_rows(tokens: Tokens, rows: Tensor, name: str) -> None:
    if tokens.length == 0 or (tokens.real is not None and not bool(tokens.real.any(-1).all())):
        bad = 0 if tokens.length == 0 else int((~tokens.real_or_ones().any(-1)).nonzero()[0])
        raise SupervisionError(f"batch row {bad} (record {int(rows[bad])}): the {name} is padding only")


def _refuse_labels_on_padding(supervised: Tensor, tokens: Tokens, rows: Tensor) -> None:
    if tokens.real is not None and bool((supervised & ~tokens.real).any()):
        bad = int((supervised & ~tokens.real).any(-1).nonzero()[0])
        raise SupervisionError(f"batch row {bad} (record {int(rows[bad])}): a label stands on padding")
