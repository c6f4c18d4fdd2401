"""FLOPs against PyTorch's own counter, on explicit attention (R28)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isoform.config import Experts, ModelConfig, RelativeBuckets, presets
from isoform.cost import Workload, count_flops, flops
from isoform.cost.workload import visible_pairs
from isoform.errors import ConfigError
from isoform.nn import Cache, Output, build
from isoform.nn.stack import RULES
from isoform.tokens import Tokens
from isoform.visibility import Places, Window
from strategies import model_configs

SMALL = {"d_model": 12, "n_heads": 3, "ffn_width": 10}
DECODER = presets.llama(30, d_model=12, n_heads=6, n_kv_heads=2, head_width=4, ffn_width=10, n_layers=3)
TRANSLATOR = presets.pre_ln(30, **SMALL, n_encoder_layers=2, n_decoder_layers=3, dropout=0.0)


def tokens(batch: int, length: int, prefix: bool = False) -> Tokens:
    start = torch.ones(batch, dtype=torch.long) if prefix else None
    return Tokens(torch.ones(batch, length, dtype=torch.long), prefix=start)


def result(output: Output) -> torch.Tensor:
    if output.logits is not None:
        return output.logits
    return output.hidden if output.pooled is None else output.pooled


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(model_configs(), st.integers(1, 3), st.integers(2, 9), st.integers(1, 9))
def test_random_configurations(config: ModelConfig, batch: int, length: int, source_length: int):
    model = build(config, seed=0).set_attention("eager")
    prefix = config.stack.visibility == "prefix"
    source = tokens(batch, source_length, prefix=True) if config.source is not None else None
    work = Workload("train", batch, length, None if source is None else source_length)
    found = flops(config, work)
    outputs: list[torch.Tensor] = []
    forward = count_flops(lambda: outputs.append(result(model(tokens(batch, length, prefix), source))))
    assert forward == found.forward
    if outputs[0].requires_grad:
        assert count_flops(lambda: outputs[0].sum().backward()) == found.backward
    assert found.visible <= found.model == found.hardware - found.recomputed


@pytest.mark.parametrize("config", [DECODER, TRANSLATOR])
def test_prefill_and_decode(config: ModelConfig):
    """What generation does: encode once, project the memory once, last position's logits, then steps."""
    source = 5 if config.source is not None else None
    model = build(config, seed=0).set_attention("eager").eval()
    assert model.head is not None
    cache = Cache.allocate(config, 2, 8, dtype=torch.float32)

    def prefill() -> None:
        if source is not None:
            model.remember(cache, model.encode(tokens(2, source)))
        model.head(model.hidden(tokens(2, 6), cache=cache)[:, -1:])

    def step() -> None:
        cache.visible = 7
        model.head(model.hidden(tokens(2, 1), cache=cache))

    with torch.no_grad():
        assert count_flops(prefill) == flops(config, Workload("prefill", 2, 6, source)).forward
        assert count_flops(step) == flops(config, Workload("decode", 2, 7, source)).forward


def test_recomputation():
    work = Workload("train", 2, 7, attention="eager")
    again = dataclasses.replace(work, recomputation="layer")
    model = build(DECODER, seed=0).set_attention("eager")
    assert model.decoder is not None
    for block in model.decoder.blocks():
        block.forward = checkpointed(block.forward)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        measured = count_flops(lambda: result(model(tokens(2, 7))).sum().backward())
    assert measured == flops(DECODER, again).hardware
    assert flops(DECODER, again).model == flops(DECODER, work).model


def checkpointed(forward):
    import torch.utils.checkpoint

    return lambda *args: torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)


def test_conventions():
    work = Workload("train", 2, 8)
    found = flops(DECODER, work)
    n = 12 * 30  # the head is counted among N, the table is not
    layer = 12 * (24 + 8 + 8 + 24) + 3 * 12 * 10 + 24
    assert found.conventions.kaplan == 6 * (3 * layer + 12 + n) * 16
    assert found.conventions.palm == 6 * (3 * layer + 12 + 2 * n) * 16 + 12 * 3 * 6 * 4 * 8 * 16
    # Every matrix is used once a token: 6N and both products of attention, exactly.
    matrices = 3 * (12 * 64 + 360) + n
    assert found.model == 6 * matrices * 16 + 12 * 3 * 6 * 4 * 8 * 16


@pytest.mark.parametrize("visibility", ["bidirectional", "causal", "prefix"])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
def test_visible_pairs(visibility: str, window: int | None):
    stack = presets.gpt2(30, **SMALL, n_layers=1).stack.replace(visibility=visibility)
    rule = RULES[visibility]
    if window is not None:
        rule = rule & Window(window, "both" if visibility == "bidirectional" else "past")
    for length, prefix in ((1, 0), (9, 0), (9, 4), (9, 9)):
        places = Places.range(length, prefix=prefix)
        wanted = int(rule.on(places).matrix.sum())
        assert visible_pairs(stack, window, length, prefix) == wanted


def test_all_experts():
    assert DECODER.decoder is not None
    expert = DECODER.decoder.layer.feed_forward
    experts = Experts(
        n_experts=4, top_k=1, expert=expert, router_bias=True, router_order="top_k_then_softmax"
    )
    config = DECODER.replace(decoder__layer__feed_forward=experts)
    found, full = (
        flops(c, Workload("train", 2, 8))
        for c in (config, config.replace(decoder__layer__feed_forward__top_k=4))
    )
    assert found.all_experts == full.model and found.model < full.model


def test_learned_bias_and_fused_attention_count_alike():
    assert DECODER.decoder is not None
    buckets = RelativeBuckets(n_buckets=4, max_distance=8, bidirectional=False)
    config = DECODER.replace(decoder__layer__attention__positions=buckets)
    eager, fused = (flops(config, Workload("train", 2, 8, attention=a)) for a in ("eager", "sdpa"))
    assert eager == fused  # storage differs, arithmetic does not


@pytest.mark.parametrize(
    ("config", "work", "message"),
    [
        (TRANSLATOR, Workload("train", 1, 4), "source_length: needed"),
        (DECODER, Workload("train", 1, 4, 3), "only an encoder–decoder"),
        (presets.bert(30, **SMALL), Workload("decode", 1, 4), "needs a decoder"),
        (presets.bert(30, **SMALL, max_positions=5), Workload("train", 1, 6), "exceeds the 5 learned"),
        (DECODER, Workload("train", 1, 4, prefix_length=2), "only a decoder with visibility 'prefix'"),
    ],
)
def test_work_that_cannot_be_done(config: ModelConfig, work: Workload, message: str):
    with pytest.raises(ConfigError, match=message):
        flops(config, work)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "trian"}, "did you mean 'train'"),
        ({"batch": 0}, "must be at least 1"),
        ({"prefix_length": 9}, "must lie between 0 and length 8"),
        ({"devices": 2}, "choose 'ddp' or 'fsdp'"),
        ({"dtype": "float16"}, "loss scaling"),
    ],
)
def test_work_that_makes_no_sense(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Workload(**{"mode": "train", "batch": 1, "length": 8, **arguments})
