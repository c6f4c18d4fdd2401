"""Training steps against torch.nn.Transformer and transformers; token buckets against random batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import isoform as iso
from benchmarks.networks import Shape, decoder, in_transformers, prompts
from benchmarks.timing import Row, Run, Section, in_turns
from isoform.checkpoints.torch_nn import to_torch
from isoform.cost import Machine, Workload, flops
from isoform.data.batching_config import TokenBudget
from isoform.data.buckets import plan_batches
from isoform.training.heap import settled_heap
from isoform.training.loss import Work, batch_loss


def steps(shapes: tuple[Shape, Shape], batch: int, length: int, repeats: int, machine: Machine) -> Section:
    """Forward and backward pass and the optimizer's step, of an encoder–decoder and of a decoder."""
    both, alone = shapes
    rows = _against_torch(both, batch, length, repeats, machine)
    rows += _against_transformers(alone, batch, length, repeats, machine)
    text = "AdamW at rate 0, so that losses can be compared: equal means to 1e-4. The limit is the FLOPs at "
    return Section("Training steps", "tokens/s", rows, text + "the machine's measured peak of products.")


def _against_torch(shape: Shape, batch: int, length: int, repeats: int, machine: Machine) -> list[Row]:
    cfg = iso.presets.torch_nn(
        shape.vocab,
        d_model=shape.d_model,
        n_heads=shape.heads,
        ffn_width=4 * shape.d_model,
        n_encoder_layers=shape.layers,
        n_decoder_layers=shape.layers,
        dropout=0.0,
    )
    model = iso.build(cfg, seed=0).train()
    peer = _Peer(model).train()
    generator = torch.Generator().manual_seed(0)
    source, target, labels = (
        torch.randint(3, shape.vocab, (batch, length), generator=generator) for _ in range(3)
    )
    work = _work(iso.Tokens(target), iso.Tokens(source), labels)
    return _compare(
        f"{shape.name}, {batch} × ({length} + {length}) tokens",
        {
            "torch.nn.Transformer": (peer, lambda: F.cross_entropy(peer(source, target), labels.flatten())),
            "isoform": (model, lambda: batch_loss(model, work).loss / work.count),
        },
        2 * batch * length,
        repeats,
        flops(cfg, Workload("train", batch, length, length)).model / machine.flops,
    )


class _Peer(nn.Module):
    """`torch.nn.Transformer` between our own embedding and head, copied."""

    def __init__(self, model: iso.nn.Transformer) -> None:
        super().__init__()
        import copy

        self.embedding, self.source = copy.deepcopy(model.embedding), copy.deepcopy(model.source_embedding)
        self.stacks: Any = to_torch(model)
        self.head = copy.deepcopy(model.head)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        place = torch.arange(target.shape[1])[None]
        there, here = (
            table(iso.Tokens(ids), place) for table, ids in ((self.source, source), (self.embedding, target))
        )
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.stacks(there, here, tgt_mask=mask, tgt_is_causal=True)).flatten(0, 1)


def _against_transformers(shape: Shape, batch: int, length: int, repeats: int, machine: Machine) -> list[Row]:
    bundle = decoder(shape)
    model, peer = bundle.model.train(), in_transformers(bundle).train()
    ids = prompts(bundle, batch, length + 1)
    work = _work(iso.Tokens(ids[:, :-1]), None, ids[:, 1:])
    theirs = ids[:, :-1]
    return _compare(
        f"{shape.name}, {batch} × {length} tokens",
        {
            "transformers": (
                peer,
                lambda: F.cross_entropy(
                    peer(theirs, use_cache=False).logits.flatten(0, 1), ids[:, 1:].flatten()
                ),
            ),
            "isoform": (model, lambda: batch_loss(model, work).loss / work.count),
        },
        batch * length,
        repeats,
        flops(bundle.config, Workload("train", batch, length)).model / machine.flops,
    )


def _work(tokens: iso.Tokens, source: iso.Tokens | None, labels: torch.Tensor) -> Work:
    return Work(tokens, source, torch.arange(labels.numel()), labels.flatten(), False, labels.numel())


def _compare(case: str, given: dict[str, Any], tokens: int, repeats: int, floor: float) -> list[Row]:
    runs: dict[str, Run] = {}
    losses: dict[str, float] = {}
    for half in (False, True):
        for who, (module, loss) in given.items():
            name = f"{who} {'bfloat16 autocast' if half else 'float32'}"
            runs[name] = _step(name, module, loss, half, losses)
    with settled_heap():  # as in the training loop, for the peers too
        seconds = in_turns(runs, repeats)
    first = next(iter(runs))
    found: list[Row] = []
    for who, took in seconds.items():
        near = abs(losses[who] - losses[first]) / abs(losses[first])
        equal = "reference" if who == first else "equal" if near < 1e-4 else f"loss differs by {near:.1e}"
        limit = floor / took if who.startswith("isoform") and who.endswith("float32") else None
        found.append(Row(case, who, took, tokens / took, equal, limit))
    return found


def _step(name: str, module: nn.Module, loss: Any, half: bool, losses: dict[str, float]) -> Run:
    # Both get the fused optimizer: what differs is the network.
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, fused=True)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[name] = float(value.detach())

    return run


def buckets(shape: Shape, sentences: int, repeats: int) -> Section:
    """A pass over sentences of log-normal lengths, in token buckets and in random batches of 16."""
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.lognormal(3.0, 0.6, sentences).astype(int), 2, 120)
    model = decoder(shape).model.train()
    budget = TokenBudget(max_tokens=int(16 * lengths.mean()))
    plan = plan_batches([lengths], budget, numbers)
    order = numbers.permutation(sentences)
    plans = {
        "random batches of 16": [order[i : i + 16] for i in range(0, sentences, 16)],
        "token buckets": plan,
    }
    works = {who: [_bucket(lengths[rows], shape) for rows in rows_of] for who, rows_of in plans.items()}
    # What is usual: scores at every place, padding among them, of which the loss then takes some.
    works = {"random batches of 16, scores everywhere": works["random batches of 16"], **works}
    runs: dict[str, Run] = {who: _pass(model, batches) for who, batches in works.items()}
    runs[next(iter(works))] = _usual_pass(model, works["random batches of 16"])
    with settled_heap():  # as in the training loop, for the peers too
        seconds = in_turns(runs, repeats)
    rows: list[Row] = []
    for who, took in seconds.items():
        held = sum(w.tokens.ids.numel() for w in works[who])
        padding = 1 - int(lengths.sum()) / held
        note = f"padding {padding:.1%}, {len(works[who])} batches"
        rows.append(
            Row(
                f"{shape.name}, {sentences} sentences",
                who,
                took,
                lengths.sum() / took,
                "same sentences",
                None,
                note,
            )
        )
    text = "Forward and backward pass over all sentences once. Our loss scores supervised places alone, "
    text += "which spares padding its largest product also in random batches."
    return Section("Token buckets", "tokens/s", rows, text)


def _bucket(lengths: Any, shape: Shape) -> Work:
    rows = [torch.randint(3, shape.vocab, (int(n),)).tolist() for n in lengths]
    tokens = iso.Tokens.from_lists(rows, pad_id=0)
    places = tokens.real_or_ones().flatten().nonzero()[:, 0]
    return Work(tokens, None, places, tokens.ids.flatten()[places], False, len(places))


def _pass(model: iso.nn.Transformer, works: list[Work]) -> Run:
    def run() -> None:
        for work in works:
            (batch_loss(model, work).loss / work.count).backward()
            model.zero_grad(set_to_none=True)

    return run


def _usual_pass(model: iso.nn.Transformer, works: list[Work]) -> Run:
    def run() -> None:
        for work in works:
            scores = model(work.tokens).logits
            assert scores is not None
            labels = torch.full((work.tokens.ids.numel(),), -100).index_copy(0, work.places, work.labels)
            F.cross_entropy(scores.flatten(0, 1), labels).backward()
            model.zero_grad(set_to_none=True)

    return run
