"""Running the written graphs with onnxruntime, and holding them against the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoform.checkpoints import probe
from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.checked import EngineCheck
from isoform.checkpoints.probe import STEPS, TOLERANCE
from isoform.config import ModelConfig, TokenHead
from isoform.errors import CheckError
from isoform.nn import Transformer
from isoform.tokens import Tokens


class Session:
    """The graphs of a folder.

    Args:
        runtime: the `onnxruntime` package.
        folder: what `export` wrote.
        config: the architecture.
    """

    def __init__(self, runtime: Any, folder: Path, config: ModelConfig) -> None:
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        names = ("encoder.onnx", "decoder.onnx") if config.source is not None else ("model.onnx",)
        self._graphs = [
            runtime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
            for name in names
        ]
        self.config = config

    def whole(self, tokens: Tokens) -> Tensor:
        """An encoder's answer."""
        given = {"input_ids": tokens.ids, "attention_mask": tokens.real_or_ones().long()}
        if self.config.embedding.n_token_types:
            types = tokens.token_types
            given["token_type_ids"] = torch.zeros_like(tokens.ids) if types is None else types
        return self._run(0, given)[0]

    def encode(self, source: Tokens) -> dict[str, Tensor]:
        """What the decoder takes of a source."""
        mask = source.real_or_ones().long()
        _, *parts = self._run(0, {"input_ids": source.ids, "attention_mask": mask})
        layers = range(len(parts) // 2)
        names = [f"memory.{i}.{part}" for i in layers for part in ("key", "value")]
        return {"source_mask": mask, **dict(zip(names, parts, strict=True))}

    def empty(self, batch: int) -> list[Tensor]:
        """A cache that holds nothing."""
        heads = [layer.attention for layer in self.config.stack.layers()]
        return [torch.zeros(batch, a.n_kv_heads, 0, a.head_width) for a in heads for _ in range(2)]

    def step(
        self, ids: Tensor, mask: Tensor, past: list[Tensor], more: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Scores of the new tokens, and the cache with them in it."""
        names = [f"past.{i}.{part}" for i in range(len(past) // 2) for part in ("key", "value")]
        given = {"input_ids": ids, "attention_mask": mask, **dict(zip(names, past, strict=True)), **more}
        scores, *present = self._run(-1, given)
        return scores, present

    def _run(self, graph: int, given: dict[str, Tensor]) -> list[Tensor]:
        found = self._graphs[graph].run(None, {name: t.contiguous().numpy() for name, t in given.items()})
        return [torch.from_numpy(value) for value in found]


@torch.no_grad()
def check(runtime: Any, bundle: Bundle, folder: Path) -> EngineCheck:
    """Ragged rows with padding on both sides, then greedy tokens with the cache.

    Raises:
        CheckError: onnxruntime computes another function.
    """
    model, config = bundle.model, bundle.config
    session = Session(runtime, folder, config)
    training = model.training
    model.eval()
    try:
        worst, count = 0.0, 0
        tokens, source = probe.inputs(config)
        for side in ("right", "left"):
            ours, theirs = _answers(model, session, tokens.padded(side), source and source.padded(side))
            worst = max(worst, (ours - theirs).abs().max().item() / max(1.0, ours.abs().max().item()))
            count += ours.numel()
        if not worst <= TOLERANCE["float32"]:
            accepted = f"accepted: {TOLERANCE['float32']:.0e}"
            raise CheckError(f"check: onnxruntime's scores differ by {worst:.2g} ({accepted})")
        chosen = 0
        if config.decoder is not None and isinstance(config.head, TokenHead):
            chosen = _continued(model, session, tokens, source)
    finally:
        model.train(training)
    return EngineCheck("onnxruntime", str(runtime.__version__), count, worst, chosen)


def _answers(
    model: Transformer, session: Session, tokens: Tokens, source: Tokens | None
) -> tuple[Tensor, Tensor]:
    output = model(tokens, source)
    ours = output.logits if output.logits is not None else output.pooled
    ours = output.hidden if ours is None else ours
    if model.config.structure == "encoder":
        theirs = session.whole(tokens)
    else:
        mask = tokens.real_or_ones().long()
        theirs, _ = session.step(
            tokens.ids, mask, session.empty(tokens.batch), _more(session, tokens, source)
        )
    if ours.dim() == 3:
        real = tokens.real_or_ones()
        return ours[real], theirs[real]
    return ours, theirs


def _more(session: Session, tokens: Tokens, source: Tokens | None) -> dict[str, Tensor]:
    more: dict[str, Tensor] = {} if source is None else session.encode(source)
    return more if tokens.prefix is None else {**more, "prefix": tokens.prefix}


def _continued(model: Transformer, session: Session, tokens: Tokens, source: Tokens | None) -> int:
    """Greedy tokens of all rows, the graph with its cache against whole passes; how many agreed a row."""
    room = (model.config.max_positions() or tokens.length + STEPS) - tokens.length
    more = _more(session, tokens, source)
    mask, past = tokens.real_or_ones().long(), session.empty(tokens.batch)
    scores, past = session.step(tokens.ids, mask, past, more)
    rows = torch.arange(tokens.batch)
    last = scores[rows, tokens.lengths() - 1]
    whole = tokens
    for n in range(min(STEPS, room)):
        ours = _last(model, whole, source)
        top = ours.topk(2, -1).values
        if bool(((top[:, 0] - top[:, 1]) <= 2 * TOLERANCE["float32"] * ours.abs().amax(-1)).any()):
            return n  # a near tie: either choice is right, and what follows depends on it
        chosen = ours.argmax(-1)
        theirs = last.argmax(-1)
        if not torch.equal(chosen, theirs):
            raise CheckError(
                f"check: onnxruntime's greedy tokens {n + 1} are {theirs.tolist()}, ours {chosen.tolist()}"
            )
        whole = _appended(whole, chosen)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        scores, past = session.step(chosen[:, None], mask, past, more)
        last = scores[:, -1]
    return min(STEPS, room)


def _last(model: Transformer, tokens: Tokens, source: Tokens | None) -> Tensor:
    logits = model(tokens, source).logits
    assert logits is not None
    columns = torch.arange(tokens.length)
    return logits[torch.arange(tokens.batch), torch.where(tokens.real_or_ones(), columns, 0).amax(-1)]


def _appended(tokens: Tokens, chosen: Tensor) -> Tokens:
    real = torch.cat([tokens.real_or_ones(), torch.ones_like(chosen[:, None], dtype=torch.bool)], 1)
    return Tokens(torch.cat([tokens.ids, chosen[:, None]], 1), real, prefix=tokens.prefix, layout="any")
