"""``step.cpp`` compiled for this machine, kept on disk.

The cache is ``$ISOFORM_CACHE``, or ``isoform`` in the user's cache folder (``$XDG_CACHE_HOME`` or
``~/.cache``). With ``ISOFORM_COMPILE=never`` in the environment nothing is used unless it is asked for.
A library is called by what it was made of: source, options, compiler and processor. Where there is no
compiler, or what it made cannot be loaded, there is no library, and everything runs without.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Int8, Shaped
from torch import Tensor

from isoform.config.temporary import temporary
from isoform.native.eights import groups_of
from isoform.native.program import EIGHT, FORMS, SPARE

SOURCE = Path(__file__).with_name("step.cpp")
PARTS = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
"""The source, and what it includes."""
OPTIONS = (
    "-O2",
    "-std=c++17",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
"""No option that lets the compiler assume numbers finite: NaN has to come out as NaN."""
REALS = {torch.float32: "float", torch.float64: "double"}
SECONDS = 120  # after which a compiler is given up


class Library:
    """The compiled step for one type of number.

    Args:
        path: of the shared object.
    """

    def __init__(self, path: Path) -> None:
        self._loaded = ctypes.CDLL(str(path))
        self.step: Any = self._loaded.isoform_step
        self.step.restype = ctypes.c_int
        self.step.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self._log_sums: Any = self._loaded.isoform_log_sums
        self._log_sums.restype = ctypes.c_int
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._log_sums.argtypes = [pointer, number, number, pointer, number]
        self._best: Any = self._loaded.isoform_best
        self._best.restype = ctypes.c_int
        self._best.argtypes = [
            *[pointer] * 2,
            number,
            number,
            pointer,
            number,
            number,
            pointer,
            pointer,
            number,
        ]
        self._linear: Any = self._loaded.isoform_linear
        self._linear.restype = ctypes.c_int
        self._linear.argtypes = [
            pointer,
            number,
            number,
            pointer,
            number,
            *[pointer] * 3,
            number,
            *[pointer] * 2,
            number,
        ]

    def linear(
        self,
        x: Float[Tensor, "*batch width"],
        weight: Shaped[Tensor, "out width"],
        scale: Float[Tensor, " out"] | None,
        bias: Float[Tensor, " out"] | None,
    ) -> Float[Tensor, "*batch out"]:
        """x Wᵀ, times a scale an output, and a bias; W side by side, of a type in `FORMS` or of that of x."""
        return self._product(x, weight, FORMS.get(weight.dtype, 0), weight.shape[0], scale, bias)

    def eights(
        self,
        x: Float[Tensor, "*batch width"],
        laid: Int8[Tensor, "blocks bytes"],
        scale: Float[Tensor, " out"],
        bias: Float[Tensor, " out"] | None,
    ) -> Float[Tensor, "*batch out"]:
        """The same with inputs rounded to 8 bits; W as `eights.laid_out` lays it."""
        return self._product(x, laid, EIGHT, len(scale), scale, bias)

    def _product(
        self, x: Tensor, weight: Tensor, form: int, n: int, scale: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        (rows, width), threads = flat.shape, torch.get_num_threads()
        out, spare = flat.new_empty(rows, n), flat.new_empty(threads, SPARE * width)
        rounded = flat.new_empty(rows, groups_of(width) + 1) if form == EIGHT else None
        self._linear(
            flat.data_ptr(),
            rows,
            width,
            weight.data_ptr(),
            form,
            None if scale is None else scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            n,
            spare.data_ptr(),
            None if rounded is None else rounded.data_ptr(),
            threads,
        )
        return out.view(*x.shape[:-1], n)

    def log_sums(self, scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
        """log Σ exp of every row."""
        scores = scores.contiguous()
        rows, width = scores.shape
        found = scores.new_empty(rows)
        self._log_sums(scores.data_ptr(), rows, width, found.data_ptr(), torch.get_num_threads())
        return found

    def best(
        self,
        scores: Float[Tensor, "rows vocab"],
        k: int,
        banned: Int[Tensor, " ids"] | None,
        base: Float[Tensor, " rows"],
    ) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
        """The k largest of base + log-probability of every row, equal ones in order, and their ids.

        ``banned`` ids, ascending, count for the others' probabilities and are not found. Where there are
        fewer than k finite ones, the rest is -inf; in a row with NaN or infinity, NaN.
        """
        scores, base = scores.contiguous(), base.to(scores.dtype).contiguous()
        rows, width = scores.shape
        values = scores.new_empty(rows, k)
        ids = torch.empty(rows, k, dtype=torch.long)
        self._best(
            scores.data_ptr(),
            base.data_ptr(),
            rows,
            width,
            None if banned is None else banned.data_ptr(),
            0 if banned is None else len(banned),
            k,
            values.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return values, ids


_known: dict[Path, Library | None] = {}
_in_use: dict[torch.dtype, Library] = {}


def folder() -> Path:
    """Where compiled libraries are kept."""
    if given := os.environ.get("ISOFORM_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "isoform"


def switched_off() -> bool:
    """Whether the environment says that only who asks for machine code gets it."""
    return os.environ.get("ISOFORM_COMPILE") == "never"


def built(dtype: torch.dtype) -> bool:
    """Whether `library` has nothing to compile."""
    compiler = _compiler()
    return compiler is not None and _path(compiler, dtype).is_file()


def loaded(x: Tensor) -> Library | None:
    """The library for numbers like these, where one is in use already."""
    if x.device.type != "cpu" or switched_off():
        return None
    return _in_use.get(x.dtype)


def library(dtype: torch.dtype) -> Library | None:
    """The step for numbers of a type, compiled unless it was before; None: there is none on this machine."""
    compiler = _compiler()
    if compiler is None or dtype not in REALS:
        return None
    path = _path(compiler, dtype)
    if path not in _known:
        try:
            if not path.is_file():
                _compile(compiler, REALS[dtype], path)
            _known[path] = Library(path)
        except (OSError, AttributeError, subprocess.SubprocessError):
            _known[path] = None
    found = _known[path]
    if found is not None:
        _in_use[dtype] = found
    return found


def _compiler() -> str | None:
    """The C++ compiler; the library needs OpenMP as GCC calls it, which is what PyTorch brings on Linux."""
    if platform.system() != "Linux":
        return None
    try:
        folder()
    except RuntimeError:  # a user without a home
        return None
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")


def _path(compiler: str, dtype: torch.dtype) -> Path:
    return folder() / _name(compiler, REALS.get(dtype, ""))


@functools.cache
def _name(compiler: str, real: str) -> str:
    status = Path(compiler).stat()
    parts = (
        *(part.read_text(encoding="utf-8") for part in PARTS),
        *OPTIONS,
        real,
        str(Path(compiler).resolve()),
        str((status.st_size, status.st_mtime_ns)),
        _processor(),
    )
    return f"step-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = ("model name", "flags", "Features")
            return "".join(line for line in _first_block(lines) if line.startswith(names))
    except OSError:
        return platform.machine()


def _first_block(lines: Any) -> list[str]:
    found: list[str] = []
    for line in lines:
        if not line.strip():
            break
        found.append(line)
    return found


def _compile(compiler: str, real: str, path: Path) -> None:
    # One name for all: what a killed compiler has left goes, whichever library it was to be.
    with temporary(path.with_name("step"), folder=True) as work:
        made, object_ = work / "step.so", work / "step.o"
        for command in (
            [compiler, *OPTIONS, f"-DREAL={real}", "-c", str(SOURCE), "-o", str(object_)],
            # Linked without OpenMP's own library: its names are found in the one that PyTorch has loaded.
            [compiler, "-shared", str(object_), "-o", str(made)],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
        made.replace(path)
