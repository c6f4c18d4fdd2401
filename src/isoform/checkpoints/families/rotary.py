"""Rotary settings as the library writes them: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from isoform.checkpoints.keys import Keys
from isoform.config import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    Rotary,
    YarnScaling,
)
from isoform.config.positions import RotaryScaling
from isoform.errors import ArtifactError


def read_rotary(
    keys: Keys,
    *,
    head_width: int,
    theta: float,
    max_positions: int,
    share: float = 1.0,
    share_key: bool = False,
) -> Rotary:
    """The rotary setting of a model with one for all layers.

    Args:
        keys: the configuration.
        head_width: channels of a head.
        theta: the class's default base.
        max_positions: the class's default of ``max_position_embeddings``.
        share: the class's default share of rotating channels.
        share_key: whether the class reads ``partial_rotary_factor``.
    """
    length = keys.integer("max_position_embeddings", max_positions)
    base = keys.real("rope_theta", theta)
    table = keys.take("rope_scaling", None)
    parameters = keys.take("rope_parameters", None)
    if share_key:
        share = keys.real("partial_rotary_factor", share)
    if parameters is not None:
        base = float(parameters.get("rope_theta", base))
        share = float(parameters.get("partial_rotary_factor", share)) if share_key else share
        table = {k: v for k, v in parameters.items() if k not in ("rope_theta", "partial_rotary_factor")}
    table = with_original(keys, table, length, modern=parameters is not None)
    return make_rotary(table, width=int(head_width * share), theta=base, length=length, where=keys.where)


def with_original(
    keys: Keys, table: Mapping[str, Any] | None, length: int, *, modern: bool
) -> Mapping[str, Any] | None:
    """LongRoPE's original length and factor, wherever they stand; another scaling has them in its table.

    Args:
        keys: the configuration, which may have the length beside the table.
        table: the scaling.
        length: ``max_position_embeddings``.
        modern: whether the table is one of version 5, which reads a length inside and prefers its factor.

    Raises:
        ArtifactError: a length beside another scaling, or one inside that version 4 does not read.
    """
    beside = keys.take("original_max_position_embeddings", None)
    if table is None or (table.get("rope_type") or table.get("type")) != "longrope":
        if beside is None:
            return table
        raise ArtifactError(
            f"{keys.where}: original_max_position_embeddings without longrope is not supported"
        )
    inside, factor = table.get("original_max_position_embeddings"), table.get("factor")
    original = beside or (inside if modern else None) or length
    if inside not in (None, original):
        raise ArtifactError(
            f"{keys.where}: original_max_position_embeddings is {inside} in rope_scaling, where version 4 of "
            f"transformers does not look (it takes {original}) but 5 does: write it beside the table"
        )
    if factor is None or (beside is not None and not modern):
        factor = length / original if modern or beside is not None else None
    return {**table, "original_max_position_embeddings": original, "factor": factor}


def make_rotary(
    table: Mapping[str, Any] | None, *, width: int, theta: float, length: int, where: str
) -> Rotary:
    """A rotary setting from its scaling table."""
    scaling = NoScaling() if table is None else _scaling(dict(table), length, where)
    return Rotary(layout="half", theta=theta, width=width, scaling=scaling, precision="float32")


def _scaling(table: dict[str, Any], length: int, where: str) -> RotaryScaling:
    kinds = [table.pop(name) for name in ("rope_type", "type") if name in table]
    kind = kinds[0] if kinds else "default"
    result: RotaryScaling
    if kind == "default":
        result = NoScaling()
        table.pop("factor", None)
    elif kind == "linear":
        result = LinearScaling(factor=float(table.pop("factor")))
    elif kind == "dynamic":
        # The library takes the limit from max_position_embeddings, whatever the table says.
        table.pop("original_max_position_embeddings", None)
        result = DynamicNtkScaling(factor=float(table.pop("factor")), original_length=length)
    elif kind == "llama3":
        result = Llama3Scaling(
            factor=float(table.pop("factor")),
            low_frequency_factor=float(table.pop("low_freq_factor")),
            high_frequency_factor=float(table.pop("high_freq_factor")),
            original_length=int(table.pop("original_max_position_embeddings")),
        )
    elif kind == "yarn":
        factor = float(table.pop("factor"))
        result = YarnScaling(
            factor=factor,
            original_length=int(table.pop("original_max_position_embeddings", None) or length),
            beta_fast=float(table.pop("beta_fast", None) or 32.0),
            beta_slow=float(table.pop("beta_slow", None) or 1.0),
            attention_factor=_attention_factor(factor, table),
            truncate=bool(table.pop("truncate", True)),
        )
    elif kind == "longrope":
        original, factor = int(table.pop("original_max_position_embeddings")), table.pop("factor")
        given = table.pop("attention_factor", None)
        if given is None:
            if factor is None:
                raise ArtifactError(f"{where}: rope_scaling: factor is missing")
            given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        result = LongRopeScaling(
            short=tuple(map(float, table.pop("short_factor"))),
            long=tuple(map(float, table.pop("long_factor"))),
            original_length=original, attention_factor=float(given),
        )  # fmt: skip
    else:
        raise ArtifactError(f"{where}: rope_scaling of type {kind!r} is not supported")
    if table:
        raise ArtifactError(f"{where}: rope_scaling: not understood: {', '.join(sorted(table))}")
    return result


def _attention_factor(factor: float, table: dict[str, Any]) -> float:
    given = table.pop("attention_factor", None)
    ours, all_dim = table.pop("mscale", None), table.pop("mscale_all_dim", None)
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(ours) / scale(all_dim) if ours and all_dim else scale(1.0)


def write_rotary(rotary: Rotary, *, share_key: bool = False, head_width: int = 0) -> dict[str, Any]:
    """The keys that give this setting when read, apart from ``max_position_embeddings``."""
    result: dict[str, Any] = {"rope_theta": rotary.theta, "rope_scaling": write_scaling(rotary.scaling)}
    result |= write_original(rotary.scaling)
    if isinstance(rotary.scaling, DynamicNtkScaling):
        result["max_position_embeddings"] = rotary.scaling.original_length
    if share_key:
        result["partial_rotary_factor"] = rotary.width / head_width
    return result


def write_original(scaling: RotaryScaling) -> dict[str, Any]:
    """LongRoPE's key beside the table."""
    longrope = isinstance(scaling, LongRopeScaling)
    return {"original_max_position_embeddings": scaling.original_length} if longrope else {}


def write_scaling(scaling: RotaryScaling) -> dict[str, Any] | None:
    """The scaling table."""
    if isinstance(scaling, NoScaling):
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, DynamicNtkScaling):
        return {"rope_type": "dynamic", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    if isinstance(scaling, LongRopeScaling):
        return {
            "rope_type": "longrope",
            "factor": 1.0,  # what it would decide is written out
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            "attention_factor": scaling.attention_factor,
        }
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.attention_factor,
        "truncate": scaling.truncate,
    }
