"""A recording is the pass as it was: in memory, on disk, made elsewhere, whatever code did to its tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from isoform.errors import DataError
from isoform.verify import Recording, compare, record
from isoform.verify.diagnose.graph import Graph
from verify.small import IDS, pair

INPUTS = {"ids": IDS}


class Rough(nn.Module):
    """Edits in place, views of one memory, complex numbers, a module called twice, a dict of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twice = nn.Embedding(31, 6), nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(2))
        self.table.weight.data = torch.arange(186.0).reshape(31, 6).sin()

    def forward(self, ids, scale):
        self.count += 1
        x = self.table(ids)
        left = x[..., :2]
        before = x * 1
        left.mul_(3.0)  # x has changed with it
        x = self.twice(self.twice(x) + before)
        scale.add_(1.0)
        z = torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous())
        z = z * torch.polar(torch.ones(3), torch.arange(3.0)) + z.conj() * 0.5
        x = torch.view_as_real(z).flatten(-2)
        allowed = torch.ones(1, ids.shape[1], 1, dtype=torch.bool).expand(len(ids), -1, 6)
        return {"other": (x * scale,), "logits": torch.where(allowed, x * scale, 0.0)}


def rough(**options) -> tuple[Recording, torch.Tensor]:
    torch.manual_seed(0)
    model = Rough()
    expected = Rough.forward(model, IDS.clone(), torch.ones(6))["logits"]
    model.count.zero_()
    return record(model, {"ids": IDS, "scale": torch.ones(6)}, **options), expected


def same(a: Recording, b: Recording) -> None:
    assert (a.subject, a.output, a.ties, a.reals, a.contents, a.trained) == (
        b.subject, b.output, b.ties, b.reals, b.contents, b.trained,
    )  # fmt: skip
    assert len(a.nodes) == len(b.nodes)
    for x, y in zip(a.nodes, b.nodes, strict=True):
        assert (x.op, x.args, x.kwargs, x.module, x.source) == (y.op, y.args, y.kwargs, y.module, y.source)
        assert x.value.dtype == y.value.dtype and torch.equal(x.value, y.value), x.op
    for one, two in ((a.parameters, b.parameters), (a.inputs, b.inputs), (a.constants, b.constants)):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_it_is_the_pass_that_ran() -> None:
    found, expected = rough()
    assert torch.equal(found.result(), expected)
    assert torch.equal(found.inputs["scale"], torch.ones(6))  # as it was given, not as it was left
    assert torch.equal(found.parameters["count"], torch.zeros(2))
    assert [n.module for n in found.nodes if n.op == "addmm"] == ["twice", "twice"]
    assert all("test_record.py" in n.source for n in found.nodes if n.op == "mul")


@pytest.mark.parametrize("in_memory", [1 << 29, 0])
def test_every_operation_gives_its_value_when_run_again(in_memory: int) -> None:
    """Run from the values it read, so that an old value under a new name would show."""
    found, _ = rough(in_memory=in_memory)
    graph = Graph(found, native=True)
    for node in found.nodes:
        again = graph._run(node, {})
        assert torch.equal(again, node.value), (node.number, node.op)


def test_what_is_not_kept_in_memory_is_the_same(tmp_path: Path) -> None:
    kept, spooled = rough()[0], rough(in_memory=0)[0]
    same(kept, spooled)
    for name, recording in (("a", kept), ("b", spooled)):
        recording.save(tmp_path / name)
        same(kept, Recording.load(tmp_path / name))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def _resident() -> int:
    """KiB of mapped recordings that are in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if "isoform-recording-" in line]
    return sum(int(next(x for x in lines[i:] if x.startswith("Rss:")).split()[1]) for i in starts)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is in memory")
def test_what_is_mapped_leaves_memory_when_it_is_released() -> None:
    found, expected = rough(in_memory=0)
    before = _resident()
    assert torch.equal(found.result(), expected) and _resident() > before
    found.release()
    assert _resident() == before
    assert torch.equal(found.result(), expected)


def test_views_are_not_written_twice(tmp_path: Path) -> None:
    from safetensors import safe_open

    a, _ = pair()
    recording = record(a, INPUTS, tmp_path / "a")
    values = [n.value for n in recording.nodes]
    values += [*recording.parameters.values(), *recording.inputs.values(), *recording.constants.values()]
    memory = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values}
    with safe_open(tmp_path / "a", "pt") as file:
        written = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert written == sum(memory.values()) < 0.7 * sum(v.nbytes for v in values)


class Chain(nn.Module):
    """Counts how many of the activations before are alive at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.alive = -1

    def forward(self, x):
        seen = []
        for _ in range(12):
            x = self.map(x).relu()
            seen.append(StorageWeakRef(x.untyped_storage()))
        self.alive = sum(not s.expired() for s in seen)
        return x


@pytest.mark.parametrize(("in_memory", "alive"), [(0, 1), (1 << 29, 12), (8 * 48, 4)])
def test_beyond_the_limit_nothing_is_held(in_memory: int, alive: int) -> None:
    model = Chain()
    record(model, {"x": torch.ones(1, 3, 4)}, in_memory=in_memory)
    assert model.alive == alive


def test_mode_and_hooks_are_left_as_they_were() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Dropout()

        def forward(self, ids):
            self.part(ids.float())
            raise RuntimeError("no")

    model = Fails().train()
    with pytest.raises(DataError, match=r"Fails\.forward fails on these inputs: RuntimeError: no"):
        record(model, INPUTS)
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("content", [None, b"", b"not a recording", "other"])
def test_what_is_no_recording_is_one_line(content: bytes | str | None, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    place = tmp_path / "a.safetensors"
    if content == "other":
        save_file({"x": torch.ones(2)}, place)
    elif content is not None:
        place.write_bytes(content)
    wanted = "no such file" if content is None else "not a recording; expected what"
    with pytest.raises(DataError, match=wanted) as caught:
        Recording.load(place)
    assert "\n" not in str(caught.value)


def test_a_recording_made_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys; from verify.small import IDS, pair; from isoform.verify import record; "
        "record(pair()[1], {'ids': IDS}, sys.argv[1])"
    )
    place = tmp_path / "b.safetensors"
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), *(p for p in sys.path if p)])
    subprocess.run([sys.executable, "-c", code, place], check=True, env={**os.environ, "PYTHONPATH": paths})
    found = compare(pair()[0], Recording.load(place), INPUTS)
    assert found.verdict == "equivalent" and found.first_divergence is None


class _Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
        return y[:, 0]


def test_attention_fused_within_the_module_is_recorded_in_parts() -> None:
    x = torch.arange(2 * 5 * 4.0).sin().view(2, 5, 4)
    found = record(_Fused(), {"x": x})
    assert any("softmax" in node.op for node in found.nodes), [node.op for node in found.nodes]
    assert torch.allclose(found.result(), _Fused()(x), atol=1e-6)
