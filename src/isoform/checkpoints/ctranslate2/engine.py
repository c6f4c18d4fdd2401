"""The engine's own answers, held against ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.checked import EngineCheck
from isoform.checkpoints.ctranslate2.reading import words
from isoform.checkpoints.probe import STEPS, TOLERANCE
from isoform.config.protocol import Protocol
from isoform.errors import CheckError
from isoform.nn import Transformer
from isoform.tokens import Tokens

LENGTHS = (7, 4, 1)


@torch.no_grad()
def check(library: Any, bundle: Bundle, folder: Path, settings: Mapping[str, Any]) -> EngineCheck:
    """Score ragged rows and choose greedy tokens with the engine, on the CPU in float32.

    Raises:
        CheckError: it refuses the folder, or its answers are not ours.
    """
    model = bundle.model
    run = _Encoded if bundle.config.source is not None else _Alone
    try:
        engine = run(library, bundle, folder, settings)
        theirs, ours = engine.scored()
    except (RuntimeError, ValueError) as error:
        raise CheckError(
            f"check: the engine refuses what was written: {' '.join(str(error).split())}"
        ) from None
    difference = (theirs - ours).abs().max().item() / max(1.0, ours.abs().max().item())
    stored = str(next(model.parameters()).dtype).removeprefix("torch.")
    if not difference <= TOLERANCE["float32"]:
        raise CheckError(
            f"check: the engine's log-probabilities differ by {difference:.2g} "
            f"(accepted: {TOLERANCE['float32']:.0e}; stored in {stored})"
        )
    chosen, found = engine.greedy()
    tokens = _agreeing(chosen, found, bundle.protocol)
    version: str = library.__version__
    return EngineCheck("ctranslate2", version, ours.numel(), difference, tokens, _arguments(bundle, settings))


class _Side:
    """What both kinds of engine have in common."""

    def __init__(self, bundle: Bundle) -> None:
        self.protocol = bundle.protocol
        self.model: Transformer = _plain(bundle.model)
        self.size = bundle.config.embedding.vocab_size
        room = (bundle.config.max_positions() or 64) - 2
        self.lengths = [max(1, min(n, room)) for n in LENGTHS]

    def rows(self, size: int, seed: int) -> list[list[int]]:
        """Ragged rows without special ids, which an engine may treat apart."""
        p = self.protocol
        special = {p.pad_id, *p.eos_ids, *p.start, *p.source_prefix, *p.source_suffix}
        plain = [i for i in range(size) if i not in special] or [0]
        return [
            [plain[(seed + 7 * i + 5 * j * j) % len(plain)] for j in range(n)]
            for i, n in enumerate(self.lengths)
        ]

    def continued(self, start: list[int], source: Tokens | None) -> list[tuple[int, float]]:
        """Greedy ids and their margins over the second best."""
        ids, result = list(start), list[tuple[int, float]]()
        for _ in range(min(STEPS, self.lengths[0])):
            best = self.model(Tokens(torch.tensor([ids])), source).logits[0, -1].topk(2)
            result.append((int(best.indices[0]), (best.values[0] - best.values[1]).item()))
            ids.append(int(best.indices[0]))
        return result


class _Encoded(_Side):
    """An encoder–decoder."""

    def __init__(self, library: Any, bundle: Bundle, folder: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(bundle)
        self.words = words(folder, both=True)
        self.engine = library.Translator(str(folder), device="cpu", compute_type="float32", **_as_now())
        self.added = (bool(settings.get("add_source_bos")), bool(settings.get("add_source_eos")))
        assert bundle.config.source is not None
        self.sources = self.rows(bundle.config.source.vocab_size, 3)

    def _source(self) -> tuple[list[list[str]], Tokens]:
        """As the engine takes it, and as it reads it."""
        p, texts = self.protocol, self.words.source
        prefix, suffix = list(p.source_prefix), list(p.source_suffix)
        whole = [[*prefix, *row, *suffix] for row in self.sources]
        cut = [row[len(prefix) * self.added[0] : len(row) - len(suffix) * self.added[1]] for row in whole]
        return [[texts[i] for i in row] for row in cut], Tokens.from_lists(whole, pad_id=p.pad_id)

    def scored(self) -> tuple[Tensor, Tensor]:
        p = self.protocol
        source, tokens = self._source()
        start = list(p.start[:1])
        targets = self.rows(self.size, 1)
        texts = [[self.words.target[i] for i in row] for row in targets]
        if not start:  # the engine is then given the first token with the target
            start, targets = [], [[p.pad_id, *row] for row in targets]
            texts = [[self.words.target[i] for i in row] for row in targets]
        results = self.engine.score_batch(source, texts)
        inputs = Tokens.from_lists([[*start, *row] for row in targets], pad_id=p.pad_id)
        scores = self.model(inputs, tokens).logits.log_softmax(-1)
        theirs, ours = list[float](), list[Tensor]()
        for i, (row, result) in enumerate(zip(targets, results, strict=True)):
            labels = [*(row if start else row[1:]), p.eos_ids[0]]
            theirs += result.log_probs[-len(labels) :]
            ours.append(scores[i, torch.arange(len(labels)), torch.tensor(labels)])
        return torch.tensor(theirs), torch.cat(ours)

    def greedy(self) -> tuple[list[int], list[tuple[int, float]]]:
        p, words = self.protocol, self.words.target
        source, tokens = self._source()
        start = list(p.start) or [p.pad_id]
        prefix = [words[i] for i in (start[1:] if p.start else start)]
        (result,) = self.engine.translate_batch(
            source[:1], target_prefix=[prefix] if prefix else None, beam_size=1,
            max_decoding_length=min(STEPS, self.lengths[0]) + len(prefix),
        )  # fmt: skip
        chosen = [words.index(token) for token in result.hypotheses[0]][len(prefix) :]
        return chosen, self.continued(start, Tokens(tokens.ids[:1, : len(tokens.rows()[0])]))


class _Alone(_Side):
    """A decoder."""

    def __init__(self, library: Any, bundle: Bundle, folder: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(bundle)
        self.words = words(folder, both=False).target
        self.engine = library.Generator(str(folder), device="cpu", compute_type="float32", **_as_now())
        self.prompts = self.rows(self.size, 1)

    def scored(self) -> tuple[Tensor, Tensor]:
        tokens = Tokens.from_lists(self.prompts, pad_id=self.protocol.pad_id)
        import numpy as np

        found = self.engine.forward_batch(self.prompts, return_log_probs=True)
        theirs = torch.from_numpy(np.array(found))
        ours = self.model(tokens).logits.log_softmax(-1)
        real = tokens.real_or_ones()
        return theirs[real], ours[real]

    def greedy(self) -> tuple[list[int], list[tuple[int, float]]]:
        prompt = self.prompts[1]
        (result,) = self.engine.generate_batch(
            [[self.words[i] for i in prompt]], sampling_topk=1, include_prompt_in_result=False,
            max_length=min(STEPS, self.lengths[0]),
        )  # fmt: skip
        return list(result.sequences_ids[0]), self.continued(prompt, None)


def _as_now() -> dict[str, int]:
    """As many threads as PyTorch has: the engine sets the number for the whole process, PyTorch included."""
    return {"intra_threads": torch.get_num_threads()}


def _plain(model: Transformer) -> Transformer:
    """In float32 and evaluation mode, as the engine computes."""
    if next(model.parameters()).dtype == torch.float32 and not model.training:
        return model
    import copy

    return copy.deepcopy(model).float().eval()


def _agreeing(chosen: list[int], found: list[tuple[int, float]], protocol: Protocol) -> int:
    for step, (best, margin) in enumerate(found):
        if margin <= 1e-3 or best in protocol.eos_ids:
            return step
        if step >= len(chosen) or chosen[step] != best:
            theirs = chosen[step] if step < len(chosen) else "an end"
            raise CheckError(f"check: the engine's greedy token {step + 1} is {theirs}, ours {best}")
    return len(found)


def _arguments(bundle: Bundle, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of the protocol the folder cannot say."""
    protocol, config = bundle.protocol, bundle.config

    def word(number: int) -> str | int:
        tokenizer = bundle.tokenizer
        return tokenizer.token(number) if tokenizer is not None and number in tokenizer.ids else number

    result: dict[str, Any] = {}
    first = list(protocol.start[1:]) + [i for _, i in protocol.forced]
    if config.source is not None and not protocol.start:
        first = [protocol.pad_id, *first]
    if config.source is not None and first:
        result["target_prefix"] = [[word(i) for i in first]]
    if config.source is None and protocol.start:
        result["start_tokens"] = [[word(i) for i in protocol.start]]
    if protocol.suppressed:
        result["suppress_sequences"] = [[word(i)] for i in protocol.suppressed]
    if len(protocol.eos_ids) > 1:
        result["end_token"] = [word(i) for i in protocol.eos_ids]
    if config.source is not None and (
        len(protocol.source_prefix) > settings.get("add_source_bos", False)
        or len(protocol.source_suffix) > settings.get("add_source_eos", False)
    ):
        result["source"] = {
            "before": [word(i) for i in protocol.source_prefix],
            "after": [word(i) for i in protocol.source_suffix],
        }
    return result
