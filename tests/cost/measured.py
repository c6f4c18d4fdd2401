"""Real training and inference steps of a configuration, with every tensor storage followed."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from isoform.config import ModelConfig, TokenHead
from isoform.cost.counters import MemoryUse, measure_memory
from isoform.cost.workload import Workload
from isoform.nn import Cache, Output, Transformer, build
from isoform.tokens import Tokens
from isoform.training.loss import Work, batch_loss

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


def prepare(config: ModelConfig, work: Workload) -> tuple[Transformer, Tokens, Tokens | None]:
    """The network and its input."""
    model = build(config, seed=0).set_attention(work.attention).to(DTYPES[work.dtype])
    prefix = torch.zeros(work.batch, dtype=torch.long)  # read by prefix visibility only
    ids = torch.randint(0, config.embedding.vocab_size, (work.batch, work.length))
    tokens = Tokens(ids, prefix=prefix)
    source = None
    if config.source is not None:
        assert work.source_length is not None
        ids = torch.randint(0, config.source.vocab_size, (work.batch, work.source_length))
        source = Tokens(ids, prefix=prefix)
    return model, tokens, source


def loss_of(config: ModelConfig, output: Output, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy where there are scores over tokens, else some scalar."""
    if isinstance(config.head, TokenHead):
        assert output.logits is not None
        logits = output.logits.flatten(0, 1)
        return F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, labels)
    result = output.logits if output.logits is not None else output.pooled
    return (output.hidden if result is None else result).float().sum()


def train_step(config: ModelConfig, work: Workload) -> Measured:
    """A step of AdamW that is not its first, with each layer recomputed where the work says so."""
    model, tokens, source = prepare(config, work)
    model.train()
    labels = torch.zeros(work.batch * work.length, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if work.recomputation == "layer":
        for stack in (model.encoder, model.decoder):
            for block in stack.blocks() if stack is not None else []:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    after_forward = 0

    def step(use: MemoryUse | None = None) -> None:
        nonlocal after_forward
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16_autocast"):
            if work.loss == "chunked":
                places = torch.arange(len(labels))
                batch = Work(tokens, source, places, labels, by_row=False, real_tokens=len(labels))
                output, loss = None, batch_loss(model, batch).loss
            else:
                output = model(tokens, source)
                loss = loss_of(config, output, labels)
        if use is not None:
            after_forward = use.current - use.before
        loss.backward()
        optimizer.step()
        del output

    step()
    optimizer.zero_grad(set_to_none=True)
    states = [value for state in optimizer.state.values() for value in state.values()]
    with measure_memory(model, *states) as use:
        step(use)
    return Measured(after_forward, use.peak, use.peak_at)


def inference(config: ModelConfig, work: Workload) -> int:
    """Peak bytes of a prefill of ``length`` tokens, or of the step to ``length`` tokens after one."""
    model, tokens, source = prepare(config, work)
    model.eval()
    dtype = DTYPES[work.dtype]
    with torch.no_grad():
        if config.decoder is None:
            with measure_memory(model) as use:
                model(tokens)
            return use.peak
        if work.mode == "prefill":
            with measure_memory(model) as use:
                cache = Cache.allocate(config, work.batch, work.length, dtype=dtype)
                memory = None if source is None else model.encode(source)
                if memory is not None:
                    model.remember(cache, memory)
                assert model.head is not None
                model.head(model.hidden(tokens, cache=cache)[:, -1:])
            return use.peak
        cache = Cache.allocate(config, work.batch, work.length, dtype=dtype)
        if source is not None:
            model.remember(cache, model.encode(source))
        model.hidden(Tokens(tokens.ids[:, :-1], prefix=tokens.prefix), cache=cache)
        held = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        held += [t for pair in cache.memory or [] for t in pair]
        with measure_memory(model, *held) as use:
            assert model.head is not None
            model.head(model.hidden(Tokens(tokens.ids[:, -1:]), cache=cache))
        return use.peak
