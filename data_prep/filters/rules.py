"""Quality rules: their names, limits and presets; what they measure is in `quality` and `repetition`.

Rules that hold in any language that puts spaces between words, but for the English phrases of two of C4's. Published limits are
those of Gopher (Rae et al. 2021, "Scaling Language Models", table A1) and C4 (Raffel et al. 2020, section 2.2). A line is
what data_prep calls a paragraph; lines without words don't count. A rule of lines drops lines, before the documents that are
left are judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from data_prep.common.errors import BadInput

SHORT_LINE = 3  # words
PRESETS = ("off", "gopher", "c4")


def _rule(what: str, share: bool = False, lines: bool = False, **presets: float) -> Any:
    metadata = {"what": what, "share": share, "lines": lines, "presets": presets}
    return field(default=None, metadata=metadata)


def _share(what: str, **presets: float) -> Any:
    return _rule(what, share=True, lines=False, **presets)


@dataclass(frozen=True)
class Rules:
    """Limits, None for a rule that is off. A document on a limit stays. Documents without words fail `min_` counts alone."""

    min_words: float | None = _rule("words", gopher=50)
    max_words: float | None = _rule("words", gopher=100_000)
    min_mean_word: float | None = _rule("mean characters a word", gopher=3)
    max_mean_word: float | None = _rule("mean characters a word", gopher=10)
    min_letter_words: float | None = _share("words with a letter", gopher=0.8)
    max_symbol_share: float | None = _share("words with a '#', or with an ellipsis, whichever are more", gopher=0.1)
    max_bullet_lines: float | None = _share("lines that begin with a bullet", gopher=0.9)
    max_ellipsis_lines: float | None = _share("lines that end in an ellipsis", gopher=0.3)
    min_lines: float | None = _rule("lines")
    min_sentences: float | None = _rule("sentence ends", c4=5)
    max_short_lines: float | None = _share(f"lines of fewer than {SHORT_LINE} words")
    max_duplicate_lines: float | None = _share("lines that repeat an earlier one", gopher=0.3)
    max_duplicate_line_characters: float | None = _share("characters in such lines", gopher=0.2)
    max_top_2_gram: float | None = _share("characters in the most frequent 2-gram", gopher=0.2)
    max_top_3_gram: float | None = _share("characters in the most frequent 3-gram", gopher=0.18)
    max_top_4_gram: float | None = _share("characters in the most frequent 4-gram", gopher=0.16)
    max_duplicate_5_gram: float | None = _share("characters in 5-grams that occur again", gopher=0.15)
    max_duplicate_6_gram: float | None = _share("characters in 6-grams that occur again", gopher=0.14)
    max_duplicate_7_gram: float | None = _share("characters in 7-grams that occur again", gopher=0.13)
    max_duplicate_8_gram: float | None = _share("characters in 8-grams that occur again", gopher=0.12)
    max_duplicate_9_gram: float | None = _share("characters in 9-grams that occur again", gopher=0.11)
    max_duplicate_10_gram: float | None = _share("characters in 10-grams that occur again", gopher=0.1)
    min_line_words: float | None = _rule("words", lines=True, c4=3)
    min_line_ends: float | None = _rule("marks . ! ? or closing quotes at the end", lines=True, c4=1)
    max_line_notices: float | None = _rule(
        "words Javascript, and mentions of a privacy policy, cookies or terms of use", lines=True, c4=0
    )
    max_curly_brackets: float | None = _rule("words with a curly bracket", c4=0)
    max_lorem_ipsum: float | None = _rule("places that say lorem ipsum", c4=0)

    @staticmethod
    def preset(name: str) -> Rules:
        """The rules of one of `PRESETS`."""
        return Rules(**_limits(name))


_FIELDS = {rule.name.replace("_", "-"): rule for rule in fields(Rules)}
REASONS = ("", *_FIELDS)  # what a number from a verdict means; 0 is a document, or a line, that stays
LINE_RULES = frozenset(name for name, rule in _FIELDS.items() if rule.metadata["lines"])
FOLDED_RULES = ("max_line_notices", "max_lorem_ipsum")  # look at folded words


def _limits(preset: str) -> dict[str, Any]:
    if preset == "off":
        return {rule.name: None for rule in _FIELDS.values()}
    return {
        rule.name: rule.metadata["presets"][preset] for rule in _FIELDS.values() if preset in rule.metadata["presets"]
    }


def parse(items: list[str]) -> Rules:
    """Rules from a command line: presets and NAME=LIMIT, NAME=off or NAME (its published limit), later ones over earlier.

    Raises BadInput for an unknown name, with the nearest one, and for a limit that is none.
    """
    limits: dict[str, float | None] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if name in PRESETS and not equals:
            limits.update(_limits(name))
        elif name in _FIELDS:
            limits[_FIELDS[name].name] = _limit(name, text, bool(equals))
        elif name in PRESETS:
            raise BadInput(f"--filters {item}: {name} is a set of rules and takes no limit")
        else:
            near = get_close_matches(name, [*PRESETS, *_FIELDS], 1, 0)
            raise BadInput(f"--filters {item}: no rule {name!r}; the nearest is {near[0]!r}")
    for low, high in (("min_words", "max_words"), ("min_mean_word", "max_mean_word")):
        least, most = limits.get(low), limits.get(high)
        if least is not None and most is not None and least > most:
            names = low.replace("_", "-"), high.replace("_", "-")
            raise BadInput(f"--filters {names[0]}={least:g} {names[1]}={most:g}: no document meets both")
    return Rules(**limits)


def _limit(name: str, text: str, given: bool) -> float | None:
    about = _FIELDS[name].metadata
    if not given and not about["presets"]:
        raise BadInput(f"--filters {name}: no published set has it; give {name}=LIMIT")
    if not given:
        return next(iter(about["presets"].values()))
    if text == "off":
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    top = 1 if about["share"] else math.inf
    if not 0 <= limit <= top or math.isinf(limit):
        raise BadInput(
            f"--filters {name}={text}: give {'a share in 0..1' if about['share'] else 'a number >= 0'} or off"
        )
    return limit


def describe_rules() -> str:
    """One line a rule for a help text: name, what it limits, its published limits."""
    lines = []
    for name, rule in _FIELDS.items():
        bound = "at least" if name.startswith("min-") else "at most"
        of = "share of " if rule.metadata["share"] else ""
        sets = ", ".join(f"{preset} {limit:g}" for preset, limit in rule.metadata["presets"].items())
        where = " in a line, or it is dropped" if rule.metadata["lines"] else ""
        known = f" ({sets})" if sets else ""
        lines.append(f"  {name:32}{bound} this {of or 'many '}{rule.metadata['what']}{where}{known}")
    return "\n".join(lines)
