"""How folders of the sentence-transformers library say what makes one vector of a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from isoform.config import PoolingHead
from isoform.config.files import write_text
from isoform.errors import ArtifactError

MODULES = "modules.json"
_TYPES = "sentence_transformers.models."
_PLACES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
_POOLING: dict[str, Literal["mean", "first", "last"]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
}
_OTHERS = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")


def read(folder: Path, read_json: Callable[[Path], dict[str, Any]]) -> PoolingHead | None:
    """The pooling of a folder; None for other folders.

    Raises:
        ArtifactError: a module or a pooling that is not understood.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        places = [str(module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path}: not a list of modules: {error}") from None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ArtifactError(f"{path}: modules {', '.join(kinds)} are not supported")
    settings = read_json(folder / places[1] / "config.json")
    chosen = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
    if len(chosen) != 1 or chosen[0] not in _POOLING:
        raise ArtifactError(f"{path}: pooling {', '.join(chosen) or 'none'} is not supported")
    return PoolingHead(pooling=_POOLING[chosen[0]], pooler=None, normalise=len(kinds) == 3)


def write(head: PoolingHead, width: int, folder: Path) -> None:
    """The files that give this pooling when read."""
    kinds = list(_PLACES)[: 3 if head.normalise else 2]
    modules = [
        {"idx": i, "name": str(i), "path": _PLACES[kind], "type": _TYPES + kind}
        for i, kind in enumerate(kinds)
    ]
    chosen = {name: kind == head.pooling for name, kind in _POOLING.items()}
    settings = {"word_embedding_dimension": width, **dict.fromkeys(_OTHERS, False), **chosen}
    for kind in kinds[1:]:
        (folder / _PLACES[kind]).mkdir()
    write_text(folder / MODULES, json.dumps(modules, indent=2) + "\n")
    write_text(folder / _PLACES["Pooling"] / "config.json", json.dumps(settings, indent=2) + "\n")
