"""Make the tab-separated files that some of the examples read.

python examples/prepare.py pronunciation cmudict.dict.gz pronunciation.tsv
python examples/prepare.py phonemes cmudict.dict.gz phonemes.tsv
python examples/prepare.py languages FOLDER languages.tsv
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LANGUAGES = ("en", "de", "fr")
# ARPAbet in the alphabet of bart-g2p-us: one letter a phoneme, diphthongs in capitals.
PHONEMES = {
    "AA": "ɑ",
    "AE": "æ",
    "AH": "ʌ",
    "AO": "ɔ",
    "AW": "W",
    "AY": "I",
    "B": "b",
    "CH": "ʧ",
    "D": "d",
    "DH": "ð",
    "EH": "ɛ",
    "ER": "ɜɹ",
    "EY": "A",
    "F": "f",
    "G": "ɡ",
    "HH": "h",
    "IH": "ɪ",
    "IY": "i",
    "JH": "ʤ",
    "K": "k",
    "L": "l",
    "M": "m",
    "N": "n",
    "NG": "ŋ",
    "OW": "O",
    "OY": "Y",
    "P": "p",
    "R": "ɹ",
    "S": "s",
    "SH": "ʃ",
    "T": "t",
    "TH": "θ",
    "UH": "ʊ",
    "UW": "u",
    "V": "v",
    "W": "w",
    "Y": "j",
    "Z": "z",
    "ZH": "ʒ",
}
STRESS = {"0": "", "1": "ˈ", "2": "ˌ"}


def lines(path: Path) -> list[str]:
    """The lines of a text file, gzipped or not."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()


def pronunciation(dictionary: Path) -> Iterator[str]:
    """Spelling and phonemes. Second pronunciations, marked ``word(2)``, and comments are left out."""
    for line in lines(dictionary):
        word, _, phonemes = line.partition("#")[0].strip().partition(" ")
        if phonemes and not word.startswith(";") and not re.search(r"\(\d+\)$", word):
            yield f"{word}\t{' '.join(phonemes.split())}"


def phonemes(dictionary: Path) -> Iterator[str]:
    """Spelling and phonemes, one letter each; unstressed AH is ə, unstressed ER əɹ. Words of letters only."""
    for line in pronunciation(dictionary):
        word, _, spoken = line.partition("\t")
        if not word.isalpha():
            continue
        written = ""
        for phoneme in spoken.split():
            name, stress = phoneme.rstrip("012"), phoneme[-1]
            letter = {"AH0": "ə", "ER0": "əɹ"}.get(phoneme, PHONEMES[name])
            written += STRESS.get(stress, "") + letter
        yield f"{word}\t{written}"


def languages(folder: Path) -> Iterator[str]:
    """Sentence and language, each sentence once, from ``*.en-de.tsv.gz`` and ``*.en-fr.tsv.gz``."""
    seen: set[str] = set()
    for path in sorted(folder.glob("*.??-??.tsv*")):
        names = path.name.split(".")[1].split("-")
        for line in lines(path):
            for name, sentence in zip(names, line.split("\t"), strict=False):
                if name in LANGUAGES and sentence not in seen:
                    seen.add(sentence)
                    yield f"{sentence}\t{name}"


def main(arguments: list[str]) -> None:
    """Write one of the files."""
    makers = {"pronunciation": pronunciation, "phonemes": phonemes, "languages": languages}
    if len(arguments) != 3 or arguments[0] not in makers:
        sys.exit(__doc__)
    kind, source, target = arguments
    records = list(makers[kind](Path(source)))
    if not records:
        sys.exit(f"{source}: nothing found")
    Path(target).write_text("\n".join(records) + "\n", encoding="utf-8")
    print(f"{target}: {len(records):,} records")


if __name__ == "__main__":
    main(sys.argv[1:])
