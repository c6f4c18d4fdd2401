"""A port in a few lines against a library's network: another way to do a thing is no fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from zoo.others.ported import VOCABULARY, Library, Port
from zoo.others.stacked import Mixture
from zoo.steps import randomise

from isoform.verify import compare, diagnose, record
from isoform.verify.subject import Subject

IDS = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))
FAULTS = {
    "theta": "rope-frequency", "backwards": "rope-pairing", "scale": "attention-scale", "merge": "head-merge",
    "no q bias": "bias-missing", "no v bias": "bias-missing", "no bias of both": "bias-missing",
    "eps": "norm-eps",
}  # fmt: skip
CHOICES = {"top one": "expert-routing", "not one": "expert-routing"}


def library(experts: bool = False, *, plain: bool = False) -> Library:
    """Weights that show everything, or zero biases and unit gains."""
    model, generator = Library(experts).double().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1
            if parameter.dim() == 2:
                parameter.copy_(noise / 2)
            else:
                parameter.copy_(float("ln" in name and "weight" in name) + noise * (0.0 if plain else 0.4))
    return model


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_another_way_is_no_fault(experts: bool, plain: bool) -> None:
    a = library(experts, plain=plain)
    found = diagnose(a, Port(a).eval(), {"input_ids": IDS}, {"tokens": IDS})
    assert found.verdict == "equivalent", str(found)
    assert compare(a, Port(a).eval(), {"input_ids": IDS}, {"tokens": IDS}).verdict != "differs"


@pytest.mark.parametrize("fault", [*FAULTS, *CHOICES])
def test_faults_are_named_in_their_layer(fault: str) -> None:
    a = library(fault in CHOICES)
    found = diagnose(a, Port(a, fault).eval(), {"input_ids": IDS}, {"tokens": IDS}, probe=False)
    assert set(found.kinds()) == {(FAULTS | CHOICES)[fault]}, str(found)
    layers = {place.layer for finding in found.findings for place in finding.where}
    assert layers == {1}, str(found)


def test_copies_of_a_shared_layer_are_no_fault() -> None:
    a = library(plain=True)
    a.layers[1] = a.layers[0]
    found = diagnose(a, Port(a).eval(), {"input_ids": IDS}, {"tokens": IDS})
    assert found.verdict == "equivalent", str(found)
    a = library(plain=True)
    found = diagnose(a, Port(a, "eps").eval(), {"input_ids": IDS}, {"tokens": IDS})
    assert set(found.kinds()) == {"norm-eps"}, str(found)


@pytest.mark.parametrize(
    ("style", "other", "fault", "kind"),
    [
        ("loop", "batched", "activation", "activation"),
        ("batched", "einsum", "bias-missing", "bias-missing"),
        ("einsum", "matrices first", "last-bias", "bias-missing"),
        ("loop", "matrices first", "gate-order", "gate-order"),
        ("batched", "batched", "weight-transpose", "weight-transpose"),
    ],
)
def test_a_fault_of_one_among_stacked_experts(style: str, other: str, fault: str, kind: str) -> None:
    a = randomise(Mixture(style)).double()
    for planted, kinds in (("", ()), (fault, (kind,))):
        b = Mixture(other, planted).double().eval()
        b.load_state_dict(a.state_dict())
        found = diagnose(a, b, {"ids": IDS}, probe=False)
        assert found.kinds() == kinds, str(found)
        for place in (p for finding in found.findings for p in finding.where):
            assert (place.layer, place.part.endswith("of expert 2")) == (1, True), str(found)


@pytest.mark.parametrize("fault", ["activation", "gate-order"])
def test_experts_whose_matrices_are_gathered(fault: str) -> None:
    a = randomise(Mixture("loop")).double()
    for planted in ("", fault):
        b = Mixture("gathered", planted).double().eval()
        b.load_state_dict(a.state_dict())
        found = diagnose(a, b, {"ids": IDS}, probe=False)
        assert found.kinds() == ((planted,) if planted else ()), str(found)
        assert all(place.layer == 1 for finding in found.findings for place in finding.where)


class _Pictures(nn.Module):
    """Pieces of pictures with a learned vector in front; its result is what is said of the picture."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.piece, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.first, self.places = (nn.Parameter(torch.zeros(1, n, 16)) for n in (1, 20))
        kind = "relu" if fault == "activation" else "gelu"
        first = fault != "norm-placement"
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, kind, 1e-6, batch_first=True, norm_first=first)
        last = nn.LayerNorm(16, eps=1e-6)
        self.layers = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=False)

    def forward(self, pieces: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(len(pieces), -1, -1), self.piece(pieces)], 1)
        start = 1 if self.fault == "position-offset" else 0
        x = self.layers(x + self.places[:, start : start + x.shape[1]])
        return self.head(x.mean(1) if self.fault == "pooling" else x[:, 0])


@pytest.mark.parametrize("fault", ["", "activation", "position-offset", "pooling"])
def test_a_vector_in_front_of_the_stream(fault: str) -> None:
    a, b = randomise(_Pictures()), _Pictures(fault).eval()
    b.load_state_dict(a.state_dict())
    pieces = torch.arange(3 * 7 * 6.0).sin().view(3, 7, 6)
    assert diagnose(a, b, {"pieces": pieces}).kinds() == ((fault,) if fault else ())


def test_a_norm_behind_a_norm_that_moved_is_no_other_epsilon() -> None:
    """With unit gains two norms in a row look like one with ε²."""
    a, b = _Pictures().eval(), _Pictures("norm-placement").eval()
    b.load_state_dict(a.state_dict())
    pieces = torch.arange(3 * 7 * 6.0).sin().view(3, 7, 6)
    assert diagnose(a, b, {"pieces": pieces}).kinds() == ("norm-placement",)


class _Frames(nn.Module):
    """Every second frame of a convolution, and attention over what is left."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.front, self.head = nn.Conv1d(6, 16, 3, stride=2, padding=1), nn.Linear(16, 5)
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.front(frames.transpose(1, 2))
        x = (x.relu() if self.fault == "activation" else nn.functional.gelu(x)).transpose(1, 2)
        return self.head(self.layers(x))


@pytest.mark.parametrize("fault", ["", "activation"])
def test_frames_in_front_of_the_stream(fault: str) -> None:
    a, b = randomise(_Frames()), _Frames(fault).eval()
    b.load_state_dict(a.state_dict())
    found = diagnose(a, b, {"frames": torch.arange(3 * 14 * 6.0).sin().view(3, 14, 6)})
    assert found.kinds() == ((fault,) if fault else ()), str(found)
    assert all(place.layer is None for finding in found.findings for place in finding.where)


class _TimeFirst(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids.t()).transpose(0, 1)


@pytest.mark.parametrize("fault", ["", "scale"])
def test_the_same_rows_with_time_first(fault: str) -> None:
    a = library()
    b, given = _TimeFirst(Port(a, fault)).eval(), ({"input_ids": IDS}, {"ids": IDS.t()})
    found = diagnose(a, b, *given)
    assert list(found.kinds()) == (["attention-scale"] if fault else []), str(found)
    assert any("[T, B]" in note for note in compare(a, b, *given).notes)


class _Both(nn.Module):
    """Reads two sequences, the result has the positions of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.table(y) + self.table(x).mean(1, keepdim=True)


class _Named(_Both):
    def forward(self, enc_ids: Tensor, dec_ids: Tensor, enc_valid: Tensor) -> Tensor:
        return super().forward(enc_ids * enc_valid, dec_ids)


def test_the_target_is_found_by_name_and_by_length() -> None:
    ids, real = torch.arange(24).view(3, 8) % 9, torch.ones(3, 8, dtype=torch.long)
    named = Subject(_Named(), {"enc_ids": ids, "dec_ids": ids[:, :5], "enc_valid": real})
    assert (named.target.name, named.source and named.source.mask) == ("dec_ids", "enc_valid")
    contents = record(_Both(), {"x": ids, "y": ids[:, :5]}).contents
    assert contents == {"target": "y", "source": "x"}
