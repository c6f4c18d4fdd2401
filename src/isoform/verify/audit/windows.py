"""Does a layer read farther than its window, or less far? (R21, R41)"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isoform.verify.audit.causality import judge
from isoform.verify.audit.leaks import changed_places
from isoform.verify.audit.report import Check
from isoform.verify.derivatives import derivatives
from isoform.verify.subject import Subject, main_tensor

NAME = "window"


@dataclasses.dataclass(frozen=True)
class Span:
    """How far a layer reads: positions back, and ahead where it does not read the past alone."""

    back: int
    ahead: int | None = None


def check_window(subject: Subject, window: int | None = None, *, seed: int = 0) -> Check:
    """Each layer reads as far back as its window allows, and no farther.

    Args:
        subject: the model.
        window: positions that every layer reads, each its own included; None: as the configuration says.
        seed: of the contents drawn.
    """
    layers = _layers(subject.module)
    spans: list[Span | None] | None = [Span((window or 0) - 1) for _ in layers]
    if window is None:
        spans = _spans(subject.module, len(layers))
    if window is not None and not layers:
        return Check(NAME, None, "no list of layers of one class is to be found")
    if spans is None or all(span is None for span in spans):
        return Check(NAME, None, "no window is configured, and none was given")
    length = subject.content(subject.target).shape[1]
    least = min(span.back for span in spans if span is not None)
    if least >= length - 1:
        text = f"the input ({length} positions) is not longer than the narrowest window ({least + 1})"
        return Check(NAME, None, text)
    if len(layers) != len(spans):
        text = f"its {len(spans)} layers are not to be found: no list of as many modules of one class"
        return Check(NAME, None, text)
    seen = _layer_by_layer(subject, layers)
    if len(seen) != len(spans):
        return Check(NAME, None, f"{len(seen)} layers ran on the sequence, {len(spans)} are configured")
    tried: list[int] = []
    for number, ((path, leaf, out), span) in enumerate(zip(seen, spans, strict=True)):
        if span is not None and span.back < length - 1:
            fault = _fault(subject, path, leaf, out, span)
            if fault is not None:
                return dataclasses.replace(fault, evidence={"layer": number, **fault.evidence})
            tried.append(number)
    whole = _whole(subject, spans, seed)
    if whole is not None and whole.passed is False:
        return whole
    return Check(
        NAME,
        True,
        f"layer {', '.join(map(str, tried))}: as far back as the window allows is read, and no farther",
        {"layers": tried, "windows": [None if span is None else span.back + 1 for span in spans]},
        "which positions of its input each layer's output depends on",
        "windows of cached steps, and windows wider than this input",
    )


def _fault(subject: Subject, path: str, leaf: Tensor, out: Tensor, span: Span) -> Check | None:
    length, real = leaf.shape[1], subject.real(subject.target)
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(length)
    edge = reached = 0.0
    tried = False
    for query in changed_places(length):
        weight = torch.randn(out[:, query].shape, generator=generator, dtype=torch.float64).to(out)
        (grad,) = derivatives(out[:, query], [leaf], weight)
        if grad is None:
            continue
        size = grad.flatten(2).norm(dim=-1).masked_fill(~(real & real[:, query, None]), 0.0)
        beyond = places < query - span.back
        if span.ahead is not None:
            beyond = beyond | (places > query + span.ahead)
        least = 64 * torch.finfo(size.dtype).eps * float(size.max())
        bad = size.masked_fill(~beyond, 0.0)
        if float(bad.max()) > least:
            row, key = divmod(int(bad.argmax()), length)
            way = f"{query - key} back" if key < query else f"{key - query} ahead"
            text = (
                f"position {query} reads position {key} at {path}, {way} where its window allows "
                f"{span.back if key < query else span.ahead}: gradient {float(bad.max()):.3g}"
            )
            where = {"module": path, "query": query, "key": key, "row": row, "size": float(bad.max())}
            return Check(NAME, False, text, where)
        if query >= span.back and bool((real[:, query] & real[:, query - span.back]).any()):
            tried = True
            edge = max(edge, float(size[:, query - span.back].max()))
            reached = max(reached, least)
    if tried and edge <= reached:
        text = f"no position reads {span.back} back at {path}, which its window of {span.back + 1} allows"
        return Check(NAME, False, text, {"module": path, "back": span.back})
    return None


def _whole(subject: Subject, spans: list[Span | None], seed: int) -> Check | None:
    """After all layers nothing farther back than all windows together has been read."""
    real = subject.real(subject.target)
    length = real.shape[1]
    reach = sum(length if span is None else span.back for span in spans)
    if reach >= length - 1 or any(span is not None and span.ahead is not None for span in spans):
        return None

    def forbidden(key: int) -> Tensor:
        return (torch.arange(length) > key + reach) & real

    return judge(NAME, subject, forbidden, "causal", f"windows that reach {reach} back in all", seed)


def _layer_by_layer(subject: Subject, layers: Sequence[nn.Module]) -> list[tuple[str, Tensor, Tensor]]:
    """For each layer as it runs: its path, its input cut off from what is before it, and its output."""
    shape = subject.content(subject.target).shape[:2]
    paths = {module: path for path, module in subject.module.named_modules()}
    seen: list[tuple[str, Tensor, Tensor]] = []
    leaves: list[Tensor] = []

    def cut(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
        if not fits or value.shape[:2] != shape:
            return value
        leaves.append(value.detach().requires_grad_())
        return leaves[-1]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves.clear()
        for number, value in enumerate(args):
            new = cut(value)
            if new is not value:
                return (*args[:number], new, *args[number + 1 :]), kwargs
        for name, value in kwargs.items():
            new = cut(value)
            if new is not value:
                return args, {**kwargs, name: new}
        return args, kwargs

    def after(module: nn.Module, _: Any, output: Any) -> None:
        out = main_tensor(output)
        if leaves and out.shape[:2] == shape:
            seen.append((paths[module], leaves[0], out))

    handles: list[Any] = []
    for layer in dict.fromkeys(layers):
        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.register_forward_hook(after))
    try:
        subject.run(grad=True)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _layers(module: nn.Module) -> Sequence[nn.Module]:
    """The list of layers: of as many as the configuration says, else the longest of one class."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    alike = [m for m in lists if len({type(x) for x in m}) == 1]
    found = [m for m in alike if any(True for _ in m[0].children())]
    config: Any = getattr(module, "config", None)
    for name in ("num_hidden_layers", "num_layers", "n_layer"):
        count = getattr(config, name, None)
        if isinstance(count, int):
            found = [m for m in found if len(m) == count]
    decoder = getattr(module, "decoder", None)
    own = [m for m in found if isinstance(decoder, nn.Module) and any(m is x for x in decoder.modules())]
    return list(max(own or found, key=len, default=nn.ModuleList()))


def _spans(module: nn.Module, count: int) -> list[Span | None] | None:
    """What the configuration says, layer by layer."""
    config: Any = getattr(module, "config", None)
    stack: Any = getattr(config, "decoder", None) or getattr(config, "encoder", None)
    listed: Any = getattr(stack, "layers", None)
    if callable(listed):
        both = stack.visibility == "bidirectional"
        windows: list[int | None] = [layer.attention.window for layer in listed()]  # pyright: ignore
        return [None if w is None else Span(w - 1, w - 1 if both else None) for w in windows]
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int):
        if getattr(config, "use_sliding_window", True) is False:
            return None
        types: Any = getattr(config, "layer_types", None) or ["sliding_attention"] * count
        return [Span(window - 1) if kind == "sliding_attention" else None for kind in types]
    kinds, width = getattr(config, "attention_layers", None), getattr(config, "window_size", None)
    if isinstance(kinds, list) and isinstance(width, int):
        return [Span(width - 1) if kind == "local" else None for kind in kinds]
    near, every = (
        getattr(config, "local_attention", None),
        getattr(config, "global_attn_every_n_layers", None),
    )
    if isinstance(near, int) and isinstance(every, int):
        return [Span(near // 2, near // 2) if i % every else None for i in range(count)]
    return None
