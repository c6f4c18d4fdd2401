"""A folder that plain `torch.nn.Transformer` and `TransformerEncoder` load (R40).

``torch_nn.json``      what their constructors take; configuration, protocol and vocabularies around them
``stacks.safetensors`` the module's state dict
``around.safetensors`` embeddings, positions and head, which the module lacks, under their names here
``tokenizer.*``        the vocabularies, as in an artifact
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isoform.checkpoints import artifact, probe
from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.checked import Checked, EngineCheck
from isoform.checkpoints.entries import CrossPacked, FamilyMapping, Layers, Module, Same
from isoform.checkpoints.keys import understood
from isoform.checkpoints.mapping import load_weights, save_weights
from isoform.checkpoints.shards import Shards
from isoform.checkpoints.torch_nn import make, to_torch
from isoform.checkpoints.vocabularies import read_json
from isoform.checkpoints.weights import SafetensorsFile, skeleton, stored_names
from isoform.config import ModelConfig, Stack, TwoLayer
from isoform.config.base import parse
from isoform.config.files import write_text
from isoform.config.folders import replaced
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError, CheckError, ConfigError
from isoform.nn import Transformer, capture

MARK, STACKS, AROUND = "torch_nn.json", "stacks.safetensors", "around.safetensors"
FORMAT = 1


def is_torch_folder(folder: Path) -> bool:
    """Whether a folder says that it is one."""
    return (folder / MARK).is_file()


def export(bundle: Bundle, folder: Path) -> Path:
    """Write the folder, and check it: opened again, and by the module itself.

    Raises:
        ArtifactError: the modules cannot say this configuration, with the field.
        CheckError: what was written is another function.
    """
    from safetensors.torch import save_file

    config = bundle.config
    module = to_torch(bundle.model)
    with replaced(folder, mark=MARK) as new:
        tensors = save_weights(bundle.model, _mapping(bundle.model), bare=False)
        inside = set(module.state_dict())
        save_file({n: t for n, t in tensors.items() if n in inside}, new / STACKS, metadata={"format": "pt"})
        outside = {n: t.contiguous() for n, t in tensors.items() if n not in inside}
        save_file(outside, new / AROUND, metadata={"format": "pt"})
        state = {
            "format": FORMAT,
            "class": type(module).__name__,
            "stacks": {name: _arguments(stack, config.d_model) for name, stack in _stacks(config).items()},
            "config": config.model_dump(mode="json"),
            "protocol": bundle.protocol.model_dump(mode="json"),
            "vocabularies": artifact.write_tokenizers(bundle, new),
        }
        write_text(new / MARK, json.dumps(state, indent=1, ensure_ascii=False) + "\n")
        again = load(new)
        for (name, a), b in zip(bundle.model.named_parameters(), again.model.parameters(), strict=True):
            if not torch.equal(a.cpu(), b):
                raise CheckError(f"{folder}: {name} does not come back as it was")
        report = probe.compare(
            probe.record(bundle.model, bundle.protocol), probe.record(again.model, bundle.protocol)
        )
        Checked(report, _by_the_module(again, new)).write(new)
    return folder


def load(
    folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Bundle:
    """Open such a folder.

    Raises:
        ArtifactError: parts that are missing, unknown or misshaped, by name.
    """
    state = read_json(folder / MARK)
    if state.get("format") != FORMAT:
        raise ArtifactError(f"{folder / MARK}: format {state.get('format')!r} is unknown; expected {FORMAT}")
    with understood(str(folder / MARK)):
        try:
            config = parse(ModelConfig, state["config"], where="config")
            protocol = parse(Protocol, state["protocol"], where="protocol")
        except ConfigError as error:
            raise ArtifactError(f"{folder / MARK}: {error}") from None
        target, source = artifact.read_tokenizers(state["vocabularies"], folder)
    model = skeleton(config)
    load_weights(model, *opened(folder, model), dtype=dtype, device=device)
    provenance = {"format": "torch", "folder": folder.name}
    return Bundle(model.eval(), config, target, source, protocol, provenance)


def opened(folder: Path, model: Transformer) -> tuple[FamilyMapping, Shards]:
    """The tensors of a folder and what they correspond to, to compare a network with what it came from."""
    weights = Shards(folder, [SafetensorsFile(folder / name) for name in (STACKS, AROUND)])
    return _mapping(model), weights


def _stacks(config: ModelConfig) -> dict[str, Stack]:
    found = {"encoder": config.encoder, "decoder": config.decoder}
    return {name: stack for name, stack in found.items() if stack is not None}


def _arguments(stack: Stack, d_model: int) -> dict[str, Any]:
    """What the constructors of a stack take; the two dropouts that they do not take are set afterwards."""
    layer, norm = stack.layer, stack.final_norm
    assert isinstance(layer.feed_forward, TwoLayer)
    return {
        "layer": {
            "d_model": d_model,
            "nhead": layer.attention.n_heads,
            "dim_feedforward": layer.feed_forward.width,
            "dropout": layer.residual_dropout,
            "activation": layer.feed_forward.activation,
            "layer_norm_eps": layer.norm.eps,
            "batch_first": True,
            "norm_first": layer.placement == "pre",
            "bias": layer.feed_forward.bias_up,
        },
        "num_layers": stack.n_layers,
        "norm": None if norm is None else {"normalized_shape": d_model, "eps": norm.eps, "bias": norm.bias},
        "attention_dropout": layer.attention.dropout,
        "feed_forward_dropout": layer.feed_forward.dropout,
    }


def _mapping(model: Transformer) -> FamilyMapping:
    """The module's names; parts around it keep theirs."""
    both = model.config.structure == "encoder-decoder"

    def norms(ours: str, theirs: str) -> tuple[Module, ...]:
        return tuple(Module(f"{ours}.{place}", theirs) for place in ("before", "after_sum"))

    def layer(last: str) -> tuple[Any, ...]:
        projections = tuple(
            Same(f"attention.body.qkv.{kind}", f"self_attn.in_proj_{kind}") for kind in ("weight", "bias")
        )
        return (
            *projections,
            Module("attention.body.output", "self_attn.out_proj"),
            *norms("attention", "norm1"),
            CrossPacked("cross_attention.body", "multihead_attn.in_proj_{}"),
            Module("cross_attention.body.output", "multihead_attn.out_proj"),
            *norms("cross_attention", "norm2"),
            Module("feed_forward.body.up", "linear1"),
            Module("feed_forward.body.down", "linear2"),
            *norms("feed_forward", last),
        )

    names = ("encoder", "decoder") if both else ("encoder",)
    entries: list[Any] = []
    for name in names:
        inside = f"{name}." if both else ""
        entries.append(Layers(name, inside + "layers.{}.", layer("norm3" if name == "decoder" else "norm2")))
        entries.append(Module(f"{name}.final_norm", f"{inside}norm"))
    around = [n for n in stored_names(model) if not n.startswith(("encoder.", "decoder."))]
    return FamilyMapping(entries=(*entries, *(Same(name, name) for name in around)))


@torch.no_grad()
def _by_the_module(bundle: Bundle, folder: Path) -> EngineCheck:
    """The file's state dict in a module made by the constructors, on the embedded rows of the probe.

    Raises:
        CheckError: its states differ beyond rounding.
    """
    from safetensors.torch import load_file

    model = bundle.model
    wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    model.to(wide)
    module = make(model.config)
    module.load_state_dict(load_file(folder / STACKS))
    module.eval().to(wide)
    tokens, source = probe.inputs(model.config)
    with capture(model, "*embedding.output") as seen:
        ours = model(tokens, source)
    theirs = _states(module, seen, ~tokens.real_or_ones(), None if source is None else ~source.real_or_ones())
    real = tokens.real_or_ones()
    difference = (theirs - ours.hidden)[real].abs().max() / ours.hidden[real].abs().max()
    if not difference <= probe.TOLERANCE["float32"]:
        name = type(module).__name__
        raise CheckError(f"{folder}: the states of torch.nn.{name} differ by {difference:.2g}")
    count = int(real.sum()) * theirs.shape[-1]
    return EngineCheck("torch.nn", str(torch.__version__), count, float(difference), 0, {})


def _states(module: nn.Module, seen: Mapping[str, Tensor], target: Tensor, source: Tensor | None) -> Tensor:
    x = seen["embedding.output"]
    if source is None:
        return module(x, src_key_padding_mask=target)
    n = x.shape[1]
    later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    return module(
        seen["source_embedding.output"], x, tgt_mask=later, src_key_padding_mask=source,
        tgt_key_padding_mask=target, memory_key_padding_mask=source,
    )  # fmt: skip
