"""Holding an imported network against the library it came from, in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isoform.checkpoints import Bundle, export, load
from isoform.checkpoints.families import FAMILIES
from isoform.checkpoints.mapping import save_weights
from isoform.tokens import Tokens

TOLERANCE = 1e-9


def perturb(model: nn.Module, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Move every parameter, biases and gains included, so that nothing is zero or one by accident."""
    generator = torch.Generator().manual_seed(seed)
    fixed = {id(p) for m in model.modules() if "Sinusoidal" in type(m).__name__ for p in m.parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if id(p) in fixed:
                continue
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.mul_(3.0 if p.dim() > 1 and "embed" not in name else 1.0).add_(noise.to(p.dtype), alpha=scale)
        for name, buffer in model.named_buffers():
            if name.endswith("logits_bias"):  # trained like a parameter
                buffer.add_(torch.randn(buffer.shape, generator=generator).to(buffer.dtype), alpha=scale)
    return model.double().eval()


@contextlib.contextmanager
def honest_float64() -> Iterator[None]:
    """The library rounds to float32 inside norms, softmax and routers; keep float64 float64 there.

    Rotary angles are left alone: there float32 is part of the function.
    """
    to, float_, softmax = Tensor.to, Tensor.float, nn.functional.softmax
    depth = 0

    def kept_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if depth and self.dtype == torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return to(self, *args, **kwargs)

    def kept_float(self: Tensor) -> Tensor:
        return self if depth and self.dtype == torch.float64 else float_(self)

    def kept_softmax(input: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        if input.dtype == torch.float64 and dtype is torch.float32:
            dtype = None
        return softmax(input, *args, dtype=dtype, **kwargs)

    call = nn.Module.__call__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        name = type(self).__name__
        if "Rotary" in name:
            before, depth = depth, 0
            try:
                return call(self, *args, **kwargs)
            finally:
                depth = before
        if name.endswith(("Norm", "T5Attention")) or "Router" in name or "Moe" in name:
            depth += 1
            try:
                return call(self, *args, **kwargs)
            finally:
                depth -= 1
        return call(self, *args, **kwargs)

    Tensor.to, Tensor.float, nn.functional.softmax = kept_to, kept_float, kept_softmax
    nn.Module.__call__ = counted
    try:
        yield
    finally:
        Tensor.to, Tensor.float, nn.functional.softmax = to, float_, softmax
        nn.Module.__call__ = call


def ragged(vocab: int, lengths: tuple[int, ...], side: str, seed: int = 1, low: int = 3) -> Tokens:
    """Rows of random ids, none of them a special one."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(low, vocab, (n,), generator=generator).tolist() for n in lengths]
    return Tokens.from_lists(rows, pad_id=0, side=side)


def close(ours: Tensor, theirs: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Largest difference relative to the largest magnitude (at least one)."""
    assert ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
    scale = max(1.0, theirs.abs().max().item())
    worst = (ours - theirs).abs().max().item() / scale
    assert worst <= tolerance, f"{what}: {worst:.2e}"


def saved(hf: nn.Module, folder: Path) -> Path:
    """The library's own folder, in float64."""
    with warnings.catch_warnings():  # token rules in config.json, as older files have them
        warnings.filterwarnings("ignore", message="Moving the following attributes|Some non-default")
        hf.save_pretrained(folder)
    return folder


@dataclasses.dataclass
class Case:
    """One imported network beside its original."""

    hf: nn.Module
    bundle: Bundle
    folder: Path


def imported(hf: nn.Module, folder: Path) -> Case:
    """Save the original and open it."""
    return Case(hf, load(saved(hf, folder)), folder)


def their_inputs(tokens: Tokens, *, positions: bool) -> dict[str, Tensor]:
    """The library's arguments. Positions are passed where it would number the padding."""
    result = {"input_ids": tokens.ids, "attention_mask": tokens.real_or_ones().long()}
    if positions:
        result["position_ids"] = tokens.positions()
    return result


def compare_outputs(
    case: Case, tokens: Tokens, theirs: dict[str, Tensor], source: Tokens | None = None,
    tolerance: float = TOLERANCE, name: str = "logits", gradients: bool = True,
) -> None:  # fmt: skip
    """Scores or states at real places, and the gradient of every parameter."""
    hf, model = case.hf, case.bundle.model
    hf.zero_grad(), model.zero_grad()
    with honest_float64():
        reference = hf(**theirs)
    expected = getattr(reference, name)
    output = model(tokens, source)
    found = (
        output.hidden if name == "last_hidden_state" else output.logits if name == "logits" else output.pooled
    )
    if found.dim() == 3:
        real = tokens.real_or_ones()
        found, expected = found[real], expected[real]
    close(found, expected, name, tolerance)
    if not gradients:
        return
    weight = torch.linspace(-1.0, 1.0, found.numel(), dtype=found.dtype).cos().view_as(found)
    (found * weight).sum().backward()
    with honest_float64():
        (expected * weight).sum().backward()
    family = FAMILIES[case.bundle.provenance["family"]]
    with torch.no_grad():
        kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        bare = case.bundle.config.head is None
        mapped = save_weights(model, family.mapping(case.bundle.config), bare=bare)
        ours = {n: g.clone() for n, g in mapped.items()}
        for n, p in model.named_parameters():
            p.copy_(kept[n])
    theirs_all = dict(hf.named_parameters(remove_duplicate=False))
    wanted = {n: p.grad for n, p in theirs_all.items()}
    for n, gradient in ours.items():
        if n not in wanted or (wanted[n] is None and (not gradient.any() or not theirs_all[n].requires_grad)):
            continue
        assert wanted[n] is not None, n
        close(gradient.reshape(wanted[n].shape), wanted[n], f"gradient of {n}", tolerance)


def round_trip(case: Case, folder: Path, cls: type, **options: Any) -> None:
    """Exported, the library opens it without a word, with the same tensors bit for bit."""
    export(case.bundle, folder)
    back, info = cls.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float64,
        attn_implementation=case.hf.config._attn_implementation, **options,
    )  # fmt: skip
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    before, after = case.hf.state_dict(), back.state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    again = load(folder)
    assert again.config == case.bundle.config
    assert again.protocol == case.bundle.protocol
    for (name, a), b in zip(case.bundle.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    return back.eval()
