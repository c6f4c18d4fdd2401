"""The same models as in ``steps``, packed and functional: flat parameters, one function, fused kernels.

Weights stand ``[in, out]`` and together: q, k and v in one matrix, gate and content in another.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .steps import ACTIVATIONS, Config, Decoder, EncoderDecoder, Faults, Stack, restarted, route, sinusoid


class Packed(nn.Module):
    """Decoder, encoder or encoder–decoder out of flat parameters."""

    def __init__(self, like: Decoder | EncoderDecoder, fault: Faults | None = None) -> None:
        super().__init__()
        self.c, self.fault = like.c, fault or {}
        self.p = nn.ParameterDict()
        self.both = isinstance(like, EncoderDecoder)
        if self.both:
            self._take("enc", like.encoder)
            self._take("dec", like.decoder)
            self.causal = {"enc": False, "dec": True}
        else:
            self._take("dec", like.stack)
            self.causal = {"dec": like.stack.causal}
        self.p["head"] = like.lm.head.weight.detach().clone()
        if like.lm.head.bias is not None:
            self.p["head_bias"] = like.lm.head.bias.detach().clone()

    def _take(self, side: str, stack: Stack) -> None:
        put = lambda name, x: self.p.__setitem__(f"{side}_{name}", nn.Parameter(x.detach().clone()))  # noqa: E731
        put("table", stack.table.weight)
        for name in ("places", "relative"):
            if hasattr(stack, name):
                put(name, getattr(stack, name).weight)
        norms = [("final", stack.norm)]
        if hasattr(stack, "embedding_norm"):
            norms.append(("first", stack.embedding_norm))
        for i, layer in enumerate(stack.layers):
            kinds = [("self", layer.attention)] + (
                [("cross", layer.cross)] if hasattr(layer, "cross") else []
            )
            for kind, attention in kinds:
                maps = (attention.q_proj, attention.k_proj, attention.v_proj)
                put(f"{i}_{kind}_qkv", torch.cat([m.weight.t() for m in maps], 1))
                put(f"{i}_{kind}_o", attention.o_proj.weight.t())
                if attention.q_proj.bias is not None:
                    size = attention.v_proj.weight.shape[0]
                    biases = [m.bias if m.bias is not None else torch.zeros(size) for m in maps]
                    put(f"{i}_{kind}_qkv_b", torch.cat(biases))
                    put(f"{i}_{kind}_o_b", attention.o_proj.bias)
                if self.c.qk_norm:
                    norms += [(f"{i}_{kind}_qn", attention.q_norm), (f"{i}_{kind}_kn", attention.k_norm)]
                norms.append((f"{i}_{kind}", layer.attention_norm if kind == "self" else layer.cross_norm))
            if self.c.experts:
                put(f"{i}_router", layer.ff.router.weight)
                each = layer.ff.experts
                put(f"{i}_in", torch.stack([torch.cat([e.gate.weight, e.up.weight]).t() for e in each]))
                put(f"{i}_out", torch.stack([e.down.weight.t() for e in each]))
                put(f"{i}_in_b", torch.stack([torch.cat([e.gate.bias, e.up.bias]) for e in each]))
                put(f"{i}_out_b", torch.stack([e.down.bias for e in each]))
                norms.append((f"{i}_ff", layer.ff_norm))
                continue
            maps = [layer.ff.gate, layer.ff.up] if self.c.gated else [layer.ff.up]
            put(f"{i}_in", torch.cat([m.weight.t() for m in maps], 1))
            put(f"{i}_out", layer.ff.down.weight.t())
            if layer.ff.up.bias is not None:
                put(f"{i}_in_b", torch.cat([m.bias for m in maps]))
                put(f"{i}_out_b", layer.ff.down.bias)
            norms.append((f"{i}_ff", layer.ff_norm))
        for name, norm in norms:
            put(f"{name}_g", norm.weight)
            if hasattr(norm, "bias"):
                put(f"{name}_h", norm.bias)

    def at(self, layer: int, name: str) -> bool:
        """Whether a fault is planted in this layer."""
        return name in self.fault and self.fault.get("layer", layer) == layer

    def norm(self, x: Tensor, name: str, layer: int) -> Tensor:
        c, gain = self.c, self.p[f"{name}_g"]
        if self.at(layer, "norm-offset"):
            gain = 1.0 + gain
        eps = 1e-3 if self.at(layer, "norm-eps") else c.eps
        if c.norm == "rms":
            return F.rms_norm(x, x.shape[-1:], gain, eps)
        bias = self.p[f"{name}_h"]
        if self.at(layer, "norm-kind"):
            return F.rms_norm(x, x.shape[-1:], gain, eps) + bias
        if self.at(layer, "norm-outside"):
            std, mean = torch.std_mean(x, -1, keepdim=True, correction=0)
            return torch.addcmul(bias, (x - mean) / (std + eps), gain)
        if self.at(layer, "norm-unbiased"):
            var, mean = torch.var_mean(x, -1, keepdim=True)
            return torch.addcmul(bias, (x - mean) * torch.rsqrt(var + eps), gain)
        return F.layer_norm(x, x.shape[-1:], gain, bias, eps)

    def turn(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Rotation by complex numbers of ``[B, T, h, dh]``; pairs are halves."""
        c = self.c
        theta = 500.0 if self.at(layer, "rope-frequency") else c.theta
        width = c.rotary // 2 if self.at(layer, "rope-partial") else c.rotary
        head, rest = x[..., :width], x[..., width:]
        freq = 1.0 / theta ** (torch.arange(0, width, 2).double() / width)
        angle = positions[..., None].double() * freq
        if self.at(layer, "rope-precision"):
            angle = angle.to(torch.bfloat16).double()
        phase = torch.polar(torch.ones_like(angle), angle)[:, :, None].to(torch.complex64)
        if x.dtype == torch.float64:
            phase = torch.polar(torch.ones_like(angle), angle)[:, :, None]
        if self.at(layer, "rope-axis"):
            phase = torch.polar(
                torch.ones(x.shape[2], len(freq)), torch.arange(x.shape[2])[:, None] * freq.float()
            )
        if self.at(layer, "rope-pairing"):
            z = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous())
            out = torch.view_as_real(z * phase).flatten(-2)
        else:
            z = torch.view_as_complex(head.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())
            out = torch.view_as_real(z * phase).transpose(-1, -2).flatten(-2)
        return torch.cat([out, rest], -1)

    def normed(self, name: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        width = q.shape[-1]
        return (
            F.rms_norm(q, (width,), self.p[f"{name}_qn_g"], 1e-6),
            F.rms_norm(k, (width,), self.p[f"{name}_kn_g"], 1e-6),
        )

    def attend(self, side, i, kind, x, memory, real, positions, documents=None) -> Tensor:
        c, b, t, s = self.c, x.shape[0], x.shape[1], memory.shape[1]
        name, width = f"{side}_{i}_{kind}", c.d // c.heads
        sizes = [c.d, c.kv * width, c.kv * width]
        matrix, bias = self.p[f"{name}_qkv"], self.p.get(f"{name}_qkv_b", None)
        if self.at(i, "bias-missing"):
            bias = None if bias is None else torch.cat([bias[: c.d], torch.zeros_like(bias[c.d :])])
        if kind == "self":
            packed = (
                x @ matrix if bias is None else torch.addmm(bias, x.reshape(b * t, -1), matrix).view(b, t, -1)
            )
            if self.at(i, "qkv-packing"):
                q, k, v = packed.view(b, t, c.heads, 3, width).unbind(3)
            else:
                q, k, v = packed.split(sizes, -1)
        else:
            wq, wk, wv = matrix.split(sizes, 1)
            q, k, v = x @ wq, memory @ wk, memory @ wv
            if bias is not None:
                bq, bk, bv = bias.split(sizes)
                q, k, v = q + bq, k + bk, v + bv
        q, k, v = q.reshape(b, t, c.heads, width), k.reshape(b, s, -1, width), v.reshape(b, s, -1, width)
        late = self.at(i, "qk-norm-order")
        if c.qk_norm and not self.at(i, "qk-norm") and not late:
            q, k = self.normed(name, q, k)
        if c.position == "rope" and kind == "self":
            q, k = self.turn(q, positions, i), self.turn(k, positions, i)
        if c.qk_norm and late:
            q, k = self.normed(name, q, k)
        scale = c.d**-0.5 if self.at(i, "attention-scale") else c.scale
        allowed = real[:, None, None, :].expand(b, 1, t, s)
        polarity = self.fault["mask-polarity"] if self.at(i, "mask-polarity") and kind == "self" else ""
        if polarity == "inverted":
            allowed = ~allowed
        elif polarity or (kind == "cross" and self.at(i, "cross-mask")):
            allowed = torch.ones_like(allowed)
        if self.at(i, "mask-row") and kind == "self":
            allowed = allowed.roll(1, 0)
        if documents is not None and "document-leak" not in self.fault:
            allowed = allowed & (documents[:, None, :, None] == documents[:, None, None])
        far = torch.arange(s)[None] - torch.arange(t)[:, None]
        if self.causal[side] and kind == "self" and not self.at(i, "causality"):
            allowed = allowed & (far <= self.at(i, "causality-off"))
        if c.window is not None and kind == "self" and not self.at(i, "sliding-window-lost"):
            allowed = allowed & (far > -c.window - self.at(i, "sliding-window"))
        plain = c.cap is None and c.position not in ("alibi", "relative") and polarity != "added"
        written = ("kv-head-order", "head-merge", "unlisted-attention")
        if plain and not any(self.at(i, fault) for fault in written):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=allowed,
                scale=scale,
                enable_gqa=k.shape[2] != c.heads,
            )
            out = out.transpose(1, 2).reshape(b, t, c.d)
        else:
            groups = c.heads // k.shape[2]
            if self.at(i, "kv-head-order"):
                k, v = torch.cat([k] * groups, 2), torch.cat([v] * groups, 2)
            else:
                k, v = (z[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3) for z in (k, v))
            scores = torch.einsum("bthd,bshd->bhts", q * scale, k)
            if c.cap is not None and not self.at(i, "softcap"):
                scores = torch.tanh(scores / c.cap) * c.cap
            extra = self.extra(side, i, far) if kind == "self" else None
            scores = scores if extra is None else scores + extra
            if polarity == "added":
                scores = scores + real[:, None, None].to(scores.dtype)
            scores = scores + torch.where(allowed, 0.0, -1e9).to(scores.dtype)
            weights = torch.softmax(scores, -1)
            if self.at(i, "unlisted-attention"):
                weights = weights**2
            if self.at(i, "head-merge"):
                out = torch.einsum("bhts,bshd->bhtd", weights, v).reshape(b, t, c.d)
            else:
                out = torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)
        o = self.p[f"{name}_o"]
        if self.at(i, "weight-transpose"):
            o = o.t()
        out = out @ o
        return out + self.p[f"{name}_o_b"] if c.bias else out

    def extra(self, side: str, i: int, far: Tensor) -> Tensor | None:
        c = self.c
        if c.position == "alibi":
            power = 1.0 if self.at(i, "alibi-slope") else 8 / c.heads
            slope = torch.pow(2.0, -power * torch.arange(1, c.heads + 1))
            return slope[:, None, None] * far
        if c.position == "relative" and self.at(i, "relative-bias-direction"):
            far = -far
        if c.position == "relative" and not (self.at(i, "relative-bias") and i > 0):
            return self.p[f"{side}_relative"][(far + 4).clamp(0, 7)].permute(2, 0, 1)
        return None

    def experts(self, side: str, i: int, x: Tensor) -> Tensor:
        """All experts on all tokens, in one product."""
        name = f"{side}_{i}"
        logits = x @ self.p[f"{name}_router"].t()
        kind = str(self.fault["expert-routing"]) if self.at(i, "expert-routing") else self.c.routing
        weight, index = route(logits, kind)
        share = torch.zeros_like(logits).scatter(-1, index, weight)
        y = torch.einsum("btd,edf->betf", x, self.p[f"{name}_in"]) + self.p[f"{name}_in_b"][:, None]
        gate, content = y.chunk(2, -1)
        y = torch.einsum("betf,efd->betd", F.silu(gate) * content, self.p[f"{name}_out"])
        return torch.einsum("betd,bte->btd", y + self.p[f"{name}_out_b"][:, None], share)

    def feed(self, side: str, i: int, x: Tensor) -> Tensor:
        c = self.c
        if c.experts:
            return self.experts(side, i, x)
        y = x @ self.p[f"{side}_{i}_in"]
        if c.bias:
            y = y + self.p[f"{side}_{i}_in_b"]
        f = ACTIVATIONS[
            str(self.fault.get("activation", c.activation)) if self.at(i, "activation") else c.activation
        ]
        if c.gated:
            gate, content = y.chunk(2, -1)
            if self.at(i, "gate-order"):
                y = f(content) * gate
            else:
                y = f(gate * content) if self.at(i, "gate-product") else f(gate) * content
        else:
            y = f(y)
        if self.at(i, "unlisted-feed-forward"):
            y = y + 0.1 * y.roll(1, -1)
        y = y @ self.p[f"{side}_{i}_out"]
        return y + self.p[f"{side}_{i}_out_b"] if c.bias else y

    def run(
        self, side: str, ids: Tensor, real: Tensor, memory=None, memory_real=None, documents=None
    ) -> Tensor:
        c = self.c
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        if documents is not None and "document-positions" not in self.fault:
            positions = restarted(positions, documents)
        if "position-padding" in self.fault:
            positions = torch.arange(ids.shape[1]).expand_as(ids)
        if "position-offset" in self.fault:
            positions = positions + 1
        x = F.embedding(ids, self.p[f"{side}_table"]) * c.embedding_scale
        if "embedding-scale" in self.fault:
            x = x * math.sqrt(c.d)
        if c.position == "learned":
            x = x + self.p[f"{side}_places"][positions]
        if c.position == "sinusoid":
            x = x + sinusoid(positions, c.d, "sinusoid-layout" in self.fault).to(x.dtype)
        if c.embedding_norm and "norm-missing-embedding" not in self.fault:
            x = self.norm(x, f"{side}_first", -1)
        for i in range(c.layers):
            if (c.residual == "parallel") != self.at(i, "parallel-residual"):
                n, m = self.norm(x, f"{side}_{i}_self", i), self.norm(x, f"{side}_{i}_ff", i)
                x = x + (
                    self.attend(side, i, "self", n, n, real, positions, documents) + self.feed(side, i, m)
                )
                continue
            steps = ["self", "cross", "ff"] if memory is not None else ["self", "ff"]
            moved = self.fault["norm-placement"] if self.at(i, "norm-placement") else ""
            pre = (c.placement == "pre") != (moved == "swap")
            for kind in steps:
                h = self.norm(x, f"{side}_{i}_{kind}", i) if pre else x
                x = h if moved == "residual" else x
                if kind == "ff":
                    y = self.feed(side, i, h)
                elif kind == "self":
                    y = self.attend(side, i, kind, h, h, real, positions, documents)
                else:
                    y = self.attend(side, i, kind, h, memory, memory_real, positions)
                if self.at(i, "residual-scale"):
                    y = y * 0.5
                bare = pre or self.at(i, "norm-missing-layer")
                x = x + y if bare else self.norm(x + y, f"{side}_{i}_{kind}", i)
            if "unlisted-stream" in self.fault and i == 0:
                x = x + 0.1 * x.sin()
        if c.placement == "post" or "norm-missing" in self.fault:
            return x
        if "norm-doubled" in self.fault:
            x = self.norm(x, f"{side}_final", -1)
        return self.norm(x, f"{side}_final", -1)

    def pooled(self, x: Tensor, real: Tensor, kind: str) -> Tensor:
        places = torch.arange(x.shape[1]).expand_as(real)
        if kind == "mean":
            weights = real.to(x.dtype) / real.sum(1, keepdim=True)
        elif kind == "mean-all":
            weights = torch.full(real.shape, 1 / x.shape[1], dtype=x.dtype)
        else:
            at = {"first": 0, "last": x.shape[1] - 1}.get(kind)
            at = torch.where(real, places, -1).amax(1, keepdim=True) if at is None else torch.tensor(at)
            weights = (places == at).to(x.dtype)
        return torch.einsum("btd,bt->bd", x, weights)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        src: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        if self.both:
            assert src is not None and attention_mask is not None
            real = attention_mask.bool()
            memory = self.run("enc", src, real)
            x = self.run("dec", ids, torch.ones_like(ids).bool(), memory, real)
        else:
            real = torch.ones_like(ids).bool() if attention_mask is None else attention_mask.bool()
            x = self.run("dec", ids, real, documents=documents)
            if self.c.pool is not None:
                x = self.pooled(x, real, str(self.fault.get("pooling", self.c.pool)))
        logits = x @ self.p["head"].t()
        if "head_bias" in self.p and "output-bias" not in self.fault:
            logits = logits + self.p["head_bias"]
        if self.c.logit_cap is not None and "logit-cap" not in self.fault:
            logits = (logits / self.c.logit_cap).tanh() * self.c.logit_cap
        return logits * 0.5 if "logit-scale" in self.fault else logits


__all__ = ["Config", "Packed"]
