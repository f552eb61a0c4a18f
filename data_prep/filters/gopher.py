"""Rules of Gopher (Rae et al. 2021, "Scaling Language Models", table A1).

They apply to languages with spaces between words. A line is a paragraph of data_prep; lines without words don't count.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from data_prep.filters import repetition
from data_prep.filters.measures import (
    BULLET,
    ELLIPSIS,
    ELLIPSIS_END,
    LETTER,
    N_GRAM_RULES,
    NUMBER_SIGN,
    DocumentMeasures,
    QualityRule,
    compute_share,
)

N_GRAM_LIMITS = {2: 0.2, 3: 0.18, 4: 0.16, 5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}

_rule = partial(QualityRule, "gopher")


def _mean_word(m: DocumentMeasures) -> np.ndarray:
    return compute_share(m.characters, m.words)


def _symbols(m: DocumentMeasures) -> np.ndarray:
    return compute_share(np.maximum(m.with_flag(NUMBER_SIGN), m.with_flag(ELLIPSIS)), m.words)


def _bullets(m: DocumentMeasures) -> np.ndarray:
    return m.line_share((m.flags[m.line_spans[0]] & BULLET) > 0)


def _ellipses(m: DocumentMeasures) -> np.ndarray:
    return m.line_share((m.flags[m.line_spans[1] - 1] & ELLIPSIS_END) > 0)


def _repeated_lines(m: DocumentMeasures) -> np.ndarray:
    return m.line_share(m.repeated_lines)


def _n_gram_rule(n: int) -> QualityRule:
    what = "characters in " + (f"the most frequent {n}-gram" if n in repetition.TOP else f"{n}-grams that occur again")
    return _rule(N_GRAM_RULES[n], what, lambda m: m.n_gram_shares[n], N_GRAM_LIMITS[n], share=True)


RULES = (
    _rule("min-words", "words", lambda m: m.words, 50),
    _rule("max-words", "words", lambda m: m.words, 100_000),
    _rule("min-mean-word", "mean characters a word", _mean_word, 3),
    _rule("max-mean-word", "mean characters a word", _mean_word, 10),
    _rule("min-letter-words", "words with a letter", lambda m: m.flag_share(LETTER), 0.8, share=True),
    _rule("max-symbol-share", "words with a '#', or with an ellipsis, whichever are more", _symbols, 0.1, share=True),
    _rule("max-bullet-lines", "lines that begin with a bullet", _bullets, 0.9, share=True),
    _rule("max-ellipsis-lines", "lines that end in an ellipsis", _ellipses, 0.3, share=True),
    _rule("max-duplicate-lines", "lines that repeat an earlier one", _repeated_lines, 0.3, share=True),
    _rule("max-duplicate-line-characters", "characters in such lines", lambda m: m.repeated_share(), 0.2, share=True),
    *map(_n_gram_rule, N_GRAM_RULES),
)
