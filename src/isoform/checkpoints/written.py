"""What ``isoform.json`` must hold, by type: a file of that name may be anybody's, or edited."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from isoform.errors import ArtifactError


class _Vocabulary(TypedDict):
    file: str
    sha256: str


class _Vocabularies(TypedDict):
    target: _Vocabulary | None
    source: _Vocabulary | None


class _Digest(TypedDict):
    shape: list[int]
    mean: float
    std: float
    max: float
    wave: float
    samples: list[float]


class _Scores(TypedDict):
    values: list[list[float]]


class _Greedy(TypedDict):
    ids: list[int]
    margins: list[float]


class _Probe(TypedDict):
    precision: Literal["float64", "float32", "bfloat16", "float16"]
    # A probe without these would agree with any network.
    positions: Annotated[dict[str, Any], Field(min_length=1)]
    layers: Annotated[dict[str, _Digest], Field(min_length=1)]
    logits: _Scores | None
    greedy: _Greedy | None
    texts: dict[str, dict[str, list[int]]]


class _Written(TypedDict):
    dtypes: list[str]
    sharing: list[list[str]]
    config_sha256: str
    protocol: dict[str, Any]
    vocabularies: _Vocabularies
    provenance: dict[str, Any]
    probe: _Probe


def refuse_misshapen(state: Mapping[str, Any], path: Path) -> None:
    """Read the sections' types.

    Raises:
        ArtifactError: a section that is missing or of another type; the first is named.
    """
    if missing := [key for key in _Written.__annotations__ if key not in state]:
        raise ArtifactError(f"{path}: missing: {', '.join(missing)}")
    try:
        TypeAdapter(_Written).validate_python(state)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in fault["loc"])
        wanted = fault["msg"].removeprefix("Input should be ")
        raise ArtifactError(f"{path}: {place}: damaged; expected {wanted}") from None
