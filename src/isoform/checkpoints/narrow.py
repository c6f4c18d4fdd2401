"""Weights in a form of `isoform.nn.products` in the artifact's file: numbers, and scales beside them.

A head that is tied to an embedding has no numbers of its own: its form is made again from the table, with the
scales beside it, which take longest to find.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from isoform.checkpoints.weights import SafetensorsFile, refuse_strangers, skeleton
from isoform.config import ModelConfig
from isoform.errors import ArtifactError
from isoform.nn import Transformer
from isoform.nn.forms import bias_of, form_of, kept, maps, set_product
from isoform.nn.heads import TokenHead
from isoform.nn.products import FORMS, nearest, product, restored

EXCEPT = " except "


def form(model: Transformer) -> str | None:
    """The form as it is stored, e.g. ``int8 except head``; None for float32 laid out otherwise."""
    found = form_of(model)
    if found is None or found == "float32":
        return None
    return found + (EXCEPT + ", ".join(names) if (names := kept(model)) else "")


def tensors(model: Transformer) -> dict[str, Tensor]:
    """What the file holds: every parameter once, and for a narrow weight its numbers and scales."""
    found = {name: p.detach().contiguous() for name, p in model.named_parameters() if not p.is_meta}
    for name, module in maps(model):
        if module.product is not None and (_tied(module) or module.weight.is_meta):
            stored = module.product.stored()
            suffixes = [suffix for suffix in stored if suffix or not _tied(module)]
            found |= {f"{name}.weight{suffix}": stored[suffix].contiguous() for suffix in suffixes}
    return found


def read(
    config: ModelConfig,
    stored: str,
    file: SafetensorsFile,
    folder: Path,
    device: torch.device | str | None,
) -> Transformer:
    """The network of an artifact whose weights are in a form.

    Raises:
        ArtifactError: an unknown form, or tensors that are missing, unknown, misshaped or of another type.
    """
    form, _, listed = stored.partition(EXCEPT)
    if form not in FORMS:
        raise ArtifactError(f"{folder}: weights in the unknown form {form!r}")
    as_is = set(listed.split(", ") if listed else ())
    model = skeleton(config).requires_grad_(False)
    if strange := as_is - {name for name, _ in maps(model)}:
        raise ArtifactError(f"{folder}: weights {stored!r}: the network has no map {min(strange)!r}")
    narrow = {name: module for name, module in maps(model) if name not in as_is}
    own = {name for name, module in narrow.items() if not _tied(module)}
    int8 = form.startswith("int8")
    dtypes = {f"{name}.weight": torch.int8 if int8 else torch.bfloat16 for name in own}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: file.shape(name) for name in file.names()}
    for name, module in narrow.items() if int8 else ():
        if name in own or f"{name}.weight_scale" in found:  # which older artifacts have not
            shapes[f"{name}.weight_scale"] = (module.weight.shape[0],)
    refuse_strangers(file.path, shapes, found)
    for name in found:
        kind = file.dtype(name)
        if kind != dtypes.get(name, kind) or (name not in dtypes and not kind.is_floating_point):
            raise ArtifactError(f"{file.path}: tensor {name} has dtype {kind}, not what {form} weights have")
    given = {name: file.view(name).to(device=device) for name in found}
    plain = {name: t for name, t in given.items() if name not in dtypes and not name.endswith("_scale")}
    for name, tensor in plain.items():
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, nn.Parameter(tensor, requires_grad=False))
    if model.source_embedding is not None and config.tie_source:
        model.source_embedding.weight = model.embedding.weight
    if isinstance(model.head, TokenHead) and model.head.cfg.tied:
        model.head.weight = model.embedding.weight
    for name, module in narrow.items():
        parts = {s: given[key] for s in ("", "_scale") if (key := f"{name}.weight{s}") in given}
        if "_scale" in parts and name not in own:
            parts[""] = nearest(model.embedding.weight, parts["_scale"])
        made = restored(form, parts, bias_of(module)) if parts else None
        set_product(module, made or product(form, model.embedding.weight, bias_of(module)))
    return model.eval()


def _tied(module: nn.Module) -> bool:
    return isinstance(module, TokenHead) and module.cfg.tied
