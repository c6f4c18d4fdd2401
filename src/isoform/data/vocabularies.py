"""The tokenizers of a run: one for everything or one a side, trained or brought along."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from isoform.data.batching_config import Masking
from isoform.data.config import DataConfig, DatesData, LabelledData, ParallelData, PrefixData, TaggedData
from isoform.data.records import Record, Records, columns
from isoform.data.tokenizer import Template, Tokenizer
from isoform.data.tokenizer_config import TokenizerConfig, TokenizerFile, TokenizersConfig
from isoform.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of each side; one object twice where they share it."""

    source: Tokenizer
    target: Tokenizer

    @property
    def shared(self) -> bool:
        """Whether an id means the same on both sides, so that their tables may be tied (R27)."""
        return self.source.digest == self.target.digest

    def by_side(self, records: Records[Record]) -> dict[str, Tokenizer]:
        """The tokenizer of each side of the records; the first (source, prompt, text) has the source's."""
        names = columns(records.items[:1])
        return dict(zip(names, (self.source, self.target), strict=False))


def build_tokenizers(
    config: TokenizersConfig,
    data: DataConfig,
    train: Records[Record],
    base: Path,
    masking: Masking | None = None,
) -> Tokenizers:
    """Make the tokenizers, from the training part where they are to be trained.

    Templates: a source and its EOS for pairs; BOS, text, EOS for encoders and document language models'
    labels without the BOS (the shift puts it); nothing around a stream or a prompt.

    Raises:
        ConfigError: two tokenizers where the data have one side.
    """
    texts = list(columns(train.items).values())
    where = ", ".join(str(file) for file in train.files) or train.name
    pairs = isinstance(data, ParallelData | DatesData)
    if config.shared is not None:
        one = _build(config.shared, [text for column in texts for text in column], base, where)
        made = Tokenizers(one, one)
    elif not pairs:
        raise ConfigError(f'tokenizers: data of kind "{data.kind}" take one tokenizer: give shared')
    else:
        assert config.source is not None
        assert config.target is not None
        made = Tokenizers(
            _build(config.source, texts[0], base, f"{where} (source)"),
            _build(config.target, texts[1], base, f"{where} (target)"),
        )
    source = made.source.with_template(_template(made.source, data, masking))
    target = source if made.source is made.target else made.target
    return Tokenizers(source, target)


def _template(tokenizer: Tokenizer, data: DataConfig, masking: Masking | None) -> Template:
    special = tokenizer.special
    bos = () if special.bos is None else (special.bos,)
    eos = () if special.eos is None else (special.eos,)
    if isinstance(data, ParallelData | DatesData):
        return Template(suffix=eos)
    if isinstance(data, PrefixData):
        return Template(prefix=bos)
    if isinstance(data, LabelledData | TaggedData) or masking is not None:
        return Template(bos, eos)
    return Template() if data.documents == "stream" else Template(suffix=(special.require("eos"),))


def _build(config: TokenizerConfig, texts: list[str], base: Path, where: str) -> Tokenizer:
    if isinstance(config, TokenizerFile):
        return Tokenizer.from_file(base / config.path, config.specials)
    return Tokenizer.train(config, texts, where=where)
