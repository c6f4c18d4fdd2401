"""Derivatives written out by hand, to hold automatic ones against (6.7, 6.10, 6.15–6.19, 6.22–6.23; R14).

Reference functions for one vector ``x`` of width d. A Jacobian has its outputs along the rows and its inputs
along the columns. Nothing here takes part in training.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

Vector = Float[Tensor, " d"]
Matrix = Float[Tensor, "d d"]


def layer_norm_jacobian(x: Vector, gain: Vector, eps: float) -> Matrix:
    """diag(γ) (P/s - c cᵀ/(d s³)) with c = P x and P = I - 1 1ᵀ/d (6.16); it maps the ones to zero."""
    d = x.shape[0]
    centre = torch.eye(d, dtype=x.dtype) - 1.0 / d
    c = centre @ x
    s = torch.sqrt(c @ c / d + eps)
    return gain[:, None] * (centre / s - torch.outer(c, c) / (d * s**3))


def layer_norm_gradient(x: Vector, upstream: Vector, gain: Vector, eps: float) -> Vector:
    """(h - mean h - x̂ mean(h ∘ x̂))/s with h = γ ∘ g, where g is the gradient at the output (6.17)."""
    c = x - x.mean()
    s = torch.sqrt(c.square().mean() + eps)
    normal, h = c / s, gain * upstream
    return (h - h.mean() - normal * (h * normal).mean()) / s


def rms_norm_jacobian(x: Vector, gain: Vector, eps: float) -> Matrix:
    """diag(γ) (I/r - x xᵀ/(d r³)) with r = √(mean x² + ε) (6.19)."""
    d = x.shape[0]
    r = torch.sqrt(x @ x / d + eps)
    return gain[:, None] * (torch.eye(d, dtype=x.dtype) / r - torch.outer(x, x) / (d * r**3))


def rms_norm_gradient(x: Vector, upstream: Vector, gain: Vector, eps: float) -> Vector:
    """(h - x̂ mean(h ∘ x̂))/r with h = γ ∘ g: (6.19) transposed and applied to g."""
    r = torch.sqrt(x.square().mean() + eps)
    normal, h = x / r, gain * upstream
    return (h - normal * (h * normal).mean()) / r


def relu_derivative(u: Tensor) -> Tensor:
    """1 above zero and 0 below; at zero, by convention, 0 (R8)."""
    return (u > 0).to(u.dtype)


def gelu_derivative(u: Tensor) -> Tensor:
    """Φ(u) + u φ(u), of the exact GELU (6.7)."""
    return 0.5 * (1 + torch.erf(u / math.sqrt(2))) + u * torch.exp(-u.square() / 2) / math.sqrt(2 * math.pi)


def silu_derivative(u: Tensor) -> Tensor:
    """σ(u) + u σ(u) (1 - σ(u)) (exercise 6.2)."""
    gate = torch.sigmoid(u)
    return gate + u * gate * (1 - gate)


def gated_differential(gate: Tensor, gate_derivative: Tensor, content: Tensor) -> tuple[Tensor, Tensor]:
    """What d[g(a) b] multiplies da and db by: (b g'(a), g(a)) (6.10)."""
    return content * gate_derivative, gate


def post_norm_jacobian(norm: Matrix, body: Matrix) -> Matrix:
    """J_LN(x + F(x)) [I + J_F(x)] (6.22)."""
    return norm @ (torch.eye(body.shape[0], dtype=body.dtype) + body)


def pre_norm_jacobian(norm: Matrix, body: Matrix) -> Matrix:
    """I + J_F(LN(x)) J_LN(x): one path passes the norm by (6.23)."""
    return torch.eye(body.shape[0], dtype=body.dtype) + body @ norm
