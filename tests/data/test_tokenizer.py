"""R44: tokenizers trained from text or brought along; special ids are explicit."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoform.data import BytesBpe, Characters, SpecialIds, Specials, Template, Tokenizer, Unigram, Words
from isoform.data.train_tokenizer import LONGEST_RUN, _cut
from isoform.errors import TokenizerError

SHARED = Path(__file__).parents[3] / "shared" / "data"
TEXTS = [
    "the cat sat on the mat",
    "  the dog sat, too:  2021",
    "größer → 日本語 ไทย 🙂👩‍👩‍👧 e\u0301 \u202f",
    "line one\nline two\n\n",
    "the end of the cat",
]
ODD = [
    "",
    " ",
    "  leading",
    "trailing  ",
    "e\u0301 \u0e01\u0e47",
    "👩‍👩‍👧🙂",
    "שלום مرحبا",
    "a\r\n\tb",
    "\x00\ufeff",
]


def make(config: Any, texts: list[str] = TEXTS) -> Tokenizer:
    return Tokenizer.train(config, texts, where="texts")


CONFIGS: list[Any] = [
    Characters(),
    Words(),
    BytesBpe(vocab_size=300, min_frequency=1),
    Unigram(vocab_size=70),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_specials_are_there_and_stay_out_of_text(config: Any) -> None:
    tokenizer = make(config)
    special = tokenizer.special
    assert {tokenizer.token(i) for i in special.named().values()} >= {"<pad>", "<s>", "</s>"}
    assert len(set(special.named().values())) == len(special.named())
    ids = tokenizer.encode("the cat</s><pad>")
    assert special.eos not in ids
    assert special.pad not in ids
    assert tokenizer.encode("the cat") == tokenizer.encode_batch(["x", "the cat"])[1]


def test_tokens_are_shown_as_the_text_they_are() -> None:
    """A byte-level vocabulary has its own alphabet, which nobody can read beyond ASCII."""
    tokenizer = make(BytesBpe(vocab_size=300, min_frequency=1))
    text = "größer → 日本語 🙂"
    shown = [tokenizer.shown(i) for i in tokenizer.encode(text)]
    assert "".join(shown).replace(" ", "") != text.replace(" ", "")  # some characters are cut into bytes
    pieces = re.split("((?:<[0-9a-f]{2}>)+)", "".join(shown))
    whole = [bytes.fromhex(p[1:-1].replace("><", "")).decode() if p.startswith("<") else p for p in pieces]
    assert "".join(whole) == text
    for number in tokenizer.special.named().values():
        assert tokenizer.shown(number) == tokenizer.token(number)
    letters = make(Characters())
    assert [letters.shown(i) for i in letters.encode("Ġö")] == [
        letters.token(i) for i in letters.encode("Ġö")
    ]
    with pytest.raises(TokenizerError, match="is not in the vocabulary"):
        tokenizer.shown(tokenizer.vocab_size)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_the_same_text_gives_the_same_vocabulary(config: Any) -> None:
    first, second = make(config), make(config)
    assert first.digest == second.digest
    assert first.digest != make(config, [*TEXTS, "quite another zebra zebra"]).digest


PROGRAM = """
import sys
import isoform.data
print([m for m in ('tokenizers', 'sentencepiece', 'babel', 'rich.progress') if m in sys.modules])
from isoform.data import BytesBpe, Tokenizer, Unigram
texts = [" ".join(chr(97 + (i * j * j + j) % 23) * (1 + (i + j) % 3) for j in range(9)) for i in range(300)]
for config in (Unigram(vocab_size=90), BytesBpe(vocab_size=330)):
    print(Tokenizer.train(config, texts, where="").digest)
"""


def test_another_process_learns_the_same_and_the_face_is_light() -> None:
    there = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(PROGRAM, {})
    assert there.split("\n")[0] == "[]"
    assert there.split("\n")[1:] == here.getvalue().split("\n")[1:]
    assert len(there.split()) == 3


@pytest.mark.parametrize("text", [*TEXTS, *ODD])
def test_bytes_bpe_gives_every_text_back(text: str) -> None:
    for digits in ("merged", "single"):
        tokenizer = make(BytesBpe(vocab_size=280, min_frequency=1, digits=digits))
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_bpe_gives_any_text_back(text: str) -> None:
    tokenizer = make(BytesBpe(vocab_size=270, min_frequency=1))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [*TEXTS, *ODD])
def test_characters_give_known_text_back(text: str) -> None:
    tokenizer = make(Characters(), [*TEXTS, *ODD])
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_unigram_gives_known_text_back(text: str) -> None:
    tokenizer = make(Unigram(vocab_size=90))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words() -> None:
    tokenizer = make(Words(), ["B AW1 T", "K AW1 Z"])
    assert tokenizer.decode(tokenizer.encode("K  AW1\tT")) == "K AW1 T"
    assert tokenizer.encode("Q AW1") == [tokenizer.special.unk, tokenizer.id("AW1")]
    assert tokenizer.decode(tokenizer.encode("Q AW1")) == "<unk> AW1"


def test_unknown_characters() -> None:
    tokenizer = make(Characters(vocab_size=4 + 3), ["aaabbbcccd"])
    assert tokenizer.vocab_size == 7
    assert tokenizer.encode("ad") == [tokenizer.id("a"), tokenizer.special.unk]


def test_single_digits() -> None:
    texts = ["2021 2021 2021"]
    merged = make(BytesBpe(vocab_size=300, min_frequency=1), texts)
    single = make(BytesBpe(vocab_size=300, min_frequency=1, digits="single"), texts)
    assert len(merged.encode("2021")) == 1
    assert len(single.encode("2021")) == 4


def test_normalization_and_case_belong_to_the_tokenizer() -> None:
    tokenizer = make(Characters(normalization="NFKC", lowercase=True), ["ﬁne"])
    assert tokenizer.decode(tokenizer.encode("FIN")) == "fin"
    plain = make(Characters(), ["ﬁne"])
    assert plain.encode("fi") == [plain.special.unk] * 2
    composed = make(Characters(normalization="NFC"), ["e\u0301"])
    assert len(composed.encode("e\u0301")) == 1


def test_extra_tokens_are_atomic_and_teach_nothing() -> None:
    specials = Specials(unk=None, extra=(">>de<<", ">>iso<<"))
    texts = [">>de<< a b", ">>iso<< c d"] * 5
    tokenizer = make(BytesBpe(vocab_size=400, min_frequency=1, specials=specials), texts)
    ids = tokenizer.encode(">>de<< a")
    assert ids[0] == tokenizer.special.extra[">>de<<"]
    assert tokenizer.decode(ids) == " a"
    assert tokenizer.decode(ids, skip_special=False) == ">>de<< a"
    learned = {tokenizer.token(i) for i in range(256, tokenizer.vocab_size)}
    assert not any(">>" in token or "iso" in token for token in learned - set(specials.extra))


@pytest.mark.parametrize("config", [BytesBpe(vocab_size=270), Unigram(vocab_size=60)])
def test_endless_words_are_cut_before_a_trainer_sees_them(config: Any) -> None:
    text = "ab" * 5000
    cut = [text[i : i + LONGEST_RUN] for i in range(0, len(text), LONGEST_RUN)]
    lines = [*TEXTS, "short " * 1000]
    assert make(config, [*lines, text]).digest == make(config, [*lines, *cut]).digest
    assert "".join(_cut([text, " " * 5001, "a b " * 2000])) == text + " " * 5001 + "a b " * 2000
    assert max(map(len, _cut([text, " " * 5001]))) <= LONGEST_RUN
    assert list(_cut(["a b " * 2000])) == ["a b " * 2000]


def test_max_texts_takes_some_of_them() -> None:
    few = make(Characters(max_texts=2), ["a", "b", "c", "d"])
    assert few.encode("ac") == [few.id("a"), few.id("c")]
    assert few.encode("b") == [few.special.unk]


@pytest.mark.parametrize(
    ("config", "texts", "message"),
    [
        (Characters(), [""], "no text"),
        (BytesBpe(vocab_size=300), [], "no text"),
        (Unigram(vocab_size=30), [""], "no text"),
        (BytesBpe(vocab_size=258), ["a"], "vocab_size 258 is too small: 3 special"),
        (Characters(vocab_size=4), ["a"], "too small"),
        (Unigram(vocab_size=6), ["abcdefghijkl mnop"], "pieces can be made: Vocabulary size is smaller"),
        (Words(), ["a <pad> b"], "'<pad>' is also an ordinary token"),
        (Words(), ["a <unk> b"], "'<unk>' also stands in the text"),
        (Characters(specials=Specials(bos="a")), ["a"], "'a' is also an ordinary"),
    ],
)
def test_refused_training(config: Any, texts: list[str], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        make(config, texts)


def test_ids_out_of_the_vocabulary() -> None:
    tokenizer = make(Characters(), ["ab"])
    with pytest.raises(TokenizerError, match="id 6 is not in the vocabulary of 6"):
        tokenizer.decode([1, 6])
    with pytest.raises(TokenizerError, match="id 9"):
        tokenizer.token(9)
    with pytest.raises(TokenizerError, match="no token '<bad>'; did you mean '<pad>'"):
        tokenizer.id("<bad>")
    with pytest.raises(TokenizerError, match="no <mask> token"):
        tokenizer.special.require("<mask>")


def test_special_ids_refuse_clashes() -> None:
    with pytest.raises(TokenizerError, match="pad is never eos"):
        SpecialIds(pad=2, eos=2)
    with pytest.raises(TokenizerError, match="so is another"):
        SpecialIds(pad=2, unk=2)
    SpecialIds(bos=1, eos=1)  # GPT-2 has one token for both
    tokenizer = make(Characters(), ["ab"])
    with pytest.raises(TokenizerError, match="eos has id 77"):
        Tokenizer(tokenizer.backend, SpecialIds(eos=77))


def test_template_is_put_around_and_not_in_the_digest() -> None:
    tokenizer = make(Characters(), ["ab"])
    special = tokenizer.special
    assert special.bos is not None and special.eos is not None
    around = tokenizer.with_template(Template((special.bos,), (special.eos,)))
    assert around.encode_with_template("a") == [special.bos, tokenizer.id("a"), special.eos]
    assert around.encode("a") == tokenizer.encode_with_template("a") == [tokenizer.id("a")]
    assert around.digest == tokenizer.digest


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kind)
def test_save_and_load(config: Any, tmp_path: Path) -> None:
    tokenizer = make(config).with_template(Template((), (3,)))
    files = tokenizer.save(tmp_path, "source")
    assert sorted(file.name for file in files) == sorted(file.name for file in tmp_path.iterdir())
    loaded = Tokenizer.load(tmp_path, "source")
    assert loaded.digest == tokenizer.digest
    assert loaded.special == tokenizer.special
    assert loaded.template == tokenizer.template
    for text in [*TEXTS, "</s><pad>"]:
        assert loaded.encode(text) == tokenizer.encode(text)


def test_loading_refuses_what_was_not_saved(tmp_path: Path) -> None:
    make(Characters()).save(tmp_path, "a")
    make(Characters(), ["other"]).save(tmp_path, "b")
    (tmp_path / "a.json").write_bytes((tmp_path / "b.json").read_bytes())
    with pytest.raises(TokenizerError):
        Tokenizer.load(tmp_path, "a")
    state = json.loads((tmp_path / "b.specials.json").read_text())
    state["special"]["unk"], state["special"]["bos"] = state["special"]["bos"], state["special"]["unk"]
    (tmp_path / "b.specials.json").write_text(json.dumps(state))
    with pytest.raises(TokenizerError, match="foreign vocabulary"):
        Tokenizer.load(tmp_path, "b")
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.load(tmp_path, "c")
    (tmp_path / "b.specials.json").write_text("{")
    with pytest.raises(TokenizerError, match="damaged"):
        Tokenizer.load(tmp_path, "b")
    for key, value in (("template", None), ("settings", 5), ("settings", {"a": 1}), ("file", 3)):
        (tmp_path / "b.specials.json").write_text(json.dumps({**state, key: value}))
        with pytest.raises(TokenizerError, match="damaged"):
            Tokenizer.load(tmp_path, "b")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        Tokenizer.load(tmp_path, "a")


def test_a_tokenizer_json_brought_along(tmp_path: Path) -> None:
    specials = Specials(unk=None, extra=("<mask>",))
    ours = make(BytesBpe(vocab_size=300, min_frequency=1, specials=specials))
    path = ours.save(tmp_path)[0]
    found = Tokenizer.from_file(path, specials)
    assert found.special == ours.special
    # As with the transformers library, a special token in the text is that token.
    assert found.encode("the</s>")[-1] == found.special.eos
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no token '\[PAD\]', which is to be pad"):
        Tokenizer.from_file(path, Specials(pad="[PAD]"))
    with pytest.raises(TokenizerError, match=r"expected a tokenizer\.json"):
        other = tmp_path / "vocab.txt"
        other.write_text("a")
        Tokenizer.from_file(other, specials)


def test_what_is_unknown_is_shown() -> None:
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, "<unk>"))
    inner.add_special_tokens(["<unk>", "</s>"])  # as BERT's vocabulary marks its own
    tokenizer = Tokenizer.from_huggingface(inner, SpecialIds(eos=1, unk=0), specials_in_text="tokens")
    assert tokenizer.decode([2, 0, 1]) == "a <unk>"


def test_words_in_one_text_keep_their_first_ids() -> None:
    words = ["größer", "the", "🙂", "2021,"]
    for config in CONFIGS:
        tokenizer = make(config)
        ids, first = tokenizer.encode_words(words)
        assert ids == tokenizer.encode(" ".join(words))
        assert first[0] == 0
        assert first == sorted(set(first))
        for word, start, end in zip(words, first, [*first[1:], len(ids)], strict=True):
            if tokenizer.special.unk not in ids[start:end] and config.kind != "unigram":
                assert tokenizer.decode(ids[start:end]).strip() == word
    nothing = make(Characters(normalization="NFC"), ["ab"])
    assert nothing.encode_words(["a", "", "b"]) == ([1, 0, 0, 2], [0, -1, 3])


needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent")


@needs_shared
def test_sentencepiece_equals_its_library(tmp_path: Path) -> None:
    import sentencepiece

    path = SHARED / "tokenizers" / "t5" / "spiece.model"
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    specials = Specials(pad="<pad>", bos=None, eos="</s>", unk="<unk>")
    tokenizer = Tokenizer.from_file(path, specials)
    assert tokenizer.special == SpecialIds(pad=0, eos=1, unk=2)
    with gzip.open(SHARED / "tatoeba-subset" / "dev.en-de.tsv.gz", "rt", encoding="utf-8") as file:
        texts = [*(line.strip() for line in list(file)[:300]), *ODD[:-1], "</s> <pad>"]
    assert tokenizer.encode_batch(texts) == library.encode(texts, out_type=int)
    for text in texts:
        ids = library.encode(text, out_type=int)
        assert tokenizer.decode(ids, skip_special=False) == library.decode(ids)
    assert tokenizer.decode([0, 8774, 1]) == "Hello"

    tagged = Tokenizer.from_file(path, specials.replace(extra=("<x>", ">>de<<")))
    assert tagged.special.extra == {"<x>": 32000, ">>de<<": 32001}
    assert tagged.encode(">>de<<Hello") == [32001, *library.encode("Hello", out_type=int)]
    assert tagged.decode([32001, 8774], skip_special=False) == ">>de<<Hello"
    assert tagged.decode([32001, 8774]) == "Hello"
    assert tagged.digest != tokenizer.digest
    tagged.save(tmp_path)
    assert Tokenizer.load(tmp_path).digest == tagged.digest
    assert tokenizer.encode_words(["Hello", "Wörter"])[1] == [0, 1]


@needs_shared
def test_sentencepiece_pieces_numbered_by_a_family() -> None:
    path = SHARED / "tokenizers" / "t5" / "spiece.model"
    plain = Tokenizer.from_file(path, Specials(bos=None))
    words = plain.encode("Hello world")
    pieces = {"<unk>": 0, "</s>": 1, **{plain.token(number): 7 + i for i, number in enumerate(words)}}
    mapped = Tokenizer.from_sentencepiece(
        path.read_bytes(), SpecialIds(eos=1, unk=0), added={}, pieces=pieces, where="here"
    )
    assert mapped.encode("Hello world") == [7, 8]
    assert mapped.encode("Hello zebra")[0] == 7
    assert set(mapped.encode("Hello zebra")[1:]) == {0}
    assert mapped.decode([7, 8, 1]) == "Hello world"
    assert mapped.vocab_size == 9
    with pytest.raises(TokenizerError, match="id 7 of added token '<x>' is that of"):
        Tokenizer.from_sentencepiece(
            path.read_bytes(), SpecialIds(eos=1, unk=0), added={"<x>": 7}, pieces=pieces, where="here"
        )


def test_not_a_sentencepiece_model(tmp_path: Path) -> None:
    path = tmp_path / "a.model"
    path.write_bytes(b"nonsense")
    with pytest.raises(TokenizerError, match=r"a\.model: not a SentencePiece model$"):
        Tokenizer.from_file(path, Specials())


def test_half_a_surrogate_pair_is_no_text() -> None:
    tokenizer = make(Characters(), ["abc"])
    with pytest.raises(TokenizerError, match="half a surrogate pair"):
        tokenizer.encode("a\udcff")
