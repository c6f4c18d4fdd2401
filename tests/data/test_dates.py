from __future__ import annotations

import datetime
import random
import unicodedata

import pytest

from isoform.data.dates import FORMS, ISO, LANGUAGES, Writer, corpus, tag, tags
from isoform.errors import ConfigError, DataError

YEARS = 1995, 2005


def some_dates(count: int) -> list[datetime.date]:
    picks = random.Random(3)
    first = datetime.date(YEARS[0], 1, 1).toordinal()
    last = datetime.date(YEARS[1], 12, 31).toordinal()
    return [datetime.date.fromordinal(picks.randint(first, last)) for _ in range(count)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_forms_are_those_of_babel(language: str) -> None:
    from babel.dates import format_date

    writer = Writer(language, *YEARS)
    for date in some_dates(60):
        for form in FORMS:
            written = "".join(str(unicodedata.digit(c, c)) for c in writer.write(date, form))
            assert written == format_date(date, form, locale=language)


def test_digits_are_the_languages_own() -> None:
    date = datetime.date(1999, 3, 25)
    assert "২৫" in Writer("bn", *YEARS).write(date, "long")
    assert "۱۹۹۹" in Writer("fa", *YEARS).write(date, "long")
    assert "1999" in Writer("hi", *YEARS).write(date, "long")


def test_no_text_means_two_dates() -> None:
    writers = [Writer(language, *YEARS) for language in LANGUAGES]
    meaning: dict[str, datetime.date] = {}
    start = datetime.date(1999, 1, 1)
    for date in [start + datetime.timedelta(i) for i in range(800)]:
        for writer in writers:
            for form in FORMS:
                assert meaning.setdefault(writer.write(date, form), date) == date


def test_enough_languages_and_scripts() -> None:
    scripts: set[str] = set()
    for language in LANGUAGES:
        text = Writer(language, *YEARS).write(datetime.date(2001, 5, 3), "full")
        scripts |= {unicodedata.name(c).split()[0] for c in text if c.isalpha()}
    assert len(LANGUAGES) == len(set(LANGUAGES)) >= 24
    assert len(scripts) >= 13


def test_no_date_is_in_two_parts() -> None:
    found = corpus(seed=4, train=30_000, validation=800, test=900)
    dates = [{pair.date for pair in part.items} for part in (found.train, found.validation, found.test)]
    assert not dates[0] & dates[1]
    assert not dates[0] & dates[2]
    assert not dates[1] & dates[2]
    assert [len(part) for part in (found.train, found.validation, found.test)] == [30_000, 800, 900]


def test_pairs_say_what_they_are() -> None:
    found = corpus(seed=4, train=9_000, validation=10, test=10, first_year=1990, last_year=2010)
    writers = {language: Writer(language, 1990, 2010) for language in LANGUAGES}
    directions = set()
    for pair in found.train.items:
        assert pair.source_language != pair.target_language
        directions.add((pair.source_language, pair.target_language))
        source = writers[pair.source_language].write(pair.date, pair.form)
        assert pair.source == f"{tag(pair.target_language)} {source}"
        if pair.target_language == ISO:
            assert pair.target == pair.date.isoformat()
        else:
            assert pair.target == writers[pair.target_language].write(pair.date, pair.form)
    assert len(directions) == len(LANGUAGES) * len(LANGUAGES)
    assert {pair.form for pair in found.train.items} == set(FORMS)


def test_the_seed_decides() -> None:
    small = {"train": 50, "validation": 5, "test": 5, "languages": ("en", "ja")}
    first, second = corpus(seed=1, **small), corpus(seed=1, **small)  # type: ignore[arg-type]
    assert list(first.test.items) == list(second.test.items)
    assert list(first.train.items) == list(second.train.items)
    assert list(first.train.items) != list(corpus(seed=2, **small).train.items)  # type: ignore[arg-type]
    assert first.languages == ("en", "ja")


def test_tags_end_with_iso() -> None:
    assert tags(("en", "de")) == (">>en<<", ">>de<<", ">>iso<<")


def test_refused_settings() -> None:
    with pytest.raises(DataError, match="no language 'xx'"):
        corpus(seed=1, languages=("en", "xx"))
    with pytest.raises(DataError, match="digits of 'tibt'"):
        corpus(seed=1, languages=("en", "dz"))
    with pytest.raises(ConfigError, match="at least two"):
        corpus(seed=1, languages=("en",))
    with pytest.raises(ConfigError, match="years 2000 to 1999"):
        corpus(seed=1, first_year=2000, last_year=1999)
