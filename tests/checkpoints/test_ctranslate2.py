"""CTranslate2 folders written through the engine's classes, opened again, and run by the engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform import config as c
from isoform.checkpoints import Bundle, export, load
from isoform.checkpoints.checked import Checked
from isoform.config import presets
from isoform.config.protocol import Protocol
from isoform.errors import ArtifactError, CheckError, IsoformError
from isoform.generation import Beam, generate
from isoform.nn import build
from isoform.tokens import Tokens

library = pytest.importorskip("ctranslate2")

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SIZES = {"d_model": 16, "n_heads": 4, "ffn_width": 24}
TWO = {"n_encoder_layers": 2, "n_decoder_layers": 1}
PROTOCOL = Protocol(pad_id=0, eos_ids=(2,), start=(1,), source_suffix=(2,))
NTK = c.DynamicNtkScaling(factor=2.0, original_length=8)
ALONE = Protocol(pad_id=0, eos_ids=(2,), start=(1,))


def llama(**changes: Any) -> c.ModelConfig:
    base = presets.llama(40, **SIZES, n_kv_heads=2, n_layers=2, eps=1e-4)
    return base.replace(**changes) if changes else base


CONFIGS: dict[str, c.ModelConfig] = {
    "original": presets.original(40, **SIZES, **TWO, eps=1e-4),
    "two vocabularies": presets.pre_ln(40, source_vocab_size=30, shared_vocabulary=False, **SIZES, **TWO),
    "t5": presets.t5(40, d_model=16, n_heads=4, head_width=6, ffn_width=24, n_layers=2),
    "t5 gated": presets.t5(
        40, d_model=16, n_heads=2, head_width=8, ffn_width=20, n_layers=2, gated_activation="gelu_tanh",
        tied=False,
    ),
    "bart": presets.bart(40, **SIZES, n_layers=2, max_positions=20),
    "m2m100": presets.m2m100(40, **SIZES, n_layers=2),
    "marian": presets.marian(40, **SIZES, n_layers=2),
    "gpt2": presets.gpt2(40, **SIZES, n_layers=2, max_positions=20),
    "llama": llama(),
    "llama, interleaved, scaled": llama(
        decoder__layer__attention__positions__layout="interleaved",
        decoder__layer__attention__positions__scaling=c.LinearScaling(factor=3.0),
        decoder__layer__attention__scale=0.7,
        head__softcap=4.0,
        embedding__scale=1.5,
    ),
    "qwen3": presets.qwen3(40, **SIZES, n_kv_heads=2, head_width=6, n_layers=2),
    "gemma": presets.gemma(40, **SIZES, n_layers=2),
    "gpt_neox": presets.gpt_neox(40, d_model=32, n_heads=2, ffn_width=24, n_layers=2),
    "phi": presets.phi(40, d_model=16, n_heads=2, ffn_width=24, n_layers=2),
    "bloom": presets.bloom(40, d_model=16, n_heads=4, n_layers=2),
}  # fmt: skip


def bundle_of(cfg: c.ModelConfig, protocol: Protocol | None = None) -> Bundle:
    model = build(cfg, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.2)
    if protocol is None:
        protocol = ALONE if cfg.source is None else PROTOCOL
    return Bundle(model, cfg, None, None, protocol, {})


@pytest.mark.parametrize("name", CONFIGS)
def test_written_opened_and_run(name: str, tmp_path: Path) -> None:
    bundle = bundle_of(CONFIGS[name])
    back = load(export(bundle, tmp_path / "out", to="ctranslate2"))
    figures = Checked.read(tmp_path / "out")
    assert figures.engine is not None and figures.probe is not None
    assert figures.engine.difference < 1e-5
    assert figures.engine.scores >= 15
    assert figures.probe.worst_layer[1] < 1e-6
    assert back.protocol == bundle.protocol
    mine = dict(bundle.model.named_parameters())
    for key, tensor in back.model.named_parameters():
        assert torch.equal(tensor, mine[key][-tensor.shape[0] :]), key
    assert [set(group) for group in back.model.tied()] == [set(group) for group in bundle.model.tied()]
    # What it wrote, it writes again: every byte.
    export(back, tmp_path / "again", to="ctranslate2")
    for file in ("model.bin", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


@pytest.mark.parametrize("source", [True, False])
def test_the_check_leaves_pytorch_its_threads(source: bool, tmp_path: Path) -> None:
    """The engine and PyTorch share one pool: what the engine is given would stay after it."""
    name = next(name for name, cfg in CONFIGS.items() if (cfg.source is not None) == source)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        export(bundle_of(CONFIGS[name]), tmp_path / "out", to="ctranslate2")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays(dtype: torch.dtype, tmp_path: Path) -> None:
    back = load(export(bundle_of(CONFIGS["bart"]).to(dtype=dtype), tmp_path / "out", to="ctranslate2"))
    assert {p.dtype for p in back.model.parameters()} == {dtype}


def test_greedy_and_beam_as_the_engine_does(tmp_path: Path) -> None:
    bundle = bundle_of(CONFIGS["marian"])
    with torch.no_grad():
        bundle.model.head.bias[2] -= 100.0  # so that no output ends, whatever the random weights
    export(bundle, tmp_path / "out", to="ctranslate2")
    engine = library.Translator(str(tmp_path / "out"), compute_type="float32", intra_threads=1)
    words = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text(encoding="utf-8"))
    rows = [[5, 9, 33, 7], [11, 4], [38, 20, 21, 22, 23, 6]]
    found = engine.translate_batch(
        [[words[i] for i in row] for row in rows], beam_size=3, num_hypotheses=3, return_scores=True,
        max_decoding_length=12, length_penalty=1,
    )  # fmt: skip
    source = Tokens.from_lists([[*row, 2] for row in rows], pad_id=0)
    ours = generate(
        bundle.model, Tokens(torch.ones(3, 1, dtype=torch.long)), source=source, max_new_tokens=12,
        protocol=bundle.protocol,
        search=Beam(3, length_penalty="length", n_best=3, early_stopping="when_full"),
    )  # fmt: skip
    for mine, theirs in zip(ours.hypotheses, found, strict=True):
        assert [h.ids for h in mine] == [[words.index(w) for w in h] for h in theirs.hypotheses]
        # The engine's incremental decoding rounds more coarsely than its own scoring.
        assert [h.score for h in mine] == pytest.approx(theirs.scores, abs=5e-4)
    best = [h[0] for h in ours.hypotheses]
    scored = engine.score_batch(
        [[words[i] for i in row] for row in rows], [[words[i] for i in h.ids] for h in best]
    )
    for h, found_again in zip(best, scored, strict=True):
        assert len(h.ids) == 12, "none of them ends, so the end is not part of the score"
        assert h.score == pytest.approx(sum(found_again.log_probs[:-1]) / len(h.ids), abs=1e-6)


@pytest.mark.skipif(not (DATA / "ct2-aren-transliteration").exists(), reason=f"no checkpoint at {DATA}")
def test_a_version_2_binary_becomes_a_version_6_one(tmp_path: Path) -> None:
    folder = DATA / "ct2-aren-transliteration"
    bundle = load(folder)
    back = load(export(bundle, tmp_path / "new", to="ctranslate2"))
    assert back.protocol == bundle.protocol
    for (name, a), b in zip(bundle.model.named_parameters(), back.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    words = ["محمد", "القاهرة", "عبدالله", "م"]
    answers = [
        library.Translator(str(place), compute_type="float32", intra_threads=1).translate_batch(
            [list(word) for word in words], beam_size=4, return_scores=True
        )
        for place in (folder, tmp_path / "new")
    ]
    for old, new in zip(*answers, strict=True):
        assert old.hypotheses == new.hypotheses
        assert old.scores == new.scores
    assert back.generate(words, search=Beam(4, length_penalty="length")) == [
        "".join(answer.hypotheses[0]) for answer in answers[1]
    ]


def test_what_the_engine_takes_at_each_call_is_said(tmp_path: Path) -> None:
    protocol = Protocol(
        pad_id=0, eos_ids=(2, 5), start=(1, 7), forced=((0, 9),), suppressed=(0,), source_prefix=(3,),
        source_suffix=(2,),
    )  # fmt: skip
    back = load(export(bundle_of(CONFIGS["marian"], protocol), tmp_path / "out", to="ctranslate2"))
    assert back.protocol == protocol
    engine = Checked.read(tmp_path / "out").engine
    assert engine is not None
    assert engine.arguments == {
        "target_prefix": [[7, 9]], "suppress_sequences": [[0]], "end_token": [2, 5],
    }  # fmt: skip
    assert engine.lines()[-1].startswith("the engine's calls need: target_prefix=[[7, 9]]")


def test_another_function_does_not_pass(tmp_path: Path) -> None:
    from isoform.checkpoints.ctranslate2.engine import check

    bundle = bundle_of(CONFIGS["llama"])
    folder = export(bundle, tmp_path / "out", to="ctranslate2")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with torch.no_grad():
        bundle.model.decoder.final_norm.weight[3] += 0.2
    with pytest.raises(CheckError, match="log-probabilities differ by"):
        check(library, bundle, folder, settings)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (presets.bert(40, **SIZES, n_layers=1), "encoder: written are decoders and encoder–decoders"),
        (llama(decoder__layer__attention__softcap=5.0), "softcap: scores are not capped"),
        (llama(decoder__layer__attention__window=5), "decoder.layer.attention.window"),
        (llama(decoder__layer__residual_scale=0.5), "decoder.layer.residual_scale"),
        (llama(decoder__layer__placement="sandwich"), "layer.placement: 'sandwich' is not one of pre, post"),
        (llama(decoder__visibility="prefix"), "decoder.visibility: a decoder is causal"),
        (llama(decoder__layer__feed_forward__activation="mish"), "'mish' is not one of relu, gelu_tanh"),
        (
            llama(decoder__layer__attention__positions__scaling=NTK),
            "positions.scaling: dynamic_ntk is not one of none, linear",
        ),
        (llama(decoder__final_norm__eps=1e-3), r"decoder\.final_norm\.eps would become 0\.0001"),
        (
            presets.qwen2(40, **SIZES, n_kv_heads=2, n_layers=1).replace(
                decoder__layer__attention__bias__key=False
            ),
            "bias: query, key and value have biases together",
        ),
        (presets.mixtral(40, **SIZES, n_kv_heads=2, n_layers=1), "layer.feed_forward.kind|window"),
        (presets.gemma2(40, **SIZES, n_kv_heads=2, n_layers=2), "decoder.variants: all layers are of one"),
        (presets.torch_nn(40, **SIZES, **TWO), "final_norm: there is none after norms in post placement"),
    ],
)  # fmt: skip
def test_what_the_format_cannot_say(cfg: c.ModelConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"cannot say this configuration: .*({message})") as caught:
        export(bundle_of(cfg), tmp_path / "out", to="ctranslate2")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_float64_and_no_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no float64"):
        export(bundle_of(llama()).to(dtype=torch.float64), tmp_path / "out", to="ctranslate2")
    with pytest.raises(ArtifactError, match=r"needs an end token: protocol\.eos_ids is empty"):
        export(bundle_of(llama(), Protocol(pad_id=0, eos_ids=())), tmp_path / "out", to="ctranslate2")


def test_the_library_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ArtifactError, match=r"pip install 'isoform\[ctranslate2\]'"):
        export(bundle_of(llama()), tmp_path / "out", to="ctranslate2")


class TestDamaged:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return export(bundle_of(llama()), tmp_path / "out", to="ctranslate2")

    def test_truncated(self, folder: Path) -> None:
        path = folder / "model.bin"
        path.write_bytes(path.read_bytes()[:-7])
        with pytest.raises(ArtifactError, match="truncated, or not a CTranslate2 binary"):
            load(folder)

    def test_an_unknown_number(self, folder: Path) -> None:
        path = folder / "model.bin"
        path.write_bytes(path.read_bytes().replace(b"decoder/scale_alibi", b"decoder/scale_blibi"))
        with pytest.raises(ArtifactError, match=r"not understood.*: decoder\.scale_blibi"):
            load(folder)

    def test_a_short_vocabulary(self, folder: Path) -> None:
        (folder / "vocabulary.json").write_text('["a", "b"]', encoding="utf-8")
        with pytest.raises(ArtifactError, match="the target vocabulary has 2 lines, its table 40 rows"):
            load(folder)

    def test_an_unknown_token(self, folder: Path) -> None:
        path = folder / "config.json"
        table = json.loads(path.read_text(encoding="utf-8"))
        table.pop("isoform")
        path.write_text(json.dumps({**table, "eos_token": "nowhere"}), encoding="utf-8")
        with pytest.raises(ArtifactError, match="eos_token 'nowhere' is not in the vocabulary"):
            load(folder)


def test_a_damaged_binary_is_one_line_or_a_network(tmp_path: Path) -> None:
    """A byte changed, or everything after it gone."""
    folder = export(bundle_of(CONFIGS[next(iter(CONFIGS))]), tmp_path / "out", to="ctranslate2")
    raw = (folder / "model.bin").read_bytes()
    refused = 0
    for place in range(0, 3000, 61):
        for damaged in (raw[:place], raw[:place] + bytes([raw[place] ^ 0x5A]) + raw[place + 1 :]):
            (folder / "model.bin").write_bytes(damaged)
            try:
                load(folder)
            except IsoformError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused >= 50  # every one that ends early
