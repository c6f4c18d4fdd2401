"""The artifact: one folder that holds all of a network, and refuses to be read as anything else (R37–R38).

``model.safetensors``  every parameter once, shared ones under their first name
``config.json``        the architecture
``tokenizer.*``        the vocabulary of the only stream or of the target
``source_tokenizer.*`` that of the source, where it is another
``isoform.json``       format, versions, sharing relation, protocol, digests, provenance, golden probe
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isoform.checkpoints import narrow, probe
from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.weights import SafetensorsFile, fill, refuse_strangers, skeleton, stored_names
from isoform.checkpoints.written import refuse_misshapen
from isoform.config import ModelConfig
from isoform.config.base import parse
from isoform.config.files import dumps, read, read_table, write_text
from isoform.config.folders import replaced
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError, CheckError, ConfigError, IsoformError, TokenizerError
from isoform.nn import Transformer
from isoform.nn.forms import plain

if TYPE_CHECKING:
    from isoform.data import Tokenizer

FORMAT = 1
MARK = "isoform.json"


def save(bundle: Bundle, folder: Path) -> Path:
    """Write the artifact whole or not at all; see `Bundle.save`."""
    model, config = bundle.model, bundle.config
    _refuse_misfits(bundle, str(folder))
    with replaced(folder, mark=MARK) as new:
        _write_weights(model, new / "model.safetensors")
        write_text(new / "config.json", dumps(config, ".json"))
        vocabularies = write_tokenizers(bundle, new)
        state = {
            "format": FORMAT,
            "versions": _versions(),
            "dtypes": _dtypes(p for p in model.parameters() if not p.is_meta),
            "weights": narrow.form(model),
            "sharing": [list(group) for group in model.tied()],
            "config_sha256": _sha256(new / "config.json"),
            "protocol": bundle.protocol.model_dump(mode="json"),
            "vocabularies": vocabularies,
            "provenance": dict(bundle.provenance),
            "probe": {**probe.record(plain(model), bundle.protocol), "texts": _texts(bundle)},
        }
        write_text(new / MARK, json.dumps(state, indent=1, ensure_ascii=False) + "\n")
    return folder


def load(
    folder: Path,
    *,
    check: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Bundle:
    """Read an artifact. Weights stay mapped from the file until they are used.

    Args:
        folder: what `Bundle.save` wrote.
        check: run the golden probe again and hold it against what was recorded; figures in ``Bundle.report``.
        dtype: a floating type to hold the weights in; default: as stored.
        device: where to put the network; default: the CPU.

    Raises:
        ArtifactError: parts that are missing, unknown, misshaped, truncated or foreign, by name.
        CheckError: ``check`` found a difference; the message names the first layer.
    """
    state = _state(folder)
    config_path = folder / "config.json"
    config = _config(config_path)
    altered = _sha256(config_path) != state["config_sha256"]
    if altered and not check:
        raise ArtifactError(
            f"{config_path}: not the configuration this artifact was saved with; "
            "load with check=True to see what it changes"
        )
    protocol = _protocol(state, folder)
    tokenizer, source_tokenizer = read_tokenizers(state["vocabularies"], folder)
    model = _read_weights(config, state, folder, dtype, device)
    bundle = Bundle(model, config, tokenizer, source_tokenizer, protocol, state["provenance"])
    _refuse_misfits(bundle, str(folder))
    if not check:
        return bundle
    report = _check(bundle, state)
    if altered:
        raise CheckError(
            f"{config_path}: not the configuration this artifact was saved with, though the probe agrees"
        )
    return Bundle(model, config, tokenizer, source_tokenizer, protocol, state["provenance"], report)


def is_artifact(folder: Path) -> bool:
    """Whether a folder says that it is one."""
    return (folder / MARK).is_file()


def _check(bundle: Bundle, state: Mapping[str, Any]) -> probe.ProbeReport:
    saved = state["probe"]
    texts = _texts(bundle)
    for side, ids in saved["texts"].items():
        for text, before in ids.items():
            if texts.get(side, {}).get(text) != before:
                raise CheckError(f"check: the {side} token ids of {text!r} are not the saved ones")
    found = probe.record(plain(bundle.model), bundle.protocol)
    stored = state["dtypes"][0] if len(state["dtypes"]) == 1 else "float32"
    found["rounding"] = probe.rounding(plain(bundle.model), stored)
    report = probe.compare(saved, found)
    n_texts = sum(len(ids) for ids in saved["texts"].values())
    return dataclasses.replace(report, texts=n_texts)


def _state(folder: Path) -> dict[str, Any]:
    path = folder / MARK
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder")
    if not path.is_file():
        raise ArtifactError(f"{folder}: not an Isoform artifact: no {MARK}")
    try:
        state = read_table(path)
    except ConfigError as error:
        raise ArtifactError(str(error)) from None
    if state.get("format") != FORMAT:
        raise ArtifactError(
            f"{path}: format {state.get('format')!r} is unknown; this version reads format {FORMAT}"
        )
    refuse_misshapen(state, path)
    return state


def _config(path: Path) -> ModelConfig:
    try:
        return read(ModelConfig, path)
    except ConfigError as error:
        raise ArtifactError(str(error)) from None


def _protocol(state: Mapping[str, Any], folder: Path) -> Protocol:
    try:
        return parse(Protocol, state["protocol"], where=f"{folder / MARK}: protocol")
    except ConfigError as error:
        raise ArtifactError(str(error)) from None


def _write_weights(model: Transformer, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(narrow.tensors(model), path, metadata={"format": "pt"})


def _read_weights(
    config: ModelConfig,
    state: Mapping[str, Any],
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Transformer:
    path = folder / "model.safetensors"
    file = SafetensorsFile(path)
    if (form := state.get("weights")) is not None:
        if dtype is not None:
            raise ArtifactError(f"{folder}: its weights are {form}; they cannot be read as {dtype}")
        return narrow.read(config, form, file, folder, device)
    model = skeleton(config)
    tied = model.tied()
    if [list(group) for group in tied] != state["sharing"]:
        raise ArtifactError(
            f"{folder}: {MARK} says that these are shared: {state['sharing']}, "
            f"config.json says: {[list(group) for group in tied]}"
        )
    found = {name: file.shape(name) for name in file.names()}
    for first, *others in tied:
        for name in others:
            if name in found:
                raise ArtifactError(
                    f"{path}: broken tie: {name} is stored although it is shared with {first}"
                )
    refuse_strangers(path, stored_names(model), found)
    dtypes = {name: file.dtype(name) for name in found}
    for name, kind in dtypes.items():
        if not kind.is_floating_point:
            raise ArtifactError(f"{path}: tensor {name} has dtype {kind}, expected a floating type")
    names = sorted({_dtype_name(kind) for kind in dtypes.values()})
    if names != state["dtypes"]:
        raise ArtifactError(f"{path}: holds {', '.join(names)}, {MARK} says {', '.join(state['dtypes'])}")
    fill(model, ((name, file.view(name).to(device=device, dtype=dtype)) for name in found))
    return model.eval()


def write_tokenizers(bundle: Bundle, folder: Path) -> dict[str, Any]:
    """Save the vocabularies of both sides, one where they share it; where each is, and its digest."""
    result: dict[str, Any] = {"target": None, "source": None}
    if bundle.tokenizer is not None:
        bundle.tokenizer.save(folder, "tokenizer")
        result["target"] = {"file": "tokenizer", "sha256": bundle.tokenizer.digest}
    source = bundle.source_tokenizer
    if source is not None:
        shared = bundle.tokenizer is not None and source is bundle.tokenizer
        if not shared:
            source.save(folder, "source_tokenizer")
        result["source"] = {"file": "tokenizer" if shared else "source_tokenizer", "sha256": source.digest}
    return result


def read_tokenizers(
    vocabularies: Mapping[str, Any], folder: Path
) -> tuple[Tokenizer | None, Tokenizer | None]:
    """What `write_tokenizers` wrote: target and source.

    Raises:
        ArtifactError: a vocabulary is missing, or another one than was written.
    """
    from isoform.data import Tokenizer

    read: dict[str, Tokenizer] = {}
    sides: list[Tokenizer | None] = []
    for side in ("target", "source"):
        entry = vocabularies[side]
        if entry is None:
            sides.append(None)
            continue
        name = entry["file"]
        try:
            if name not in read:
                read[name] = Tokenizer.load(folder, name)
        except TokenizerError as error:
            raise ArtifactError(f"{side} vocabulary: {error}") from None
        if read[name].digest != entry["sha256"]:
            raise ArtifactError(
                f"{folder}: a foreign {side} vocabulary: its digest is {read[name].digest[:12]}…, "
                f"{MARK} says {entry['sha256'][:12]}…"
            )
        sides.append(read[name])
    return sides[0], sides[1]


def _refuse_misfits(bundle: Bundle, where: str) -> None:
    """Vocabularies and protocol must fit the tables they index."""
    config, protocol = bundle.config, bundle.protocol
    if bundle.model.config != config:
        raise ArtifactError(f"{where}: the network was built from another configuration than the bundle's")
    source = config.source or config.embedding
    for side, tokenizer, table in (
        ("target", bundle.tokenizer, config.embedding),
        ("source", bundle.source_tokenizer, source),
    ):
        if tokenizer is not None and tokenizer.vocab_size > table.vocab_size:
            raise ArtifactError(
                f"{where}: the {side} vocabulary has {tokenizer.vocab_size} tokens, "
                f"its table {table.vocab_size} rows"
            )
    ids = {
        "eos_ids": (protocol.eos_ids, config.embedding.vocab_size),
        "start": (protocol.start, config.embedding.vocab_size),
        "source_prefix": (protocol.source_prefix, source.vocab_size),
        "source_suffix": (protocol.source_suffix, source.vocab_size),
    }
    for name, (values, size) in ids.items():
        if beyond := [i for i in values if i >= size]:
            raise ArtifactError(f"{where}: protocol.{name} has id {beyond[0]}, the table has {size} rows")


def _texts(bundle: Bundle) -> dict[str, dict[str, list[int]]]:
    """Token ids of the sample texts that a vocabulary can say."""
    result: dict[str, dict[str, list[int]]] = {}
    for side, tokenizer in (("target", bundle.tokenizer), ("source", bundle.source_tokenizer)):
        if tokenizer is None:
            continue
        ids = result.setdefault(side, {})
        for text in probe.TEXTS:
            try:
                ids[text] = tokenizer.encode(text)
            except IsoformError:
                continue  # a vocabulary without an unknown token refuses what it lacks
    return result


def _versions() -> dict[str, str]:
    from isoform import __version__

    return {"isoform": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _dtypes(parameters: Any) -> list[str]:
    return sorted({_dtype_name(p.dtype) for p in parameters})


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
