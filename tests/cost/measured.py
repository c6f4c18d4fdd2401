"""Real training and inference steps of a configuration, with every tensor storage followed."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

from isoform.config import ModelConfig, TokenHead
from isoform.cost.counters import measure_memory
from isoform.cost.workload import Workload
from isoform.nn import Output, Transformer, build
from isoform.tokens import Tokens

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bfloat16_autocast": torch.float32,
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes: after the forward pass and the loss, beyond what was there before; at the peak, all together."""

    forward: int
    peak: int
    peak_at: str


def prepare(config: ModelConfig, work: Workload, device: str = "cpu") -> tuple[Transformer, Tokens, Tokens | None]:
    """The network and its input."""
    with torch.device(device):
        model = build(config, seed=0).set_attention(work.attention).to(DTYPES[work.dtype])
        shape = (work.batch, work.length)
        tokens = Tokens(torch.randint(0, config.embedding.vocab_size, shape), layout="full")
        source = None
        if config.source is not None:
            assert work.source_length is not None
            shape = (work.batch, work.source_length)
            source = Tokens(torch.randint(0, config.source.vocab_size, shape), layout="full")
    return model, tokens, source


def loss_of(config: ModelConfig, output: Output, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy where there are scores over tokens, else some scalar."""
    if isinstance(config.head, TokenHead):
        assert output.logits is not None
        logits = output.logits.flatten(0, 1)
        return F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, labels)
    result = output.logits if output.logits is not None else output.pooled
    return (output.hidden if result is None else result).float().sum()


def train_step(config: ModelConfig, work: Workload, device: str = "cpu") -> Measured:
    """A step of AdamW that is not its first."""
    model, tokens, source = prepare(config, work, device)
    labels = torch.zeros(work.batch * work.length, dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device != "meta")
    after_forward = 0

    def step(use=None) -> None:
        nonlocal after_forward
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16_autocast"):
            output = model(tokens, source)
            loss = loss_of(config, output, labels)
        if use is not None:
            after_forward = use.current - use.before
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    states = [value for state in optimizer.state.values() for value in state.values()]
    with measure_memory(model, *states) as use:
        step(use)
    return Measured(after_forward, use.peak, use.peak_at)
