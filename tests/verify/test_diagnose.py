"""R39: planted faults are named with their place; sound twins are not accused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from zoo.cases import IDS, SOUND, STACKED, Planted, grid, models, stacked
from zoo.packed import Packed
from zoo.steps import Config, Decoder, randomise

from isoform.errors import DataError
from isoform.verify import Recording, assert_equivalent, diagnose, record


def _grid(cases: list[Planted]) -> list:
    """A part of the grid in every run, all of it in the long one."""
    marks = [pytest.mark.long] if cases is not SOUND else []
    return [pytest.param(case, marks=marks if i % 2 else [], id=str(case)) for i, case in enumerate(cases)]


@pytest.mark.parametrize("style", ["steps", "packed"])
@pytest.mark.parametrize("case", _grid(SOUND))
def test_sound_twins_are_equivalent(case: Planted, style: str) -> None:
    a, b, ours, theirs = models(case, style)
    found = diagnose(a, b, ours, theirs)
    assert found.verdict in ("equivalent", "noise"), str(found)
    assert not found.findings


@pytest.mark.parametrize(
    ("case", "style"),
    [
        pytest.param(case, style, marks=[] if short else [pytest.mark.long], id=f"{style}:{case}")
        for case, style, short in grid()
    ],
)
def test_every_row_is_named_in_every_form(case: Planted, style: str) -> None:
    _named(case, style)


@pytest.mark.parametrize("case", _grid(STACKED))
def test_stacked_faults_are_all_named(case: Planted) -> None:
    _named(case, "packed")


@pytest.mark.parametrize(
    ("case", "style"),
    [
        pytest.param(
            case, style, marks=[pytest.mark.long] if size > 2 or i >= 2 else [], id=f"{style}:{case}"
        )
        for size, count in ((2, 30), (3, 15))
        for i, (case, style) in enumerate(stacked(size, count))
    ],
)
def test_a_sample_of_faults_together(case: Planted, style: str) -> None:
    _named(case, style)


def _named(case: Planted, style: str) -> None:
    a, b, ours, theirs = models(case, style)
    found = diagnose(a, b, ours, theirs, probe=False)
    assert found.verdict == "differs"
    assert set(found.kinds()) == set(case.found), str(found)
    layer = case.fault.get("layer")
    for finding in found.findings:
        assert finding.where and finding.where[0].reference_source
        if layer is not None:
            assert {place.layer for place in finding.where} == {layer}, str(finding)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_layer_is_named(layer: int) -> None:
    case = Planted(("attention-scale",), {"attention-scale": 1, "layer": layer})
    a, b, ours, theirs = models(case, "steps")
    (finding,) = diagnose(a, b, ours, theirs, probe=False).findings
    (place,) = finding.where
    assert place.layer == layer
    assert place.reference == f"stack.layers.{layer}.attention"
    assert "steps.py" in place.candidate_source
    assert finding.statement.startswith("the reference scales scores by 0.5 = 1/√d_head, the candidate")


def test_roles_can_be_exchanged() -> None:
    case = Planted(("activation",), {"activation": "gelu"})
    a, b, ours, theirs = models(case, "steps")
    (forward,), (back,) = (
        diagnose(x, y, i, j, probe=False).findings
        for x, y, i, j in ((a, b, ours, theirs), (b, a, theirs, ours))
    )
    assert forward.statement == "the reference applies silu, the candidate applies gelu"
    assert back.statement == "the reference applies gelu, the candidate applies silu"


def _untrained(**config: object) -> Decoder:
    """Small weights, zero biases, unit gains: what hides faults."""
    torch.manual_seed(0)
    model = Decoder(Config(**config)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.dim() > 1:
                p.mul_(0.1)
    return model


@pytest.mark.parametrize(
    ("fault", "config"),
    [("sliding-window", {"window": 6}), ("bias-missing", {})],
)
def test_the_probe_shows_what_inputs_and_weights_hide(fault: str, config: dict[str, object]) -> None:
    a = _untrained(**config)
    b = Packed(a, {fault: 1}).eval()
    before = [p.clone() for p in (*a.parameters(), *b.parameters())]
    found = diagnose(a, b, {"ids": IDS[:, :4]})
    assert [(f.kind, f.latent) for f in found.findings] == [(fault, True)]
    assert diagnose(a, b, {"ids": IDS[:, :4]}, probe=False).verdict == "equivalent"
    assert all(torch.equal(x, y) for x, y in zip(before, (*a.parameters(), *b.parameters()), strict=True))


def test_the_probe_accuses_no_sound_twin() -> None:
    a = _untrained(norm="layer")
    assert diagnose(a, Packed(a).eval(), {"ids": IDS[:, :4]}).verdict == "equivalent"


def _rotary_permutation(heads: int, width: int) -> torch.Tensor:
    """Rows of halves in the order of interleaved pairs."""
    one = torch.stack([torch.arange(width // 2), torch.arange(width // 2) + width // 2], 1).reshape(-1)
    return torch.cat([one + h * width for h in range(heads)])


def test_rotary_style_with_permuted_weights_is_equivalent() -> None:
    a = randomise(Decoder(Config()))
    b = Decoder(Config(), {"rope-pairing": 1})
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        for layer in b.stack.layers:
            for m in (layer.attention.q_proj, layer.attention.k_proj):
                order = _rotary_permutation(m.weight.shape[0] // 4, 4)
                m.weight.copy_(m.weight[order])
                m.bias.copy_(m.bias[order])
    assert diagnose(a, b.eval(), {"ids": IDS}).verdict == "equivalent"
    # … and beside a true fault it is not accused either.
    for layer in b.stack.layers:
        layer.ff.fault = {"activation": "gelu"}
    assert diagnose(a, b, {"ids": IDS}, probe=False).kinds() == ("activation",)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_rows_permuted_in_a_file_are_a_matter_of_the_rotation(qk_norm: bool) -> None:
    """The same code, W_q and W_k in the order of the other pairing: the class is named by the rotation."""
    a, b = (randomise(Decoder(Config(qk_norm=qk_norm))) for _ in range(2))
    with torch.no_grad():
        for layer in b.stack.layers:
            for m in (layer.attention.q_proj, layer.attention.k_proj):
                order = _rotary_permutation(m.weight.shape[0] // 4, 4)
                m.weight.copy_(m.weight[order])
                m.bias.copy_(m.bias[order])
            if qk_norm:
                for norm in (layer.attention.q_norm, layer.attention.k_norm):
                    norm.weight.copy_(norm.weight[_rotary_permutation(1, 4)])
    (finding,) = diagnose(a, b, {"ids": IDS}, probe=False).findings
    assert finding.kind == "rope-pairing"
    assert "the candidate pairs them 0 with 1, 2 with 3 of the reference's rows" in finding.statement


def test_scale_folded_into_the_query_projection_is_equivalent() -> None:
    a, b = randomise(Decoder(Config())), Decoder(Config(scale=1.0))
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        for layer in b.stack.layers:
            layer.attention.q_proj.weight.mul_(0.5)
            layer.attention.q_proj.bias.mul_(0.5)
    assert diagnose(a, b.eval(), {"ids": IDS}).verdict == "equivalent"
    for layer in b.stack.layers:
        layer.ff.fault = {"gate-order": 1}
    assert diagnose(a, b, {"ids": IDS}, probe=False).kinds() == ("gate-order",)


def test_value_bias_folded_into_the_output_bias_is_equivalent() -> None:
    a, b = randomise(Decoder(Config())), Decoder(Config())
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        for layer in b.stack.layers:
            x = layer.attention
            wide = x.v_proj.bias.view(2, 1, 4).expand(2, 3, 4).reshape(-1)
            x.o_proj.bias.add_(x.o_proj.weight @ wide)
            x.v_proj.bias.zero_()
            layer.ff.fault = {"activation": "gelu"}
    assert diagnose(a, b.eval(), {"ids": IDS}, probe=False).kinds() == ("activation",)


def test_permuted_feed_forward_units_are_equivalent() -> None:
    a, b = randomise(Decoder(Config())), Decoder(Config())
    b.load_state_dict(a.state_dict())
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in b.stack.layers:
            for m in (layer.ff.up, layer.ff.gate):
                m.weight.copy_(m.weight[order])
                m.bias.copy_(m.bias[order])
            layer.ff.down.weight.copy_(layer.ff.down.weight[:, order])
            layer.attention.fault = {"attention-scale": 1}
    assert diagnose(a, b.eval(), {"ids": IDS}, probe=False).kinds() == ("attention-scale",)


def test_dtypes_are_noise() -> None:
    a, b = randomise(Decoder(Config())), randomise(Decoder(Config()))
    assert diagnose(a, b.to(torch.bfloat16), {"ids": IDS}).verdict == "noise"
    assert diagnose(a.double(), randomise(Decoder(Config())), {"ids": IDS}).verdict in ("equivalent", "noise")


def test_what_was_folded_before_rounding_is_noise() -> None:
    """A factor in the token table, rounded with it: not the reference's rows, rounded, times the factor."""
    a, b = randomise(Decoder(Config(embedding_scale=24**0.5))), Decoder(Config(embedding_scale=1.0))
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.stack.table.weight.mul_(24**0.5)
        for layer in b.stack.layers:  # and the scale of the scores, in part
            layer.attention.q_proj.weight.mul_(0.3)
            layer.attention.q_proj.bias.mul_(0.3)
            layer.attention.c = Config(scale=0.5 / 0.3)
    b = b.to(torch.bfloat16).eval()
    assert diagnose(a, b, {"ids": IDS}, probe=False).verdict == "noise"
    for layer in b.stack.layers:
        layer.ff.fault = {"gate-order": 1}
    assert diagnose(a, b, {"ids": IDS}, probe=False).kinds() == ("gate-order",)


def test_a_tensor_that_is_not_the_checkpoints() -> None:
    a, b = randomise(Decoder(Config())), randomise(Decoder(Config()))
    with torch.no_grad():
        b.lm.head.weight.normal_(generator=torch.Generator().manual_seed(9))
    (finding,) = diagnose(a, b, {"ids": IDS}, probe=False).findings
    assert finding.kind == "tie-lost"
    assert finding.where[0].candidate == "lm"


def test_from_recordings(tmp_path: Path) -> None:
    case = Planted(("rope-pairing",), {"rope-pairing": 1})
    a, b, ours, theirs = models(case, "packed")
    record(a, ours, tmp_path / "a.safetensors")
    recording = Recording.load(tmp_path / "a.safetensors")
    assert diagnose(recording, b, None, theirs).kinds() == ("rope-pairing",)
    with pytest.raises(DataError, match="the candidate, Packed: no inputs given"):
        diagnose(recording, b)
    with pytest.raises(DataError, match="no such file"):
        Recording.load(tmp_path / "none.safetensors")


def test_assert_equivalent_names_the_cause() -> None:
    case = Planted(("gate-order",), {"gate-order": 1})
    a, b, ours, _ = models(case, "steps")
    assert_equivalent(a, a, ours)
    with pytest.raises(AssertionError, match="gate-order: the reference activates the gate"):
        assert_equivalent(a, b, ours)


def test_in_place_writes_through_views_are_followed() -> None:
    class Written(nn.Module):
        def __init__(self, like: Decoder) -> None:
            super().__init__()
            self.like = like

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros(*ids.shape, 31)
            logits = self.like(ids)
            whole[:, :4] = logits[:, :4]
            whole[:, 4:] = logits[:, 4:] * 2
            return whole

    a = randomise(Decoder(Config()))
    found = diagnose(a, Written(a).eval(), {"ids": IDS}, probe=False)
    assert found.kinds() == ("unexplained",)
    assert found.findings[0].where[0].part == "result"
