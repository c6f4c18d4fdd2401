"""The built-in corpus: calendar dates written out in many languages, translated into each other.

Patterns and names are those of the Unicode CLDR (through Babel), in the Gregorian calendar and with the
digits each locale writes by default. The target language is told by a leading tag, an atomic special
token: ``>>de<< Tuesday, March 9, 2021`` becomes ``Dienstag, 9. März 2021``. A full form (with the weekday)
becomes a full form and a long one (without) a long one, so that nothing asks for calendar arithmetic; both
become ISO 8601 under ``>>iso<<``.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from isoform.data.records import Pair, Records
from isoform.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from babel import Locale

    from isoform.data.config import DatesData

Form = Literal["full", "long"]
FORMS: tuple[Form, Form] = ("full", "long")
ISO = "iso"
# 26 languages in 15 scripts: Latin, Cyrillic, Greek, Arabic, Hebrew, Devanagari, Bengali, Tamil, Thai,
# Georgian, Armenian, Ethiopic, Hangul, Han, and Han with the Japanese year, month and day signs.
LANGUAGES = (
    *("en", "de", "fr", "es", "pt", "it", "pl", "fi", "tr", "vi", "ru", "uk", "el"),
    *("ar", "fa", "he", "hi", "bn", "ta", "th", "ka", "hy", "am", "ko", "ja", "zh"),
)
# First digit of the numbering systems (UTS 35, part 3) that a default form may use.
ZEROS = {"latn": "0", "arab": "٠", "arabext": "۰", "beng": "০", "deva": "०", "mymr": "၀"}
# Pattern letters (UTS 35, part 4) that the full and long forms are made of, and what they depend on.
FIELDS = {"E": "weekday", "c": "weekday", "d": "day", "M": "month", "L": "month", "y": "year"}
CORPUS_SHARES = (0.9, 0.04, 0.06)  # of the calendar dates: training, validation, test


def tag(language: str) -> str:
    """The token that asks for a language, e.g. ``>>de<<``."""
    return f">>{language}<<"


def tags(languages: Sequence[str] = LANGUAGES) -> tuple[str, ...]:
    """All tags, ISO 8601 last: the tokenizer's extra tokens."""
    return tuple(tag(language) for language in (*languages, ISO))


@dataclasses.dataclass(frozen=True, slots=True)
class DatedPair(Pair):
    """A pair and what it is about."""

    source_language: str
    target_language: str
    date: datetime.date
    form: Form


@dataclasses.dataclass(frozen=True)
class DatesCorpus:
    """Three parts that share no calendar date."""

    train: Records[DatedPair]
    validation: Records[DatedPair]
    test: Records[DatedPair]
    languages: tuple[str, ...]

    def part(self, name: Literal["train", "validation", "test"]) -> Records[DatedPair]:
        """A part by its name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]


class Writer:
    """Writes dates in one language.

    A form depends on the weekday, the day, the month and the year apart, so each is looked up in a table
    made once through Babel, and filled into the pattern.
    """

    def __init__(self, language: str, first_year: int, last_year: int) -> None:
        """
        Args:
            language: a CLDR code.
            first_year: the first year that will be asked for.
            last_year: the last one.

        Raises:
            DataError: CLDR has no such language, or its forms need something that is not known here.
        """
        from babel import Locale, UnknownLocaleError

        try:
            locale = Locale.parse(language)
        except (UnknownLocaleError, ValueError):
            known = did_you_mean(language, LANGUAGES)
            raise DataError(f"dates: CLDR knows no language {language!r}{known}") from None
        self.language = language
        self._years = range(first_year, last_year + 1)
        self._forms = {form: self._tables(locale, form) for form in FORMS}

    def write(self, date: datetime.date, form: Form) -> str:
        """The date in CLDR's full or long form: Babel's `format_date` with the locale's own digits."""
        pattern, weekdays, days, months, years = self._forms[form]
        return pattern.format(
            weekdays[date.weekday()], days[date.day], months[date.month], years[date.year - self._years[0]]
        )

    def _tables(self, locale: Locale, form: Form) -> tuple[str, list[str], list[str], list[str], list[str]]:
        from babel.dates import DateTimeFormat, tokenize_pattern

        system = locale.default_numbering_system
        if system not in ZEROS:
            raise DataError(f"dates: {self.language!r} writes digits of {system!r}, a system not known here")
        digits = {ord("0") + i: chr(ord(ZEROS[system]) + i) for i in range(10)}

        def value(date: datetime.date, field: str) -> str:
            return DateTimeFormat(date, locale)[field].translate(digits)

        # 1 January 2001 was a Monday: weekday 0 in Python.
        dates = {
            "weekday": [datetime.date(2001, 1, 1 + i) for i in range(7)],
            "day": [datetime.date(2001, 1, max(i, 1)) for i in range(32)],
            "month": [datetime.date(2001, max(i, 1), 1) for i in range(13)],
            "year": [datetime.date(year, 1, 1) for year in self._years],
        }
        tables: dict[str, list[str]] = {name: [""] * len(values) for name, values in dates.items()}
        pattern = ""
        for _, content in tokenize_pattern(locale.date_formats[form].pattern):
            if isinstance(content, str):
                pattern += content.replace("{", "{{").replace("}", "}}")
                continue
            letter, width = str(content[0]), int(content[1])
            if letter == "G":
                pattern += value(dates["day"][1], letter * width)
            elif letter in FIELDS:
                name = FIELDS[letter]
                tables[name] = [value(date, letter * width) for date in dates[name]]
                pattern += f"{{{tuple(dates).index(name)}}}"
            else:
                raise DataError(f"dates: the {form} form of {self.language!r} has a field {letter!r}")
        return pattern, tables["weekday"], tables["day"], tables["month"], tables["year"]


def corpus(
    *,
    seed: int,
    train: int = 200_000,
    validation: int = 1_000,
    test: int = 4_000,
    first_year: int = 1900,
    last_year: int = 2099,
    languages: Sequence[str] = LANGUAGES,
) -> DatesCorpus:
    """Draw the corpus. The same arguments give the same records.

    The calendar dates are dealt out to the parts first (90 / 4 / 6 %); then each pair draws a date of its
    part, a form, a source language and another target (a language or ISO 8601), all uniformly, so that
    training sees most dates in several ways.

    Raises:
        ConfigError: fewer than two languages, one given twice, or years out of order.
        DataError: a language CLDR does not know.
    """
    if len(languages) < 2 or len(set(languages)) != len(languages):
        raise ConfigError("dates: at least two languages are needed, each once")
    if not 1000 <= first_year <= last_year <= 9999:
        raise ConfigError(f"dates: years {first_year} to {last_year}; expected four digits, in order")
    writers = [Writer(language, first_year, last_year) for language in languages]
    generator = np.random.default_rng(seed)
    start = datetime.date(first_year, 1, 1).toordinal()
    days = generator.permutation(np.arange(start, datetime.date(last_year, 12, 31).toordinal() + 1))
    cuts = np.cumsum([round(share * len(days)) for share in CORPUS_SHARES[:2]])
    parts = zip(("train", "validation", "test"), (train, validation, test), np.split(days, cuts), strict=True)
    drawn = {name: _draw(name, count, part, writers, generator) for name, count, part in parts}
    return DatesCorpus(**drawn, languages=tuple(languages))


def corpus_from(config: DatesData) -> DatesCorpus:
    """The corpus a run file asks for."""
    languages = LANGUAGES if config.languages is None else config.languages
    counts = config.train, config.validation, config.test
    return _remembered(config.seed, counts, (config.first_year, config.last_year), languages)


@functools.lru_cache(maxsize=1)  # a run asks for its three parts one after the other
def _remembered(
    seed: int, counts: tuple[int, int, int], years: tuple[int, int], languages: tuple[str, ...]
) -> DatesCorpus:
    return corpus(
        seed=seed,
        train=counts[0],
        validation=counts[1],
        test=counts[2],
        first_year=years[0],
        last_year=years[1],
        languages=languages,
    )


def _draw(
    name: str, count: int, days: np.ndarray, writers: list[Writer], generator: np.random.Generator
) -> Records[DatedPair]:
    ordinals = generator.choice(days, count).tolist()
    forms = generator.integers(2, size=count).tolist()
    sources = generator.integers(len(writers), size=count)
    # A step of 1 … n from the source among n + 1 targets (the last is ISO): any but the source itself.
    targets = ((sources + generator.integers(1, len(writers) + 1, size=count)) % (len(writers) + 1)).tolist()
    pairs: list[DatedPair] = []
    for ordinal, form_index, i, j in zip(ordinals, forms, sources.tolist(), targets, strict=True):
        date, form = datetime.date.fromordinal(ordinal), FORMS[form_index]
        into = ISO if j == len(writers) else writers[j].language
        text = date.isoformat() if into == ISO else writers[j].write(date, form)
        source = f"{tag(into)} {writers[i].write(date, form)}"
        pairs.append(DatedPair(source, text, writers[i].language, into, date, form))
    return Records(name, pairs, range(1, count + 1))
