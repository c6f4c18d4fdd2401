"""Training steps against torch.nn.Transformer and transformers; token buckets against random batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import isoform as iso
from benchmarks.networks import Shape, decoder, in_transformers, prompts
from benchmarks.timing import Row, Run, Section, in_turns
from isoform.checkpoints.torch_nn import to_torch
from isoform.cost import Workload, flops, measure_machine
from isoform.data.batching_config import TokenBudget
from isoform.data.buckets import plan_batches
from isoform.nn.exact import exact_products
from isoform.training.heap import settled_heap
from isoform.training.loss import Work, batch_loss

CPU = torch.device("cpu")


def peaks() -> dict[str, float]:
    """FLOPs a second of matrix products, by the type of number, as `isoform train` has them made."""
    with exact_products(CPU):
        return {kind: measure_machine(kind, seconds=2.0).flops for kind in ("float32", "bfloat16")}


def steps(
    shapes: tuple[Shape, Shape], batch: int, length: int, repeats: int, peaks: Mapping[str, float]
) -> Section:
    """Forward and backward pass and the optimizer's step, of an encoder–decoder and of a decoder."""
    rows: list[Row] = []
    for dropout in (0.0, 0.1):
        for compared, shape in zip((_against_torch, _against_transformers), shapes, strict=True):
            rows += compared(shape, dropout, batch, length, repeats, peaks)
    text = (
        "AdamW at rate 0, fused, for all, so that losses can be compared: equal means to 1e-4. Ours runs as "
        "`isoform train` does, where large float32 products go to oneDNN if that is as exact; a peer too, "
        "where it says so. The limit is the FLOPs at the measured peak of products of its type."
    )
    return Section("Training steps", "tokens/s", rows, text)


def _against_torch(
    shape: Shape, dropout: float, batch: int, length: int, repeats: int, peaks: Mapping[str, float]
) -> list[Row]:
    cfg = iso.presets.torch_nn(
        shape.vocab,
        d_model=shape.d_model,
        n_heads=shape.heads,
        ffn_width=4 * shape.d_model,
        n_encoder_layers=shape.layers,
        n_decoder_layers=shape.layers,
        dropout=dropout,
    )
    model = iso.build(cfg, seed=0).train()
    peer = _Peer(model).train()
    generator = torch.Generator().manual_seed(0)
    source, target, labels = (
        torch.randint(3, shape.vocab, (batch, length), generator=generator) for _ in range(3)
    )
    work = _work(iso.Tokens(target), iso.Tokens(source), labels)
    return _compare(
        f"{shape.name}, {batch} × ({length} + {length}) tokens, dropout {dropout}",
        {
            "torch.nn.Transformer": (peer, lambda: F.cross_entropy(peer(source, target), labels.flatten())),
            "isoform": (model, lambda: batch_loss(model, work).loss / work.count),
        },
        2 * batch * length,
        repeats,
        {
            kind: flops(cfg, Workload("train", batch, length, length)).model / peak
            for kind, peak in peaks.items()
        },
    )


class _Peer(nn.Module):
    """`torch.nn.Transformer` between our own embedding and head, copied."""

    def __init__(self, model: iso.nn.Transformer) -> None:
        super().__init__()
        # At once: tables that are shared stay so.
        parts: Any = (model.embedding, model.source_embedding, model.head)
        self.embedding, self.source, self.head = copy.deepcopy(parts)
        self.stacks: Any = to_torch(model)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        place = torch.arange(target.shape[1])[None]
        there, here = (
            table(iso.Tokens(ids), place) for table, ids in ((self.source, source), (self.embedding, target))
        )
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.stacks(there, here, tgt_mask=mask, tgt_is_causal=True)).flatten(0, 1)


def _against_transformers(
    shape: Shape, dropout: float, batch: int, length: int, repeats: int, peaks: Mapping[str, float]
) -> list[Row]:
    bundle = decoder(shape, dropout=dropout)
    model, peer = bundle.model.train(), in_transformers(bundle).train()
    ids = prompts(bundle, batch, length + 1)
    work = _work(iso.Tokens(ids[:, :-1]), None, ids[:, 1:])
    theirs = ids[:, :-1]
    return _compare(
        f"{shape.name}, {batch} × {length} tokens, dropout {dropout}",
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
        {
            kind: flops(bundle.config, Workload("train", batch, length)).model / peak
            for kind, peak in peaks.items()
        },
    )


def _work(tokens: iso.Tokens, source: iso.Tokens | None, labels: torch.Tensor) -> Work:
    return Work(tokens, source, torch.arange(labels.numel()), labels.flatten(), False, labels.numel())


def _compare(
    case: str, given: dict[str, Any], tokens: int, repeats: int, floors: Mapping[str, float]
) -> list[Row]:
    runs: dict[str, Run] = {}
    losses: dict[str, float] = {}
    peer = next(iter(given))
    for kind in floors:
        for who, (module, loss) in given.items():
            name = f"{who} {kind}"
            runs[name] = _step(name, module, loss, kind == "bfloat16", losses, exact=who != peer)
            if who == peer and kind == "float32" and _elsewhere():
                name = f"{name}, products by oneDNN"
                runs[name] = _step(name, module, loss, False, losses, exact=True)
    with settled_heap():  # as in the training loop, for the peers too
        seconds = in_turns(runs, repeats)
    first = next(iter(runs))
    found: list[Row] = []
    for who, took in seconds.items():
        near = abs(losses[who] - losses[first]) / abs(losses[first])
        equal = "equal" if near < 1e-4 else f"loss differs by {near:.1e}"
        limit = floors[who.split()[1]] / took if who.startswith("isoform") else None
        found.append(Row(case, who, took, tokens / took, "reference" if who == first else equal, limit))
    return found


def _elsewhere() -> bool:
    """Whether `exact_products` changes anything here."""
    with exact_products(CPU):
        return torch.get_float32_matmul_precision() != "highest"


def _step(
    name: str, module: nn.Module, loss: Any, half: bool, losses: dict[str, float], *, exact: bool
) -> Run:
    # Both get the fused optimizer: what differs is the network.
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, fused=True)

    def run() -> None:
        with exact_products(CPU) if exact else contextlib.nullcontext():
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
