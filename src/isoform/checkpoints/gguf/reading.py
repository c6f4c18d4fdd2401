"""GGUF files as networks: the keys as a configuration, the names of llama.cpp as a mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from isoform.checkpoints.bundle import Bundle
from isoform.checkpoints.entries import FamilyMapping, Ignored, Layers, Module, Packed, Same
from isoform.checkpoints.gguf.file import File
from isoform.checkpoints.gguf.vocabulary import read_tokenizer
from isoform.checkpoints.keys import understood
from isoform.checkpoints.mapping import load_weights
from isoform.checkpoints.protocol import read_protocol
from isoform.checkpoints.weights import skeleton
from isoform.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoScaling,
    QKNorm,
    Rotary,
    TokenHead,
)
from isoform.config.positions import RotaryScaling
from isoform.config.presets.build import attention, decoder_only, embedding, gated, rms_norm
from isoform.config.stack import Layer
from isoform.errors import ArtifactError
from isoform.nn.positions import rotary_frequencies

# Which channels turn together is no key of the format but belongs to the architecture's name: rows of query
# and key projections of "llama" were rearranged when the file was made.
LAYOUTS: dict[str, Literal["interleaved", "half"]] = {
    "llama": "interleaved", "qwen2": "half", "qwen3": "half",
}  # fmt: skip
FACTORS = "rope_freqs.weight"
QKV = (("query", "attn_q"), ("key", "attn_k"), ("value", "attn_v"))
MAPPING = FamilyMapping(
    entries=(
        Module("embedding", "token_embd"),
        Layers(
            "decoder",
            "blk.{}.",
            (
                Module("attention.before", "attn_norm"),
                Packed("attention.body.qkv", QKV),
                Module("attention.body.output", "attn_output"),
                Module("attention.body.query_norm", "attn_q_norm"),
                Module("attention.body.key_norm", "attn_k_norm"),
                Module("feed_forward.before", "ffn_norm"),
                Packed("feed_forward.body.gate_up", (("gate", "ffn_gate"), ("up", "ffn_up"))),
                Module("feed_forward.body.down", "ffn_down"),
            ),
        ),
        Module("decoder.final_norm", "output_norm"),
        Same("head.weight", "output.weight"),
    ),
    ignored=(Ignored(FACTORS, "read as the scaling of the rotary embedding"),),
)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def opened(path: Path) -> tuple[FamilyMapping, File]:
    """The tensors of a file and what they correspond to, to compare a network with what it came from."""
    return MAPPING, File(path)


def load(path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Bundle:
    """Open a file; quantised weights become float32 unless ``dtype`` says otherwise.

    Args:
        path: the file.
        dtype: what to hold the weights in.
        device: where to put the network.

    Raises:
        ArtifactError: the `gguf` library is missing, another architecture, keys or tensors that are not
            understood.
    """
    file = File(path)
    with understood(str(path)):
        config = read_config(file)
    model = skeleton(config)
    load_weights(model, MAPPING, file, dtype=dtype, device=device)
    tokenizer = read_tokenizer(file, config.embedding.vocab_size)
    ids = {
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    protocol = read_protocol(ids, {}, encoder_decoder=False, bos=False)
    if tokenizer is not None:
        protocol = protocol.replace(start=tokenizer.template.prefix)
    provenance = {
        "format": "gguf",
        "file": path.name,
        "family": file.get("general.architecture"),
        "types": file.kinds(),
    }
    return Bundle(model.eval(), config, tokenizer, None, protocol, provenance)


def read_config(file: File) -> ModelConfig:
    """The architecture.

    Raises:
        ArtifactError: an architecture, or a key of it, that is not understood.
    """
    name = str(file.require("general.architecture"))
    if name not in LAYOUTS:
        raise ArtifactError(
            f"{file.where}: architecture {name!r} is not supported; known: {', '.join(LAYOUTS)}"
        )
    d, heads = _count(file, f"{name}.embedding_length"), _count(file, f"{name}.attention.head_count")
    n_layers = _count(file, f"{name}.block_count")
    width = int(file.get(f"{name}.attention.key_length", d // heads))
    for key, accepted in (
        ("attention.value_length", width), ("rope.dimension_count", width), ("expert_count", 0),
        ("expert_used_count", 0), ("attention.causal", True), ("attention.sliding_window", 0),
    ):  # fmt: skip
        if (value := file.get(f"{name}.{key}", accepted)) != accepted:
            raise ArtifactError(f"{file.where}: {name}.{key} is {value!r}, which is not supported")
    # 9.999999747378752e-06 is how float32 says 1e-05.
    norm = rms_norm(float(f"{file.require(f'{name}.attention.layer_norm_rms_epsilon'):.7g}"))
    rotary = Rotary(
        layout=LAYOUTS[name],
        theta=float(f"{file.get(f'{name}.rope.freq_base', 10_000.0):.7g}"),
        width=width,
        precision="float32",
    )
    rotary = rotary.replace(scaling=_scaling(file, name, rotary))
    tensors = set(file.names())
    inputs, output = (f"blk.0.{part}.bias" in tensors for part in ("attn_q", "attn_output"))
    reads = attention(
        d,
        heads,
        n_kv_heads=int(file.get(f"{name}.attention.head_count_kv", heads)),
        head_width=width,
        bias=(inputs, inputs, inputs, output),
        positions=rotary,
        qk_norm=QKNorm(norm=norm, axis="head", order="before_rotation")
        if "blk.0.attn_q_norm.weight" in tensors
        else None,
    )
    layer = Layer(
        placement="pre",
        residual="sequential",
        norm=norm,
        attention=reads,
        feed_forward=gated(
            _count(file, f"{name}.feed_forward_length"), "silu", bias="blk.0.ffn_up.bias" in tensors
        ),
    )
    file.get(f"{name}.context_length")
    if "token_embd.weight" not in tensors:
        raise ArtifactError(f"{file.where}: missing: token_embd.weight")
    rows = file.shape("token_embd.weight")[0]
    if (said := file.get(f"{name}.vocab_size", rows)) != rows:
        raise ArtifactError(f"{file.where}: {name}.vocab_size is {said}, token_embd.weight has {rows} rows")
    if left := file.unasked(f"{name}."):
        raise ArtifactError(
            f"{file.where}: not understood, and possibly a change of the function: "
            f"{left[0]} = {file.get(left[0])!r}"
        )
    return decoder_only(
        table=embedding(rows, d),
        n_layers=n_layers,
        layer=layer,
        final_norm=norm,
        head=TokenHead(tied="output.weight" not in tensors, bias=False),
    )


def _count(file: File, name: str) -> int:
    value = file.require(name)
    if not isinstance(value, int):
        raise ArtifactError(f"{file.where}: {name} is {value!r}, expected a whole number")
    return value


def _scaling(file: File, name: str, rotary: Rotary) -> RotaryScaling:
    """From the keys, or from the factors that Llama 3's files hold instead of its rule."""
    kind = file.get(f"{name}.rope.scaling.type", "none")
    factor = float(file.get(f"{name}.rope.scaling.factor", file.get(f"{name}.rope.scale_linear", 1.0)))
    length = file.get(f"{name}.rope.scaling.original_context_length")
    file.get(f"{name}.rope.scaling.finetuned")
    if kind not in ("none", "linear"):
        raise ArtifactError(f"{file.where}: {name}.rope.scaling.type {kind!r} is not supported")
    if FACTORS not in file.names():
        return NoScaling() if kind == "none" or factor == 1.0 else LinearScaling(factor=factor)
    wanted = file.read(FACTORS).float()
    plain = rotary_frequencies(rotary, None, torch.device("cpu"))[0][0]
    scaling = Llama3Scaling(
        factor=float(f"{wanted.max().item():.6g}"),
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_length=int(length or 8192),
    )
    found = rotary_frequencies(rotary.replace(scaling=scaling), None, torch.device("cpu"))[0][0]
    if wanted.shape != plain.shape or not torch.allclose(plain / wanted, found, rtol=1e-4):
        raise ArtifactError(f"{file.where}: {FACTORS} does not follow the rule of Llama 3")
    return scaling
