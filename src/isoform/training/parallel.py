"""One network on several processes: replicated (DDP) or in pieces (FSDP2), behind one face."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from isoform.nn import Stack, Transformer
from isoform.training.group import Group
from isoform.training.learner import Learner
from isoform.training.loss import Work
from isoform.training.settings import Distributed

DTYPES = {"as_held": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Alone:
    """The network of a process that trains by itself.

    Args:
        learner: what is trained.
    """

    factor = 1.0
    """What a loss is multiplied by before its backward pass: DDP and FSDP2 average over processes, and the
    loss is already divided by the global count."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.model = learner.model

    def __call__(self, work: Work) -> tuple[Tensor, Tensor, Tensor]:
        """The learner's sums."""
        return self.learner(work)

    def sums_up(self, last: bool) -> AbstractContextManager[object]:
        """The context of a forward and backward pass; ``last``: gradients are exchanged at its end."""
        return nullcontext()

    def settle(self) -> None:
        """After passes that no backward pass follows: weights are held as before them."""

    def gathered(self) -> dict[str, Tensor]:
        """All weights, whole, by name; shared ones once."""
        return {name: whole(p.detach()) for name, p in self.model.named_parameters()}


class Replicated(Alone):
    """Every process holds the network; gradients are averaged at the end of the last backward pass.

    Args:
        learner: what is trained.
        group: the processes.
        unused: whether some parameters get no gradient from some batches.
    """

    def __init__(self, learner: Learner, group: Group, *, unused: bool) -> None:
        super().__init__(learner)
        self.factor = float(group.size)
        self._ddp = nn.parallel.DistributedDataParallel(learner, find_unused_parameters=unused)

    def __call__(self, work: Work) -> tuple[Tensor, Tensor, Tensor]:
        # While nothing is learnt each process reads its own share, perhaps of another length.
        return self._ddp(work) if torch.is_grad_enabled() else self.learner(work)

    def sums_up(self, last: bool) -> AbstractContextManager[object]:
        """Only the last pass of an update is followed by an exchange."""
        return nullcontext() if last else self._ddp.no_sync()


class Sharded(Alone):
    """Every process holds a piece of each weight, its gradient and its moments (FSDP2).

    The given network stays as it is; its copy is cut up. Tied weights are one tensor before and after.

    Args:
        learner: what is copied.
        group: the processes.
        settings: the arithmetic's types.
        device: where the pieces lie.
    """

    def __init__(self, learner: Learner, group: Group, settings: Distributed, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        copied = copy.deepcopy(learner)
        copied.sharded = True
        super().__init__(copied)
        self.factor = float(group.size)
        mesh = init_device_mesh(device.type, (group.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[settings.compute], reduce_dtype=DTYPES[settings.reduce]
        )
        for stack in stacks(self.model):
            blocks = list(dict.fromkeys(stack.layers))
            if len(blocks) == len(stack.layers):  # a layer that is run twice is left to the whole
                for block in blocks:
                    fully_shard(block, mesh=mesh, mp_policy=policy)
        self._whole = fully_shard(copied, mesh=mesh, mp_policy=policy)

    def settle(self) -> None:
        """Let go of what the last pass has gathered: the outermost part waits for a backward pass with it."""
        self._whole.reshard()


def parallelise(
    learner: Learner, group: Group, settings: Distributed, device: torch.device, *, unused: bool
) -> Alone:
    """The network as the run file wants it on this many processes."""
    if group.alone:
        return Alone(learner)
    if settings.strategy == "fsdp":
        return Sharded(learner, group, settings, device)
    return Replicated(learner, group, unused=unused)


def stacks(model: Transformer) -> list[Stack]:
    """The network's stacks."""
    return [stack for stack in (model.encoder, model.decoder) if stack is not None]


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the pieces that other processes hold; all of them have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The piece of a tensor that this process holds; writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `local`, for many."""
    return [local(tensor) for tensor in tensors]


def cut_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor in the pieces of another; nothing is sent, every process has the whole."""
    if not isinstance(like, DTensor):
        return value
    moved: Any = value.to(device=like.device, dtype=like.dtype)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
