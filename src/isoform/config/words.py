"""A configuration in words: what `isoform show` says about an architecture."""

from __future__ import annotations

from isoform.config import phrases
from isoform.config.difference import difference
from isoform.config.embedding import Embedding
from isoform.config.model import ModelConfig
from isoform.config.parts import Experts
from isoform.config.phrases import joined, listed, number, quoted
from isoform.config.stack import Layer, Stack, Variant

STRUCTURES = {"encoder": "encoder", "decoder": "decoder", "encoder-decoder": "encoder–decoder"}
PLACEMENTS = {
    "post": "Post-LN",
    "pre": "Pre-LN",
    "sandwich": "sandwich-norm",
    "res_post": "norm-on-increments",
}
NORM_PLACES = {
    "post": "norm after each residual sum",
    "pre": "norm before each sublayer",
    "sandwich": "norm before and after each sublayer, inside the residual",
    "res_post": "norm after each sublayer, inside the residual",
}
RESIDUALS = {
    "sequential": "sublayers in sequence",
    "parallel": "attention and feed-forward in parallel, a norm each",
    "parallel_shared_norm": "attention and feed-forward in parallel behind one norm",
}


def describe(config: ModelConfig) -> list[str]:
    """The architecture in words, a component a line, the first line a summary.

    Two configurations that are not the same function never read the same: every field is said, except
    where its value is the absence of an operation.
    """
    both = config.structure == "encoder-decoder"
    lines = [summary(config)]
    lines.append(f"{'target embedding' if both else 'embedding'}: {_embedding(config.embedding)}")
    if config.source is not None:
        table = "the target's table" if config.tie_source else "a table of its own"
        lines.append(f"source embedding: {table}, {_embedding(config.source)}")
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is not None:
            lines += [f"{name}{line}" for line in _stack(stack)]
    return [*lines, f"head: {phrases.head(config.head)}"]


def summary(config: ModelConfig) -> str:
    """One line: "Pre-LN encoder–decoder, 6 + 6 layers of width 512, LayerNorm (eps 1e-5, …), exact GELU"."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]

    def each(words: list[str]) -> str:
        return " / ".join(dict.fromkeys(words))

    structure = STRUCTURES[config.structure]
    if config.structure == "decoder":
        structure = f"{config.stack.visibility} decoder"
    layers = " + ".join(str(stack.n_layers) for stack in stacks)
    plural = "layer" if layers == "1" else "layers"
    return (
        f"{each([PLACEMENTS[stack.layer.placement] for stack in stacks])} {structure}, "
        f"{layers} {plural} of width {config.d_model}, "
        f"{each([phrases.norm(stack.layer.norm) for stack in stacks])}, "
        f"{each([_activation(stack) for stack in stacks])}"
    )


def _activation(stack: Stack) -> str:
    network = stack.layer.feed_forward
    experts = isinstance(network, Experts)
    inner = network.expert if experts else network
    name = phrases.gate(inner.activation) if inner.kind == "gated" else phrases.ACTIVATIONS[inner.activation]
    return f"{name} experts" if experts else name


def _embedding(table: Embedding) -> str:
    scale = "√(model width)" if isinstance(table.scale, str) else number(table.scale)
    return joined(
        f"{table.vocab_size} × {table.width} for vocabulary {quoted(table.vocabulary)}",
        f"rows × {scale}" if table.scale != 1 else None,
        phrases.projection(table.projection) if table.projection else None,
        phrases.positions(table.positions),
        f"{table.n_token_types} token types" if table.n_token_types else None,
        phrases.norm(table.norm) if table.norm else "no norm",
        phrases.dropped(table.dropout),
    )


def _stack(stack: Stack) -> list[str]:
    layer = stack.layer
    final = phrases.norm(stack.final_norm) if stack.final_norm else "no norm"
    lines = [
        f": {stack.n_layers} {'layer' if stack.n_layers == 1 else 'layers'}, {stack.visibility}, "
        + joined(f"{final} at the end", phrases.dropped(stack.final_dropout, "dropout after it")),
        f" layers: {_joins(layer)}",
        f" self-attention: {phrases.attention(layer.attention)}",
    ]
    if layer.cross_attention is not None:
        memory = f"memory under {phrases.norm(layer.memory_norm)}" if layer.memory_norm else "memory as it is"
        lines.append(f" cross-attention: {memory}, {phrases.attention(layer.cross_attention)}")
    lines.append(f" feed-forward: {phrases.feed_forward(layer.feed_forward)}")
    lines += [_variant(stack, variant) for variant in stack.variants]
    if stack.layer_sharing is not None:
        owners = ", ".join(map(str, stack.layer_sharing))
        lines.append(f" sharing: layers 0 to {stack.n_layers - 1} use the parameters of layers {owners}")
    return lines


def _joins(layer: Layer) -> str:
    where = {"all": "", "attention": " of attention alone", "feed_forward": " of the feed-forward alone"}
    on_increments = f"dropout on the increments{where[layer.residual_dropout_on]}"
    if not layer.residual_dropout and layer.residual_dropout_on != "all":
        on_increments += " 0"  # said all the same, so that two configurations never read alike
    return joined(
        NORM_PLACES[layer.placement],
        phrases.norm(layer.norm),
        RESIDUALS[layer.residual],
        "increments added to the normalised input" if layer.residual_source == "normalised" else None,
        f"increments × {number(layer.residual_scale)}" if layer.residual_scale != 1 else None,
        phrases.dropped(layer.residual_dropout, on_increments)
        or (on_increments if layer.residual_dropout_on != "all" else None),
    )


def _variant(stack: Stack, variant: Variant) -> str:
    """A variant by what it changes, in the words of a difference."""
    changes: list[str] = []
    for name, ours, common in (
        ("self-attention", variant.attention, stack.layer.attention),
        ("feed-forward", variant.feed_forward, stack.layer.feed_forward),
    ):
        if ours is None:
            continue
        found = difference(common, ours)
        if not found:
            changes.append(f"{name} as in the others")
        changes += [" ".join(filter(None, (name, d.place, d.subject, d.second))) for d in found]
    numbers = ", ".join(map(str, variant.layers))
    return f" {'layer' if len(variant.layers) == 1 else 'layers'} {numbers}: {listed(changes)}"
