"""Padding that no mask shows: lengths, an id that fills rows up, masks of other names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from zoo.steps import randomise

from isoform.errors import ShapeError
from isoform.verify import compare, diagnose
from isoform.verify.inner_padding import real_tokens
from isoform.verify.subject import Subject

V, D, H, PAD = 31, 24, 4, 2
IDS = torch.randint(3, V, (3, 9), generator=torch.Generator().manual_seed(5))
LENGTHS = torch.tensor([9, 6, 4])
RIGHT = torch.arange(9) < LENGTHS[:, None]
LEFT = RIGHT.flip(1)


class Network(nn.Module):
    """An encoder whose padding is found in one of four ways."""

    def __init__(self, *faults: str) -> None:
        super().__init__()
        self.faults, self.pad_id = frozenset(faults), PAD
        self.table, self.places = nn.Embedding(V, D), nn.Embedding(12, D)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(D, 3 * D), "o": nn.Linear(D, D), "n1": nn.LayerNorm(D),
                    "n2": nn.LayerNorm(D), "up": nn.Linear(D, 2 * D), "down": nn.Linear(2 * D, D),
                }
            )
            for _ in range(2)
        )  # fmt: skip

    def run(self, ids: Tensor, real: Tensor) -> Tensor:
        f = self.faults
        places = torch.arange(ids.shape[1]).expand_as(ids)
        if "position-padding" in f:
            places = (real.long().cumsum(1) - 1).clamp(min=0)
        x = self.table(ids) + self.places(places)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            q, k, v = (
                z.unflatten(-1, (H, -1)).transpose(1, 2) for z in layer["qkv"](layer["n1"](x)).chunk(3, -1)
            )
            seen = {"inverted": ~real, "ignored": torch.ones_like(real)}
            allowed = next((seen[name] for name in seen if name in f), real)
            s = q @ k.transpose(-1, -2) * (D // H) ** -(1.0 if "attention-scale" in f else 0.5)
            s = s.masked_fill(~allowed[:, None, None], -1e9)
            x = x + layer["o"]((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
            y = layer["up"](layer["n2"](x))
            x = x + layer["down"](F.relu(y) if "activation" in f else F.gelu(y))
        return x * real[..., None] if "zeroed" in f else x


class Masked(Network):
    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        return self.run(ids, keep.bool())


class Long(Network):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.run(ids, torch.arange(ids.shape[1]) < lengths[:, None])


class Inside(Network):
    def forward(self, ids: Tensor) -> Tensor:
        return self.run(ids, ids != self.pad_id)


class Unknown(Network):
    def forward(self, ids: Tensor) -> Tensor:
        return self.run(ids, ids != V - 1)


def test_one_that_shows_its_padding_tells_it_of_both() -> None:
    ids = torch.where(RIGHT, IDS.clamp(max=V - 2), V - 1)
    a = randomise(Masked())
    b = Unknown("zeroed").eval()
    b.load_state_dict(a.state_dict())
    mine, theirs = {"ids": ids, "keep": RIGHT}, {"ids": ids}
    assert not diagnose(a, b, mine, candidate_inputs=theirs).findings
    assert not diagnose(b, a, theirs, candidate_inputs=mine).findings
    assert compare(a, b, mine, candidate_inputs=theirs).verdict == "equivalent"
    assert compare(b, a, theirs, candidate_inputs=mine).verdict == "equivalent"


def _given(kind: type[Network], real: Tensor) -> dict[str, Any]:
    ids = torch.where(real, IDS, PAD)
    if kind is Masked:
        return {"ids": ids, "keep": real.long()}
    return {"ids": ids, "lengths": LENGTHS} if kind is Long else {"ids": ids}


PAIRS = [(Masked, Long, RIGHT), (Masked, Inside, LEFT), (Inside, Inside, RIGHT), (Long, Inside, RIGHT)]
PAIRS += [(Inside, Inside, LEFT), (Masked, Masked, LEFT)]
FAULTS = {
    "zeroed": "", "inverted": "mask-polarity", "ignored": "mask-polarity", "activation": "activation",
    "attention-scale": "attention-scale", "position-padding": "position-padding",
}  # fmt: skip


@pytest.mark.parametrize(("one", "two", "real"), PAIRS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_where_no_mask_is_given(
    one: type[Network], two: type[Network], real: Tensor, fault: str
) -> None:
    wanted = FAULTS[fault] if fault != "position-padding" or real is LEFT else ""
    a = randomise(one())
    b = two(fault).eval()
    b.load_state_dict(a.state_dict())
    for turned in (False, True):
        both = ((b, a), (_given(two, real), _given(one, real)))
        first, second = both if turned else (both[0][::-1], both[1][::-1])
        found = diagnose(*first, second[0], candidate_inputs=second[1])
        assert [f.kind for f in found.findings] == [wanted] * bool(wanted), str(found)
    if not wanted:
        verdict = compare(a, b, _given(one, real), candidate_inputs=_given(two, real)).verdict
        assert verdict in ("equivalent", "noise")


def _real(module: nn.Module, **given: Tensor) -> Tensor:
    subject = Subject(module, given)
    return real_tokens(subject, subject.target)


def test_what_is_padding_and_what_is_not() -> None:
    ids = torch.where(RIGHT, IDS, PAD)
    assert torch.equal(_real(Inside(), ids=ids), RIGHT)
    assert torch.equal(_real(Long(), ids=IDS, lengths=LENGTHS), RIGHT)
    assert torch.equal(_real(Masked(), ids=IDS, keep=LEFT), LEFT)
    assert torch.equal(_real(Masked(), ids=IDS, keep=LEFT.long()), LEFT)
    assert [s.name for s in Subject(Masked(), {"ids": IDS, "keep": LEFT.long()}).streams] == ["ids"]
    # An id that stands elsewhere too, in all rows, once, or that no one calls padding.
    for other in (
        torch.cat([torch.full((3, 1), PAD), ids[:, 1:]], 1),
        torch.cat([ids[:, :7], torch.full((3, 2), PAD)], 1),
        torch.cat([IDS[:, :8], torch.tensor([[5], [PAD], [5]])], 1),
        torch.where(RIGHT, IDS, V - 1),
    ):
        assert bool(_real(Inside(), ids=other).all())


def test_rows_of_nothing_are_refused_and_rows_of_padding_are_not() -> None:
    a = randomise(Inside())
    b = Inside("activation").eval()
    b.load_state_dict(a.state_dict())
    ids = torch.where(RIGHT, IDS, PAD)
    for empty in (ids[:0], ids[:, :0]):
        with pytest.raises(ShapeError, match="at least one row and one position"):
            diagnose(a, b, {"ids": empty})
    ids[0] = PAD
    assert diagnose(a, b, {"ids": ids}).kinds() == ("activation",)
