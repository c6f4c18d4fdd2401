"""What a model reads: token ids, which of them are real, and where each one stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from isoform.errors import ShapeError

Layout = Literal["full", "right", "left", "any"]
TENSORS = ("ids", "real", "documents", "prefix", "token_types", "position_ids")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """A batch of token sequences, padded on either side.

    Args:
        ids: ``[B, T]`` token ids. What stands at padded places is never read.
        real: ``[B, T]`` True where a token is real; None means that every token is.
        documents: ``[B, T]`` number of the document a token belongs to, for packed rows (R21).
        prefix: ``[B]`` how many leading real tokens form the condition of a prefix decoder (6.33).
        token_types: ``[B, T]`` segment ids for models with a token-type table.
        position_ids: ``[B, T]`` to be given only when the positions differ from the derived ones,
            e.g. to agree with an implementation that numbers padding; default: see `positions`.
        layout: what is known about the padding without reading the tensors. ``"full"``: none;
            ``"right"`` / ``"left"``: only on that side; ``"any"``: unknown. Derived when omitted, and checked
            where the tensors can be read at no cost.

    Raises:
        ShapeError: tensors that do not fit each other, or a layout that the padding does not have.
    """

    ids: Int[Tensor, "batch length"]
    real: Bool[Tensor, "batch length"] | None = None
    documents: Int[Tensor, "batch length"] | None = None
    prefix: Int[Tensor, " batch"] | None = None
    token_types: Int[Tensor, "batch length"] | None = None
    position_ids: Int[Tensor, "batch length"] | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.ids.dim() != 2:
            raise ShapeError(f"Tokens.ids has shape {list(self.ids.shape)}, expected [batch, length]")
        if self.ids.is_floating_point() or self.ids.dtype == torch.bool:
            raise ShapeError(f"Tokens.ids has dtype {self.ids.dtype}, expected integers")
        for name in ("real", "documents", "token_types", "position_ids"):
            value = getattr(self, name)
            if value is not None and value.shape != self.ids.shape:
                raise ShapeError(
                    f"Tokens.{name} has shape {list(value.shape)}, Tokens.ids {list(self.ids.shape)}"
                )
        if self.prefix is not None and self.prefix.shape != self.ids.shape[:1]:
            raise ShapeError(
                f"Tokens.prefix has shape {list(self.prefix.shape)}, expected [{self.ids.shape[0]}]"
            )
        if self.real is not None and self.real.dtype != torch.bool:
            raise ShapeError(
                f"Tokens.real has dtype {self.real.dtype}, expected bool with True for a real token"
            )
        object.__setattr__(self, "layout", _layout(self.real, self.layout))

    @classmethod
    def from_lists(
        cls,
        rows: Sequence[Sequence[int]],
        *,
        pad_id: int,
        side: Literal["right", "left"] = "right",
        device: torch.device | str | None = None,
    ) -> Tokens:
        """Pad rows of unequal length with `pad_id` on the given side."""
        length = max((len(row) for row in rows), default=0)
        ids = torch.full((len(rows), length), pad_id, dtype=torch.long)
        real = torch.zeros((len(rows), length), dtype=torch.bool)
        for i, row in enumerate(rows):
            place = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
            ids[i, place] = torch.as_tensor(row, dtype=torch.long)
            real[i, place] = True
        if all(len(row) == length for row in rows):
            return cls(ids.to(device), layout="full")
        return cls(ids.to(device), real.to(device), layout=side)

    @property
    def batch(self) -> int:
        """Number of rows B."""
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        """Padded length T."""
        return self.ids.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self.ids.device

    def real_or_ones(self) -> Bool[Tensor, "batch length"]:
        """``real``, written out."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.real is None else self.real

    def lengths(self) -> Int[Tensor, " batch"]:
        """Real tokens a row."""
        return self.real_or_ones().sum(-1)

    def places(self) -> Int[Tensor, "batch length"]:
        """Number of real tokens before each one in its row: 0, 1, 2 … whatever the padding side.

        Padding gets the place of the last real token before it (0 when there is none), so that it
        always indexes a valid position. Rows of packed documents keep counting across documents.
        """
        if self.real is None:
            return torch.arange(self.length, device=self.device).expand(self.batch, -1)
        return (self.real.long().cumsum(-1) - 1).clamp(min=0)

    def positions(self) -> Int[Tensor, "batch length"]:
        """The positions fed to the position encoding: places, restarted at each document."""
        if self.position_ids is not None:
            return self.position_ids
        places = self.places()
        if self.documents is None:
            return places
        documents = self.documents
        if self.real is not None:  # a document goes on behind padding inside it
            last = torch.where(self.real, torch.arange(self.length, device=self.device), 0).cummax(-1).values
            documents = documents.gather(-1, last)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return places - torch.where(starts, places, 0).cummax(-1).values

    def rows(self) -> list[list[int]]:
        """The real ids of each row, as ragged lists."""
        real = self.real_or_ones().tolist()
        return [
            [i for i, r in zip(ids, keep, strict=True) if r]
            for ids, keep in zip(self.ids.tolist(), real, strict=True)
        ]

    def to(self, device: torch.device | str) -> Tokens:
        """The same tokens on another device."""
        return self._each(lambda x: x.to(device))

    def select(self, rows: Int[Tensor, " n"]) -> Tokens:
        """The given rows, in the given order (repeats allowed)."""
        return self._each(lambda x: x.index_select(0, rows))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        given = {name: getattr(self, name) for name in TENSORS}
        return dataclasses.replace(self, **{n: change(x) for n, x in given.items() if x is not None})

    def padded(self, side: Literal["right", "left"]) -> Tokens:
        """The same rows with all padding moved to one side; real tokens keep their order."""
        if self.layout in ("full", side):
            return self
        real = self.real_or_ones()
        order = torch.sort((~real if side == "right" else real).to(torch.uint8), dim=-1, stable=True).indices
        moved = {
            name: None if value is None else value.gather(-1, order)
            for name in ("ids", "real", "documents", "token_types", "position_ids")
            for value in (real if name == "real" else getattr(self, name),)
        }
        return dataclasses.replace(self, **moved, layout=side)


def _layout(real: Tensor | None, given: Layout | None) -> Layout:
    """Where the padding is. ``given`` is trusted only where reading is dear: compiling, or off the CPU."""
    if real is None:
        return "full"
    if torch.compiler.is_compiling() or real.device.type != "cpu":
        return given or "any"
    fits: list[Layout] = ["any"]
    if not bool((~real[:, 1:] & real[:, :-1]).any()):
        fits.insert(0, "left")
    if not bool((real[:, 1:] & ~real[:, :-1]).any()):
        fits.insert(0, "right")
    if bool(real.all()):
        return "full"
    if given is not None and given not in fits:
        raise ShapeError(f"Tokens.layout is {given!r}, but the padding of Tokens.real is {fits[0]!r}")
    return fits[0] if given in (None, "any") else given
