"""Texts in, texts out: the token protocol around them, batches of similar length, the order restored."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from isoform.data.progress import track
from isoform.data.tokenizer import Tokenizer
from isoform.errors import ConfigError, DataError, TokenizerError
from isoform.generation.forward import Compile
from isoform.generation.generate import Generated, generate
from isoform.generation.search import Greedy, Hypothesis, Search
from isoform.tokens import Tokens

if TYPE_CHECKING:
    from isoform.checkpoints import Bundle

DEFAULT_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class TextOutput:
    """One output as text.

    Args:
        text: what was generated; of a decoder only what comes after its prompt.
        ids: its tokens, EOS excluded.
        log_probability: sum of their log-probabilities, EOS included.
        score: what the outputs of one text are ranked by.
        finished: it came to its end; False: it was cut at the length limit.
    """

    text: str
    ids: list[int]
    log_probability: float
    score: float
    finished: bool


class TextGenerator:
    """A network that turns texts into texts.

    The source of an encoder–decoder is ``source_prefix``, text, ``source_suffix`` of the protocol, and its
    decoder begins with ``start``; the prompt of a decoder is ``start``, text, all of it the condition where
    the visibility is prefix. An empty text gives an empty text. What a text gives depends on the others only
    through rounding.

    Args:
        bundle: the network with its tokenizers and protocol.
        search: how tokens are chosen; default: greedily.
        max_new_tokens: the longest output; default: 256 tokens, or what a learned position table leaves.
        min_new_tokens: no end before an output has so many tokens.
        batch_size: texts generated at a time.
        compile: as for `isoform.generate`.

    Raises:
        ConfigError: the bundle lacks what is needed.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        search: Search | None = None,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        batch_size: int = 64,
        compile: Compile = "auto",
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}, expected at least 1")
        if max_new_tokens is not None and min_new_tokens > max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {min_new_tokens}, expected at most max_new_tokens {max_new_tokens}"
            )
        self._bundle = bundle
        self._both = bundle.config.source is not None
        self._reader = _need(bundle.source_tokenizer if self._both else bundle.tokenizer, "input")
        self._writer = _need(bundle.tokenizer, "output")
        self._search = Greedy() if search is None else search
        self._new, self._min, self._batch_size = max_new_tokens, min_new_tokens, batch_size
        self._compile: Compile = compile
        if self._both and not bundle.protocol.start:
            raise ConfigError("the protocol has no start token: the decoder has nothing to begin with")

    def write(self, texts: Sequence[str], *, progress: str | None = None) -> list[list[TextOutput]]:
        """The outputs of each text, the best first.

        Args:
            texts: what is read.
            progress: what to call the bar that is shown after two seconds on a terminal; None: no bar.

        Raises:
            DataError: a text with more tokens than the network has positions for, or with none.
        """
        return self._write(texts, 1, progress)

    def _write(self, texts: Sequence[str], first: int, progress: str | None) -> list[list[TextOutput]]:
        rows = self._encode(texts, first)
        limits = [self._limit(number, len(row)) if row else 0 for number, row in enumerate(rows, first)]
        found: list[list[TextOutput]] = [[TextOutput("", [], 0.0, 0.0, True)] for _ in texts]
        order = sorted((i for i, row in enumerate(rows) if row), key=lambda i: -len(rows[i]))
        batches = list(self._batches(order, limits))
        shown = batches if progress is None else track(batches, total=len(batches), what=progress)
        for batch in shown:
            made = self._generate([rows[i] for i in batch], limits[batch[0]])
            for i, outputs in zip(batch, made.hypotheses, strict=True):
                found[i] = [self._text(rows[i], h) for h in outputs]
        return found

    def stream(
        self, lines: Iterable[str], *, window: int = 1024, progress: str | None = None
    ) -> Iterator[tuple[str, list[TextOutput]]]:
        """Each line and its outputs, in order, while lines are still coming in.

        Args:
            lines: texts without line ends.
            window: how many are read before the first are written; sorted by length among themselves.
            progress: as in `write`, for each window.
        """
        remaining, first = iter(lines), 1
        while held := list(itertools.islice(remaining, window)):
            yield from zip(held, self._write(held, first, progress), strict=True)
            first += len(held)

    def read(self, texts: Sequence[str]) -> list[tuple[Tokens, Tokens | None, int]]:
        """What the network is given for texts, empty ones left out, in batches: prompts, sources, limit."""
        rows = [row for row in self._encode(texts, 1) if row]
        limits = [self._limit(number, len(row)) for number, row in enumerate(rows, 1)]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        batches = self._batches(order, limits)
        return [(*self._tokens([rows[i] for i in batch]), limits[batch[0]]) for batch in batches]

    def _encode(self, texts: Sequence[str], first: int) -> list[list[int]]:
        protocol = self._bundle.protocol
        before = protocol.source_prefix if self._both else protocol.start
        after = protocol.source_suffix if self._both else ()
        rows: list[list[int]] = []
        encoded = self._reader.encode_batch(texts)
        for number, (text, ids) in enumerate(zip(texts, encoded, strict=True), first):
            row = [*before, *ids, *after] if text else []
            if text and not row:
                raise DataError(f"text {number}: {text[:40]!r} has no tokens, and nothing is put around it")
            rows.append(row)
        return rows

    def _limit(self, number: int, length: int) -> int:
        """How many tokens may be generated for a text of so many."""
        cfg = self._bundle.config
        read = cfg.embedding.positions if cfg.source is None else cfg.source.positions
        if read.kind == "learned" and length > read.max_positions:
            raise DataError(f"text {number}: {length} tokens, the network has {read.max_positions} positions")
        before = len(self._bundle.protocol.start) if self._both else length
        written = cfg.embedding.positions
        room = written.max_positions - before + 1 if written.kind == "learned" else None
        if self._new is None:
            return DEFAULT_NEW_TOKENS if room is None else min(DEFAULT_NEW_TOKENS, room)
        if room is not None and self._new > room:
            raise DataError(
                f"text {number}: max_new_tokens {self._new} exceeds the {room} that the network's "
                "positions leave"
            )
        return self._new

    def _batches(self, order: list[int], limits: list[int]) -> Iterator[list[int]]:
        """Texts of similar length. They share the length limit, so that none is cut because of another."""
        batch: list[int] = []
        for i in order:
            if batch and (len(batch) == self._batch_size or limits[i] != limits[batch[0]]):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _tokens(self, rows: list[list[int]]) -> tuple[Tokens, Tokens | None]:
        bundle, protocol = self._bundle, self._bundle.protocol
        device = bundle.model.embedding.weight.device
        read = Tokens.from_lists(rows, pad_id=protocol.pad_id, side=protocol.padding_side, device=device)
        if self._both:
            start = torch.tensor([protocol.start] * len(rows), device=device)
            return Tokens(start, layout="full"), read
        prefix = bundle.config.stack.visibility == "prefix"
        return dataclasses.replace(read, prefix=read.lengths() if prefix else None), None

    def _generate(self, rows: list[list[int]], limit: int) -> Generated:
        tokens, source = self._tokens(rows)
        return generate(
            self._bundle.model,
            tokens,
            source=source,
            max_new_tokens=limit,
            search=self._search,
            protocol=self._bundle.protocol,
            min_new_tokens=min(self._min, limit),
            compile=self._compile,
        )

    def _text(self, row: list[int], h: Hypothesis) -> TextOutput:
        if self._both:
            text = self._writer.decode(h.ids)
        else:
            # Decoding is not a sum of pieces (a leading space, a letter in several bytes): what comes after
            # the prompt is seen in the whole.
            before, whole = self._writer.decode(row), self._writer.decode([*row, *h.ids])
            text = whole[len(before) :] if whole.startswith(before) else self._writer.decode(h.ids)
        return TextOutput(text, h.ids, h.log_probability, h.score, h.finished)


def generate_texts(
    bundle: Bundle,
    texts: Sequence[str],
    *,
    search: Search | None = None,
    max_new_tokens: int | None = None,
    min_new_tokens: int = 0,
    batch_size: int = 64,
    compile: Compile = "auto",
) -> list[str]:
    """The best output of each text; see `TextGenerator`."""
    writer = TextGenerator(
        bundle,
        search=search,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        batch_size=batch_size,
        compile=compile,
    )
    return [outputs[0].text for outputs in writer.write(texts)]


def _need(tokenizer: Tokenizer | None, side: str) -> Tokenizer:
    if tokenizer is None:
        raise TokenizerError(f"there is no tokenizer for the {side}: use isoform.generate with token ids")
    return tokenizer
