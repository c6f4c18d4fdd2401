"""A decoder as a list of operations for the compiled step; the same parts as in `flat`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from isoform import config
from isoform.native.eights import groups_of
from isoform.native.program import EIGHT, FORMS, Program
from isoform.nn.attention import Attention
from isoform.nn.feed_forward import Gated, TwoLayer
from isoform.nn.forms import bias_of
from isoform.nn.heads import TokenHead
from isoform.nn.layer import Layer, ParallelLayer, Residual
from isoform.nn.linear import Linear, Packed
from isoform.nn.norms import Norm
from isoform.nn.products import Int8Dynamic
from isoform.nn.stack import Stack


class Unknown(Exception):
    """A part that has no operation."""


def lower(
    stack: Stack, head: TokenHead, d_model: int, dtype: torch.dtype, *, copies: bool
) -> tuple[Program, bool] | None:
    """The operations from the embedded token to its scores, and whether the head is among them.

    None where a part is no module of ours, or one that has no operation (experts, adapters), or where weights
    would have to be copied and are not to be.
    """
    program = Program(dtype, copies=copies)
    program.need("stream", d_model)
    try:
        for i, block in enumerate(stack.blocks()):
            if type(block) is Layer:
                _sequential(program, block, i, stack.kind_of[i])
            elif type(block) is ParallelLayer:
                _parallel(program, block, i, stack.kind_of[i])
            else:
                return None
        _norm(program, stack.final_norm, "stream", "stream")
    except Unknown:
        return None
    return program, _head(program, head)


def _weight(module: Linear | Packed | TokenHead) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Numbers, a scale an output where they have one, and the bias."""
    bias = bias_of(module)
    product = module.product
    if product is None or product.form == "float32":
        return module.weight, None, bias
    stored = product.stored()
    return stored[""], stored.get("_scale"), bias


def _linear(
    program: Program,
    module: nn.Module,
    given: str,
    out: str,
    *,
    source: str | None = None,
    act: str = "identity",
    alpha: float = 1.0,
    gated: bool = False,
    softcap: float = 0.0,
) -> None:
    if type(module) not in (Linear, Packed, TokenHead):
        raise Unknown
    assert isinstance(module, Linear | Packed | TokenHead)
    product = module.product
    n, m = module.weight.shape
    program.need(out, n)
    program.need(given, m)
    if isinstance(product, Int8Dynamic):
        laid = product.laid() if program.dtype == torch.float32 else None
        if laid is None:
            raise Unknown
        tensors, form = (laid, product.stored()["_scale"], bias_of(module)), EIGHT
        program.need("rounded", groups_of(m) + 1)
        program.add("round", given, "rounded", numbers={"m": m})
        given = "rounded"
    else:
        tensors = _weight(module)
        form = FORMS.get(tensors[0].dtype, 0)
        if tensors[0].dtype not in (program.dtype, *FORMS):
            raise Unknown
        if not (program.copies or tensors[0].is_contiguous()):
            raise Unknown
    program.add(
        "linear",
        given,
        out,
        source=source,
        tensors=tensors,
        act=act,
        alpha=alpha,
        numbers={
            "form": form,
            "n": n // 2 if gated else n,
            "m": m,
            "gated": int(gated),
            "softcap": softcap,
        },
    )


def _norm(program: Program, module: nn.Module, given: str, out: str, *, at: int = 0, count: int = 1) -> None:
    """A norm, or nothing; what is to be elsewhere is copied there."""
    if type(module) is nn.Identity:
        if given != out:
            program.need(out, program.widths[given])
            program.add("copy", given, out, numbers={"n": program.widths[given]})
        return
    if type(module) is not Norm:
        raise Unknown
    gain, cfg = module.weight, module.cfg
    if gain is not None and cfg.gain_offset:
        gain = gain + cfg.gain_offset
    program.need(given, at + count * module.width)
    program.need(out, at + count * module.width)
    program.add(
        "norm",
        given,
        out,
        tensors=(None, gain, module.bias),
        numbers={
            "n": module.width,
            "count": count,
            "eps": cfg.eps,
            "rms": int(cfg.kind == "rms"),
            "in_at": at,
            "out_at": at,
        },
    )


def _scores(cfg: config.Attention) -> dict[str, float]:
    return {
        "heads": cfg.n_heads,
        "kv": cfg.n_kv_heads,
        "width": cfg.head_width,
        "alpha": cfg.score_scale,
        "softcap": 0.0 if cfg.softcap is None else cfg.softcap,
    }


def _self_read(program: Program, module: nn.Module, given: str, layer: int, kind: int) -> None:
    if type(module) is not Attention:
        raise Unknown
    cfg, norms = module.cfg, (module.query_norm, module.key_norm)
    h, kv, width = cfg.n_heads, cfg.n_kv_heads, cfg.head_width
    _linear(program, module.qkv, given, "heads")
    late = cfg.qk_norm is not None and cfg.qk_norm.order == "after_rotation"
    if late and isinstance(cfg.positions, config.Rotary):
        program.add("rotate", "heads", "heads", numbers={"count": h + kv, "width": width, "near": kind})
    if cfg.qk_norm is not None:
        each = cfg.qk_norm.axis == "head"
        _norm(program, norms[0], "heads", "heads", count=h if each else 1)
        _norm(program, norms[1], "heads", "heads", at=h * width, count=kv if each else 1)
    program.need("context", h * width)
    numbers = {"layer": layer, "near": kind, "gated": int(late), **_scores(cfg)}
    program.add("attend", "heads", "context", numbers=numbers)


def _crossing(program: Program, module: nn.Module, given: str, layer: int) -> None:
    if type(module) is not Attention:
        raise Unknown
    cfg = module.cfg
    _linear(program, module.query, given, "heads")
    if cfg.qk_norm is not None:
        each = cfg.qk_norm.axis == "head"
        _norm(program, module.query_norm, "heads", "heads", count=cfg.n_heads if each else 1)
    program.need("context", cfg.n_heads * cfg.head_width)
    program.add("cross", "heads", "context", numbers={"layer": layer, **_scores(cfg)})


def _feed(program: Program, module: nn.Module, given: str) -> nn.Module:
    """Everything but the last map, which is returned; it reads "hidden"."""
    if type(module) is TwoLayer:
        _linear(program, module.up, given, "hidden", act=module.cfg.activation)
        return module.down
    if type(module) is Gated:
        _linear(program, module.gate_up, given, "hidden", act=module.cfg.activation, gated=True)
        return module.down
    raise Unknown


def _residual(
    program: Program, module: nn.Module, body: Callable[[nn.Module, str], nn.Module], read: str
) -> None:
    """``body`` writes all but its last map, which it returns, and which reads the buffer ``read``."""
    if type(module) is not Residual:
        raise Unknown
    given = "stream" if type(module.before) is nn.Identity else "normed"
    if given == "normed":
        _norm(program, module.before, "stream", "normed")
    last = body(module.body, given)
    source = given if module.from_normalised else "stream"
    if type(module.after_body) is nn.Identity:
        _linear(program, last, read, "stream", source=source, alpha=module.scale)
    else:
        _linear(program, last, read, "increment")
        _norm(program, module.after_body, "increment", "increment")
        numbers = {"n": program.widths["stream"]}
        program.add("add", "increment", "stream", source=source, alpha=module.scale, numbers=numbers)
    _norm(program, module.after_sum, "stream", "stream")


def _sequential(program: Program, block: Layer, layer: int, kind: int) -> None:
    def attention(module: nn.Module, given: str) -> nn.Module:
        _self_read(program, module, given, layer, kind)
        return _output(module)

    def crossing(module: nn.Module, given: str) -> nn.Module:
        _crossing(program, module, given, layer)
        return _output(module)

    _residual(program, block.attention, attention, "context")
    if block.cross_attention is not None:
        _residual(program, block.cross_attention, crossing, "context")
    _residual(program, block.feed_forward, lambda module, given: _feed(program, module, given), "hidden")


def _output(module: nn.Module) -> nn.Module:
    assert isinstance(module, Attention)
    return module.output


def _parallel(program: Program, block: ParallelLayer, layer: int, kind: int) -> None:
    if type(block.attention) is not Attention:
        raise Unknown
    _norm(program, block.attention_norm, "stream", "normed")
    given = "normed"
    if not block.shared:
        _norm(program, block.feed_forward_norm, "stream", "other")
        given = "other"
    _self_read(program, block.attention, "normed", layer, kind)
    _linear(program, block.attention.output, "context", "stream", source="stream", alpha=block.scale)
    last = _feed(program, block.feed_forward, given)
    _linear(program, last, "hidden", "stream", source="stream", alpha=block.scale)


def _head(program: Program, head: TokenHead) -> bool:
    """Scores; False: the head has parts, or a scale beside a bias, that are left to its module."""
    if type(head.transform) is not nn.Identity or (head.scale != 1.0 and head.bias is not None):
        return False
    cap = head.cfg.softcap
    _linear(
        program,
        head,
        "stream",
        "scores",
        act="identity" if cap is None else "softcap",
        softcap=0.0 if cap is None else cap,
        alpha=head.scale,
    )
    return True
