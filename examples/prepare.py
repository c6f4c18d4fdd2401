"""Make the tab-separated files that two of the examples read.

python examples/prepare.py pronunciation cmudict.dict.gz pronunciation.tsv
python examples/prepare.py languages FOLDER languages.tsv
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LANGUAGES = ("en", "de", "fr")


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
    makers = {"pronunciation": pronunciation, "languages": languages}
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
