"""Rules from a command line: presets, single rules, and one clear line for what is wrong."""

from dataclasses import asdict

import pytest

from data_prep.common.errors import BadInput
from data_prep.filters import rules
from data_prep.filters.rules import Rules, parse


def test_gopher_has_the_published_limits() -> None:
    limits = {name: limit for name, limit in asdict(Rules.preset("gopher")).items() if limit is not None}
    assert limits == {
        "min_words": 50,
        "max_words": 100_000,
        "min_mean_word": 3,
        "max_mean_word": 10,
        "min_letter_words": 0.8,
        "max_symbol_share": 0.1,
        "max_bullet_lines": 0.9,
        "max_ellipsis_lines": 0.3,
        "max_duplicate_lines": 0.3,
        "max_duplicate_line_characters": 0.2,
        "max_top_2_gram": 0.2,
        "max_top_3_gram": 0.18,
        "max_top_4_gram": 0.16,
        "max_duplicate_5_gram": 0.15,
        "max_duplicate_6_gram": 0.14,
        "max_duplicate_7_gram": 0.13,
        "max_duplicate_8_gram": 0.12,
        "max_duplicate_9_gram": 0.11,
        "max_duplicate_10_gram": 0.1,
    }


def test_c4_has_the_rules_of_its_paper() -> None:
    limits = {name: limit for name, limit in asdict(Rules.preset("c4")).items() if limit is not None}
    assert limits == {
        "min_line_words": 3,
        "min_line_ends": 1,
        "max_line_notices": 0,
        "min_sentences": 5,
        "max_curly_brackets": 0,
        "max_lorem_ipsum": 0,
    }


def test_names_and_limits() -> None:
    assert parse([]) == parse(["off"]) == parse(["gopher", "off"]) == Rules.preset("off") == Rules()
    assert parse(["gopher"]) == Rules.preset("gopher") and parse(["c4"]) == Rules.preset("c4")
    assert parse(["min-words=20", "max-symbol-share=0.2"]) == Rules(min_words=20, max_symbol_share=0.2)
    assert parse(["max-top-2-gram"]) == Rules(max_top_2_gram=0.2)
    mixed = parse(["gopher", "min-words=20", "max-words=off", "min-sentences"])
    assert (mixed.min_words, mixed.max_words, mixed.min_sentences) == (20, None, 5)
    assert mixed.max_top_3_gram == 0.18


@pytest.mark.parametrize(
    ("items", "line"),
    [
        (["min-lines"], "--filters min-lines: no published set has it; give min-lines=LIMIT"),
        (["min-word=3"], "--filters min-word=3: no rule 'min-word'; the nearest is 'min-words'"),
        (["gofer"], "--filters gofer: no rule 'gofer'; the nearest is 'gopher'"),
        (["gopher=2"], "--filters gopher=2: gopher is a set of rules and takes no limit"),
        (["max-symbol-share=2"], "--filters max-symbol-share=2: give a share in 0..1 or off"),
        (["min-words=-1"], "--filters min-words=-1: give a number >= 0 or off"),
        (["min-words=inf"], "--filters min-words=inf: give a number >= 0 or off"),
        (["min-words=nan"], "--filters min-words=nan: give a number >= 0 or off"),
        (["min-words="], "--filters min-words=: give a number >= 0 or off"),
        (["min-words=9", "max-words=8"], "--filters min-words=9 max-words=8: no document meets both"),
    ],
)
def test_what_is_wrong_is_one_line(items, line) -> None:
    with pytest.raises(BadInput) as error:
        parse(items)
    assert str(error.value) == line


def test_every_rule_is_described_once() -> None:
    lines = rules.describe_rules().splitlines()
    assert [line.split()[0] for line in lines] == list(rules.REASONS[1:])
    assert " ".join(lines[0].split()) == "min-words at least this many words (gopher 50)"
    assert "at most this share of words with a '#', or" in rules.describe_rules()
