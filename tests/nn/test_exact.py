"""Float32 products go elsewhere only where nothing is lost."""

from __future__ import annotations

import pytest
import torch

from isoform.config import presets
from isoform.nn import attention, build, exact
from isoform.nn.attention import Attention
from isoform.tokens import Tokens


@pytest.fixture(autouse=True)
def _tried_again():
    exact._nothing_is_lost.cache_clear()
    yield
    exact._nothing_is_lost.cache_clear()


def test_products_are_sent_elsewhere_only_where_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(*, avx512: bool, errors: list[float], device: str = "cpu", accelerator: bool = False) -> str:
        given = iter(errors)
        exact._nothing_is_lost.cache_clear()
        monkeypatch.setattr(exact, "_has_avx512_alone", lambda: avx512)
        monkeypatch.setattr(exact, "_error", lambda: next(given))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: accelerator)
        with exact.exact_products(torch.device(device)):
            inside = torch.get_float32_matmul_precision()
        assert torch.get_float32_matmul_precision() == "highest"
        return inside

    assert seen(avx512=True, errors=[1e-7, 1.5e-7]) == "medium"
    assert seen(avx512=True, errors=[1e-7, 1e-3]) == "highest"
    assert seen(avx512=False, errors=[]) == "highest"
    assert seen(avx512=True, errors=[], device="meta") == "highest"
    assert seen(avx512=True, errors=[], accelerator=True) == "highest"


def test_the_product_that_is_tried_tells_float32_from_bfloat16() -> None:
    assert exact._error() < 1e-5
    assert exact._error(torch.bfloat16) > 1e-3


def test_it_is_tried_once_and_not_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_has_avx512_alone", lambda: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact._nothing_is_lost()
        assert exact._error() < 1e-5
    monkeypatch.setattr(exact, "_error", lambda: 1 / 0)
    with exact.exact_products(torch.device("cpu")):
        pass


def test_the_setting_of_a_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_has_avx512_alone", lambda: True)
    torch.set_float32_matmul_precision("high")
    try:
        with exact.exact_products(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("length", "setting", "learns", "kernel"),
    [
        (64, "highest", True, "eager"),
        (64, "highest", False, "sdpa"),
        (65, "highest", True, "sdpa"),
        (255, "medium", True, "eager"),
        (255, "medium", False, "eager"),
        (256, "medium", True, "sdpa"),
    ],
)
def test_attention_is_written_out_where_that_is_faster(
    length: int, setting: str, learns: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = presets.gpt2(20, d_model=12, n_heads=2, ffn_width=8, n_layers=1, dropout=0.0, max_positions=300)
    model, asked = build(cfg, seed=0), []
    choose = Attention._kernel

    def seen(self, *given):
        asked.append(choose(self, *given))
        return asked[-1]

    monkeypatch.setattr(Attention, "_kernel", seen)
    torch.set_float32_matmul_precision(setting)
    try:
        with torch.set_grad_enabled(learns):
            model(Tokens(torch.zeros(2, length, dtype=torch.long)))
            monkeypatch.setattr(attention, "SCORES", 2 * 2 * length * length - 1)
            model(Tokens(torch.zeros(2, length, dtype=torch.long)))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert asked == [kernel, "sdpa" if setting == "medium" else kernel]
