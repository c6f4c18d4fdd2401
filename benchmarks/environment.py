"""The machine, the libraries, and the settings that every process here runs under."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

SETTINGS = {
    "OMP_WAIT_POLICY": "active",
    "GOMP_SPINCOUNT": "1000000",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
PEERS = ("torch", "transformers", "x-transformers", "ctranslate2")


def enter() -> None:
    """Start over under the settings, which libraries read once, when they are loaded."""
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.environ.update(SETTINGS)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])


def version(package: str) -> str | None:
    """The installed version; None: not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def line() -> str:
    """One line that says what the figures hold for."""
    import torch

    processor = platform.processor() or platform.machine()
    for text in _read("/proc/cpuinfo").splitlines():
        if text.startswith("model name"):
            processor = text.split(":", 1)[1].strip()
            break
    known = [f"{name} {version(name)}" for name in PEERS if version(name) is not None]
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    )
    threads = f"{torch.get_num_threads()} threads"
    return ", ".join([processor, device, threads, f"Python {platform.python_version()}", *known])


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
