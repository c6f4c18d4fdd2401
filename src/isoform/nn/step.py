"""One token a row through a decoder, as a flat list of calls that is prepared once (R31–R32).

A step of the modules spends most of its time on Python, and on masks that say the same at every token. Here
what the configuration decides is decided when the step is made, what depends on a position is a row of a
table, and keys and values are slices of `lanes`. It is the function of the modules, which tests hold it to;
what it does not cover is left to them: see `prepare`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isoform import config
from isoform.config.positions import BY_LENGTH, AttentionPositions
from isoform.nn.attention import Attention
from isoform.nn.biases import alibi_slopes, relative_buckets
from isoform.nn.capture import listening
from isoform.nn.flat import At, Run, flat_embedding, flat_head, flat_layer, flat_norm
from isoform.nn.heads import TokenHead
from isoform.nn.lanes import Lanes
from isoform.nn.model import Transformer
from isoform.nn.positions import rotary_table
from isoform.nn.reads import Near
from isoform.nn.stack import Stack

WIDE = (torch.float32, torch.float64)


def prepare(model: Transformer) -> Step | None:
    """The step of a network; None where only the modules will do.

    That is: under autograd, autocast, a recorder or hooks; with half-precision parameters; with attention set
    to one backend; with rotary frequencies that change as a row grows (dynamic NTK), ALiBi that is rounded by
    place, or layers whose caches differ in shape.
    """
    stack, head = model.decoder, model.head
    if type(model) is not Transformer or stack is None or type(head) is not TokenHead:
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    if listening() or model.embedding.weight.dtype not in WIDE:
        return None
    for module in model.modules():
        hooks = module._forward_hooks, module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        if any(hooks):
            return None
        if isinstance(module, Attention) and module.backend != "auto":
            return None
    attentions = [layer.attention for layer in stack.cfg.layers()]
    if len({(a.n_kv_heads, a.head_width) for a in attentions}) > 1:
        return None
    for positions in (a.positions for a in attentions):
        if isinstance(positions, config.Rotary) and isinstance(positions.scaling, BY_LENGTH):
            return None
        if isinstance(positions, config.Alibi) and positions.rounding != "none":
            return None
    runs = [flat_layer(block) for block in stack.blocks()]
    known = [run for run in runs if run is not None]
    return Step(model, stack, known, head) if len(known) == len(runs) else None


class Step:
    """Reads one token a row; `prepare` makes it."""

    def __init__(self, model: Transformer, stack: Stack, runs: list[Run], head: TokenHead) -> None:
        self.stack, self.token_head, self.d_model = stack, head, model.config.d_model
        self._embedding = model.embedding
        self._embed = flat_embedding(model.embedding)
        self._runs = runs
        self._final, self._head = flat_norm(stack.final_norm), flat_head(head)
        self.dtype, self._device = model.embedding.weight.dtype, model.embedding.weight.device
        self._until = 0
        self._rows: Tensor | None = None
        self._tables: list[tuple[Tensor, ...]] = []

    @property
    def shares(self) -> bool:
        """Whether outputs of one prompt may read one copy of it: no layer sees it otherwise as they grow."""
        plain = (config.NoPositions, config.Rotary)
        return all(window is None and isinstance(p, plain) for window, p, _ in self.stack.kinds)

    def embed(
        self, ids: Int[Tensor, " rows"], place: int | Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows d_model"]:
        """First states of tokens at a position, within what `tables` was last asked for."""
        return self._embed(ids, None if self._rows is None else _at(self._rows, place))

    def tables(self, least: int) -> tuple[int, list[tuple[Tensor, ...]]]:
        """How far they reach, and for every kind of layer the rows of its positions, at least so many:
        cosines and sines ``[positions, width]``, or what is added to scores ``[h, distances]``."""
        self._extend(least)
        return self._until, [t if len(t) != 1 else (t[0][0, :, 0].flip(-1),) for t in self._tables]

    def __call__(self, ids: Int[Tensor, " rows"], lanes: Lanes) -> Float[Tensor, "rows vocab"]:
        """Read a token a row, and score the one after it. There is room for it: `Lanes.reserve`."""
        used, end = lanes.used, lanes.used + 1
        if used + lanes.ahead >= self._until:
            self._extend(used + lanes.ahead + 1)
        place = lanes.offset + used
        x = self.embed(ids, place)
        written = lanes.own.select(3, used).unbind(0)
        nears: list[Near] = []
        reads: list[tuple[Tensor, ...]] = []
        for (window, positions, _), table in zip(self.stack.kinds, self._tables, strict=True):
            low = 0 if window is None else max(0, end - window)
            reads.append(lanes.own.narrow(3, low, end - low).unbind(0))
            nears.append(_near(positions, table, place, low, end, lanes))
        shared = None if lanes.shared is None else lanes.shared.unbind(0)
        memory, lanes.used = lanes.memory, end
        for i, (run, kind) in enumerate(zip(self._runs, self.stack.kind_of, strict=True)):
            k, v = 2 * i, 2 * i + 1
            at = At(
                nears[kind],
                (written[k], written[v]),
                reads[kind][k],
                reads[kind][v],
                None if shared is None else (shared[k], shared[v]),
                None if memory is None else memory[i],
                lanes.memory_mask,
            )
            x = run(x, at)
        return self._head(x if self._final is None else self._final(x))

    def _extend(self, least: int) -> None:
        """Rows of every table for positions, or distances, up to ``least`` and some more."""
        self._until = 1 << max(6, (least - 1).bit_length())
        places = torch.arange(self._until, device=self._device)
        positions = self._embedding.cfg.positions
        if isinstance(positions, config.Learned):
            places = places[: positions.max_positions]
        if self._embedding.positions is not None:
            self._rows = self._embedding.positions(places[None], self.dtype)[0]
        self._tables = [self._table(p, h) for _, p, h in self.stack.kinds]

    def _table(self, positions: AttentionPositions, n_heads: int) -> tuple[Tensor, ...]:
        until = torch.arange(self._until, device=self._device)
        if isinstance(positions, config.Rotary):
            cos, sin = rotary_table(positions, until[None], None, self.dtype)
            return cos[0, 0], sin[0, 0]
        if isinstance(positions, config.Alibi):
            slopes = torch.tensor(alibi_slopes(n_heads), dtype=torch.float64, device=self._device)
            slopes = (slopes * positions.factor).to(self.dtype)
            return (-(slopes[:, None] * until.flip(0))[None, :, None],)
        if isinstance(positions, config.RelativeBuckets):
            assert self.stack.relative_bias is not None
            bias = self.stack.relative_bias.weight[relative_buckets(positions, -until.flip(0))]
            return (bias.t()[None, :, None].to(self.dtype),)
        return ()


def _at(rows: Tensor, place: int | Tensor) -> Tensor:
    return rows[place] if isinstance(place, int) else rows.index_select(0, place)


def _near(
    positions: AttentionPositions,
    table: tuple[Tensor, ...],
    place: int | Tensor,
    low: int,
    end: int,
    lanes: Lanes,
) -> Near:
    added = None if lanes.mask is None else lanes.mask[..., low:end]
    rotary = None
    if isinstance(positions, config.Rotary):
        cos, sin = (_at(t, place) for t in table)
        rotary = (cos, sin) if isinstance(place, int) else (cos[:, None], sin[:, None])
    elif table:
        until = table[0].shape[-1]
        bias = table[0][..., until - (end - low) :]
        added = bias if added is None else bias + added
    return Near(rotary, added, lanes.shared_mask, lanes.outputs)
