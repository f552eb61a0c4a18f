"""Rules of C4 (Raffel et al. 2020, section 2.2), without its list of bad words; two of them look for English phrases."""

from __future__ import annotations

import numpy as np

from data_prep.common.arrays import segment_sums
from data_prep.filters.measures import CURLY, MARK_END, SENTENCE_END, DocumentMeasures, QualityRule, phrase_begins

LOREM_IPSUM = ("lorem ipsum",)
# lines that ask for Javascript, and boilerplate notices of policies
NOTICES = (
    *("javascript", "terms of use", "privacy policy", "cookie policy"),
    *("uses cookies", "use of cookies", "use cookies"),
)


def _end_marks(m: DocumentMeasures) -> np.ndarray:
    return (m.flags[np.maximum(m.batch.paragraphs[1:] - 1, 0)] & MARK_END > 0).astype(np.int64)


def _notices(m: DocumentMeasures) -> np.ndarray:
    return segment_sums(phrase_begins(m.batch, NOTICES), m.batch.paragraphs)


RULES = (
    QualityRule("min-sentences", "sentence ends", lambda m: m.with_flag(SENTENCE_END), presets={"c4": 5}),
    QualityRule("max-curly-brackets", "words with a curly bracket", lambda m: m.with_flag(CURLY), presets={"c4": 0}),
    QualityRule(
        "max-lorem-ipsum",
        "occurrences of lorem ipsum",
        lambda m: m.with_phrase(LOREM_IPSUM),
        folded=True,
        presets={"c4": 0},
    ),
    QualityRule("min-line-words", "words", lambda m: np.diff(m.batch.paragraphs), lines=True, presets={"c4": 3}),
    QualityRule("min-line-ends", "marks . ! ? or closing quotes at the end", _end_marks, lines=True, presets={"c4": 1}),
    QualityRule(
        "max-line-notices",
        "words Javascript, and mentions of a privacy policy, cookies or terms of use",
        _notices,
        lines=True,
        folded=True,
        presets={"c4": 0},
    ),
)
