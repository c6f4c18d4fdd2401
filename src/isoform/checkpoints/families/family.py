"""What a family is: how to read and write its configuration, and how its tensors map."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from isoform.checkpoints.entries import FamilyMapping
from isoform.checkpoints.keys import Keys
from isoform.config import Head, ModelConfig, SequenceHead, TaggingHead, TokenHead
from isoform.errors import ArtifactError

HeadKind = Literal["tokens", "states", "sequence", "tagging", "pooled", "question", "replaced"]


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
        model_type: its name in ``config.json``.
        architectures: what each of its classes reads off the last states.
        read: from ``config.json`` and a kind of head to an architecture.
        write: from an architecture to the keys of ``config.json`` that decide the function.
        mapping: the tensors, for an architecture.
        bos: whether prompts begin with BOS where no tokenizer says so.
        defaults: what its configuration class takes for keys that a file leaves out: token ids, and whatever
            ``read`` cannot know because several families share it.
    """

    model_type: str
    architectures: Mapping[str, HeadKind]
    read: Callable[[Keys, HeadKind], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    mapping: Callable[[ModelConfig], FamilyMapping]
    bos: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def token_ids(bos: int | None, eos: int, pad: int | None = None, **others: int) -> dict[str, Any]:
    """Token ids by their keys; those that are None stay out."""
    given = {"bos": bos, "eos": eos, "pad": pad, **others}
    return {f"{name}_token_id": number for name, number in given.items() if number is not None}


def decoder_head(keys: Keys, kind: HeadKind, *, tied: bool, bias: bool = False) -> Head | None:
    """The head of a causal decoder's class."""
    if kind == "tokens":
        return TokenHead(tied=tied, bias=bias)
    if kind == "sequence":
        return SequenceHead(n_labels=keys.n_labels(), pooling="last", pooler=None, bias=False)
    return None


def labels(head: Head | None) -> dict[str, Any]:
    """The key that says how many labels a classifier has."""
    n = head.n_labels if isinstance(head, SequenceHead | TaggingHead) else 0
    return {"id2label": {str(i): f"LABEL_{i}" for i in range(n)}} if n else {}


def single(values: set[Any], what: str) -> Any:
    """The one value that a format allows.

    Raises:
        ArtifactError: there are several.
    """
    if len(values) != 1:
        raise ArtifactError(f"cannot be written: {what} differs between layers: {sorted(map(str, values))}")
    return values.pop()
