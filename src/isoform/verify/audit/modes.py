"""Training and evaluation, gradient modes, backends: do they compute what they should? (R33, R41)"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from isoform.errors import IsoformError
from isoform.verify.audit.report import Check
from isoform.verify.noise import largest_difference, tolerance
from isoform.verify.subject import Subject, main_tensor, mode


def check_eval_determinism(subject: Subject) -> Check:
    """Two runs in evaluation mode are equal to the bit."""
    a, b = subject.run().output, subject.run().output
    if torch.equal(a.nan_to_num(), b.nan_to_num()):
        return Check("eval-determinism", True, "two runs in evaluation mode are equal to the bit")
    gap = largest_difference(a, b)
    return Check(
        "eval-determinism",
        False,
        f"two runs in evaluation mode differ by {gap:.3g}: dropout stays on",
        {"size": gap},
    )


def check_train_dropout(subject: Subject) -> Check:
    """Where dropout is configured, two runs in training mode differ."""
    rates = sorted(dropout_rates(subject.module))
    if not rates or rates[-1] == 0.0:
        return Check("train-dropout", None, "no dropout is configured")
    with mode(subject.module, training=True):
        a, b = subject.run().output, subject.run().output
    if torch.equal(a, b):
        statement = (
            f"dropout {rates[-1]:g} is configured, but two runs in training mode are equal: it never acts"
        )
        return Check("train-dropout", False, statement, {"rate": rates[-1]})
    gap = largest_difference(a, b)
    return Check(
        "train-dropout",
        True,
        f"dropout {rates[-1]:g} acts in training mode: two runs differ by {gap:.3g}",
        {"size": gap},
    )


def dropout_rates(module: nn.Module) -> set[float]:
    """Every dropout probability found in modules or their settings."""
    modules: list[Any] = list(module.modules())
    rates = {float(m.p) for m in modules if isinstance(m, nn.Dropout | nn.Dropout1d)}
    for holder in (*modules, *(getattr(m, "cfg", None) for m in modules)):
        rate = getattr(holder, "dropout", None)
        if isinstance(rate, float):
            rates.add(rate)
    return rates


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
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
            tried[name] = None
            if "inference" in name or name == "no gradient":
                return Check(
                    "paths", False, f"{name}: it cannot be run: {' '.join(str(error).split())[:120]}", tried
                )
            continue
        if other.shape != base.shape:
            statement = f"{name}: the output has shape {list(other.shape)}, with gradients {list(base.shape)}"
            return Check("paths", False, statement, {**tried, name: "shape"})
        tried[name] = gap = largest_difference(subject.at_real(other), subject.at_real(base))
        if gap > 8 * tolerance(base):
            where = _first_row(other, base)
            return Check(
                "paths",
                False,
                f"{name}: the output differs by {gap:.3g} {where}from the pass with gradients",
                tried,
            )
    names = ", ".join(name for name, gap in tried.items() if gap is not None)
    return Check("paths", True, f"the same output with gradients and by: {names}", tried)


def _trimmed(subject: Subject) -> str | None:
    """What is wrong without gradients where a whole column is padding, which fused paths may leave out."""
    stream = subject.target
    if stream.mask is None or subject.content(stream).shape[1] < 2:
        return None
    real = subject.real(stream).clone()
    real[:, -1] = False
    here = Subject(subject.module, subject.with_content(stream, subject.content(stream), real))
    try:
        base, other = here.run(grad=True).output, here.run().output
    except (RuntimeError, ValueError, TypeError, IndexError, IsoformError):
        return None
    what = "no gradient, the last column all padding: the output"
    if other.shape != base.shape:
        return f"{what} has shape {list(other.shape)}, with gradients {list(base.shape)}"
    gap = largest_difference(here.at_real(other), here.at_real(base))
    if gap > 8 * tolerance(base):
        return f"{what} differs by {gap:.3g} {_first_row(other, base)}from the pass with gradients"
    return None


def _first_row(a: Tensor, b: Tensor) -> str:
    if a.dim() < 3:
        return ""
    gap = (a - b).abs().flatten(2).nan_to_num(nan=float("inf")).amax(-1)
    row, place = divmod(int(gap.argmax()), gap.shape[1])
    return f"(row {row}, position {place}) "


def _paths(subject: Subject, compiled: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    yield "no gradient", lambda: subject.run().output

    def inference() -> Tensor:
        with torch.inference_mode():
            return subject.run().output.clone()

    yield "inference mode", inference

    def training_without_dropout() -> Tensor:
        with without_dropout(subject.module) as module:
            module.train()
            return _output(subject, module)

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
    config = copy.deepcopy(module.config)
    twin = type(module)._from_config(config, attn_implementation=backend)
    twin.load_state_dict(module.state_dict())
    for name, buffer in module.named_buffers():  # those that no state holds
        twin.get_buffer(name).data = buffer.clone()
    return _output(subject, twin.to(next(module.parameters()).dtype).eval())


def _output(subject: Subject, module: nn.Module) -> Tensor:
    with torch.no_grad():
        return subject.batch_major(main_tensor(module(**subject.kwargs)))


def _has_batch_statistics(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())  # pyright: ignore[reportPrivateUsage]


@contextmanager
def without_dropout(module: nn.Module) -> Generator[nn.Module]:
    """A copy of the module in which every dropout probability that can be found is zero."""
    twin = copy.deepcopy(module)
    for m in twin.modules():
        if isinstance(m, nn.Dropout | nn.Dropout1d):
            m.p = 0.0
        for name in (
            "dropout",
            "attention_dropout",
            "activation_dropout",
            "dropout_p",
            "p",
            "attn_dropout",
            "dropout_prob",
        ):
            if isinstance(getattr(m, name, None), float):
                setattr(m, name, 0.0)
        cfg = getattr(m, "cfg", None)
        if isinstance(getattr(cfg, "dropout", None), float):
            m.cfg = cfg.model_copy(update={"dropout": 0.0})  # pyright: ignore[reportOptionalMemberAccess]
    yield twin


def check_masked_rows(subject: Subject) -> Check:
    """A row that is all padding yields finite values and gradients, in half precision too."""
    name, stream = "masked-rows", subject.target
    source = subject.source
    streams = [s for s in (stream, source) if s is not None and s.mask is not None]
    if not streams:
        return Check(name, None, f"{type(subject.module).__name__} takes no padding mask")
    evidence: dict[str, Any] = {}
    for s in streams:
        content, real = subject.content(s), subject.real(s).clone()
        if real.shape[0] < 2:
            return Check(
                name, None, "the batch has one row; at least two are needed to mask one of them whole"
            )
        real[-1] = False
        inputs = subject.with_content(s, content, real)
        for dtype in (None, torch.bfloat16, torch.float16):
            label = f"{s.name}, {'as it is' if dtype is None else str(dtype).removeprefix('torch.')}"
            fault = _finite(subject, inputs, dtype)
            evidence[label] = fault or "finite"
            if fault and not fault.startswith("cannot"):
                return Check(name, False, f"with a row of {s.name} all padding ({label}): {fault}", evidence)
    if "finite" not in evidence.values():
        return Check(name, None, f"with a row all padding it {next(iter(evidence.values()))}", evidence)
    return Check(
        name,
        True,
        "a row that is all padding gives finite values and gradients",
        evidence,
        "values and gradients of this forward pass",
        "loss functions that divide by the number of real tokens",
    )


def _finite(subject: Subject, inputs: dict[str, Any], dtype: torch.dtype | None) -> str | None:
    module, kwargs = subject.module, inputs
    try:
        module = copy.deepcopy(subject.module)
        if dtype is not None:
            module = module.to(dtype)
            kwargs = {
                k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
                for k, v in inputs.items()
            }
        module.eval()
        module.zero_grad(set_to_none=True)
        with torch.enable_grad():
            output = main_tensor(module(**kwargs))
            shown = output.float()
            shown.square().mean().backward()
    except (RuntimeError, ValueError, TypeError, IndexError, IsoformError) as error:
        return f"cannot be run: {' '.join(str(error).split())[:120]}"
    if not bool(output.isfinite().all()):
        rows = (~output.isfinite()).flatten(1).any(-1).nonzero().flatten().tolist()
        return f"non-finite values in rows {rows}"
    for path, parameter in module.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return f"non-finite gradient of {path}"
    return None


def check_normalisation(subject: Subject) -> Check:
    """Every norm is finite, in value and gradient, on constant and on tiny-variance vectors."""
    name = "normalisation"
    norms = [(path, m) for path, m in subject.module.named_modules() if _is_norm(m)]
    if not norms:
        return Check(name, None, "no module looks like a normalisation over features")
    worst: dict[str, Any] = {"modules": len(norms)}
    for path, module in norms:
        width = _width(module)
        parameter = next(module.parameters(), None)
        dtype = parameter.dtype if parameter is not None else torch.get_default_dtype()
        for label, vector in (
            ("a constant vector", torch.full((1, 2, width), 3.0, dtype=dtype)),
            ("a zero vector", torch.zeros(1, 2, width, dtype=dtype)),
            ("variance 1e-12", 1.0 + 1e-6 * torch.linspace(-1, 1, width, dtype=dtype).expand(1, 2, width)),
        ):
            x = vector.clone().requires_grad_()
            try:
                with torch.enable_grad():
                    y = module(x)
                    (grad,) = torch.autograd.grad(y.square().sum(), x)
            except (RuntimeError, TypeError, ValueError) as error:
                worst[path] = f"cannot be run alone: {' '.join(str(error).split())[:80]}"
                break
            if not bool(y.isfinite().all()) or not bool(grad.isfinite().all()):
                what = "value" if not bool(y.isfinite().all()) else "gradient"
                why = "its eps is zero, too small, or in the wrong place"
                statement = f"{path} gives a non-finite {what} on {label}: {why}"
                return Check(name, False, statement, {"module": path, "input": label})
    return Check(
        name,
        True,
        f"{len(norms)} norms are finite on constant, zero and tiny-variance vectors",
        worst,
        "that eps keeps each norm away from 0/0",
        "whether eps has the value the weights were trained with",
    )


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    weight = getattr(module, "weight", None)
    has_gain = isinstance(weight, Tensor) and weight.dim() == 1
    return "norm" in type(module).__name__.lower() and has_gain and not list(module.children())


def _width(module: Any) -> int:
    weight = getattr(module, "weight", None)
    return int(weight.shape[0] if isinstance(weight, Tensor) else module.normalized_shape[0])
