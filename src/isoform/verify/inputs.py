"""Example inputs for any module, by its signature."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from isoform.errors import DataError
from isoform.tokens import Tokens
from isoform.verify.subject import vocabulary_size

_ENCODERS = nn.TransformerEncoder | nn.TransformerEncoderLayer
_DECODERS = nn.TransformerDecoder | nn.TransformerDecoderLayer
BATCH, LENGTH, SOURCE = 3, 11, 9


def example_inputs(module: nn.Module, *, length: int = LENGTH, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of ``forward`` that show as much as possible: unequal lengths, padding, no symmetry.

    Knows Isoform's networks, Hugging Face's argument names, `torch.nn.Transformer` and its parts, and
    otherwise gives the first argument token ids.

    Args:
        module: the module.
        length: positions of the main sequence.
        seed: of the ids.

    Raises:
        DataError: a module whose arguments say nothing; inputs have to be given.
    """
    names = inspect.signature(module.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    length = min(length, _longest(module))
    if isinstance(module, nn.Transformer | _ENCODERS | _DECODERS):
        return _of_torch(module, length, generator)
    if isinstance(module, nn.MultiheadAttention):
        raise DataError("MultiheadAttention reads queries, keys and values apart; audit the layer it is in")
    if "tokens" in names:
        return _of_isoform(module, length, generator)
    ids, real = _ids(module, length, generator), _real(length)
    if "input_ids" in names:
        found: dict[str, Any] = {"input_ids": ids}
        if "attention_mask" in names:
            found["attention_mask"] = real.long()
        if "decoder_input_ids" in names:
            found["decoder_input_ids"] = _ids(module, max(length - 3, 2), generator)
        return found
    required = [
        n
        for n, p in names.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if not required:
        raise DataError(f"{type(module).__name__}.forward has no argument to give ids to; pass --inputs")
    return _of_names(module, required, list(names), ids, real, generator)


def _of_names(
    module: nn.Module,
    required: list[str],
    names: list[str],
    ids: Tensor,
    real: Tensor,
    generator: torch.Generator,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        word = name.lower()
        padding = any(part in word for part in ("mask", "real", "padding"))
        if (padding and word not in ("src_mask", "tgt_mask", "mask") and "attention" in word) or (
            name in required and padding
        ):
            found[name] = ~real if "padding" in word else real.long()
        elif name in required:
            found[name] = ids if not found else _ids(module, ids.shape[1], generator)
    return found


def _of_torch(module: nn.Module, length: int, generator: torch.Generator) -> dict[str, Any]:
    attention = next(m for m in module.modules() if isinstance(m, nn.MultiheadAttention))
    dtype = next(module.parameters()).dtype

    def vectors(size: int) -> Tensor:
        x = torch.randn(BATCH, size, attention.embed_dim, generator=generator, dtype=torch.float64).to(dtype)
        return x if attention.batch_first else x.transpose(0, 1)

    if isinstance(module, _ENCODERS):
        return {"src": vectors(length), "src_key_padding_mask": ~_real(length)}
    mask = nn.Transformer.generate_square_subsequent_mask(length - 2, dtype=dtype)
    if isinstance(module, _DECODERS):
        return {"tgt": vectors(length - 2), "memory": vectors(length), "tgt_mask": mask}
    return {
        "src": vectors(length),
        "tgt": vectors(length - 2),
        "tgt_mask": mask,
        "src_key_padding_mask": ~_real(length),
        "memory_key_padding_mask": ~_real(length),
    }


def _of_isoform(module: nn.Module, length: int, generator: torch.Generator) -> dict[str, Any]:
    config: Any = getattr(module, "config", None)
    prefix = None
    if config is not None and config.structure == "decoder" and config.stack.visibility == "prefix":
        prefix = torch.tensor([2, 3, 1])
    tokens = Tokens(_ids(module, length, generator), _real(length), prefix=prefix)
    if config is not None and config.source is not None:
        return {"tokens": tokens, "source": Tokens(_ids(module, SOURCE, generator), _real(SOURCE))}
    return {"tokens": tokens}


def _ids(module: nn.Module, length: int, generator: torch.Generator) -> Tensor:
    size = vocabulary_size(module)
    low = min(4, size - 1)
    return torch.randint(low, size, (BATCH, length), generator=generator)


def _real(length: int) -> Tensor:
    lengths = torch.tensor([length, max(length - 3, 1), max(length - 5, 1)])
    return torch.arange(length)[None] < lengths[:, None]


def _longest(module: nn.Module) -> int:
    """Positions that the module has room for."""
    config = getattr(module, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_length", "n_ctx"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size > 2:
            return size - 2 if size < LENGTH + 3 else size
    return 10**6
