"""Which arguments of a module are content and which are masks.

Knows three conventions by their argument names (Isoform's `Tokens`, Hugging Face's ``input_ids`` /
``attention_mask``, `torch.nn.Transformer`'s ``src`` / ``src_key_padding_mask``) and otherwise takes the first
``[B, T]`` integers or ``[B, T, d]`` floats for the content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isoform.errors import ShapeError
from isoform.tokens import Tokens

MaskTruth = Literal["real", "padding"]

# Where each convention keeps the padding mask of a content argument, and what True (or 1) means there.
_MASKS: dict[str, tuple[str, MaskTruth]] = {
    "input_ids": ("attention_mask", "real"),
    "inputs_embeds": ("attention_mask", "real"),
    "decoder_input_ids": ("decoder_attention_mask", "real"),
    "decoder_inputs_embeds": ("decoder_attention_mask", "real"),
    "encoder_hidden_states": ("encoder_attention_mask", "real"),
    "src": ("src_key_padding_mask", "padding"),
    "tgt": ("tgt_key_padding_mask", "padding"),
    "memory": ("memory_key_padding_mask", "padding"),
}
_SOURCES = frozenset(("source", "src", "memory", "enc", "encoder", "context"))
_TARGETS = frozenset(("target", "tgt", "trg", "dec", "decoder"))
"""Words of an argument's name."""

DOCUMENTS = ("documents", "document_ids", "doc_ids", "document_id", "doc_id")
PREFIXES = ("prefix_lengths", "prefix_length", "prefix_lens", "prefix_len", "prefix")
"""Arguments with the numbers of packed documents, and with lengths of conditions that are read both ways."""
_GENERIC_MASKS: tuple[tuple[str, MaskTruth], ...] = (
    ("attention_mask", "real"),
    ("padding_mask", "padding"),
    ("key_padding_mask", "padding"),
    ("pad_mask", "padding"),
    ("src_key_padding_mask", "padding"),
    ("real", "real"),
    ("mask", "real"),
)
_WORDS = ("mask", "pad", "keep", "valid", "real", "attn", "attend")


@dataclasses.dataclass(frozen=True)
class Stream:
    """One sequence that a module reads.

    Args:
        name: the argument that holds it.
        role: "target" for the stream whose positions the output has, else "source".
        mask: the argument of its padding mask; None: the module takes none.
        truth: what True means in that mask.
    """

    name: str
    role: Literal["target", "source"]
    mask: str | None
    truth: MaskTruth


def find_streams(
    module: nn.Module, kwargs: Mapping[str, Any], parameters: Mapping[str, Any], batch_first: bool
) -> tuple[Stream, ...]:
    """The sequences that a module reads, by the names and forms of its arguments.

    Raises:
        ShapeError: nothing looks like one.
    """
    found: list[Stream] = []
    contents = {n: v for n, v in kwargs.items() if isinstance(v, Tensor) and _is_content(v)}
    flags = {n for n, v in contents.items() if n not in _MASKS and _is_flag(v)}
    shapes = {v.shape[:2] for n, v in contents.items() if n not in flags}
    for name, value in kwargs.items():
        if name in flags and value.shape in shapes:
            continue  # masks and segments, whatever they are called
        if isinstance(value, Tokens):
            found.append(Stream(name, _role(name), name, "real"))
        elif isinstance(value, Tensor) and (name in _MASKS or _reads(name, value, bool(found))):
            mask, truth = _MASKS.get(name, (None, "real"))
            if mask is None or mask not in parameters:
                mask, truth = _generic_mask(name, kwargs, parameters, batch_first)
            found.append(Stream(name, _role(name), mask, truth))
    if not found:
        raise ShapeError(
            f"{type(module).__name__}: no input looks like token ids [B, T] or vectors [B, T, d]"
        )
    targets = [s for s in found if s.role == "target"]
    if len(targets) > 1 and any(_words(s.name) & _TARGETS for s in targets):
        found = [
            dataclasses.replace(s, role="target" if _words(s.name) & _TARGETS else "source") for s in found
        ]
    elif not targets:
        found = [dataclasses.replace(found[0], role="target"), *found[1:]]
    elif len(targets) > 1:
        found = [dataclasses.replace(s, role="target" if s is targets[0] else "source") for s in found]
    return tuple(found)


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _role(name: str) -> Literal["target", "source"]:
    words = _words(name)
    return "source" if words & _SOURCES and not words & _TARGETS else "target"


def _reads(name: str, value: Tensor, more: bool) -> bool:
    """Whether an argument of no known name holds content: the first that can, and further token ids."""
    if not _is_content(value):
        return False
    word = name.lower()
    kinds = ("mask", "type", "segment", "position", "label", "real", "pad", "prefix")
    other = name in (*DOCUMENTS, "targets") or any(part in word for part in kinds)
    return not more or (not value.is_floating_point() and not other)


def _generic_mask(
    name: str, kwargs: Mapping[str, Any], parameters: Mapping[str, Any], batch_first: bool
) -> tuple[str | None, MaskTruth]:
    shape = content_shape(kwargs[name], batch_first)
    for mask in (f"{name}_{word}" for word in ("mask", "padding_mask", "key_padding_mask", "real")):
        given = kwargs.get(mask)
        if isinstance(given, Tensor) and given.shape == shape:
            return mask, _truth(given, "padding" if "padding" in mask else "real")
    stem = name.removesuffix("_ids").removesuffix("_tokens") + "_"
    for mask, given in kwargs.items():
        alike = mask != name and mask.startswith(stem) and isinstance(given, Tensor) and given.shape == shape
        if alike and any(word in mask for word in ("mask", "pad", "real", "valid")):
            return mask, _truth(given, "padding" if "pad" in mask else "real")
    for mask, truth in _GENERIC_MASKS:
        given = kwargs.get(mask)
        if mask in parameters and (given is None or (isinstance(given, Tensor) and given.dim() == 2)):
            square = isinstance(given, Tensor) and given.shape != shape
            if not square:
                return mask, truth
    return _mask_by_form(kwargs, shape)


def _mask_by_form(kwargs: Mapping[str, Any], shape: torch.Size) -> tuple[str | None, MaskTruth]:
    """A padding mask of another name: rows that change once, at their padding, beside one that has none."""
    for name, given in kwargs.items():
        fits = isinstance(given, Tensor) and given.shape == shape and _is_flag(given)
        if not fits or not (given.dtype == torch.bool or any(w in name.lower() for w in _WORDS)):
            continue
        changes = (given[:, 1:] != given[:, :-1]).sum(1)
        even = given[changes == 0].bool()
        if int(changes.max()) == 1 and len(even) and bool(even.all()) != bool((~even).all()):
            return name, "real" if bool(even.all()) else "padding"
    return None, "real"


def content_shape(value: Tensor, batch_first: bool) -> torch.Size:
    """``[B, T]`` of ids or vectors."""
    shape = value.shape[:2]
    return shape if batch_first or value.dim() < 3 else torch.Size((shape[1], shape[0]))


def _is_content(value: Tensor) -> bool:
    if value.dtype == torch.bool:
        return False
    return value.dim() == 3 if value.is_floating_point() else value.dim() == 2


def _is_flag(value: Tensor) -> bool:
    return not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())


def _truth(mask: Tensor, default: MaskTruth) -> MaskTruth:
    """What True means in a mask: padding is never in the first column of all rows and in the last one too."""
    edges = mask.bool()[:, [0, -1]]
    if bool(edges.all(0).any()) and not bool((~edges).all(0).any()):
        return "real"
    if bool((~edges).all(0).any()) and not bool(edges.all(0).any()):
        return "padding"
    return default
