"""Tokenizers come with a checkpoint and cut text as transformers does, template and special ids included."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from isoform.checkpoints import languages
from isoform.checkpoints.folder_vocabularies import find
from isoform.errors import ArtifactError

transformers = pytest.importorskip("transformers")
DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"
FAIRSEQ = "sentencepiece.bpe.model"
TEXTS = [
    "Hello, world! 123", "  two  spaces ", "it's  a\ttab\nand a line", "naïve café — œuvre", "Привет, мир!",
    "你好，世界。日本語テキスト", "مرحبا بالعالم", "हिन्दी पाठ", "emoji 👩‍👩‍👧 🎉",
    "a", "ALL CAPS and CamelCase", "1,000.50 €",
    "end of text", "ﬁne ligature ½", "\u200bzero width", "``quoted'' 9,9 in 2024, İstanbul",
    "a</s>b <unk> c<pad>", "",
]  # fmt: skip
CORPUS = [text * 3 for text in TEXTS] + ["the quick brown fox jumps over the lazy dog"] * 5


def train_pieces(folder: Path, name: str, **settings: Any) -> Path:
    import sentencepiece

    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_text("\n".join(t.replace("\n", " ") for t in CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "made"), vocab_size=420,
        character_coverage=1.0, minloglevel=2, hard_vocab_limit=False, **settings,
    )  # fmt: skip
    shutil.move(folder / "made.model", folder / name)
    (folder / "made.vocab").unlink()
    return folder


def same(folder: Path, model_type: str, theirs: Any, table: dict[str, Any] | None = None) -> Any:
    found = find(folder, model_type, table or {})
    assert found is not None
    for text in TEXTS:
        assert found.source.encode_with_template(text) == theirs(text)["input_ids"], text
    return found.source


needs_gpt2 = pytest.mark.skipif(not (DATA / "gpt2").exists(), reason="the GPT-2 vocabulary is not there")
needs_t5 = pytest.mark.skipif(not (DATA / "t5").exists(), reason="the T5 vocabulary is not there")


@needs_gpt2
def test_gpt2() -> None:
    theirs = transformers.GPT2TokenizerFast(
        str(DATA / "gpt2" / "vocab.json"), str(DATA / "gpt2" / "merges.txt")
    )
    ours = same(DATA / "gpt2", "gpt2", theirs)
    assert (ours.special.eos, ours.special.pad) == (50256, None)
    assert ours.encode("<|endoftext|>") == [50256]
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text


@needs_gpt2
def test_roberta_and_bart_put_ends_around(tmp_path: Path) -> None:
    vocab = json.loads((DATA / "gpt2" / "vocab.json").read_text(encoding="utf-8"))
    for i, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]):
        vocab[name] = len(vocab) + i - i
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    shutil.copy(DATA / "gpt2" / "merges.txt", tmp_path / "merges.txt")
    theirs = transformers.RobertaTokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    ours = same(tmp_path, "roberta", theirs)
    assert ours.encode("a <mask> b") == theirs("a <mask> b", add_special_tokens=False)["input_ids"]
    assert ours.special.pad == vocab["<pad>"]


@needs_t5
def test_t5() -> None:
    theirs = transformers.T5Tokenizer(str(DATA / "t5" / "spiece.model"), legacy=True)
    ours = same(DATA / "t5", "t5", theirs)
    assert (ours.special.pad, ours.special.eos, ours.special.unk) == (0, 1, 2)
    assert ours.encode("<extra_id_0>") == [32099]
    assert ours.vocab_size == 32100


def test_word_pieces(tmp_path: Path) -> None:
    from tokenizers import BertWordPieceTokenizer

    trainer = BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(CORPUS, vocab_size=400, show_progress=False)
    trainer.save_model(str(tmp_path))
    same(tmp_path, "bert", transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")))
    cased = {"do_lower_case": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(cased), encoding="utf-8")
    ours = same(
        tmp_path, "bert", transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=False)
    )
    assert ours.special.pad == 0
    assert "[MASK]" in ours.special.extra


def test_llama_model(tmp_path: Path) -> None:
    folder = train_pieces(
        tmp_path, "tokenizer.model", model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    theirs = transformers.LlamaTokenizer(str(folder / "tokenizer.model"), legacy=True)
    ours = same(folder, "llama", theirs)
    assert (ours.special.bos, ours.special.eos, ours.special.unk) == (1, 2, 0)
    assert ours.template.prefix == (1,)


def test_llama_tokens_beyond_the_model(tmp_path: Path) -> None:
    """Chat tokens, which only ``added_tokens.json`` or the settings number."""
    folder = train_pieces(tmp_path, "tokenizer.model", model_type="bpe", byte_fallback=True)
    theirs = transformers.LlamaTokenizer(str(folder / "tokenizer.model"), legacy=True)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    theirs.save_pretrained(folder)
    ours = same(folder, "llama", theirs)
    text = "<|im_start|>Hello</s>world<|im_end|>"
    assert ours.encode_with_template(text) == theirs(text)["input_ids"]
    assert ours.special.extra["<|im_end|>"] == len(theirs.sp_model) + 1


SPLIT = [
    "</s>Hello</s>world </s> x",
    "a</s>",
    "</s>",
    " </s>a",
    "▁a ▁</s>▁b",
    "a<extra_id_0>b <extra_id_1> c",
]


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_no_word_boundary_after_special_tokens(family: str, spaces: bool, tmp_path: Path) -> None:
    """``legacy=False``: only where a text begins, unless it begins with a special token."""
    own = T5_IDS if family == "t5" else {"byte_fallback": True, "remove_extra_whitespaces": False}
    file, cls = ("spiece.model", "T5Tokenizer") if family == "t5" else ("tokenizer.model", "LlamaTokenizer")
    kind = "unigram" if family == "t5" else "bpe"
    folder = train_pieces(tmp_path / "plain", file, model_type=kind, **own)
    theirs = getattr(transformers, cls)(str(folder / file), legacy=False, add_prefix_space=spaces)
    theirs.save_pretrained(tmp_path / "saved")
    ours = same(tmp_path / "saved", family, theirs)
    for text in SPLIT:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    for text in ("Hello world", "a b</s>c"):
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special=False) == text
    ours.save(tmp_path / "saved", "ours")
    saved = type(ours).load(tmp_path / "saved", "ours")
    assert saved.digest == ours.digest
    assert saved.encode(SPLIT[0]) == ours.encode(SPLIT[0])


def test_no_word_boundary_at_all(tmp_path: Path) -> None:
    """``add_prefix_space`` false, as the quick class of the library does it for either ``legacy``."""
    folder = train_pieces(
        tmp_path / "plain", "tokenizer.model", model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    theirs = transformers.LlamaTokenizerFast(
        str(folder / "tokenizer.model"), legacy=True, add_prefix_space=False, from_slow=True
    )
    settings = {"legacy": True, "add_prefix_space": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    same(folder, "llama", theirs)


# Pieces by the family that trained them, and the model's own special pieces.
T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ALBERT_IDS = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": "[CLS],[SEP],[MASK]"}
PIECES: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "t5": ("t5", "T5Tokenizer", "spiece.model", T5_IDS, {"legacy": True, "extra_ids": 7}),
    "mt5": ("mt5", "T5Tokenizer", "spiece.model", T5_IDS, {"legacy": True, "extra_ids": 0}),
    "pegasus": ("pegasus", "PegasusTokenizer", "spiece.model", T5_IDS, {}),
    "pegasus-offset": ("pegasus", "PegasusTokenizer", "spiece.model", T5_IDS, {"offset": 9}),
    "albert": ("albert", "AlbertTokenizer", "spiece.model", ALBERT_IDS, {}),
    "albert-cased": (
        "albert", "AlbertTokenizer", "spiece.model", ALBERT_IDS,
        {"do_lower_case": False, "keep_accents": True, "remove_space": False},
    ),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaTokenizer", "sentencepiece.bpe.model", {}, {}),
    "mbart": ("mbart", "MBartTokenizer", "sentencepiece.bpe.model", {}, {}),
    "mbart-german": ("mbart", "MBartTokenizer", "sentencepiece.bpe.model", {}, {"src_lang": "de_DE"}),
    "mbart-50": ("mbart", "MBart50Tokenizer", "sentencepiece.bpe.model", {}, {"src_lang": "gl_ES"}),
    "nllb": ("m2m_100", "NllbTokenizer", "sentencepiece.bpe.model", {}, {"src_lang": "swh_Latn"}),
    "nllb-first": (
        "m2m_100", "NllbTokenizer", "sentencepiece.bpe.model", {},
        {"src_lang": "swh_Latn", "legacy_behaviour": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PIECES)
def test_piece_models(case: str, tmp_path: Path) -> None:
    """A model alone, and with the settings that the library's own class writes beside it."""
    family, cls, file, own, settings = PIECES[case]
    folder = train_pieces(tmp_path / "plain", file, model_type="unigram", **own)
    theirs = getattr(transformers, cls)(str(folder / file), **settings)
    theirs.save_pretrained(tmp_path / "saved")
    ours = same(tmp_path / "saved", family, theirs)
    for part in ("pad", "bos", "eos", "unk"):
        number = getattr(ours.special, part)
        assert getattr(theirs, f"{part}_token_id") in (number, None), part
    for name, number in ours.special.extra.items():
        assert theirs.convert_tokens_to_ids(name) == number, name
        assert ours.encode(f"a {name} b") == theirs(f"a {name} b", add_special_tokens=False)["input_ids"]
    assert ours.vocab_size == len(theirs)
    if not settings and family != "m2m_100":
        assert same(folder, family, theirs).digest == ours.digest


def test_languages_of_nllb_where_no_file_numbers_them(tmp_path: Path) -> None:
    """In fairseq's order, the mask last, as in the published tables (256,001 to 256,203)."""
    folder = train_pieces(tmp_path, "sentencepiece.bpe.model", model_type="unigram")
    found = find(folder, "m2m_100", {})
    assert found is not None
    extra, size = found.source.special.extra, len(transformers.NllbTokenizer(str(folder / FAIRSEQ)).sp_model)
    assert (extra["ace_Arab"], extra["zul_Latn"], extra["<mask>"]) == (size + 1, size + 202, size + 203)
    assert found.source.template.prefix == (extra["eng_Latn"],)


@pytest.mark.parametrize("codes", ["m2m100", "wmt21"])
def test_m2m100(codes: str, tmp_path: Path) -> None:
    import sentencepiece

    folder = train_pieces(tmp_path, FAIRSEQ, model_type="unigram")
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / FAIRSEQ))
    pieces = [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    kept = ["<s>", "<pad>", "</s>", "<unk>", *reversed(pieces[:-20])]
    (folder / "vocab.json").write_text(json.dumps({n: i for i, n in enumerate(kept)}), encoding="utf-8")
    language = "sw" if codes == "m2m100" else "ha"
    settings = {"src_lang": language, "language_codes": codes}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    listed = [f"__{code}__" for code in (languages.M2M100 if codes == "m2m100" else languages.WMT21)]
    theirs = transformers.M2M100Tokenizer(
        str(folder / "vocab.json"), str(folder / FAIRSEQ), additional_special_tokens=listed, **settings
    )
    ours = same(folder, "m2m_100", theirs)
    assert ours.template.prefix == (theirs.get_lang_id(language),)
    for code, number in theirs.lang_token_to_id.items():
        assert ours.special.extra[code] == number
    assert ours.encode("a __de__ b") == theirs("a __de__ b", add_special_tokens=False)["input_ids"]
    (folder / "tokenizer_config.json").write_text('{"src_lang": "xx"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match="no token __xx__ for the source language"):
        find(folder, "m2m_100", {})


def test_models_without_their_special_pieces(tmp_path: Path) -> None:
    folder = train_pieces(tmp_path, "spiece.model", model_type="unigram")
    for family, message in (
        ("t5", r"spiece\.model: no piece <pad>"), ("albert", r"spiece\.model: no piece <pad>"),
        ("pegasus", "its first pieces are not <pad>, </s> and <unk>"),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match=message):
            find(folder, family, {})


def marian_files(folder: Path, numbered: bool = False) -> Any:
    """A model for both sides; one table of ids, or one for each."""
    import sentencepiece

    train_pieces(folder, "source.spm", model_type="unigram")
    shutil.copy(folder / "source.spm", folder / "target.spm")
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    pieces = [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    vocab = {name: i for i, name in enumerate(["</s>", "<unk>", ">>de<<", *reversed(pieces), "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    settings: dict[str, Any] = {}
    if numbered:
        target = {name: i for i, name in enumerate(["</s>", "<unk>", *pieces, ">>de<<", "<pad>"])}
        (folder / "target_vocab.json").write_text(json.dumps(target), encoding="utf-8")
        settings = {"separate_vocabs": True, "target_vocab_file": str(folder / "target_vocab.json")}
    files = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    theirs = transformers.MarianTokenizer(*files, **settings)
    theirs.normalizer = None
    theirs.punc_normalizer = lambda text: text
    return theirs


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("numbered", [False, True])
def test_marian_models(numbered: bool, tmp_path: Path) -> None:
    theirs = marian_files(tmp_path, numbered)
    ours = same(tmp_path, "marian", theirs)
    assert ours.encode_with_template(">>de<< Hello")[0] == theirs.encoder[">>de<<"]
    assert ours.special.eos == 0
    found = find(tmp_path, "marian", {})
    assert found is not None
    for text in ("Hello, world!", "naïve café", "你好"):
        assert found.target.encode_with_template(text) == theirs(text_target=text)["input_ids"]


def m2m100_files(folder: Path) -> Any:
    """Ids from ``vocab.json``, in another order than the model's."""
    import sentencepiece

    train_pieces(folder, FAIRSEQ, model_type="unigram")
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / FAIRSEQ))
    pieces = [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    kept = ["<s>", "<pad>", "</s>", "<unk>", *reversed(pieces[:-20])]
    (folder / "vocab.json").write_text(json.dumps({n: i for i, n in enumerate(kept)}), encoding="utf-8")
    listed = [f"__{code}__" for code in languages.M2M100]
    return transformers.M2M100Tokenizer(
        str(folder / "vocab.json"), str(folder / FAIRSEQ), additional_special_tokens=listed
    )


TINY = {
    "d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 90,
    "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5", "ForConditionalGeneration", {
        "d_model": 12, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}),
    "pegasus": ("Pegasus", "ForConditionalGeneration", {
        **TINY, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}),
    "albert": ("Albert", "ForMaskedLM", {
        "embedding_size": 8, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 8, "bos_token_id": 2, "eos_token_id": 3}),
    "mbart": ("MBart", "ForConditionalGeneration", TINY),
    "mbart-50": ("MBart", "ForConditionalGeneration", TINY),
    "nllb": ("M2M100", "ForConditionalGeneration", TINY),
    "m2m100": ("M2M100", "ForConditionalGeneration", TINY),
    "marian": ("Marian", "MTModel", {**TINY, "eos_token_id": 0, "forced_eos_token_id": None}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("case", NETWORKS)
def test_a_checkpoint_with_its_tokenizer_there_and_back(case: str, tmp_path: Path) -> None:
    """Text in, text out as the library's; written again, its own class reads the same ids."""
    from isoform.checkpoints import export, load

    if case == "marian":
        theirs = marian_files(tmp_path / "files")
    elif case == "m2m100":
        theirs = m2m100_files(tmp_path / "files")
    else:
        _, cls, file, own, settings = PIECES[case]
        folder = train_pieces(tmp_path / "files", file, model_type="unigram", **own)
        theirs = getattr(transformers, cls)(str(folder / file), **settings)
    name, kind, settings = NETWORKS[case]
    config = getattr(transformers, f"{name}Config")(vocab_size=len(theirs) + 2, **settings)
    if case == "marian":
        config.pad_token_id = config.decoder_start_token_id = theirs.pad_token_id
    extra = {"mbart": "ro_RO", "mbart-50": "ro_RO", "nllb": "fra_Latn", "m2m100": "__fr__"}
    torch.manual_seed(0)
    hf = getattr(transformers, name + kind)(config).double().eval()
    if case in extra:
        hf.generation_config.forced_bos_token_id = theirs.convert_tokens_to_ids(extra[case])
    for part in (hf, theirs):
        part.save_pretrained(tmp_path / "in")
    bundle = load(tmp_path / "in")
    if case != "albert":
        texts = ["Hello, world!", "你好 naïve"]
        batch = theirs(texts, return_tensors="pt", padding=True)
        ids = hf.generate(**batch, max_new_tokens=6, do_sample=False, num_beams=1)
        rows = [[i for i in row if i not in bundle.protocol.eos_ids] for row in ids[:, 1:].tolist()]
        assert bundle.tokenizer is not None
        expected = [bundle.tokenizer.decode(row) for row in rows]
        assert bundle.generate(texts, max_new_tokens=6) == expected
    export(bundle, tmp_path / "out")
    back = load(tmp_path / "out")
    assert back.protocol == bundle.protocol
    again = type(theirs).from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert again(text)["input_ids"] == theirs(text)["input_ids"], text
    for a, b in ((back.tokenizer, bundle.tokenizer), (back.source_tokenizer, bundle.source_tokenizer)):
        assert (None if a is None else a.digest) == (None if b is None else b.digest)
    if case in extra:
        code = {"mbart": "cs_CZ", "mbart-50": "cs_CZ", "nllb": "ces_Latn", "m2m100": "__cs__"}[case]
        number = theirs.convert_tokens_to_ids(code)
        theirs.src_lang = code.strip("_")
        protocol = bundle.protocol.replace(
            source_prefix=tuple(theirs.prefix_tokens), source_suffix=tuple(theirs.suffix_tokens)
        )
        assert number in (*protocol.source_prefix, *protocol.source_suffix)
        export(dataclasses.replace(bundle, protocol=protocol), tmp_path / "czech")
        assert load(tmp_path / "czech").protocol == protocol


def test_tokenizer_json_with_its_template(tmp_path: Path) -> None:
    from tokenizers import BertWordPieceTokenizer

    trainer = BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(CORPUS, vocab_size=400, show_progress=False)
    trainer.save_model(str(tmp_path))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "fast")
    ours = same(tmp_path / "fast", "bert", transformers.AutoTokenizer.from_pretrained(tmp_path / "fast"))
    assert ours.template.prefix == (2,)
    assert ours.template.suffix == (3,)


def test_damaged_and_absent(tmp_path: Path) -> None:
    assert find(tmp_path, "llama", {}) is None
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: not a tokenizer\.json"):
        find(tmp_path, "llama", {})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"nothing of the kind")
    with pytest.raises(ArtifactError, match="not a SentencePiece model"):
        find(tmp_path, "llama", {})
