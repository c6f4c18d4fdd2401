"""The token protocol that goes with what was trained: the same ids at the same places as in training."""

from __future__ import annotations

from isoform.config.protocol import Protocol
from isoform.data.config import LabelledData, PrefixData, TaggedData, TextData
from isoform.data.parts import Task
from isoform.data.vocabularies import Tokenizers


def protocol_of(task: Task, tokenizers: Tokenizers) -> Protocol:
    """What is put around texts, starts an output and ends it, read off the data's kind and the tokenizers.

    Pairs: the source in its template, the decoder from the start token to EOS. Prompts: after BOS, answers to
    EOS. Lines of text: after BOS, to EOS. A stream: nothing around it, and no end. Encoders: their template.
    """
    data, special, template = task.data, tokenizers.target.special, tokenizers.source.template
    eos = () if special.eos is None else (special.eos,)
    pad = _pad(special.pad, eos)
    if isinstance(data, LabelledData | TaggedData) or task.masking is not None:
        around = (template.prefix, template.suffix)
        return Protocol(pad_id=pad, eos_ids=eos, source_prefix=around[0], source_suffix=around[1])
    if isinstance(data, PrefixData):
        return Protocol(pad_id=pad, eos_ids=eos, start=() if special.bos is None else (special.bos,))
    if isinstance(data, TextData) and data.documents == "stream":
        return Protocol(pad_id=pad, eos_ids=(), end_supervised=False)
    start = (special.require("bos") if task.start_id is None else task.start_id,)
    if isinstance(data, TextData):
        return Protocol(pad_id=pad, eos_ids=eos, start=start)
    return Protocol(
        pad_id=pad,
        eos_ids=eos,
        start=start,
        source_prefix=template.prefix,
        source_suffix=template.suffix,
    )


def _pad(pad: int | None, eos: tuple[int, ...]) -> int:
    """The padding id; where a vocabulary has none, the lowest that does not end a text: it is never read."""
    return pad if pad is not None else next(i for i in range(len(eos) + 1) if i not in eos)
