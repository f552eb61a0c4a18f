"""Rules of C4 (Raffel et al. 2020, section 2.2), without its list of bad words; two of them look for English phrases."""

from __future__ import annotations

from functools import partial

import numpy as np

from data_prep.common.arrays import segment_sums
from data_prep.filters.measures import CURLY, MARK_END, SENTENCE_END, DocumentMeasures, QualityRule, phrase_begins

LOREM_IPSUM = ("lorem ipsum",)
# lines that ask for Javascript, and boilerplate notices of policies
NOTICES = (
    *("javascript", "terms of use", "privacy policy", "cookie policy"),
    *("uses cookies", "use of cookies", "use cookies"),
)

_rule = partial(QualityRule, "c4")
_line_rule = partial(QualityRule, "c4", lines=True)


def _end_marks(m: DocumentMeasures) -> np.ndarray:
    return (m.flags[np.maximum(m.batch.paragraphs[1:] - 1, 0)] & MARK_END > 0).astype(np.int64)


def _phrases(m: DocumentMeasures, phrases: tuple[str, ...], edges: np.ndarray) -> np.ndarray:
    return segment_sums(phrase_begins(m.batch, phrases, edges), edges)


NOTICE = "words Javascript, and mentions of a privacy policy, cookies or terms of use"
RULES = (
    _rule("min-sentences", "sentence ends", lambda m: m.with_flag(SENTENCE_END), 5),
    _rule("max-curly-brackets", "words with a curly bracket", lambda m: m.with_flag(CURLY), 0),
    _rule(
        "max-lorem-ipsum", "occurrences of lorem ipsum", lambda m: _phrases(m, LOREM_IPSUM, m.documents), 0, folded=True
    ),
    _line_rule("min-line-words", "words", lambda m: np.diff(m.batch.paragraphs), 3),
    _line_rule("min-line-ends", "marks . ! ? or closing quotes at the end", _end_marks, 1),
    _line_rule("max-line-notices", NOTICE, lambda m: _phrases(m, NOTICES, m.batch.paragraphs), 0, folded=True),
)
