"""Tests of the tests: each line below is changed in a copy of the library, and the tests named must fail.

A change that no test notices would be a line that nothing holds. Every entry is one line of one file, what it
becomes, and the tests that hold it; they run in a process of their own on the changed copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "isoform"

LAYER = "nn/test_layer.py"
ATTENTION, NORMS, SEES = "chapter/test_attention.py", "chapter/test_norms.py", "chapter/test_visibility.py"
FEED, CACHE, RULES = "chapter/test_feed_forward.py", "nn/test_cache.py", "test_visibility.py"
HEADS, EMBED, PLACES = "nn/test_heads.py", "nn/test_embedding.py", "nn/test_positions.py"

OPTIONS = ["-x", "-q", "-m", "not long", "-p", "no:cacheprovider", "-p", "no:xdist"]

# file: (what stands there, what it becomes, tests that must notice)
CHANGES: dict[str, list[tuple[str, str, str]]] = {
    "nn/attention.py": [
        ("(grouped * self.cfg.score_scale)", "(grouped * 0.5)", f"{ATTENTION}::test_scale"),
        (
            "scores = torch.tanh(scores / self.cfg.softcap) * self.cfg.softcap",
            "pass",
            f"{ATTENTION}::test_softcap",
        ),
        ("scores = scores + mask", "pass", ATTENTION),
        (
            "return context if alive is None else context * alive.to(context.dtype)",
            "return context",
            ATTENTION,
        ),
        ("cache.write(k, v, ", "cache.write(v, k, ", CACHE),
        ('cfg.qk_norm.order == "after_rotation"', "False", f"{ATTENTION}::test_query_key_norm"),
        ('self.cfg.qk_norm.axis == "head"', "True", f"{ATTENTION}::test_query_key_norm"),
        ("return self._normed(k, self.key_norm), v", "return k, v", LAYER),
        ('wanted(self, "scores", "weights")', "False", "nn/test_capture.py"),
        ("k = self._rotated(k, reading.rotary_keys)", "pass", "generation/test_cached.py"),
    ],
    "nn/kernels.py": [
        ("reading.lowered.is_causal and reading.bias is None", "False", ATTENTION),
        ("k.repeat_interleave(h // kv, 1)", "k.repeat(1, h // kv, 1, 1)", ATTENTION),
        ("return out if alive is None else out * alive.to(out.dtype)", "return out", ATTENTION),
        ("score = torch.tanh(score / softcap) * softcap", "pass", f"{ATTENTION}::test_softcap"),
        ("score + bias(b, h, i, j)", "score", f"{ATTENTION}::test_flex_is_the_same_function"),
    ],
    "nn/reading.py": [
        ("torch.finfo(dtype).min / 2", 'float("-inf")', ATTENTION),
        ("_additive(self.lowered.written_out, dtype)", "_additive(self.lowered.mask, dtype)", ATTENTION),
    ],
    "nn/layer.py": [
        ("increment = increment * self.scale", "pass", LAYER),
        ("inner if self.from_normalised else x", "x", LAYER),
        ('cfg.norm if place in ("pre", "sandwich")', 'cfg.norm if place in ("pre",)', LAYER),
        ('cfg.norm if place in ("sandwich", "res_post")', 'cfg.norm if place in ("sandwich",)', LAYER),
        ("increment if self.scale == 1.0 else increment * self.scale", "increment", LAYER),
        ("attention.project_memory(self.memory_norm(memory))", "attention.project_memory(memory)", SEES),
        ("inner = self.feed_forward_norm(x)", "pass", LAYER),
    ],
    "nn/stack.py": [
        ("x = self.final_norm(x)", "pass", SEES),
        ('"both" if self.cfg.visibility == "bidirectional" else "past"', '"past"', SEES),
        (
            "source = memory.hidden",
            "source = memory.hidden.detach()",
            "parity/test_torch_nn.py::test_transformer",
        ),
        ("own[cfg.owner(i)] for i", "layer(cfg.layer_at(i), d_model) for i", "nn/test_sharing.py"),
        (
            "readings[self.kind_of[i]]",
            "readings[0]",
            "checkpoints/test_decoders.py checkpoints/test_llama_like.py",
        ),
    ],
    "nn/model.py": [
        ("self.source_embedding.weight = self.embedding.weight", "pass", "nn/test_sharing.py"),
        ("index = cache.lengths[:, None] + steps", "index = cache.lengths.amax() + steps", CACHE),
        ("cache.prefix = tokens.prefix if cache.prefix is None else cache.prefix", "pass", CACHE),
    ],
    "nn/cache.py": [
        ("tokens.length if tokens.real is None else tokens.real.sum(-1)", "tokens.length", CACHE),
        ("self.even = self.even + tokens.length if known else None", "pass", CACHE),
        ("lengths=self.lengths.index_select(0, rows)", "lengths=self.lengths", CACHE),
        ("self.prefix.index_select(0, rows)", "self.prefix[: len(rows)]", CACHE),
        ("select_places(self.memory_places, rows)", "self.memory_places", CACHE),
        ("layers=self._selected(rows), lengths=self.lengths.clone()", "layers=self._selected(rows)", CACHE),
    ],
    "nn/positions.py": [
        ("(positions + cfg.offset).to(wide)", "positions.to(wide)", PLACES),
        ("else self.width / 2", "else half", PLACES),
        ("lookup(positions + self.cfg.offset,", "lookup(positions,", PLACES),
        ("torch.cat([-sin, sin], -1)", "torch.cat([sin, sin], -1)", PLACES),
        ("turned.roll(width // 2, -1)", "turned.roll(1, -1)", PLACES),
        ("return frequency / scaling.factor, 1.0", "return frequency, 1.0", PLACES),
        ("angles.cos() * factor", "angles.cos()", PLACES),
        ("grown ** (cfg.width / (cfg.width - 2))", "grown", PLACES),
    ],
    "nn/biases.py": [
        ("(slopes * self.cfg.factor).to(dtype)", "slopes.to(dtype)", PLACES),
        ("(ahead > 0).long() * n if", "(ahead >= 0).long() * n if", PLACES),
        (
            "self.key[:, None, :] - self.query[:, :, None]",
            "self.query[:, :, None] - self.key[:, None, :]",
            PLACES,
        ),
        ("2.0 ** (-8.0 * (2 * i + 1) / (2 * power))", "2.0 ** (-8.0 * (i + 1) / (2 * power))", PLACES),
    ],
    "nn/embedding.py": [
        ("tokens.ids.masked_fill(~tokens.real, 0)", "tokens.ids", EMBED),
        ('self.norm(tap(self, "sum", x))', 'tap(self, "sum", x)', EMBED),
        ("x = x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)", "pass", EMBED),
        ("return self.token_types[0]", "return self.token_types[1]", EMBED),
    ],
    "nn/heads.py": [
        ("hidden.masked_fill(~real[..., None], 0.0)", "hidden", HEADS),
        ("flags.flip(-1).argmax(-1)", "0", HEADS),
        ("scores = torch.tanh(scores / self.cfg.softcap) * self.cfg.softcap", "pass", HEADS),
        ("x = x * self.scale", "pass", HEADS),
        ("F.normalize(pooled, dim=-1) if self.cfg.normalise else pooled", "pooled", HEADS),
        (".masked_fill(~real.any(-1, keepdim=True), 0.0)", "", HEADS),
    ],
    "nn/experts.py": [
        ("* share[start : start + n, None]", "", "nn/test_experts.py"),
        ("weights = weights / weights.sum(-1, keepdim=True)", "pass", "nn/test_experts.py"),
        ("weights * cfg.router_scale", "weights", "nn/test_experts.py"),
        ("self.activation(gate) * content", "self.activation(content) * gate", "nn/test_experts.py"),
        ("self._expert(x, e) * share[:, e, None]", "self._expert(x, e)", "nn/test_compile.py"),
    ],
    "nn/feed_forward.py": [
        (
            'tap(self, "gate", gate)) * tap(self, "content", up)',
            'tap(self, "gate", up)) * tap(self, "content", gate)',
            FEED,
        ),
        (
            'self.activation(tap(self, "preactivation", self.up(x)))',
            'tap(self, "preactivation", self.up(x))',
            FEED,
        ),
    ],
    "nn/norms.py": [
        ("gain = gain + cfg.gain_offset", "pass", NORMS),
        ("gain, self.bias, cfg.eps)", "gain, None, cfg.eps)", NORMS),
        ("(x, (self.width,), gain, cfg.eps)", "(x, (self.width,), gain, 0.0)", NORMS),
    ],
    "nn/dropout.py": [
        ("mul_(1.0 / (1.0 - share))", "mul_(1.0)", "nn/test_dropout.py"),
        ("if not training or share == 0.0:", "if share == 0.0:", "nn/test_dropout.py"),
        ("x.numel() + 3", "x.numel()", "nn/test_dropout.py"),
    ],
    "nn/capture.py": [
        ("self.captured[path] = value", "self.captured[path] = value.detach()", "nn/test_capture.py"),
        ("value = change(value)", "change(value)", "nn/test_capture.py"),
        ("        _recorder = None\n    for", "        pass\n    for", "nn/test_capture.py"),
    ],
    "nn/initialise.py": [
        ("weight.mul_((2 * stack.n_layers) ** -0.5)", "pass", "nn/test_initialise.py"),
        (
            "_glorot(module.part(name), generator)",
            "_glorot(module.weight, generator)",
            "nn/test_initialise.py",
        ),
        ("1.0 - module.cfg.gain_offset", "1.0", "nn/test_initialise.py"),
    ],
    "visibility.py": [
        ("return key.index <= query.index\n", "return key.index < query.index\n", RULES),
        ("back < self.size if", "back <= self.size if", RULES),
        ("back.abs() < self.size", "back < self.size", RULES),
        ("key.index < query.index + self.k", "key.index <= query.index + self.k", RULES),
        (
            "(query.index < prefix) & (key.index < prefix)",
            "(query.index < prefix) & (key.index <= prefix)",
            SEES,
        ),
        ("return query.documents == key.documents", "return query.documents <= key.documents", RULES),
        ("return query.real & key.real", "return key.real | query.real", RULES),
    ],
    "masks.py": [
        ("return Forbidden(~self.matrix)", "return Forbidden(self.matrix)", RULES),
        ("matrix = ~self.matrix", "matrix = self.matrix", RULES),
        ("Additive(torch.where(self.matrix,", "Additive(torch.where(~self.matrix,", RULES),
        ("return t == s and bool((self.matrix == triangle).all())", "return t == s", RULES),
        ("return Allowed(self.matrix == 0)", "return Allowed(self.matrix != 0)", RULES),
    ],
    "lowering.py": [
        ("ordered = query is key and query.ordered", "ordered = query.ordered", RULES),
        ("(ordered or _last(query, key)) and rule.size >= key.length", "True", RULES),
        ("reads_itself and all(_reads_itself(r) for r in rule.rules())", "True", ATTENTION),
    ],
    "tokens.py": [
        ("(self.real.long().cumsum(-1) - 1)", "self.real.long().cumsum(-1)", "test_tokens.py"),
        ("documents = documents.gather(-1, last)", "pass", "test_tokens.py"),
        (
            "return places - torch.where(starts, places, 0).cummax(-1).values",
            "return places",
            "test_tokens.py",
        ),
    ],
}


def entries() -> list[object]:
    return [
        pytest.param(file, *change, id=f"{file}: {' '.join(change[0].split())[:60]}")
        for file, changes in CHANGES.items()
        for change in changes
    ]


@pytest.mark.parametrize(("file", "line", "becomes", "tests"), entries())
def test_the_line_is_there(file: str, line: str, becomes: str, tests: str) -> None:
    """So that an entry does not fall asleep when the code moves on."""
    assert (SOURCE / file).read_text(encoding="utf-8").count(line) == 1, f"{file}: {line!r}"
    assert all((ROOT / "tests" / test.partition("::")[0]).exists() for test in tests.split())


@pytest.mark.soak
@pytest.mark.parametrize(("file", "line", "becomes", "tests"), entries())
def test_changing_it_is_noticed(file: str, line: str, becomes: str, tests: str, tmp_path: Path) -> None:
    copy = tmp_path / "isoform"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    changed = (copy / file).read_text(encoding="utf-8").replace(line, becomes)
    compile(changed, file, "exec")
    (copy / file).write_text(changed, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *(f"tests/{test}" for test in tests.split())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, f"nothing fails in {tests}\n{done.stdout[-2000:]}{done.stderr[-1000:]}"
    assert "failed" in done.stdout
