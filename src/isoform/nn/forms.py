"""A network whose linear maps keep their weights in one of the forms of `products`, and back."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from isoform.errors import ConfigError, did_you_mean
from isoform.nn.experts import Router
from isoform.nn.heads import TokenHead
from isoform.nn.linear import Linear, Packed
from isoform.nn.model import Transformer
from isoform.nn.products import FORMS, Form, Product, product

Map = Linear | Packed | TokenHead


def maps(model: Transformer) -> Iterator[tuple[str, Map]]:
    """Every linear map that can take a form, with its dotted name, those that are shared once.

    A router stays as it is: to round it would send tokens to other experts. Stacked experts and embedding
    tables, also those that a head is tied to, are no single product and keep their type.
    """
    routers = {id(m.scores) for m in model.modules() if isinstance(m, Router)}
    for name, module in model.named_modules():
        if isinstance(module, Linear | Packed | TokenHead) and id(module) not in routers:
            yield name, module


def bias_of(module: Map) -> Tensor | None:
    """The bias, zeros included where some of several projections have none."""
    return module.full_bias() if isinstance(module, Packed) else module.bias


def set_product(module: Map, made: Product) -> None:
    """Compute through a product. What its numbers were made of is let go, unless an embedding holds it."""
    module.product = made
    if made.form != "float32":
        empty = torch.empty_like(module.weight, device="meta")
        module.weight = nn.Parameter(empty, requires_grad=False)
    elif not isinstance(module, TokenHead) or not module.cfg.tied:
        module.weight = nn.Parameter(made.dense(), requires_grad=False)


def set_form(model: Transformer, form: Form, keep: Sequence[str] = ()) -> Transformer:
    """Give every linear map a form, in place and for inference only. Returns the network.

    Args:
        model: the network.
        form: the form.
        keep: names of maps that stay as they are, ``*`` for any run of characters.

    Raises:
        ConfigError: an unknown form, a network that has one already, or a name that no map has.
    """
    if form not in FORMS:
        raise ConfigError(f"weights: {form!r} is not a form; expected {', '.join(FORMS)}")
    if form_of(model) is not None:
        raise ConfigError(f"weights: the network is in {form_of(model)} already; start from the original")
    names = [name for name, _ in maps(model)]
    for pattern in keep:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"keep: no map is called {pattern!r}{did_you_mean(pattern, names)}")
    model.requires_grad_(False)
    for name, module in maps(model):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in keep):
            set_product(module, product(form, module.weight, bias_of(module)))
    return model.eval()


def kept(model: Transformer) -> list[str]:
    """The maps of a network with a form that have none."""
    return [name for name, module in maps(model) if module.product is None]


def form_of(model: Transformer) -> Form | None:
    """The form of a network's linear maps; None: plain parameters."""
    return next((module.product.form for _, module in maps(model) if module.product is not None), None)


def plain(model: Transformer) -> Transformer:
    """The network with what its forms stand for as float32 parameters; itself if it has no form."""
    if form_of(model) is None:
        return model
    with torch.device("meta"):
        twin = Transformer(model.config)
    dense = {
        f"{name}.weight": module.product.dense()
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Linear | Packed | TokenHead)
        if module.product is not None and module.weight.is_meta
    }
    given = {name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.is_meta} | dense
    if isinstance(twin.head, TokenHead) and twin.head.cfg.tied:
        given["head.weight"] = given["embedding.weight"]  # as it is stored, though the head reads it rounded
    twin.load_state_dict(given, assign=True)
    return twin.requires_grad_(False).eval()
