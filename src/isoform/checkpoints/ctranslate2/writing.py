"""CTranslate2 folders out, through the engine's own specification classes, and checked by the engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from isoform.checkpoints import probe
from isoform.checkpoints.artifact import write_tokenizers
from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.checked import Checked
from isoform.checkpoints.ctranslate2.engine import check
from isoform.checkpoints.ctranslate2.reading import CONFIG, FILE, OURS, load
from isoform.checkpoints.ctranslate2.specification import specification
from isoform.checkpoints.ctranslate2.structure import BUILT_IN, sinusoids
from isoform.checkpoints.ctranslate2.tensors import ENCODINGS, mapping
from isoform.checkpoints.extras import need
from isoform.checkpoints.mapping import save_weights
from isoform.checkpoints.weights import fill, skeleton, stored_names
from isoform.config import Learned, ModelConfig, Sinusoidal, difference
from isoform.config.folders import replaced
from isoform.data.tokenizer import Tokenizer
from isoform.errors import ArtifactError, CheckError
from isoform.nn import Transformer

POSITIONS = 2048
"""Rows written of sinusoids that the engine does not compute itself: the longest text it then takes."""


def export(bundle: Bundle, folder: Path) -> Path:
    """Write a folder that the engine opens as the same function.

    Args:
        bundle: what to write; its protocol goes along, though the engine takes parts of it at each call.
        folder: where; replaced whole if it is an earlier export.

    Raises:
        ArtifactError: the `ctranslate2` library is missing, or the format cannot say the configuration.
        CheckError: what was written is another function, opened again here or run by the engine.
    """
    library = need("ctranslate2", "ctranslate2", "the ctranslate2 format")
    kind = next(bundle.model.parameters()).dtype
    if kind == torch.float64:
        raise ArtifactError("the ctranslate2 format has no float64: convert the bundle to float32 first")
    if not bundle.protocol.eos_ids:
        raise ArtifactError("the ctranslate2 format needs an end token: protocol.eos_ids is empty")
    spec = specification(library, bundle.config)
    model = _from_first_row(bundle.model)
    bundle = dataclasses.replace(bundle, model=model, config=model.config)
    _fill(library, spec, model)
    _describe(spec, bundle)
    try:
        spec.validate()
    except ValueError as error:
        raise ArtifactError(f"the ctranslate2 format: {' '.join(str(error).split())}") from None
    spec.optimize()
    with replaced(folder, mark=FILE) as new:
        write_tokenizers(bundle, new)
        spec.save(str(new))
        _checked(library, bundle, new).write(new)
    return folder


def _from_first_row(model: Transformer) -> Transformer:
    """The same network without the unused rows before the first position, for which there is no word."""
    changes: dict[str, Any] = {}
    for name, table in (("embedding", model.config.embedding), ("source", model.config.source)):
        if table is not None and isinstance(table.positions, Learned) and table.positions.offset:
            changes[f"{name}__positions__offset"] = 0
    if not changes:
        return model
    result = skeleton(model.config.replace(**changes))
    sizes, parameters = stored_names(result), dict(model.named_parameters())
    fill(result, ((name, parameters[name].detach()[-size[0] :]) for name, size in sizes.items()))
    return result.eval()


def _fill(library: Any, spec: Any, model: Transformer) -> None:
    cfg = model.config
    tensors = save_weights(model, mapping(cfg, table="encoder.embeddings_0"), {}, bare=False)
    dtype = next(model.parameters()).dtype
    for side, table in (("encoder", cfg.source), ("decoder", cfg.embedding)):
        if table is not None and isinstance(table.positions, Sinusoidal) and table.positions != BUILT_IN:
            rows = sinusoids(table.positions, POSITIONS, cfg.d_model)
            tensors[ENCODINGS.format(side)] = rows.to(dtype)
    classes, index = library.specs.common_spec, library.specs.model_spec.index_spec
    offset = {
        side: stack is not None and bool(stack.layer.norm.gain_offset)
        for side, stack in (("encoder", cfg.encoder), ("decoder", cfg.decoder))
    }
    for name, tensor in tensors.items():
        scope, _, attribute = name.replace(".", "/").rpartition("/")
        part = index(spec, scope)
        if isinstance(part, classes.LayerNormSpec):
            attribute = {"weight": "gamma", "bias": "beta"}[attribute]
            if offset[name.partition(".")[0]]:
                part.layer_norm_use_residual = True
        setattr(part, attribute, tensor)


def _describe(spec: Any, bundle: Bundle) -> None:
    """Vocabularies and the tokens that start and end."""
    cfg, protocol, settings = bundle.config, bundle.protocol, spec.config
    target = _tokens(bundle.tokenizer, cfg.embedding.vocab_size)
    eps = {norm.eps for stack in (cfg.encoder, cfg.decoder) if stack for norm in (stack.layer.norm,)}
    settings.layer_norm_epsilon = eps.pop()
    special = None if bundle.tokenizer is None else bundle.tokenizer.special
    unknown = None if special is None else special.unk
    settings.unk_token = target[protocol.pad_id if unknown is None else unknown]
    settings.eos_token = target[protocol.eos_ids[0]]
    begin = protocol.source_prefix or protocol.start or (protocol.pad_id,)
    if cfg.source is None:
        spec.register_vocabulary(target)
        settings.bos_token = target[(protocol.start or (protocol.pad_id,))[0]]
    else:
        source = _tokens(bundle.source_tokenizer or bundle.tokenizer, cfg.source.vocab_size)
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)
        settings.bos_token = source[begin[0]] if begin[0] < len(source) else target[begin[0]]
        settings.decoder_start_token = target[protocol.start[0]] if protocol.start else None
        settings.add_source_bos = len(protocol.source_prefix) == 1
        same_end = [source[i] for i in protocol.source_suffix] == [settings.eos_token]
        settings.add_source_eos = same_end
    settings.add_attribute(OURS, {"protocol": protocol.model_dump(mode="json")})


def _tokens(tokenizer: Tokenizer | None, size: int) -> list[str]:
    """The token of each row; rows without one get a name of their own."""
    if tokenizer is None:
        return [f"<row {i}>" for i in range(size)]
    return [tokenizer.token(i) if i in tokenizer.ids else f"<row {i}>" for i in range(size)]


def _checked(library: Any, bundle: Bundle, folder: Path) -> Checked:
    """Open what was written, here and in the engine.

    Raises:
        ArtifactError: the format says another configuration.
        CheckError: it is another function.
    """
    back = load(folder)
    if found := difference(_sayable(back.config), _sayable(bundle.config)):
        raise ArtifactError(
            f"the ctranslate2 format cannot say this configuration: {found[0].path} would become "
            f"{found[0].a!r} instead of {found[0].b!r}"
        )
    for (name, mine), other in zip(bundle.model.named_parameters(), back.model.parameters(), strict=True):
        if not torch.equal(mine, other):
            raise CheckError(f"check: {name} does not come back as it was")
    before = probe.record(bundle.model, bundle.protocol)
    after = probe.record(back.model, back.protocol)
    # Where a table of sinusoids took the place of a rule, it is the same numbers under another name.
    report = probe.compare({**before, "positions": after["positions"]}, after)
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return Checked(report, check(library, bundle, folder, settings))


def _sayable(cfg: ModelConfig) -> ModelConfig:
    """Without what matters in training only, the names of vocabularies, and when a gain is rounded."""

    def plain(node: Any) -> Any:
        if isinstance(node, list | tuple):
            return [plain(item) for item in node]
        if not isinstance(node, dict):
            return node
        found = {key: plain(value) for key, value in node.items()}
        for key in found:
            if key.endswith("dropout") and isinstance(found[key], float):
                found[key] = 0.0
        if "residual_dropout_on" in found:
            found["residual_dropout_on"] = "all"
        if "gain_after_cast" in found:
            found["gain_after_cast"] = False
        if found.get("kind") == "sinusoidal":
            found["precision"] = "float32"
        return found

    data = plain(cfg.model_dump())
    shared = cfg.source is not None and cfg.tie_source
    data["embedding"]["vocabulary"] = "target"
    if cfg.source is not None:
        data["source"]["vocabulary"] = "target" if shared else "source"
    return ModelConfig.model_validate(data)
