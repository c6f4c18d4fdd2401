"""R39: what is one function compares as one, in any style of code; what is not, parts where it parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from isoform.errors import DataError, ShapeError
from isoform.verify import compare, record
from verify.small import IDS, Other, Plain, drawn, pair

INPUTS = {"ids": IDS}


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_other_styles_of_one_function(form: str) -> None:
    """Concatenated, transposed, permuted weights, gains less one, edits in place, other modules."""
    a, b = pair(form=form)
    found = compare(a, b, INPUTS)
    assert found.verdict == "equivalent" and found.first_divergence is None, str(found)
    names = [row.name for row in found.rows]
    assert names.count("self-attention context") == names.count("feed-forward input map") == 2
    assert names[0] == "token vectors" and names[-1] == "result"
    assert all(row.shape[:2] == (3, 8) for row in found.rows)


def test_layers_that_run_twice_against_their_copies() -> None:
    a, b = pair(times=2)
    found = compare(a, b, INPUTS)
    assert found.verdict == "equivalent" and found.first_divergence is None, str(found)
    assert sum(row.name == "self-attention context" for row in found.rows) == 4


def test_the_first_divergence_and_its_profile() -> None:
    a, b = pair()
    with torch.no_grad():
        b.parts[12 + 3][5] += 0.1  # the bias of the second layer's attention output, one channel
    found = compare(a, b, INPUTS)
    first = found.first_divergence
    assert found.verdict == "differs" and first is not None
    assert (first.name, first.layer, first.reference) == ("self-attention output", 1, "layers.1.o")
    channels = found.profiles["channel"]
    assert [i for i, error in enumerate(channels) if error > 1e-9] == [5]
    assert set(found.profiles) == {"row", "position", "channel", "head"}
    assert found.to_dict()["first_divergence"]["name"] == first.name
    assert "≠" in str(found)


def test_another_order_of_axes_is_said() -> None:
    a, b = pair(time_first=True)
    found = compare(a, b, INPUTS)
    assert found.verdict == "equivalent"
    assert found.notes == ("the reference gives [B, T], the candidate [T, B]: compared as [B, T]",)


def test_another_vocabulary_and_other_data_are_said() -> None:
    a = drawn(Plain().double())
    b = drawn(Plain(vocabulary=33).double())
    assert "a result has 31 features in the reference, 33 in the candidate" in compare(a, b, INPUTS).notes
    found = compare(a, a, INPUTS, {"ids": IDS.flip(0)})
    assert found.verdict == "differs"
    assert found.notes == (
        "the two read other token ids at 16 of 24 real positions of the target: not the same data",
    )
    with pytest.raises(ShapeError, match="not the same batch and length"):
        compare(a, a, INPUTS, {"ids": IDS[:, :6]})


class Half(nn.Module):
    """In float64 but for a norm that is written in float32."""

    def __init__(self, like: Plain, factor: float = 1.0) -> None:
        super().__init__()
        self.like, self.factor = like, factor

    def forward(self, ids):
        x = self.like.table(ids)
        for layer in self.like.layers:
            x = layer(x)
        x = nn.functional.layer_norm(x.float(), (12,), eps=1e-5).double()
        return self.like.head((x * self.like.norm.weight + self.like.norm.bias) * self.factor)


def test_rounding_is_that_of_the_coarsest_part() -> None:
    a = drawn(Plain().double())
    assert compare(a, Half(a), INPUTS).verdict == "equivalent"
    assert compare(a, Half(a, 1.001), INPUTS).verdict == "differs"
    assert compare(a, copy.deepcopy(a).float(), INPUTS).verdict == "equivalent"
    assert compare(a.float(), copy.deepcopy(a).bfloat16(), INPUTS).verdict == "noise"


def test_a_result_that_is_not_a_number_differs() -> None:
    a, b = pair()
    with torch.no_grad():
        b.bias[3] = float("nan")
    assert compare(a, b, INPUTS).verdict == compare(b, a, INPUTS).verdict == "differs"


def test_gradients() -> None:
    a, b = pair()
    same = compare(a, b, INPUTS, backward=True)
    gradients = [row for row in same.rows if row.name == "gradient"]
    assert same.verdict == "equivalent" and len(gradients) == 14
    with torch.no_grad():
        assert compare(a, b, INPUTS).verdict == "equivalent"
    b.register_forward_hook(lambda _, __, out: out + (out.detach() - out) * 0.5)
    assert compare(a, b, INPUTS).verdict == "equivalent"
    assert compare(a, b, INPUTS, backward=True).verdict == "differs"


def test_recordings_stand_for_modules(tmp_path) -> None:
    a, b = pair()
    kept = record(b, INPUTS, tmp_path / "b.safetensors")
    assert compare(a, kept, INPUTS).rows == compare(a, b, INPUTS).rows
    assert compare(record(a, INPUTS), kept).verdict == "equivalent"
    with pytest.raises(DataError, match="gradients cannot be compared with a recording"):
        compare(a, kept, INPUTS, backward=True)
    with pytest.raises(DataError, match="no inputs given"):
        compare(a, kept)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once; what is mapped from a file is in no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.held = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().resizable():
                memory = tensor.untyped_storage()
                self.held[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return out


@pytest.mark.parametrize(
    ("vocabulary", "length", "kept", "change", "backward"),
    [
        pytest.param(4000, 40, 0, 0.0, False, id="logits"),
        pytest.param(4000, 40, 1 << 19, 0.1, False, id="kept-and-differs"),
        pytest.param(31, 230, 0, 0.0, False, id="scores"),
        pytest.param(4000, 40, 0, 0.0, True, id="gradients"),
    ],
)
def test_memory_is_bounded(vocabulary: int, length: int, kept: int, change: float, backward: bool) -> None:
    a = drawn(Plain(vocabulary=vocabulary))
    b = Other(a).eval()
    b.bias.data[3] += change
    ids = torch.arange(2 * length).reshape(2, length) * 5 % 31
    largest = 4 * max(2 * length * vocabulary, 2 * 3 * length**2)
    networks = 4 * sum(p.numel() for m in (a, b) for p in m.parameters())
    with Live() as live:
        found = compare(a, b, {"ids": ids}, backward=backward, in_memory=kept)
    assert (found.verdict == "differs") is (change > 0)
    assert live.peak <= 2 * kept + networks * (1 + backward) + 4 * largest, live.peak / largest


def test_another_form_on_the_way_is_no_noise() -> None:
    a, b = drawn(Plain()).double(), drawn(Plain()).double()
    b.load_state_dict(a.state_dict())
    b.norm.weight.data *= 2.0
    b.head.weight.data /= 2.0
    b.norm.bias.data *= 2.0
    found = compare(a, b, INPUTS)
    assert any(row.differs for row in found.rows) and found.verdict == "equivalent", str(found)


def test_which_of_the_two_fails_is_said() -> None:
    from isoform.verify import diagnose

    class Fails(Plain):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            raise ShapeError("one stream alone")

    for run in (compare, diagnose):
        with pytest.raises(ShapeError, match="the reference, Fails: one stream alone"):
            run(Fails(), Plain(), INPUTS)
        with pytest.raises(ShapeError, match="the candidate, Fails: one stream alone"):
            run(Plain(), Fails(), INPUTS)
        with pytest.raises(DataError, match="the candidate, Plain: no inputs given"):
            run(record(Plain(), INPUTS), Plain())


def test_streams_of_other_widths_are_said() -> None:
    from isoform.config import presets
    from isoform.nn import build
    from isoform.verify import diagnose, example_inputs

    def gpt2(width: int) -> torch.nn.Module:
        return build(
            presets.gpt2(31, d_model=width, n_heads=3, ffn_width=40, n_layers=2, max_positions=20), seed=0
        )

    models = gpt2(12), gpt2(24)
    inputs = example_inputs(models[0])
    assert (
        "the stream has 12 features in the reference, 24 in the candidate" in compare(*models, inputs).notes
    )
    with pytest.raises(ShapeError, match="streams of 12 and 24 features"):
        diagnose(*models, inputs)
