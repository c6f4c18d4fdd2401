"""The compiled step: forms of weights, what it leaves to others, and the cache its library is kept in."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from isoform import generate
from isoform.generation import Beam, Cached, Sample
from isoform.native import library
from isoform.native.library import built
from isoform.native.program import ACTIVATIONS, BUFFERS, SPARE, Call, Program
from isoform.nn import products
from isoform.nn.activations import activation
from isoform.nn.compiled import compiled
from isoform.nn.forms import plain, set_form
from isoform.nn.products import FORMS
from isoform.nn.step import prepare
from isoform.nn.trails import Trails
from isoform.tokens import Tokens
from networks import network, preset

needs_compiler = pytest.mark.skipif(library(torch.float32) is None, reason="there is no C++ compiler")
PROMPTS = Tokens.from_lists([[3, 1, 4, 2], [5], [2, 6, 1]], pad_id=0)


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch):
    """What is loaded is used wherever it helps."""
    monkeypatch.delenv("ISOFORM_COMPILE")


@pytest.fixture
def float32():
    return lambda name, **settings: network(preset(name, **settings)).float()


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9, 23])
def test_forms(float32, form, rows, monkeypatch):
    """Widths that fill no vector, and numbers of rows that take every way through the products. Numbers of 8
    and 16 bits are multiplied as they are. Where inputs are rounded too, one between two numbers may
    be rounded to the other, by what the layers before it leave open."""
    model = set_form(float32("llama", d_model=30, n_heads=6, head_width=6, ffn_width=77), form)
    tokens = Tokens(torch.arange(rows * 3).view(rows, 3) % 20)
    monkeypatch.setattr(products, "loaded", lambda x: None)
    rounds = form == "int8_dynamic"
    with torch.inference_mode():
        dense = [Cached(model if rounds else plain(model), compile="never") for _ in range(2)]
        for forward in dense:
            forward.begin(tokens, None, 4)
        ids = torch.arange(rows) % 19
        trails = Trails.of(dense[1]._step[1])
        trails.reserve(4)
        found = compiled(prepare(model), library(torch.float32))(ids, trails)
        expected = dense[0].step(ids)
        if rounds:
            assert ((found - expected).norm(dim=1) <= 0.02 * expected.norm(dim=1)).all()
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("name", ["gpt2", "original", "gemma2", "t5"])
@pytest.mark.parametrize("search", [Beam(3), Sample(temperature=1.0, n=3, seed=1)])
def test_whole_generations(name, search):
    model = network(preset(name))
    source = None if model.config.source is None else Tokens(torch.tensor([[1, 2], [3, 4], [2, 2]]))
    found = [
        generate(
            model,
            PROMPTS if source is None else Tokens(torch.tensor([[1]] * 3)),
            source=source,
            max_new_tokens=9,
            eos_id=[2, 3],
            search=search,
            compile=setting,
            return_logits=True,
        )
        for setting in ("never", "always")
    ]
    assert found[0].ids == found[1].ids
    for a, b in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@needs_compiler
def test_nan_comes_out_as_nan(float32):
    model = float32("gpt2")
    with torch.inference_mode():
        model.decoder.layers[0].attention.before.bias[3] = torch.nan
        machine = Cached(model, compile="always")
        machine.begin(PROMPTS, None, 4)
        assert machine.step(torch.tensor([1, 2, 3])).isnan().all()


@needs_compiler
def test_what_it_does_not_take(float32):
    """Experts are no operation; half precision, autograd and hooks are refused before."""
    with torch.inference_mode():
        model = float32("mixtral")
        step = prepare(model)
        assert step is not None
        assert compiled(step, library(torch.float32)) is None
    assert prepare(float32("gpt2")) is None


@needs_compiler
def test_weights_that_lie_column_by_column(float32):
    """As GPT-2's files have them: copied for long jobs, left to the other step for short ones."""
    model = float32("gpt2")
    up = model.decoder.layers[0].feed_forward.body.up
    with torch.inference_mode():
        before = compiled(prepare(model), library(torch.float32), copies=False)
    assert before is not None
    up.weight = torch.nn.Parameter(up.weight.detach().t().contiguous().t())
    with torch.inference_mode():
        assert compiled(prepare(model), library(torch.float32), copies=False) is None
        plain, machine = Cached(model, compile="never"), Cached(model, compile="always")
        for forward in (plain, machine):
            forward.begin(PROMPTS, None, 4)
        ids = torch.tensor([1, 2, 3])
        torch.testing.assert_close(machine.step(ids), plain.step(ids), rtol=0, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 8, 13, 25, 53])
def test_products(rows):
    """One map, its outputs shared out to threads; outputs that fill no panel, inputs that fill no vector."""
    for dtype in (torch.float32, torch.float64):
        machine = library(dtype)
        x = torch.linspace(-1, 1, rows * 2 * 37, dtype=dtype).view(rows, 2, 37)[:, :1].sin()
        numbers = (torch.arange(45 * 37) * 31 % 255 - 127).view(45, 37)
        scale, bias = torch.linspace(1e-3, 1e-2, 45, dtype=dtype), torch.linspace(-1, 1, 45, dtype=dtype)
        for kind in (dtype, torch.bfloat16, torch.int8):
            for given in ((None, None), (scale, bias)):
                expected = torch.nn.functional.linear(x, numbers.to(dtype))
                expected = expected if given[0] is None else expected * scale + bias
                found = machine.linear(x, numbers.to(kind), *given)
                torch.testing.assert_close(
                    found, expected, rtol=0, atol=3e-4 if dtype == torch.float32 else 1e-11
                )


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 47, 49, 50])
def test_products_of_wide_rows(rows):
    """Which are taken in parts, or in blocks of rows, the last of one row or two."""
    machine = library(torch.float64)
    x = torch.linspace(-1, 1, rows * 8203, dtype=torch.float64).view(rows, 8203).sin()
    numbers = (torch.arange(6 * 8203) * 31 % 255 - 127).view(6, 8203)
    for kind in (torch.float64, torch.bfloat16, torch.int8):
        found = machine.linear(x, numbers.to(kind), None, None)
        torch.testing.assert_close(found, x @ numbers.double().t(), rtol=0, atol=1e-8)


@needs_compiler
def test_log_sums():
    """Whatever their size, infinities among them, as in `torch.logsumexp`."""
    for dtype, atol in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        machine = library(dtype)
        scores = torch.linspace(-90, 40, 3 * 77, dtype=dtype).view(3, 77) * torch.tensor([[1.0], [-1], [9]])
        scores[0, :5] = -torch.inf
        torch.testing.assert_close(machine.log_sums(scores), scores.logsumexp(-1), rtol=1e-6, atol=atol)
        scores[1, 3] = torch.nan
        assert machine.log_sums(scores).isnan().tolist() == [False, True, False]


def test_without_a_compiler(float32, monkeypatch, tmp_path):
    monkeypatch.setenv("ISOFORM_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not built(torch.float32)
    assert library(torch.float32) is None
    with torch.inference_mode():
        forward = Cached(float32("llama"), compile="auto")
        forward.begin(PROMPTS, None, 10**9)
        assert forward._machine is None
        assert forward._step is not None


def test_without_a_folder_to_keep_it_in(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("ISOFORM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert not built(torch.float32)
    assert library(torch.float32) is None


def test_a_compiler_that_fails_is_asked_once(monkeypatch, tmp_path):
    script = tmp_path / "g++"
    script.write_text(f"#!/bin/sh\necho x >> {tmp_path / 'asked'}\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("ISOFORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(script))
    assert library(torch.float32) is None
    assert library(torch.float32) is None
    assert (tmp_path / "asked").read_text() == "x\n"


@needs_compiler
def test_short_jobs_do_not_compile(float32, monkeypatch):
    """A job of a moment pays for no compiler; what is compiled already is used."""
    model = float32("gpt2")
    with torch.inference_mode():
        for there, tokens, expected in ((False, 4, False), (False, 10**6, True), (True, 4, True)):
            monkeypatch.setattr("isoform.generation.forward.built", lambda dtype, there=there: there)
            forward = Cached(model, compile="auto")
            forward._room = tokens
            assert (forward._compiled(prepare(model), 3, tokens) is not None) == expected
            never = Cached(model, compile="never")
            assert never._compiled(prepare(model), 3, 10**6) is None


@needs_compiler
def test_the_library_is_kept(monkeypatch):
    assert library(torch.float32) is not None
    assert built(torch.float32)
    assert not built(torch.float16)
    monkeypatch.setenv("ISOFORM_CACHE", os.devnull)
    assert not built(torch.float32)


@needs_compiler
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    """Each over its whole range, and NaN as NaN: the outputs of a map whose weights they are."""
    odd = [0.0, -1.0, 1.0, 4.2, -1e15, 1e15, torch.nan]
    x = torch.cat(
        [torch.linspace(-30, 30, 2001, dtype=torch.float64), torch.tensor(odd, dtype=torch.float64)]
    )
    for dtype, bound in ((torch.float32, 4e-7), (torch.float64, 1e-14)):
        given, found = x.to(dtype), torch.empty(1, len(x), dtype=dtype)
        program, one = Program(dtype, copies=False), torch.ones(1, 1, dtype=dtype)
        numbers = {"n": len(x), "m": 1, "softcap": 3.0}
        weight = given[:, None].contiguous()
        program.add("linear", "stream", "hidden", tensors=(weight, None, None), act=name, numbers=numbers)
        held = [one if b == "stream" else found for b in BUFFERS]
        buffers = (ctypes.c_void_p * len(held))(*(b.data_ptr() for b in held))
        strides = (ctypes.c_int64 * len(held))(*(b.shape[1] for b in held))
        spare = torch.empty(SPARE * len(x), dtype=dtype)
        call = Call(rows=1, threads=1, spare=spare.data_ptr(), spare_stride=len(spare))
        call.buffers, call.strides = ctypes.addressof(buffers), ctypes.addressof(strides)
        library(dtype).step(program.array(), 1, None, ctypes.byref(call))
        exact = given.double()
        expected = 3 * torch.tanh(exact / 3) if name == "softcap" else activation(name)(exact)
        assert found[0, -1].isnan()
        error = (found[0].double() - expected).abs() / expected.abs().clamp(min=1.0)
        assert float(error[:-1].max()) <= bound
