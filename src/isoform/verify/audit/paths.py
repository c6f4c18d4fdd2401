"""With and without gradients, in inference mode, with every kernel: one function? (R33, R41)"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from isoform.verify.audit.report import Check, one_line
from isoform.verify.noise import largest_difference, same, tolerance
from isoform.verify.subject import Subject, main_tensor


def check_paths(subject: Subject, *, compiled: bool = False) -> Check:
    """With and without gradients, in inference mode, with every attention kernel: one function."""
    base = subject.run(grad=True).output
    tried: dict[str, float | None] = {}
    statement = _trimmed(subject)
    if statement is not None:
        return Check("paths", False, statement)
    for name, run in _paths(subject, compiled):
        try:
            other = run()
        except Exception as error:
            tried[name] = None
            if "inference" in name or name == "no gradient":
                return Check("paths", False, f"{name}: it cannot be run: {one_line(error)}", tried)
            continue
        if other.shape != base.shape:
            statement = f"{name}: the output has shape {list(other.shape)}, with gradients {list(base.shape)}"
            return Check("paths", False, statement, {**tried, name: "shape"})
        tried[name] = gap = largest_difference(subject.at_real(other), subject.at_real(base))
        if gap > 8 * tolerance(base):
            where = _worst(subject, other, base)
            return Check(
                "paths",
                False,
                f"{name}: the output differs by {gap:.3g} {where}from the pass with gradients",
                tried,
            )
    names = ", ".join(name for name, gap in tried.items() if gap is not None)
    left = ", ".join(name for name, gap in tried.items() if gap is None)
    statement = f"the same output with gradients and by: {names}"
    return Check("paths", True, statement, tried, does_not_show=left and f"what cannot be run: {left}")


def _trimmed(subject: Subject) -> str | None:
    """What is wrong without gradients where a whole column is padding, which fused paths may leave out."""
    stream = subject.target
    if stream.mask is None or subject.content(stream).shape[1] < 2:
        return None
    real = subject.real(stream).clone()
    real[:, -1] = False
    here = Subject(subject.module, subject.with_content(stream, subject.content(stream), real))
    try:
        base, other = here.run(grad=True).output, _output(here, here.module)
    except Exception:
        return None
    what = "no gradient, the last column all padding: the output"
    if other.shape != base.shape:
        return f"{what} has shape {list(other.shape)}, with gradients {list(base.shape)}"
    gap = largest_difference(here.at_real(other), here.at_real(base))
    if gap > 8 * tolerance(base):
        return f"{what} differs by {gap:.3g} {_worst(here, other, base)}from the pass with gradients"
    return None


def _worst(subject: Subject, a: Tensor, b: Tensor) -> str:
    """The real position that differs most, in words."""
    real = subject.real(subject.target)
    if a.dim() < 3:
        return ""
    gap = (a - b).abs().flatten(2).nan_to_num(nan=float("inf")).amax(-1)
    gap = gap.masked_fill(~real, 0.0) if gap.shape == real.shape else gap
    row, place = divmod(int(gap.argmax()), gap.shape[1])
    return f"(row {row}, position {place}) "


def _paths(subject: Subject, compiled: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    # Without anything that listens: fused paths are left where modules have hooks.
    yield "no gradient", lambda: _output(subject, subject.module)

    def inference() -> Tensor:
        with torch.inference_mode():
            return subject.batch_major(main_tensor(subject.module(**subject.given()))).clone()

    yield "inference mode", inference

    def training_without_dropout() -> Tensor:
        with without_dropout(subject.module) as module:
            module.train()
            output = _output(subject, module)
            if not same(output, _output(subject, module)):
                raise RuntimeError("two passes differ: what is drawn at random is no dropout that is found")
            return output

    if not _has_batch_statistics(subject.module):
        yield "training mode, dropout 0", training_without_dropout
    for label, kernels in (
        ("math kernel", [SDPBackend.MATH]),
        ("flash kernel", [SDPBackend.FLASH_ATTENTION]),
    ):

        def kernel(kernels: list[SDPBackend] = kernels) -> Tensor:
            with sdpa_kernel(kernels):
                return subject.run().output

        yield label, kernel
    for backend in _backends(subject.module):
        yield f"attention {backend}", lambda backend=backend: _with_backend(subject, backend)
    if compiled:
        yield "compiled", lambda: _output(subject, torch.compile(subject.module))  # pyright: ignore[reportArgumentType]


def _backends(module: nn.Module) -> list[str]:
    ours, theirs = hasattr(module, "set_attention"), hasattr(type(module), "_from_config")
    return ["eager", "sdpa"] if ours or theirs else []


def _with_backend(subject: Subject, backend: str) -> Tensor:
    module: Any = subject.module
    if hasattr(module, "set_attention"):
        twin = copy.deepcopy(module)
        twin.set_attention(backend)
        return _output(subject, twin)
    # Hugging Face: some classes choose the code of their attention when they are built, so build it anew.
    kept = getattr(module.config, "_attn_implementation", None)
    if kept is not None and not same(_built_anew(subject, kept), _output(subject, module)):
        raise RuntimeError("built anew from its configuration it is another function: it was changed since")
    return _built_anew(subject, backend)


def _built_anew(subject: Subject, backend: str) -> Tensor:
    module: Any = subject.module
    config = copy.deepcopy(module.config)
    twin = type(module)._from_config(config, attn_implementation=backend)
    twin.load_state_dict(module.state_dict())
    for name, buffer in module.named_buffers():  # those that no state holds
        twin.get_buffer(name).data = buffer.clone()
    return _output(subject, twin.to(next(module.parameters()).dtype).eval())


def _output(subject: Subject, module: nn.Module) -> Tensor:
    with torch.no_grad():
        return subject.batch_major(main_tensor(module(**subject.given())))


def _has_batch_statistics(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())  # pyright: ignore[reportPrivateUsage]


@contextmanager
def without_dropout(module: nn.Module) -> Generator[nn.Module]:
    """A copy of the module in which every dropout probability that can be found is zero."""
    twin = copy.deepcopy(module)
    for m in twin.modules():
        if isinstance(m, nn.Dropout | nn.Dropout1d):
            m.p = 0.0
        for name, value in list(vars(m).items()):  # dropout_p, attention_dropout, layerdrop, drop_path
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(m, name, 0.0)
        cfg = getattr(m, "cfg", None)
        if isinstance(getattr(cfg, "dropout", None), float):
            m.cfg = cfg.model_copy(update={"dropout": 0.0})  # pyright: ignore[reportOptionalMemberAccess]
    yield twin
