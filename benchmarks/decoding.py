"""Decoding and translation against transformers, CTranslate2 and x-transformers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import isoform as iso
from benchmarks.engine import Engine
from benchmarks.environment import version
from benchmarks.networks import EOS, Shape, decoder, in_transformers, prompts, translator
from benchmarks.timing import Row, Run, Section, agreement, in_turns
from isoform.checkpoints import Bundle
from isoform.cost import Workload
from isoform.cost.products import products
from isoform.generation.forward import Compile
from isoform.nn.products import FORMS
from isoform.optimized import optimize

BYTES = {"plain": 4, "float32": 4, "bfloat16": 2, "int8": 1, "int8_dynamic": 1}
"""Of a weight in each form."""
LEAST = 2**28
"""Bytes that are read at a time when the memory is measured: far more than caches hold."""
LIMIT = (
    "The limit is the time that the memory takes for the bytes of the weights that a token needs, measured "
    "in the same turns by a sum over a large array; a network that fits the caches may pass it."
)


def decode(shapes: list[Shape], batches: list[int], lengths: list[int], new: int, repeats: int) -> Section:
    """New tokens a second after a prompt, greedy, the end suppressed until all are made."""
    rows: list[Row] = []
    for shape in shapes:
        with _Peers(decoder(shape)) as peers:
            for length in lengths:
                for batch in batches:
                    ids = prompts(peers.bundle, batch, length)
                    case = f"{shape.name}, batch {batch}, prompt {length}"
                    rows += peers.compare(case, ids, new, 1, repeats)
            if version("x-transformers") is not None:
                rows += _x_transformers(shape, lengths[0], [b for b in batches if b <= 8], new, repeats)
    return Section(
        "Decoding",
        "tokens/s",
        rows,
        "Same weights in all rows of a case, except x-transformers: a network of the same shape with its own "
        "weights and details. Steps are compiled but where it says that they are not; compiling, once a "
        f"machine, is not counted. {LIMIT}",
    )


def translate(shape: Shape, batches: list[int], beams: list[int], new: int, repeats: int) -> Section:
    """New target tokens a second, a source of 32 tokens, greedy and beam search."""
    rows: list[Row] = []
    with _Peers(translator(shape)) as peers:
        for width in beams:
            for batch in batches:
                ids = prompts(peers.bundle, batch, 32)
                ids[:, -1] = EOS
                search = "greedy" if width == 1 else f"beam {width}"
                case = f"{shape.name}, {search}, batch {batch}"
                rows += peers.compare(case, ids, new, width, repeats)
    return Section("Translation", "tokens/s", rows, f"Sources of 32 tokens. {LIMIT}")


class _Peers:
    """One network everywhere."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._folder = tempfile.TemporaryDirectory()
        self._theirs = {"float32": in_transformers(bundle)}
        self._theirs["bfloat16"] = copy.deepcopy(self._theirs["float32"]).to(torch.bfloat16)
        self._read = _weights_read(bundle)
        self._array = torch.ones(max(self._read, LEAST // 4))
        self._forms: dict[str, Bundle] = {"plain": bundle}
        for form in FORMS:
            self._forms[form] = optimize(bundle, weights=form, max_new_tokens=2)
        self._engines: dict[str, Engine] = {}

    def __enter__(self) -> _Peers:
        if version("ctranslate2") is not None:
            folder = iso.export(self.bundle, Path(self._folder.name) / "ct2", to="ctranslate2")
            kind = "Generator" if self.bundle.config.source is None else "Translator"
            for compute in ("float32", "int8"):
                self._engines[compute] = Engine(folder, kind, compute, torch.get_num_threads())
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()
        self._folder.cleanup()

    def compare(self, case: str, ids: torch.Tensor, new: int, width: int, repeats: int) -> list[Row]:
        """All implementations in turns on one batch."""
        outputs: dict[str, list[list[int]]] = {}
        runs: dict[str, Run] = {
            f"transformers {kind}": self._transformers(kind, ids, new, width, outputs)
            for kind in self._theirs
        }
        for form, bundle in self._forms.items():
            runs[f"isoform {form}"] = _ours(bundle, ids, new, width, outputs, f"isoform {form}", "always")
        packed, eager = self._forms["float32"], "isoform float32, not compiled"
        runs[eager] = _ours(packed, ids, new, width, outputs, eager, "never")
        words = [[f"<row {i}>" for i in row] for row in ids.tolist()]
        for compute, engine in self._engines.items():
            runs[f"CTranslate2 {compute}"] = _engine(engine, words, new, width, outputs, compute)
        runs["memory"] = self._array.sum
        seconds = in_turns(runs, repeats)
        bandwidth = 4 * self._array.numel() / seconds.pop("memory")
        expected = outputs["transformers float32"]
        tokens = ids.shape[0] * new
        found: list[Row] = []
        for who, took in seconds.items():
            form = who.removeprefix("isoform ")
            limit = None
            if form in self._forms:
                limit = self._read * BYTES[form] / bandwidth * new / took
            equal = "reference" if who == "transformers float32" else agreement(outputs[who], expected)
            found.append(Row(case, who, took, tokens / took, equal, limit))
        return found

    def _transformers(
        self, kind: str, ids: torch.Tensor, new: int, width: int, outputs: dict[str, Any]
    ) -> Run:
        def run() -> None:
            with torch.inference_mode():
                found = self._theirs[kind].generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    num_beams=width,
                    do_sample=False,
                    eos_token_id=EOS,
                    pad_token_id=0,
                    bad_words_ids=None,
                    forced_eos_token_id=None,
                )
            first = ids.shape[1] if self.bundle.config.source is None else 1
            outputs[f"transformers {kind}"] = found[:, first : first + new].tolist()

        return run


def _weights_read(bundle: Bundle) -> int:
    """Weights that one more token needs: not the encoder's, and of an embedding a row."""
    source = None if bundle.config.source is None else 32
    work = Workload("decode", 1, 32, source)
    return sum(p.weights.value(p.sizes) * p.uses for p in products(bundle.config, work))


def _ours(
    bundle: Bundle,
    ids: torch.Tensor,
    new: int,
    width: int,
    outputs: dict[str, Any],
    who: str,
    compile: Compile,
) -> Run:
    search = iso.Greedy() if width == 1 else iso.Beam(width, "length", alpha=1.0)
    both = bundle.config.source is not None
    start = torch.full((len(ids), 1), bundle.protocol.start[0])

    def run() -> None:
        found = iso.generate(
            bundle.model,
            iso.Tokens(start if both else ids),
            source=iso.Tokens(ids) if both else None,
            max_new_tokens=new,
            min_new_tokens=new,
            search=search,
            eos_id=EOS,
            compile=compile,
        )
        outputs[who] = found.ids

    return run


def _engine(
    engine: Engine, words: list[list[str]], new: int, width: int, outputs: dict[str, Any], compute: str
) -> Callable[[], float]:
    def run() -> float:
        took = engine.run(words, new, width)
        outputs[f"CTranslate2 {compute}"] = engine.ids
        return took

    return run


def _x_transformers(shape: Shape, length: int, batches: list[int], new: int, repeats: int) -> list[Row]:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=shape.d_model, depth=shape.layers, heads=shape.heads)
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=shape.vocab, max_seq_len=1024, attn_layers=layers)
    ).eval()
    found: list[Row] = []
    for batch in batches:
        ids = torch.randint(3, shape.vocab, (batch, length))

        def run(ids: torch.Tensor = ids) -> None:
            with torch.inference_mode():
                model.generate(ids, new, temperature=0.0, cache_kv=True)

        took = in_turns({"x": run}, repeats)["x"]
        case = f"{shape.name}, batch {batch}, prompt {length}"
        found.append(Row(case, "x-transformers float32", took, batch * new / took, "another network"))
    return found
