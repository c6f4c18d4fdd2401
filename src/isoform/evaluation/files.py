"""From a file, or a run's data section, to a part of data that a given network can be scored on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoform.config.heads import SequenceHead, TaggingHead
from isoform.data import encode
from isoform.data.batching_config import TokenBudget, Windows
from isoform.data.config import (
    DataConfig,
    DatesData,
    LabelledData,
    ParallelData,
    PrefixData,
    TaggedData,
    TextData,
)
from isoform.data.corpus import PartName, read_raw
from isoform.data.files import bare_suffix
from isoform.data.format_config import Sides
from isoform.data.parts import Part, Task, prepare_part
from isoform.data.tokenizer import Template
from isoform.data.vocabularies import Tokenizers
from isoform.errors import ConfigError, DataError, TokenizerError

if TYPE_CHECKING:
    from isoform.checkpoints import Bundle

MAX_TOKENS = 8192  # a batch, padding included
SPECIALS = 64  # more than a protocol puts around texts


def data_of_file(
    bundle: Bundle,
    path: Path,
    *,
    references: Path | None = None,
    fields: Sequence[str] = (),
    documents: Literal["stream", "lines"] | None = None,
) -> DataConfig:
    """What a file holds, by its suffix and by what the network does.

    Pairs for an encoder–decoder, prompts and answers for a decoder, labels or tags for an encoder with such a
    head: ``.tsv`` (columns by number), ``.jsonl`` (fields by name), ``.tmx`` (languages), or two files of
    lines. Other text is a stream or lines of documents for a decoder. ``.gz`` may follow.

    Args:
        bundle: the network.
        path: the file; of two files of lines the one that is read.
        references: the other of two files of lines.
        fields: the two columns, fields or languages; default: 1 and 2, source and target (text and label,
            words and tags); a ``.tmx`` needs them.
        documents: how plain text is divided.

    Raises:
        ConfigError: fields that are not two, or a file whose use is not clear.
    """
    if fields and len(fields) != 2:
        raise ConfigError(f"two fields are needed, {len(fields)} given: {', '.join(fields)}")
    suffix = bare_suffix(path)
    head, cfg = bundle.config.head, bundle.config
    if isinstance(head, SequenceHead):
        form = _table(suffix, fields, ("text", "label"), path)
        return _made(LabelledData, path, format=form)
    if isinstance(head, TaggingHead):
        if suffix == ".jsonl":
            return _made(TaggedData, path, format=_table(suffix, fields, ("words", "tags"), path))
        word, tag = _numbers(fields, path)
        return _made(TaggedData, path, format={"kind": "conll", "word": word, "tag": tag})
    kind = ParallelData if cfg.source is not None else PrefixData
    if references is not None:
        sides = Sides(source=path, target=references)
        return _made(kind, sides, format={"kind": "lines"})
    if suffix in (".tsv", ".jsonl", ".tmx"):
        return _made(kind, path, format=_table(suffix, fields, ("source", "target"), path))
    if kind is ParallelData:
        raise ConfigError(
            f"{path}: an encoder–decoder needs pairs: expected .tsv, .jsonl, .tmx or two files of lines"
        )
    if documents is None:
        raise ConfigError(f"{path}: say whether it is one stream of text or a document a line")
    return _made(TextData, path, documents=documents)


def part_of(
    bundle: Bundle, data: DataConfig, part: PartName, base: Path, *, window: int | None = None
) -> Part:
    """Read a part of the data and batch it for a network, with its own tokenizers and protocol.

    Args:
        bundle: the network.
        data: what to read.
        part: which part.
        base: the folder that relative paths start from.
        window: of a stream: how many tokens are read at once; default: the learned positions there are.

    Raises:
        DataError: no such part, or text that cannot be read.
        ConfigError: data of another kind than the network reads; a stream without a window, or with one
            that is longer than the learned positions.
        TokenizerError: the bundle has none.
    """
    pairs = isinstance(data, ParallelData | DatesData)
    if pairs != (bundle.config.source is not None):
        needed = "two streams: data.kind is to be parallel" if not pairs else "one stream, not pairs"
        raise ConfigError(f"the data are of kind {data.kind!r}; this network reads {needed}")
    records = read_raw(data, part, base)
    if records is None:
        raise DataError(f"the data name no {part} part")
    tokenizers = tokenizers_for(bundle, data)
    ids = encode.encode_sides(records, tokenizers.by_side(records))
    if isinstance(data, TextData) and data.documents == "stream":
        batching = _windows(bundle, window)
    else:
        longest = sum(int(side.lengths.max()) for side in ids.values())
        batching = TokenBudget(max_tokens=max(MAX_TOKENS, 2 * longest + SPECIALS))
    start = bundle.protocol.start[-1] if bundle.protocol.start else None
    task = Task(data, batching, base, seed=0, start_id=start)
    return prepare_part(task, records, ids, tokenizers, classes_of(bundle))


def classes_of(bundle: Bundle) -> dict[str, int]:
    """The number of each label, as the artifact says it; empty if it does not."""
    labels: Any = bundle.provenance.get("labels", ())
    return {str(label): number for number, label in enumerate(labels)}


def tokenizers_for(bundle: Bundle, data: DataConfig) -> Tokenizers:
    """Those of the network, with what its protocol puts around texts of this kind as templates.

    Raises:
        TokenizerError: the bundle has none.
    """
    protocol, target = bundle.protocol, bundle.tokenizer
    source = bundle.source_tokenizer if bundle.config.source is not None else target
    if source is None or target is None:
        raise TokenizerError("the network has no tokenizer, so it can read no text")
    around = Template(protocol.source_prefix, protocol.source_suffix)
    if isinstance(data, PrefixData):
        around = Template(prefix=protocol.start)
    elif isinstance(data, TextData):
        ended = data.documents != "stream" and protocol.end_supervised
        around = Template(suffix=protocol.eos_ids[:1] if ended else ())
    return Tokenizers(source.with_template(around), target)


def _windows(bundle: Bundle, window: int | None) -> Windows:
    positions = bundle.config.embedding.positions
    if window is None and positions.kind == "learned":
        window = positions.max_positions
    if window is None:
        raise ConfigError("how much of a stream is read at once is not known: give a window")
    if positions.kind == "learned" and window > positions.max_positions:
        raise ConfigError(
            f"a window of {window} tokens, the network has {positions.max_positions} positions:"
            " give a smaller one"
        )
    return Windows(length=window, batch_size=max(1, MAX_TOKENS // window))


def _made(kind: type[DataConfig], path: Path | Sides, **settings: Any) -> DataConfig:
    return kind(train=path, test=path, **settings)  # pyright: ignore


def _table(suffix: str, fields: Sequence[str], default: tuple[str, str], path: Path) -> dict[str, Any]:
    """The format of a file of rows, under the names the data section has for its two fields."""
    first, second = ("words", "tags") if default[0] == "words" else default
    if suffix == ".jsonl":
        chosen = tuple(fields) or default
    elif suffix == ".tsv":
        chosen = _numbers(fields, path)
    elif suffix == ".tmx" and default[0] == "source":
        if not fields:
            raise ConfigError(f"{path}: name the two languages of the translation memory")
        chosen = tuple(fields)
    else:
        raise ConfigError(f"{path}: expected .tsv or .jsonl, plain or .gz")
    return {"kind": suffix[1:], first: chosen[0], second: chosen[1]}


def _numbers(fields: Sequence[str], path: Path) -> tuple[int, int]:
    try:
        first, second = (int(field) for field in fields or ("1", "2"))
    except ValueError:
        raise ConfigError(f"{path}: its columns have numbers, from 1; given: {', '.join(fields)}") from None
    return first, second
