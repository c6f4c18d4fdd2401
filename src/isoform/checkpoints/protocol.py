"""The token protocol of a checkpoint, from its ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError


def read_protocol(
    config: Mapping[str, Any], generation: Mapping[str, Any], *, encoder_decoder: bool, bos: bool
) -> Protocol:
    """What starts, ends and is never part of an output.

    Args:
        config: ``config.json``.
        generation: ``generation_config.json``, which goes before it; may be empty.
        encoder_decoder: whether outputs begin with a start token of their own.
        bos: whether prompts of the family begin with BOS.
    """

    def look(name: str) -> Any:
        value = generation.get(name)
        return config.get(name) if value is None else value

    eos = _ids(look("eos_token_id"))
    start: tuple[int, ...] = ()
    if encoder_decoder:
        start = _ids(look("decoder_start_token_id")) or _ids(look("bos_token_id"))
        if not start:
            raise ArtifactError("config.json: neither decoder_start_token_id nor bos_token_id is set")
    elif bos:
        start = _ids(look("bos_token_id"))
    forced = tuple((step, i) for step, i in enumerate(_ids(look("forced_bos_token_id"))))
    never = [*_ids(look("suppress_tokens")), *(w[0] for w in look("bad_words_ids") or () if len(w) == 1)]
    return Protocol(
        pad_id=_pad(look("pad_token_id"), eos),
        eos_ids=eos,
        start=start,
        source_suffix=eos[:1] if encoder_decoder else (),
        forced=forced,
        suppressed=tuple(dict.fromkeys(i for i in never if i >= 0)),
    )


def write_protocol(protocol: Protocol, *, encoder_decoder: bool) -> dict[str, Any]:
    """The keys that give this protocol when read."""
    result: dict[str, Any] = {"pad_token_id": protocol.pad_id}
    if protocol.eos_ids:
        result["eos_token_id"] = protocol.eos_ids[0] if len(protocol.eos_ids) == 1 else list(protocol.eos_ids)
    if protocol.start:
        result["decoder_start_token_id" if encoder_decoder else "bos_token_id"] = protocol.start[0]
    if protocol.forced:
        result["forced_bos_token_id"] = protocol.forced[0][1]
    if protocol.suppressed:
        result["suppress_tokens"] = list(protocol.suppressed)
    return result


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
