"""What the records of each kind of data become: the table that encoding, ids on disk and batches follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from isoform.data import encode
from isoform.data.config import (
    DataConfig,
    DatesData,
    LabelledData,
    ParallelData,
    PrefixData,
    TaggedData,
    TextData,
)
from isoform.data.encode import EncodedLabels, EncodedPairs, EncodedPrompts, EncodedTags, EncodedTexts
from isoform.data.ragged import Ragged
from isoform.data.records import Document, Labelled, Pair, Prompted, Record, Records, Tagged
from isoform.data.vocabularies import Tokenizers

Encoded = EncodedPairs | EncodedPrompts | EncodedTexts | EncodedLabels | EncodedTags


@dataclasses.dataclass(frozen=True)
class Form:
    """A kind of encoded records, and of which arrays it is made.

    Attributes:
        kind: called with the arrays in this order, the sides first, and at last the fit.
        sides: rows of ids.
        numbers: one number a row.
    """

    kind: type[Any]
    sides: tuple[str, ...]
    numbers: tuple[str, ...] = ()


FORMS: dict[type[Any], Form] = {
    ParallelData: Form(EncodedPairs, ("source", "target")),
    PrefixData: Form(EncodedPrompts, ("tokens",), ("prefix",)),
    TextData: Form(EncodedTexts, ("tokens",)),
    LabelledData: Form(EncodedLabels, ("tokens",), ("labels",)),
    TaggedData: Form(EncodedTags, ("tokens", "tags")),
}


def encode_records(
    data: DataConfig,
    records: Records[Record],
    ids: Mapping[str, Ragged],
    tokenizers: Tokenizers,
    classes: Mapping[str, int],
) -> Encoded:
    """Put records between their templates' ids, and apply the limits; see `isoform.data.encode`.

    Args:
        data: the run file's data section; no stream.
        records: none of them empty.
        ids: what `isoform.data.encode.encode_sides` made of them.
        tokenizers: those that made the ids.
        classes: the number of each label.

    Raises:
        DataError: a record that the policies do not allow for.
    """
    source, target = tokenizers.source, tokenizers.target
    if isinstance(data, ParallelData | DatesData):
        limited = isinstance(data, ParallelData)
        return encode.encode_pairs(
            cast("Records[Pair]", records),
            ids,
            source,
            target,
            max_source=data.max_source if limited else None,
            max_target=data.max_target if limited else None,
            over_long=data.over_long if limited else "error",
        )
    length: dict[str, Any] = {"max_length": data.max_length, "over_long": data.over_long}
    if isinstance(data, PrefixData):
        return encode.encode_prompted(cast("Records[Prompted]", records), ids, source, **length)
    if isinstance(data, LabelledData):
        return encode.encode_labelled(cast("Records[Labelled]", records), ids, source, classes, **length)
    if isinstance(data, TaggedData):
        return encode.encode_tagged(cast("Records[Tagged]", records), source, classes, **length)
    return encode.encode_documents(cast("Records[Document]", records), ids, source, **length)
