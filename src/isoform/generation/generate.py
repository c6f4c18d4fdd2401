"""Autoregressive generation (Algorithm 6.2, R31–R32)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isoform.config.heads import TokenHead
from isoform.config.protocol import Protocol
from isoform.errors import CheckError, ConfigError, ShapeError
from isoform.generation.forward import Cached, Compile, Forward
from isoform.generation.search import Greedy, Hypothesis, Job, Search
from isoform.generation.stopping import AnyOf, Constraints, EndOfSequence, Stopping
from isoform.generation.whole_rows import Uncached
from isoform.nn.exact import exact_products
from isoform.nn.model import Transformer
from isoform.tokens import Tokens

GREEDY = Greedy()


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """What was generated.

    Args:
        hypotheses: for each sample its outputs, the best first; beams may give fewer than asked for when
            there are no more.
    """

    hypotheses: list[list[Hypothesis]]

    @property
    def ids(self) -> list[list[int]]:
        """The new tokens of each sample's first output, EOS excluded."""
        return [h[0].ids for h in self.hypotheses]

    @property
    def scores(self) -> list[float]:
        """Sum of the log-probabilities of each first output, its EOS included."""
        return [h[0].log_probability for h in self.hypotheses]

    @property
    def ranked_by(self) -> list[float]:
        """What each first output was ranked by: its score over the length penalty."""
        return [h[0].score for h in self.hypotheses]

    @property
    def finished(self) -> list[bool]:
        """Whether each first output came to its end before the length limit."""
        return [h[0].finished for h in self.hypotheses]

    @property
    def logits(self) -> list[Float[Tensor, "steps vocab"]]:
        """What the tokens of each first output were chosen from, EOS included.

        Raises:
            ConfigError: they were not kept.
        """
        kept = [h[0].logits for h in self.hypotheses]
        if any(k is None for k in kept):
            raise ConfigError("the logits were not kept: generate(…, return_logits=True)")
        return [k for k in kept if k is not None]


def generate(
    model: Transformer | Forward,
    tokens: Tokens,
    *,
    source: Tokens | None = None,
    max_new_tokens: int,
    search: Search = GREEDY,
    eos_id: int | Sequence[int] | None = None,
    protocol: Protocol | None = None,
    stop: Stopping | None = None,
    min_new_tokens: int = 0,
    cached: bool = True,
    compile: Compile = "auto",
    return_logits: bool = False,
) -> Generated:
    """Continue prompts token by token (Algorithm 6.2).

    Dropout is off meanwhile. A sample's result depends on the batch it is in, on the order of the batch and
    on the side of the padding only through rounding. Samples that are finished cost nothing further.

    Args:
        model: a network with a token head; or any other `Forward`.
        tokens: the prompts; for an encoder–decoder what the decoder starts with. At least one token a row.
        source: the sources of an encoder–decoder.
        max_new_tokens: the most tokens an output may have, EOS included.
        search: how tokens are chosen.
        eos_id: ids that end an output; default: the protocol's, or none.
        protocol: the ids that end an output, are forced or suppressed. Its start and prefix ids are not put
            in front of anything here.
        stop: a further rule that ends an output; the token that met it stays.
        min_new_tokens: no EOS before an output has so many tokens.
        cached: keep keys and values; False reads everything again at each step, with the same result.
        compile: whether the cached step runs as machine code. "auto": if it was compiled on this machine
            before, or the job is long enough to pay for that; "never"; "always". The result is the same, in
            another order of sums; see `Cached`.
        return_logits: keep the scores each token was chosen from, before any constraint.

    Raises:
        ShapeError: an empty prompt or source, a prompt that leaves too few positions, ids out of range.
        ConfigError: a network that cannot generate, or a limit below 1.
        CheckError: the network gave NaN.
    """
    eos_ids = _eos(eos_id, protocol)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    if not 0 <= min_new_tokens <= max_new_tokens:
        raise ConfigError(
            f"min_new_tokens is {min_new_tokens}, expected 0 to max_new_tokens {max_new_tokens}"
        )
    if tokens.batch == 0:
        return Generated([])
    _check_tokens(tokens, source)
    if isinstance(model, Transformer):
        _check_network(model, tokens, source, max_new_tokens)
        forward: Forward = Cached(model, compile=compile) if cached else Uncached(model)
    elif isinstance(model, nn.Module) and not hasattr(model, "begin"):
        raise ConfigError(
            f"a {type(model).__name__} is neither an Isoform network nor a Forward: wrap it in "
            "isoform.generation.Function"
        )
    else:
        forward = model
    end = EndOfSequence(eos_ids)
    constraints = Constraints(
        suppressed=() if protocol is None else protocol.suppressed,
        forced=_forced(protocol, max_new_tokens),
        eos_ids=eos_ids,
        min_new_tokens=min_new_tokens,
    )
    job = Job(
        samples=tokens.batch,
        limit=max_new_tokens,
        constraints=constraints,
        stopping=end if stop is None else AnyOf((end, stop)),
        eos_ids=eos_ids,
        keys=_keys(tokens, source),
        keep_logits=return_logits,
    )
    with _evaluation(model), exact_products(tokens.device), torch.inference_mode():
        found = _loop(forward, tokens, source, search, job)
    for number, outputs in enumerate(found):
        if any(math.isnan(h.log_probability) for h in outputs) or not outputs:
            raise CheckError(f"sample {number}: the network gave NaN or left nothing to choose from")
    return Generated(found)


def _loop(
    forward: Forward, tokens: Tokens, source: Tokens | None, search: Search, job: Job
) -> list[list[Hypothesis]]:
    logits = forward.begin(tokens, source, job.limit)
    job.constraints.check(logits.shape[-1])
    chooser = search.begin(job)
    while (choice := chooser.choose(logits)) is not None:
        if choice.rows is not None:
            forward.select(choice.rows, same_sample=choice.same_sample)
        logits = forward.step(choice.tokens)
    return chooser.outputs()


def _forced(protocol: Protocol | None, limit: int) -> list[tuple[int, int]]:
    """(step, id) pairs; the last step's goes before another of the same step."""
    if protocol is None:
        return []
    last = protocol.forced_last
    return [*protocol.forced, *([] if last is None else [(limit - 1, last)])]


def _eos(eos_id: int | Sequence[int] | None, protocol: Protocol | None) -> tuple[int, ...]:
    if eos_id is None:
        return () if protocol is None else protocol.eos_ids
    return (eos_id,) if isinstance(eos_id, int) else tuple(dict.fromkeys(eos_id))


def _check_tokens(tokens: Tokens, source: Tokens | None) -> None:
    for name, given in (("prompt", tokens), ("source", source)):
        if given is None:
            continue
        lengths = given.lengths().tolist()
        if 0 in lengths:
            raise ShapeError(
                f"{name} {lengths.index(0)} has no real token: "
                + ("give at least a start token" if name == "prompt" else "there is nothing to read")
            )
    if source is not None and source.batch != tokens.batch:
        raise ShapeError(f"{tokens.batch} prompts but {source.batch} sources: each needs one of its own")
    for name in ("documents", "token_types", "position_ids"):
        if getattr(tokens, name) is not None:
            raise ShapeError(f"Tokens.{name} is given for a prompt: what follows it would have none")
    if tokens.prefix is not None:
        over = (tokens.prefix > tokens.lengths()).tolist()
        if any(over):
            row = over.index(True)
            prefix, length = int(tokens.prefix[row]), int(tokens.lengths()[row])
            raise ShapeError(f"prompt {row}: prefix {prefix} exceeds its {length} tokens")


def _check_network(model: Transformer, tokens: Tokens, source: Tokens | None, new: int) -> None:
    cfg = model.config
    if cfg.decoder is None or cfg.decoder.visibility == "bidirectional":
        raise ConfigError(
            "this network reads both sides of every token: it has no next token to generate; "
            "a causal or prefix decoder is needed"
        )
    if not isinstance(cfg.head, TokenHead):
        raise ConfigError(f"generation needs a token head, this network has {cfg.head and cfg.head.kind!r}")
    if (source is None) != (cfg.source is None):
        raise ShapeError(
            "this network is an encoder–decoder: pass source=Tokens(…)"
            if source is None
            else "this network reads one stream, but a source was given"
        )
    if cfg.decoder.visibility == "prefix" and tokens.prefix is None:
        raise ShapeError(
            "a prefix decoder needs Tokens.prefix: how many leading tokens of each prompt form the condition"
        )
    sides = [("prompt", tokens, cfg.embedding, new - 1)]
    if source is not None and cfg.source is not None:
        sides.append(("source", source, cfg.source, 0))
    for name, given, table, more in sides:
        positions = table.positions
        longest = int(given.lengths().max())
        if positions.kind == "learned" and longest + more > positions.max_positions:
            raise ShapeError(
                f"the longest {name} has {longest} tokens"
                + (f", and {new} new ones need {more} more positions" if name == "prompt" else "")
                + f": the model's learned table has {positions.max_positions}"
            )
        largest = int(given.ids.max() if given.real is None else given.ids[given.real].max())
        if largest >= table.vocab_size:
            raise ShapeError(f"{name} id {largest} is out of range: the table has {table.vocab_size} rows")


def _keys(tokens: Tokens, source: Tokens | None) -> tuple[int, ...]:
    rows = tokens.rows()
    others = [None] * len(rows) if source is None else source.rows()
    return tuple(
        int.from_bytes(hashlib.sha256(repr((row, other)).encode()).digest()[:8], "big")
        for row, other in zip(rows, others, strict=True)
    )


@contextmanager
def _evaluation(model: object) -> Generator[None, None, None]:
    """Every module in eval mode, and each back in its own afterwards (Algorithm 6.2)."""
    modules = [m for m in model.modules() if m.training] if isinstance(model, nn.Module) else []
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
