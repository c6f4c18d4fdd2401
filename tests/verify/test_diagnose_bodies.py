"""A feed-forward network with a listed deviation and one of no list: both are told, in the right layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from zoo.steps import randomise

from isoform.verify import diagnose

WIDTH, INNER = 16, 24
IDS = torch.arange(1, 28).reshape(3, 9) * 7 % 29
REST: dict[str, Callable[[Tensor], Tensor]] = {
    "times": lambda h: 1.2 * h,
    "channels": lambda h: h * torch.linspace(0.8, 1.2, INNER) + torch.linspace(-1, 1, INNER),
    "order": lambda h: h.roll(1, -1),
    "off": lambda h: h.clamp(-0.5, 0.9),
    "later": lambda h: torch.cat([0 * h[:, :1], h[:, :-1]], 1),
    "last": lambda h: torch.cat([h[:, :-1], 2 * h[:, -1:]], 1),
    "tokens": lambda h: h / (1 + h.norm(dim=-1, keepdim=True)),
    "mixed": lambda h: h - 0.5 * h.mean(-1, keepdim=True),
    "averaged": lambda h: h - 0.5 * h.mean(1, keepdim=True),
    "bent": lambda h: h + 0.1 * h * h,
    "by norm": lambda h: h * (1 + h.square().mean(-1, keepdim=True)) + 0.3 * h.flip(-1).abs(),
}  # fmt: skip


class _Layer(nn.Module):
    def __init__(self, gated: bool, faults: tuple[str, ...]) -> None:
        super().__init__()
        self.gated, self.faults = gated, faults
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.gate, self.down = (nn.Linear(*n) for n in ((WIDTH, INNER),) * 2 + ((INNER, WIDTH),))

    def forward(self, x: Tensor) -> Tensor:
        heads = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        gate, content = self.gate(self.second(x)), self.up(self.second(x))
        if "gate-order" in self.faults:
            gate, content = content, gate
        act = F.gelu if "activation" in self.faults else F.silu
        if "sum" in self.faults:
            h = act(gate) + content
        else:
            h = act(gate) * content if self.gated else act(content)
        for fault in self.faults:
            h = REST[fault](h) if fault in REST else h
        return x + self.down(h)


class _Network(nn.Module):
    def __init__(self, gated: bool, *faults: str) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(29, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(_Layer(gated, ()), _Layer(gated, faults))

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.layers(self.table(ids))) @ self.table.weight.t()


BOTH = {"activation": True, "gate-order": True, "activation alone": False}
ELSEWHERE = {
    *((form, rest) for form in ("activation alone",) for rest in ("sum", "bent", "tokens")),
    *((form, "by norm") for form in ("activation", "activation alone")),
}
"""Another deviation there, or one too large to prove the other beside it."""
EVERY = [(f, rest) for rest in [*REST, "sum"] for f in BOTH if (f, rest) not in ELSEWHERE]


@pytest.mark.parametrize(
    ("form", "rest"),
    [pytest.param(*pair, marks=[pytest.mark.long] if i % 7 else []) for i, pair in enumerate(EVERY)],
)
def test_beside_a_listed_deviation_what_is_in_no_list(form: str, rest: str) -> None:
    a = randomise(_Network(BOTH[form]))
    for faults in ((rest,), (form.removesuffix(" alone"), rest)):
        b = _Network(BOTH[form], *faults).eval()
        b.load_state_dict(a.state_dict())
        found = diagnose(*((a, b) if len(faults) > 1 else (b, a)), {"ids": IDS}, probe=False)
        assert set(found.kinds()) == {*faults[:-1], "unexplained"}, f"{faults}: {found}"
        places = [place for finding in found.findings for place in finding.where]
        assert {(p.layer, p.part) for p in places} == {(1, "feed-forward")}, str(found)
