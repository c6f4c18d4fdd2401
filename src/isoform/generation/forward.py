"""Where the scores come from: the first part of generation (Algorithm 6.2)."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isoform.config import Rotary
from isoform.config.positions import BY_LENGTH
from isoform.generation.whole_rows import Growing, Uncached, head_of, select_memory
from isoform.native import built, library, switched_off
from isoform.nn.cache import Cache
from isoform.nn.compiled import Compiled, compiled
from isoform.nn.lanes import Lanes
from isoform.nn.model import Transformer
from isoform.nn.reading import forbidden
from isoform.nn.stack import Memory
from isoform.nn.step import Step, prepare
from isoform.nn.trails import Trails
from isoform.tokens import Tokens
from isoform.visibility import Visibility

BLOCK = 64  # slots a cache grows by
CHUNK = 1024  # tokens of a prompt that are read at a time, so that their hidden states need no more memory
BANDWIDTH, FLOPS = 2e10, 1e11  # bytes and operations a second of a small machine,
OVERHEAD = 1.5e-4  # seconds of Python a layer,
COMPILING = 5.0  # and seconds that compiling takes: a guess at what a job would save
COPYING = 16  # tokens from which on weights may be copied once, which takes as long as a few of them
Compile = Literal["auto", "never", "always"]


class Forward(Protocol):
    """Gives the scores of the next token. A row is one unfinished output; rows come and go by `select`."""

    def begin(
        self, tokens: Tokens, source: Tokens | None, max_new_tokens: int
    ) -> Float[Tensor, "batch vocab"]:
        """Read the prompts, and score the token after each."""
        ...

    def step(self, chosen: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Read one more token a row, and score the token after it."""
        ...

    def select(self, rows: Int[Tensor, " n"], *, same_sample: bool) -> None:
        """Go on with the given rows in the given order, repeats allowed.

        ``same_sample``: there are as many as before, and each one descends from a row of its own sample,
        with which it shares source, prompt and length.
        """
        ...


class Cached:
    """Keys and values are kept, so that a step reads one token a row (R31–R32).

    The prompt is read in one pass and the source is encoded and projected once. Rotary frequencies under
    dynamic NTK scaling change at every position once a row is longer than ``original_length``: from there
    on nothing that was stored is what a full pass would compute, and the whole rows are read again.

    Args:
        model: the network.
        visibility: another rule for the decoder; default: the configuration's.
        cross: another rule for reading the source, e.g. wait-k; default: every real token.
        compile: whether the step runs as machine code (`isoform.nn.compiled`). "auto": if it was compiled on
            this machine before, or the job is long enough to pay for that; "never"; "always", and through
            ``torch.compile``, one graph a shape, where that does not take the network. Without a C++ compiler
            every setting is "never" as far as machine code goes.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        visibility: Visibility | None = None,
        cross: Visibility | None = None,
        compile: Compile = "auto",
    ) -> None:
        self.model = model
        self._visibility, self._cross = visibility, cross
        self._compile: Compile = compile
        self._run = self._logits
        self._traced = False
        self._step: tuple[Step, Lanes] | None = None
        self._machine: tuple[Compiled, Trails] | None = None
        self._whole: Uncached | None = None
        scalings = [p.scaling for p in _rotaries(model) if isinstance(p.scaling, BY_LENGTH)]
        self._valid = min((s.original_length for s in scalings), default=None)

    def begin(
        self, tokens: Tokens, source: Tokens | None, max_new_tokens: int
    ) -> Float[Tensor, "batch vocab"]:
        """Encode the source, allocate the cache, read the prompts."""
        model = self.model
        prompt = tokens.padded("right")
        lengths = prompt.lengths()
        self._longest = int(lengths.max())
        prompt = _columns(prompt, 0, self._longest)
        self._room = self._longest + max_new_tokens - 1  # the last token is never read
        memory = None if source is None else model.encode(source)
        self._whole = self._seen = None
        if self._valid is not None and self._room > self._valid:
            self._seen = Growing(tokens)
            if self._longest > self._valid:
                return self._read_whole(memory)
        weight = model.embedding.weight
        step = prepare(model) if self._visibility is None and self._cross is None else None
        machine = None if step is None else self._compiled(step, prompt.batch, max_new_tokens)
        self._traced = self._compile == "always" and machine is None
        if self._traced:
            self._run, step = torch.compile(self._logits, dynamic=False), None
        self._cache = Cache.allocate(
            model.config, prompt.batch, self._capacity(), dtype=weight.dtype, device=weight.device
        )
        if memory is not None:
            model.remember(self._cache, memory)
        last = self._read_prompt(prompt, lengths)
        if self._traced:
            self._cache.even = None  # a number on the host would be a graph a step
        self._memory = memory if self._seen is not None else None
        self._step = self._machine = None
        if step is not None:
            places = None if memory is None else memory.places
            added = None if places is None or places.real is None else places.real[:, None, None]
            added = None if added is None else forbidden(~added, weight.dtype)
            lanes = Lanes.of(self._cache, lengths.tolist(), added)
            if machine is None:
                self._step = step, lanes
            else:
                self._machine = machine, Trails.of(lanes)
            del self._cache
        return head_of(model)(last)

    def _compiled(self, step: Step, rows: int, new: int) -> Compiled | None:
        """The step as machine code, where that is asked for or pays."""
        weight = self.model.embedding.weight
        if self._compile == "never" or weight.device.type != "cpu":
            return None
        if self._compile == "auto" and (switched_off() or not (built(weight.dtype) or self._long(rows, new))):
            return None
        found = library(weight.dtype)
        copies = self._compile == "always" or new >= COPYING
        return None if found is None else compiled(step, found, copies=copies)

    def _long(self, rows: int, new: int) -> bool:
        """Whether the job would save more time than compiling takes: half of it."""
        size = sum(p.numel() for p in self.model.parameters())
        stack = self.model.decoder
        layers = 0 if stack is None else len(stack.layers)
        step = max(4 * size / BANDWIDTH, 2 * size * rows / FLOPS) + layers * OVERHEAD
        return step * new / 2 > COMPILING

    def _read_prompt(self, prompt: Tokens, lengths: Int[Tensor, " batch"]) -> Float[Tensor, "batch d_model"]:
        """Fill the cache; the state of each prompt's last token. Long prompts are read a piece at a time.

        Not where a token may read what comes after it, nor where what is stored depends on how far one is.
        """
        model, length = self.model, prompt.length
        whole = self._valid is not None or self._visibility is not None or prompt.prefix is not None
        piece = length if whole else CHUNK
        last: Tensor | None = None
        rows = torch.arange(prompt.batch, device=prompt.device)
        for start in range(0, length, piece):
            part = _columns(prompt, start, start + piece) if piece < length else prompt
            hidden = model.hidden(part, cache=self._cache, visibility=self._visibility, cross=self._cross)
            place = (lengths - 1 - start).clamp(0, part.length - 1)
            found = hidden[rows, place]
            ends_here = (lengths > start)[:, None]
            last = found if last is None else torch.where(ends_here, found, last)
        assert last is not None
        return last

    def step(self, chosen: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Read one token a row at its own place."""
        if self._whole is not None:
            return self._whole.step(chosen)
        self._longest += 1
        if self._seen is not None:
            self._seen.append(chosen)
            assert self._valid is not None
            if self._longest > self._valid:
                return self._read_whole(self._memory)
        if self._machine is not None:
            machine, trails = self._machine
            trails.reserve(self._room)
            return machine(chosen, trails)
        if self._step is not None:
            step, lanes = self._step
            lanes.reserve(self._room)
            return step(chosen, lanes)
        if self._longest > self._cache.capacity:
            self._cache = self._cache.grow(self._capacity())
        return self._run(chosen, self._cache)

    def select(self, rows: Int[Tensor, " n"], *, same_sample: bool) -> None:
        """Copy the rows of the cache, and of the source unless it stays in place."""
        if self._whole is not None:
            self._whole.select(rows, same_sample=same_sample)
            return
        if self._machine is not None:
            self._machine[1].select(rows)
            return
        if self._step is not None:
            step, lanes = self._step
            if same_sample:
                lanes.reorder(rows)
            else:
                lanes.select(rows, share=step.shares)
            return
        self._cache = self._cache.reorder(rows) if same_sample else self._cache.select(rows)
        if self._seen is not None:
            self._seen.select(rows)
            if self._memory is not None and not same_sample:
                self._memory = select_memory(self._memory, rows)

    def _logits(self, chosen: Tensor, cache: Cache) -> Tensor:
        tokens = Tokens(chosen[:, None], layout="full")
        hidden = self.model.hidden(tokens, cache=cache, visibility=self._visibility, cross=self._cross)
        return head_of(self.model)(hidden[:, 0])

    def _capacity(self) -> int:
        """Slots for what is read next, in blocks, but none that could never be used."""
        blocks = -(-(self._longest + 1) // BLOCK)
        if self._traced and self.model.config.embedding.positions.kind != "learned":
            return BLOCK << (blocks - 1).bit_length()  # fewer shapes, fewer graphs
        return min(blocks * BLOCK, self._room)

    def _read_whole(self, memory: Memory | None) -> Tensor:
        assert self._seen is not None
        self._whole = Uncached(self.model, visibility=self._visibility, cross=self._cross)
        return self._whole.resume(self._seen, memory)


def _rotaries(model: Transformer) -> list[Rotary]:
    layers = model.config.stack.layers()
    return [p for p in (layer.attention.positions for layer in layers) if isinstance(p, Rotary)]


def _columns(tokens: Tokens, start: int, end: int) -> Tokens:
    real = None if tokens.real is None else tokens.real[:, start:end]
    return Tokens(tokens.ids[:, start:end], real, prefix=tokens.prefix, layout=tokens.layout)
