"""One entry for everything that can be opened, and one for everything that can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch

from isoform.checkpoints import (
    adapter,
    artifact,
    ctranslate2,
    gguf,
    huggingface,
    llama2c,
    mapping,
    onnx,
    torch_folder,
)
from isoform.checkpoints.bundle import Bundle
from isoform.errors import ArtifactError


def load(
    path: str | Path,
    *,
    check: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    unpickle: bool = False,
) -> Bundle:
    """Open an artifact, or a checkpoint of a known family.

    Args:
        path: an artifact; a folder of adapters, which are merged into their base; a folder with
            ``config.json`` and weights in the layout of `transformers`; a folder of CTranslate2; a ``.bin``
            file of llama2.c; a GGUF file.
        check: re-run the golden probe of an artifact; a checkpoint carries none to be held against.
        dtype: what to hold the weights in; default: as stored.
        device: where to put the network.
        unpickle: read ``pytorch_model.bin``, tensors only, where there are no safetensors.

    Raises:
        ArtifactError: nothing known is there, or parts are missing, unknown, misshaped or foreign.
        CheckError: ``check`` found a difference.
    """
    path = Path(path)
    if not path.exists():
        raise ArtifactError(f"{path}: no such file or folder")
    if adapter.is_adapter(path):
        base = load(adapter.read_state(path).base.path, check=check, unpickle=unpickle)
        return adapter.load_adapter(path, base, dtype=dtype, device=device)
    if artifact.is_artifact(path):
        return artifact.load(path, check=check, dtype=dtype, device=device)
    if check:
        raise ArtifactError(f"{path}: not an Isoform artifact, so there is no probe to check it by")
    if torch_folder.is_torch_folder(path):
        return torch_folder.load(path, dtype=dtype, device=device)
    if ctranslate2.is_ctranslate2(path):
        return ctranslate2.load(path, dtype=dtype, device=device)
    if huggingface.is_checkpoint(path):
        return huggingface.load(path, dtype=dtype, device=device, unpickle=unpickle)
    if gguf.is_gguf(path):
        return gguf.load(path, dtype=dtype, device=device)
    if llama2c.is_llama2c(path):
        return llama2c.load(path, dtype=dtype, device=device)
    raise ArtifactError(f"{path}: not an Isoform artifact, nor a checkpoint of a known family")


def unchanged(bundle: Bundle, path: str | Path, *, unpickle: bool = False) -> int | None:
    """Turn an opened checkpoint back into its tensors and compare them with the file's, bit for bit.

    Quantised ones are compared as the floating numbers that they stand for.

    Args:
        bundle: what `load` made of the checkpoint, its weights as stored.
        path: the checkpoint.
        unpickle: as for `load`.

    Returns:
        How many tensors there are; None for an artifact, whose own probe says more, and for adapters, which
        were held against the merged network when they were opened.

    Raises:
        CheckError: one differs.
    """
    path = Path(path)
    if artifact.is_artifact(path) or adapter.is_adapter(path):
        return None
    if torch_folder.is_torch_folder(path):
        rules, weights = torch_folder.opened(path, bundle.model)
    elif ctranslate2.is_ctranslate2(path):
        rules, weights = ctranslate2.opened(path)
    elif huggingface.is_checkpoint(path):
        rules, weights = huggingface.opened(path, bundle.config, unpickle=unpickle)
    else:
        rules, weights = gguf.opened(path) if gguf.is_gguf(path) else llama2c.opened(path)
    return mapping.unchanged(bundle.model, rules, weights)


Format = Literal["hf", "torch", "ctranslate2", "onnx"]


def export(bundle: Bundle, path: str | Path, *, to: Format = "hf", family: str | None = None) -> Path:
    """Write a bundle in another format, and check it by opening it again.

    Args:
        bundle: what to write.
        path: the folder to make; its ``isoform_check.json`` holds the figures of the check.
        to: "hf", the layout of `transformers`; "torch", for `torch.nn.Transformer` and its encoder;
            "ctranslate2", for that engine; "onnx", which cannot be opened here again.
        family: for "hf" the ``model_type`` to write; default: the one it was imported as, else the first
            that fits.

    Raises:
        ArtifactError: the format cannot say this configuration, with the reason; or its library is missing.
        CheckError: what was written is another function.
    """
    path = Path(path)
    if family is not None and to != "hf":
        raise ArtifactError(f"a family is for the format hf, not for {to!r}")
    if to == "hf":
        return huggingface.export(bundle, path, family=family)
    if to == "torch":
        return torch_folder.export(bundle, path)
    if to == "ctranslate2":
        return ctranslate2.export(bundle, path)
    if to == "onnx":
        return onnx.export(bundle, path)
    raise ArtifactError(f"cannot export to {to!r}; expected one of {', '.join(get_args(Format))}")
