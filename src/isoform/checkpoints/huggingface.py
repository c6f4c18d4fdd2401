"""Checkpoint folders in the layout of the `transformers` library: in and out, without that library."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from isoform.checkpoints import families, probe, sentence
from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.checked import Checked
from isoform.checkpoints.entries import FamilyMapping
from isoform.checkpoints.families.family import Family, HeadKind
from isoform.checkpoints.folder_vocabularies import Found, find
from isoform.checkpoints.keys import IRRELEVANT, Keys, understood
from isoform.checkpoints.mapping import Weights, load_weights, save_weights
from isoform.checkpoints.protocol import RULES, read_protocol, write_protocol
from isoform.checkpoints.relayout import with_layout
from isoform.checkpoints.shards import SINGLE, open_folder
from isoform.checkpoints.weights import skeleton
from isoform.checkpoints.written_vocabularies import write_tokenizer
from isoform.config import ModelConfig, PoolingHead, difference
from isoform.config.files import write_text
from isoform.config.folders import replaced
from isoform.config.protocol import Protocol
from isoform.data.tokenizer import Template
from isoform.errors import ArtifactError, IsoformError, did_you_mean

_ALPHABETS = {"grapheme_chars", "phoneme_chars"}
# Keys that the network does not have, and that go back where they came from.
_CARRIED = {"max_position_embeddings", *_ALPHABETS}
CONFIG, GENERATION = "config.json", "generation_config.json"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like one."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path) -> tuple[Family, HeadKind, ModelConfig, dict[str, Any]]:
    """The family, the kind of head, the architecture, and the table they were read from.

    Raises:
        ArtifactError: an unknown family or class, or a key that changes the function and is not understood.
    """
    table = read_json(folder / CONFIG)
    where = str(folder / CONFIG)
    name = table.get("model_type")
    if name is None:
        raise ArtifactError(
            f"{where}: no model_type, so no checkpoint of a known family; an artifact of Isoform has an"
            " isoform.json beside it"
        )
    if not isinstance(name, str) or name not in families.FAMILIES:
        raise ArtifactError(
            f"{where}: model_type {name!r} is not supported{did_you_mean(str(name), families.FAMILIES)}"
        )
    family = families.FAMILIES[name]
    table = {**family.defaults, **table}
    with understood(where):
        kind = _head(family, table, where)
        config = family.read(Keys(table, where), kind)
    pooling = sentence.read(folder, read_json)
    if pooling is not None and config.structure == "encoder":
        config = ModelConfig.model_validate({**config.model_dump(), "head": pooling.model_dump()})
    return family, kind, config, table


def load(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    unpickle: bool = False,
) -> Bundle:
    """Open a checkpoint folder.

    Args:
        folder: ``config.json``, weights and, where there is one, a tokenizer.
        dtype: what to hold the weights in; default: as stored, the widest type where they differ.
        device: where to put the network.
        unpickle: read ``pytorch_model.bin`` where there are no safetensors.

    Raises:
        ArtifactError: parts that are missing, unknown, misshaped or not understood, by name.
    """
    family, _, config, table = read_config(folder)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    weights = open_folder(folder, unpickle=unpickle)
    if isinstance(config.head, PoolingHead) and not any("pooler" in name for name in weights.names()):
        # The class can be built without its pooler; then the states are all there is.
        config = (
            ModelConfig.model_validate({**config.model_dump(), "head": None})
            if config.head.pooler
            else config
        )
    model = skeleton(config)
    load_weights(model, family.mapping(config), weights, dtype=dtype, device=device)
    both = config.structure == "encoder-decoder"
    with understood(f"{folder}: token ids"):
        protocol = read_protocol(table, generation, encoder_decoder=both, bos=family.bos)
    found = find(folder, family.model_type, table)
    if found is not None:
        _refuse_foreign(found, config, folder)
        protocol = _with_template(protocol, found.source.template, config)
    provenance: dict[str, Any] = {
        "format": "hf", "family": family.model_type, "folder": folder.name, "config": table,
    }  # fmt: skip
    if search := {name: value for name, value in generation.items() if name not in RULES}:
        provenance["generation"] = search  # settings of a search: not ours to apply, but to hand on
    if found is not None and found.came is not None:
        provenance["tokenizer"] = found.came
    source = None if found is None or config.source is None else found.source
    return Bundle(model.eval(), config, None if found is None else found.target, source, protocol, provenance)


def _with_template(protocol: Protocol, template: Template, config: ModelConfig) -> Protocol:
    """The tokenizer's own word on what surrounds a text; a decoder's prompt has a beginning only."""
    if config.structure == "decoder":
        return protocol.replace(start=template.prefix)
    return protocol.replace(source_prefix=template.prefix, source_suffix=template.suffix)


def _refuse_foreign(found: Found, config: ModelConfig, folder: Path) -> None:
    sides = (("target", found.target, config.embedding), ("source", found.source, config.source))
    for side, tokenizer, table in sides:
        if table is not None and tokenizer.vocab_size > table.vocab_size:
            raise ArtifactError(
                f"{folder}: the {side} vocabulary has {tokenizer.vocab_size} tokens, "
                f"its table {table.vocab_size} rows"
            )


def export(bundle: Bundle, folder: Path, *, family: str | None = None) -> Path:
    """Write a checkpoint folder that the library opens as the same function.

    Args:
        bundle: what to write.
        folder: where; replaced whole if it is an earlier export.
        family: its ``model_type``; default: the one it was imported as, else the first that can say it.

    Raises:
        ArtifactError: no family, or not the one asked for, can say this configuration; with the reason.
    """
    bundle = dataclasses.replace(bundle, model=with_layout(bundle.model, "half"))
    bundle = dataclasses.replace(bundle, config=bundle.model.config)
    config = bundle.config
    pooling = config.head if isinstance(config.head, PoolingHead) and config.head.pooler is None else None
    if pooling is not None:  # said beside the states, in files of its own
        config = ModelConfig.model_validate({**config.model_dump(), "head": None})
    chosen, table, kind = _expressed(bundle, config, family)
    known = (
        bundle.provenance.get("config", {}) if bundle.provenance.get("family") == chosen.model_type else {}
    )
    kept = {k: v for k, v in known.items() if k in IRRELEVANT or k in _CARRIED}
    # The class of a model with a pooler is also the one without (add_pooling_layer=False).
    named = "pooled" if kind not in chosen.architectures.values() else kind
    architecture = next(name for name, k in chosen.architectures.items() if k == named)
    dtype = str(next(bundle.model.parameters()).dtype).removeprefix("torch.")
    both = config.structure == "encoder-decoder"
    rules = write_protocol(bundle.protocol, encoder_decoder=both)
    # What neither the protocol nor the file said would be the class's own.
    silent = [n for n in (*kept, *chosen.defaults) if n in RULES and (n != "bos_token_id" or chosen.bos)]
    full = {
        **kept,
        **dict.fromkeys(silent if bundle.tokenizer is None else set(silent) - {"bos_token_id"}),
        **rules,
        **table,  # where positions are counted from the padding id, that id is part of the function
        "model_type": chosen.model_type,
        "architectures": [architecture],
        "torch_dtype": dtype,
    }
    from safetensors.torch import save_file

    with replaced(folder, mark=CONFIG) as new:
        tensors = save_weights(bundle.model, chosen.mapping(config), full, bare=kind == "states")
        save_file(tensors, new / SINGLE, metadata={"format": "pt"})
        write_text(new / CONFIG, json.dumps(full, indent=2, ensure_ascii=False, sort_keys=True) + "\n")
        if kind == "tokens" and config.decoder is not None:
            settings = {**bundle.provenance.get("generation", {}), **rules}
            write_text(new / GENERATION, json.dumps(settings, indent=2, sort_keys=True) + "\n")
        if pooling is not None:
            sentence.write(pooling, config.d_model, new)
        if not full.keys() >= _ALPHABETS:
            write_tokenizer(bundle, new, chosen.model_type)
        Checked(_checked(bundle, new)).write(new)
    return folder


def _checked(bundle: Bundle, folder: Path) -> probe.ProbeReport:
    """Open what was written and hold it against what was to be written: layers, scores, greedy tokens.

    Raises:
        CheckError: they differ.
    """
    before = probe.record(bundle.model, bundle.protocol)
    return probe.compare(before, probe.record(load(folder).model, bundle.protocol))


def opened(folder: Path, config: ModelConfig, *, unpickle: bool) -> tuple[FamilyMapping, Weights]:
    """The tensors of a folder and what they correspond to, to compare a network with what it came from."""
    family, _, _, _ = read_config(folder)
    return family.mapping(config), open_folder(folder, unpickle=unpickle)


def _expressed(
    bundle: Bundle, config: ModelConfig, name: str | None
) -> tuple[Family, dict[str, Any], HeadKind]:
    wanted = name or bundle.provenance.get("family")
    if wanted is not None:
        if wanted not in families.FAMILIES:
            raise ArtifactError(f"no family {wanted!r}{did_you_mean(wanted, families.FAMILIES)}")
        return _express(families.FAMILIES[wanted], config)
    reasons: list[str] = []
    for family in families.FAMILIES.values():
        try:
            return _express(family, config)
        except IsoformError as error:
            reasons.append(str(error))
    raise ArtifactError(f"no known family says this configuration; the first: {reasons[0]}")


def _express(family: Family, config: ModelConfig) -> tuple[Family, dict[str, Any], HeadKind]:
    """The keys that, read back, give exactly this configuration.

    Raises:
        ArtifactError: there are none; the message names the first field that cannot be said.
    """
    reason = "its parts are of another kind"
    kinds: list[HeadKind] = list(dict.fromkeys(family.architectures.values()))
    states: list[HeadKind] = ["states"]
    for kind in states if config.head is None else kinds:
        try:
            table = family.write(config)
            back = family.read(Keys(table, family.model_type), kind)
        except (AssertionError, AttributeError, KeyError, IsoformError) as error:
            reason = str(error) or reason
            continue
        found = difference(_unnamed(back), _unnamed(config))
        if not found:
            return family, table, kind
        if (back.head is None) == (config.head is None):
            reason = f"{found[0].path} would become {found[0].a!r} instead of {found[0].b!r}"
    raise ArtifactError(f"the {family.model_type} format cannot say this configuration: {reason}")


def _unnamed(config: ModelConfig) -> ModelConfig:
    """Vocabulary names are the project's own; formats have none."""
    data = config.model_dump()
    shared = config.source is not None and config.source.vocabulary == config.embedding.vocabulary
    data["embedding"]["vocabulary"] = "target"
    if config.source is not None:
        data["source"]["vocabulary"] = "target" if shared else "source"
    return ModelConfig.model_validate(data)


def _head(family: Family, table: dict[str, Any], where: str) -> HeadKind:
    names = table.get("architectures") or list(family.architectures)[:1]
    if names[0] not in family.architectures:
        raise ArtifactError(
            f"{where}: class {names[0]!r} is not supported{did_you_mean(names[0], family.architectures)}"
        )
    return family.architectures[names[0]]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON table.

    Raises:
        ArtifactError: it is not one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(data, dict):
        raise ArtifactError(f"{path}: expected a table, found {type(data).__name__}")
    return data
