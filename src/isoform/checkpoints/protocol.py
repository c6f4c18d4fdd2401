"""The token protocol of a checkpoint, from its ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError, ConfigError

# What the protocol says; everything else in a generation_config.json belongs to a search.
RULES = frozenset((
    "pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "bad_words_ids",
))  # fmt: skip
# Rules about which token may come where that no part of the protocol says.
_REFUSED = ("begin_suppress_tokens", "forced_decoder_ids", "sequence_bias")


def read_protocol(
    config: Mapping[str, Any], generation: Mapping[str, Any], *, encoder_decoder: bool, bos: bool
) -> Protocol:
    """What starts, ends and is never part of an output.

    Args:
        config: ``config.json``.
        generation: ``generation_config.json``, which goes before it; may be empty. Where there is one, what
            may be chosen is said there alone.
        encoder_decoder: whether outputs begin with a start token of their own.
        bos: whether prompts of the family begin with BOS.

    Raises:
        ConfigError: a rule about tokens that is not understood, or a start that is missing.
    """
    rules = generation or config
    for name in _REFUSED:
        if rules.get(name):
            raise ConfigError(f"{name} is {rules[name]!r}, which is not supported")

    def look(name: str) -> Any:
        value = generation.get(name)
        return config.get(name) if value is None else value

    eos = _ids(look("eos_token_id"))
    start: tuple[int, ...] = ()
    if encoder_decoder:
        start = _one(look, "decoder_start_token_id") or _one(look, "bos_token_id")
        if not start:
            raise ConfigError("neither decoder_start_token_id nor bos_token_id is set")
    elif bos:
        start = _one(look, "bos_token_id")
    last = _one(rules.get, "forced_eos_token_id")
    words = [list(word) for word in rules.get("bad_words_ids") or ()]
    if longer := [word for word in words if len(word) != 1]:
        raise ConfigError(f"bad_words_ids holds {longer[0]}, expected one token in each")
    # An end is no bad word, whatever the list says (NoBadWordsLogitsProcessor).
    never = [*_ids(rules.get("suppress_tokens")), *(word[0] for word in words if word[0] not in eos)]
    return Protocol(
        pad_id=_pad(look("pad_token_id"), eos),
        eos_ids=eos,
        start=start,
        source_suffix=eos[:1] if encoder_decoder else (),
        forced=tuple((0, i) for i in _one(rules.get, "forced_bos_token_id")),
        forced_last=last[0] if last else None,
        suppressed=tuple(dict.fromkeys(i for i in never if i >= 0)),
    )


def write_protocol(protocol: Protocol, *, encoder_decoder: bool) -> dict[str, Any]:
    """The keys that give this protocol when read."""
    result: dict[str, Any] = {"pad_token_id": protocol.pad_id}
    if protocol.eos_ids:
        result["eos_token_id"] = protocol.eos_ids[0] if len(protocol.eos_ids) == 1 else list(protocol.eos_ids)
    if protocol.start:
        result["decoder_start_token_id" if encoder_decoder else "bos_token_id"] = protocol.start[0]
    for step, number in protocol.forced:
        if step != 0:
            raise ArtifactError(f"the format forces the first token only, not {list(protocol.forced)}")
        result["forced_bos_token_id"] = number
    if protocol.forced_last is not None:
        result["forced_eos_token_id"] = protocol.forced_last
    if protocol.suppressed:
        result["suppress_tokens"] = list(protocol.suppressed)
    return result


def _one(look: Callable[[str], Any], name: str) -> tuple[int, ...]:
    ids = _ids(look(name))
    if len(ids) > 1:
        raise ConfigError(f"{name} is {list(ids)}, expected one id")
    return ids


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _pad(given: Any, eos: tuple[int, ...]) -> int:
    """The checkpoint's pad id; where it has none, or uses an end of text for it, an id that ends nothing.

    What stands at padded places is never read, so that any id serves.
    """
    if isinstance(given, int) and given >= 0 and given not in eos:
        return given
    return next(i for i in range(len(eos) + 1) if i not in eos)
