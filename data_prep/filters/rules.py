"""The list of quality rules, their limits on a command line, and their verdicts on documents and lines.

A rule of lines drops lines before documents are judged by their remaining lines. Legend: p paragraphs (lines), d documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

import numpy as np

from data_prep.common.errors import BadInput
from data_prep.filters import c4, gopher
from data_prep.filters.measures import DocumentMeasures, QualityRule, WordFacts

RULES: tuple[QualityRule, ...] = (*gopher.RULES, *c4.RULES)

PRESETS = ("off", "gopher", "c4")
BY_NAME = {rule.name: rule for rule in RULES}
# reasons by number of a verdict; 0 is a kept document, or line
REASONS = ("", *BY_NAME)
# words at a time, so that the arrays of a step stay in a core's cache: twice as fast as 1 << 18
CHUNK_WORDS = 1 << 16


def judge_lines(batch: WordFacts, limits: Mapping[str, float]) -> np.ndarray:
    """int8 [p]: 0 for a kept line, else the index in `REASONS` of the first rule of lines that it breaks."""
    verdict = np.zeros(len(batch.paragraphs) - 1, np.int8)
    rules = [(reason, rule) for reason, rule in enumerate(RULES, 1) if rule.lines and rule.name in limits]
    full = np.diff(batch.paragraphs) > 0
    if rules and full.any():
        measures = DocumentMeasures(batch, limits)
        for reason, rule in rules:
            verdict[rule.broken(measures) & full & (verdict == 0)] = reason
    return verdict


def judge(batch: WordFacts, limits: Mapping[str, float]) -> np.ndarray:
    """int8 [d]: 0 for a kept document, else the index in `REASONS` of the first rule that it breaks."""
    verdicts = [np.zeros(0, np.int8)]
    for chunk in _chunks(batch):
        measures = DocumentMeasures(chunk, limits)
        for reason, rule in enumerate(RULES, 1):
            if not rule.lines and rule.name in limits:
                measures.verdict[rule.broken(measures) & (measures.verdict == 0)] = reason
        verdicts.append(measures.verdict)
    return np.concatenate(verdicts)


def _chunks(batch: WordFacts) -> Iterator[WordFacts]:
    """The documents of a batch in order, about CHUNK_WORDS at a time."""
    d, last = 0, len(batch.documents) - 1
    while d < last:
        first = batch.documents[d]
        after = max(d + 1, int(np.searchsorted(batch.documents, first + CHUNK_WORDS, side="right")) - 1)
        end = batch.documents[after]
        p, q = np.searchsorted(batch.paragraphs, [first, end])  # empty paragraphs between chunks don't matter
        yield WordFacts(
            batch.facts[first:end],
            batch.documents[d : after + 1] - first,
            batch.paragraphs[p : q + 1] - first,
            None if batch.folded is None else batch.folded[first:end],
        )
        d = after


def parse(items: list[str]) -> dict[str, float]:
    """Limits of rules from a command line, in the order of `RULES`: presets and NAME=LIMIT, NAME=off or NAME (its published limit);
    later items override earlier ones.

    Raises BadInput for an unknown name, with the nearest one, and for a limit out of range.
    """
    limits: dict[str, float | None] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if name in PRESETS and not equals:
            if name == "off":
                limits.clear()
            limits |= {rule.name: rule.limit for rule in RULES if rule.preset == name}
        elif name in BY_NAME:
            limits[name] = _limit(BY_NAME[name], text, bool(equals))
        else:
            near = get_close_matches(name, [*PRESETS, *BY_NAME], 1, 0)
            raise BadInput(f"--filters {item}: no rule {name!r}; the nearest is {near[0]!r}")
    return {name: limit for name in BY_NAME if (limit := limits.get(name)) is not None}


def _limit(rule: QualityRule, text: str, given: bool) -> float | None:
    if not given:
        return rule.limit
    if text == "off":
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    top = 1 if rule.share else math.inf
    if not 0 <= limit <= top or math.isinf(limit):
        raise BadInput(
            f"--filters {rule.name}={text}: give {'a share in 0..1' if rule.share else 'a number >= 0'} or off"
        )
    return limit


def describe_rules() -> str:
    """A line for each rule for a help text: name, description, published limits."""
    lines = []
    for rule in RULES:
        bound = "at least" if rule.name.startswith("min-") else "at most"
        of = "share of " if rule.share else "many "
        of_preset = f"{rule.preset} {rule.limit:g}".lstrip()
        where = " in a line, or it is dropped" if rule.lines else ""
        lines.append(f"  {rule.name:32}{bound} this {of}{rule.what}{where} ({of_preset})")
    return "\n".join(lines)
