"""From a vector per token to one per row: which positions, and how they are put together.

Asked, not read: the derivative of a row's vector by the token vectors says which of them count, and how much.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from isoform.verify.align import Model
from isoform.verify.diagnose.unary import Step, describe, gap


def is_pooled(model: Model, source: int, target: int) -> bool:
    """Whether ``target`` holds one vector a row and ``source`` one for each token."""
    one, two = model.of_node(source), model.of_node(target)
    return one is not None and two is not None and one.shape[1] > 1 and two.shape[1] == 1


@dataclasses.dataclass(eq=False)
class Pooled:
    """How a row's vector comes from those of its tokens.

    Attributes:
        before, after: the nodes between which tokens become one vector a row.
        first: what happens to the token vectors in front of that.
        pool: how they are pooled.
        last: what happens to the row's vector.
    """

    before: int
    after: int
    first: list[Step]
    pool: Step
    last: list[Step]

    @property
    def steps(self) -> list[Step]:
        """All that happens."""
        return [*self.first, self.pool, *self.last]

    @property
    def single(self) -> bool:
        """Whether one of the tokens is taken: what is done to each vector can be done before or after."""
        return self.pool.words.startswith("takes")


def pooled(model: Model, source: int, target: int) -> Pooled | None:
    """How tokens become one vector a row; None where that is none of the known ways."""
    chain = model.structure.chain(target)
    value = model.of_node(source)
    if source not in chain or value is None:
        return None
    way = chain[: chain.index(source) + 1]
    width = value.shape[-1]
    for before in (n for n in way if _rows(model, n) > 1 and model.graph.values[n].shape[-1] == width):
        first = describe(model, source, before, width, value.shape)
        if any(step.kind == "other" for step in first):
            continue
        for after in (n for n in way if _rows(model, n) == 1 and model.graph.values[n].shape[-1] == width):
            words = describe_pooling(model, before, after)
            if words is None:
                continue
            last = describe(model, after, target, width, torch.Size((len(value), 1, width)))
            if not any(step.kind == "other" for step in last):
                return Pooled(before, after, first, Step("pool", words=words), last)
    return None


def _rows(model: Model, node: int) -> int:
    value = model.of_node(node)
    return 0 if value is None else value.shape[1]


def describe_pooling(model: Model, source: int, target: int) -> str | None:
    """How ``target``, one vector a row, comes from ``source``, one a token; None: it has no name."""
    weights = pooling_weights(model, source, target)
    if weights is None:
        return None
    real = model.real(model.role(source))
    if weights.shape != real.shape:
        return None
    length = real.shape[1]
    if not bool(real.any(1).all()):
        return None
    first = real.long().argmax(1)
    last = length - 1 - real.flip(1).long().argmax(1)
    used = weights.abs() > 1e-9 * weights.abs().max().clamp(min=1e-30)
    single = bool((used.sum(1) == 1).all())
    if single:
        at = used.long().argmax(1)
        names: list[str] = []
        if bool((at == 0).all()):
            names.append("the first position")
        if torch.equal(at, first):
            names.append("the first real token")
        if bool((at == length - 1).all()):
            names.append("the last position")
        if torch.equal(at, last):
            names.append("the last real token")
        if not names:
            return "takes positions " + ", ".join(map(str, at.tolist()))
        return "takes " + " = ".join(names)
    count = real.sum(1, keepdim=True).double()
    forms = {
        "averages over the real tokens": real / count,
        "averages over all positions, padding too": torch.full_like(weights, 1 / length),
        "adds up the real tokens": real.double(),
        "adds up all positions, padding too": torch.ones_like(weights),
        "adds up the real tokens and divides by all positions": real / length,
    }
    for name, form in forms.items():
        if gap(form.double(), weights) < 1e-6:
            return name
    return None


def pooling_weights(model: Model, source: int, target: int) -> Tensor | None:
    """``[B, T]`` how much each token counts, where that is the same for all channels and contents."""
    value = model.of_node(source)
    if value is None:
        return None
    generator = torch.Generator().manual_seed(17)
    found: list[Tensor] = []
    for scale in (1.0, 3.0):
        x = (scale * torch.randn(value.shape, generator=generator, dtype=torch.float64)).requires_grad_()
        shaped = model.graph.shaped(x, source, value.shape[-1])
        out = model.graph.evaluate(target, {source: shaped})
        y = model.graph.canonical(out, out.shape[-1], target)
        if y is None or y.shape[-1] != value.shape[-1]:
            return None
        for channel in (0, value.shape[-1] // 2):
            (grad,) = torch.autograd.grad(y[:, 0, channel].sum(), x, retain_graph=True)
            others = grad.clone()
            others[..., channel] = 0
            if float(others.abs().max()) > 1e-9 * float(grad.abs().max().clamp(min=1e-30)):
                return None
            found.append(grad[..., channel])
    same = all(gap(found[0], other) < 1e-9 for other in found[1:])
    return found[0] if same else None
