"""The run file: model, data, tokenizer, training and evaluation in one frozen value."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from isoform.config import ModelConfig, SequenceHead, TaggingHead, presets
from isoform.config.base import Count, Frozen, parse
from isoform.config.faults import report
from isoform.config.files import read_table
from isoform.data.config import DataConfig, DatesData, ParallelData
from isoform.data.tokenizer_config import TokenizersConfig
from isoform.errors import ConfigError, did_you_mean
from isoform.training.evaluation_config import Evaluation, refuse_misfits
from isoform.training.overrides import apply_overrides
from isoform.training.settings import Training


class PresetModel(Frozen):
    """A preset's name, its arguments, and fields to change in what it returns.

    In the file the arguments stand beside the name; ``vocab_size`` and the number of labels are left out,
    because they come from the tokenizer and the data.
    """

    preset: str
    """Name of a function of isoform.presets."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What it is called with."""
    change: dict[str, Any] = Field(default_factory=dict)
    """Dotted names of fields of the configuration it returns, and their values."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "arguments" in data:
            return data
        kept = {key: value for key, value in data.items() if key in ("preset", "change")}
        return {**kept, "arguments": {key: value for key, value in data.items() if key not in kept}}

    @model_validator(mode="after")
    def _known(self) -> PresetModel:
        if self.preset not in presets.PRESETS:
            raise ValueError(f"preset: no preset {self.preset!r}{did_you_mean(self.preset, presets.PRESETS)}")
        known = inspect.signature(presets.PRESETS[self.preset]).parameters
        for name in self.arguments:
            if name not in known:
                raise ValueError(f"{name}: {self.preset} takes no such argument{did_you_mean(name, known)}")
        return self

    def flat_change(self) -> dict[str, Any]:
        """The fields to change by their dotted names."""
        return dict(_flat(self.change))

    def expand(self, sizes: Vocabularies) -> ModelConfig:
        """Call the preset.

        Args:
            sizes: rows of the tables and number of labels.

        Raises:
            ConfigError: arguments or changes that do not make a network, or an argument that contradicts
                the sizes.
        """
        function = presets.PRESETS[self.preset]
        known = inspect.signature(function).parameters
        given = {"vocab_size": sizes.target}
        if "source_vocab_size" in known and not sizes.shared:
            given |= {"source_vocab_size": sizes.source, "shared_vocabulary": False}
        for name, value in given.items():
            if name in self.arguments and self.arguments[name] != value:
                raise ConfigError(
                    f"model.{name} is {self.arguments[name]}, the tokenizer says {value}; leave it out"
                )
        try:
            made = function(**{**self.arguments, **given})
        except ValidationError as error:
            raise ConfigError(f"model: {self.preset}: {report(ModelConfig, error)}") from None
        except (ConfigError, TypeError, ValueError) as error:
            raise ConfigError(f"model: {self.preset}: {error}") from None
        if made.source is not None and not sizes.shared and "source_vocab_size" not in known:
            raise ConfigError(
                f"model: {self.preset} has one table for source and target, so both need one tokenizer:"
                " give tokenizer.shared"
            )
        change = self.flat_change()
        head = change.get("head")
        if isinstance(head, dict) and head.get("kind") in ("sequence_labels", "token_labels"):
            change["head"] = {"n_labels": sizes.labels, **head}
        try:
            return made.replace(**change)
        except ConfigError as error:
            raise ConfigError(f"model.change: {error}") from None


class Pretrained(Frozen):
    """A network that goes on from trained weights.

    Its tokenizers and its protocol are taken along. Only the head may be another one; whatever else does not
    fit the weights is refused.
    """

    checkpoint: Path
    """An artifact or a checkpoint of a known family; relative paths start where the data's do."""
    head: dict[str, Any] | Literal["none"] | None = None
    """A new head, with random values; the number of labels comes from the data. Unset: the checkpoint's."""
    change: dict[str, Any] = Field(default_factory=dict)
    """Dotted names of fields of its configuration that change no weight, and their values: dropout."""

    def expand(self, config: ModelConfig, labels: int) -> ModelConfig:
        """The checkpoint's configuration with what is changed.

        Raises:
            ConfigError: changes that do not make a network.
        """
        changes: dict[str, Any] = dict(_flat(self.change))
        if self.head is not None:
            changes["head"] = self.head
        if isinstance(self.head, dict) and self.head.get("kind") in ("sequence_labels", "token_labels"):
            changes["head"] = {"n_labels": labels, **self.head}
        try:
            return config.replace(**changes)
        except ConfigError as error:
            raise ConfigError(f"model: {self.checkpoint}: {error}") from None


class Vocabularies(Frozen):
    """What a network must be sized for."""

    target: Count
    """Rows of the table of the only stream, or of the target."""
    source: Count
    """Rows of the source's table."""
    shared: bool
    """Whether source and target ids mean the same."""
    labels: int = 0
    """Number of classes of labelled or tagged text."""


class RunConfig(Frozen):
    """A whole run."""

    model: ModelConfig | PresetModel | Pretrained
    """The architecture, written out or as a preset with changes; or trained weights to go on from."""
    data: DataConfig
    """What is learnt from."""
    tokenizer: TokenizersConfig | None = None
    """How text becomes ids; left out where the network goes on from a checkpoint, which brings its own."""
    training: Training
    """How it is learnt."""
    evaluation: Evaluation = Evaluation()
    """How the result is scored."""

    @model_validator(mode="after")
    def _metrics_fit(self) -> RunConfig:
        if isinstance(self.model, Pretrained) != (self.tokenizer is None):
            raise ValueError(
                "tokenizer: missing"
                if self.tokenizer is None
                else "tokenizer: it comes with model.checkpoint; leave it out"
            )
        if self.training.lora is not None and not isinstance(self.model, Pretrained):
            raise ValueError("training.lora: adapters on random weights have no base; set model.checkpoint")
        refuse_misfits(self.evaluation, self.data)
        return self

    @model_validator(mode="before")
    @classmethod
    def _model_first(cls, data: Any) -> Any:
        """Read the model by the form it has, so that its faults are told in the terms of that form."""
        if isinstance(data, dict) and isinstance(data.get("model"), dict):
            table = data["model"]
            kind = PresetModel if "preset" in table else Pretrained if "checkpoint" in table else ModelConfig
            try:
                return {**data, "model": parse(kind, data["model"], where="model")}
            except ConfigError as error:
                raise ValueError(str(error)) from None  # so that the file's name is put in front
        return data

    def architecture(self, sizes: Vocabularies | None = None) -> ModelConfig:
        """The network's configuration, expanded.

        Args:
            sizes: what the tokenizers and the data ask for; None: what the run file says about it.

        Raises:
            ConfigError: the run file does not say how many tokens there are, or says other than the sizes.
        """
        if isinstance(self.model, Pretrained):
            path = self.model.checkpoint
            raise ConfigError(f"model.checkpoint: the architecture is that of {path}: isoform show {path}")
        if sizes is None:
            if isinstance(self.model, ModelConfig):
                return self.model
            return self.model.expand(self._written_sizes(self.model))
        if isinstance(self.model, PresetModel):
            return self.model.expand(sizes)
        _refuse_other_sizes(self.model, sizes)
        return self.model

    def pairs(self) -> bool:
        """Whether the data have a source and a target."""
        return isinstance(self.data, ParallelData | DatesData)

    def _written_sizes(self, model: PresetModel) -> Vocabularies:
        given = model.arguments
        tokenizers = self.tokenizer
        assert tokenizers is not None
        target = given.get("vocab_size", _written_size(tokenizers.shared or tokenizers.target))
        source = given.get("source_vocab_size", _written_size(tokenizers.shared or tokenizers.source))
        if target is None or source is None:
            raise ConfigError(
                "model.vocab_size: not known before the tokenizer is made; write it to see the architecture"
            )
        head = model.change.get("head", {})
        labels = head.get("n_labels", 2) if isinstance(head, dict) else 0
        return Vocabularies(target=target, source=source, shared=tokenizers.shared is not None, labels=labels)


def read_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file.

    Args:
        path: TOML, YAML or JSON.
        overrides: ``dotted.name=value`` each, the value in TOML's notation; what is no TOML value is a text.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    return parse(RunConfig, apply_overrides(read_table(path), overrides), where=str(path))


def _written_size(tokenizer: Any) -> int | None:
    return None if tokenizer is None else dict(tokenizer).get("vocab_size")


def _refuse_other_sizes(model: ModelConfig, sizes: Vocabularies) -> None:
    """A network written out in full must have the tables that the tokenizers ask for (R27)."""
    found = {"embedding": (model.embedding, sizes.target)}
    if model.source is not None:
        found["source"] = (model.source, sizes.source)
    for name, (table, size) in found.items():
        if table.vocab_size != size:
            raise ConfigError(
                f"model.{name}.vocab_size is {table.vocab_size}, the tokenizer has {size} tokens;"
                f" write {size}"
            )
    if model.tie_source and not sizes.shared:
        raise ConfigError(
            "model.tie_source: source and target have a tokenizer each, so no id means the same"
        )
    if isinstance(model.head, SequenceHead | TaggingHead) and model.head.n_labels != sizes.labels:
        raise ConfigError(
            f"model.head.n_labels is {model.head.n_labels}, the data has {sizes.labels} labels;"
            f" write {sizes.labels}"
        )


def _flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested tables; a table with a ``kind`` is a value."""
    for name, value in table.items():
        if isinstance(value, dict) and value and "kind" not in value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
