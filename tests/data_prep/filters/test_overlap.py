"""Overlap with evaluation texts: what is planted is found however it is spaced, what only looks alike is not."""

import random

import numpy as np
import pytest

from data_prep.filters.folding import fold
from data_prep.filters.overlap import Evaluation, index
from data_prep.tokens.encoder import word_facts

LONG = "It 's a charming and often affecting journey that never quite says what it set out to say , and does n't care who hears it in the end or what they make of it ."
MIDDLE = "A gorgeous , witty , seductive movie of manners ."
SHORT = "Contains no wit , at all ."
TINY = "Great !"


def facts(*documents):
    return word_facts([d.split("\n") for d in documents], "NFC", folded=True)


def found(evaluation, *documents):
    return [(m.document, m.text) for m in Evaluation(*index(facts(*evaluation))).find(facts(*documents))]


def test_letters_have_one_hash_however_they_are_spaced_and_cased():
    def whole(text):
        folded = fold(text.split())
        places = np.append(0, np.cumsum(folded["letters"], dtype=np.int64)[:-1]).tolist()
        base = 0x9E3779B97F4A7C15
        return sum(h * pow(base, n, 1 << 64) for h, n in zip(folded["hash"].tolist(), places, strict=True)) % (1 << 64)

    assert whole("It 's n't so , Straße") == whole("IT'S N'T SO, STRASSE!") != whole("It 's n't os , Straße")
    assert fold(["--", "a-b"])["letters"].tolist() == [0, 2]
    assert fold(["U.S.", "a.b", "so!)", ".", "--", "e"])["stops"].tolist() == [1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("text", [LONG, MIDDLE, SHORT])
def test_a_planted_text_is_found(text):
    other = "Some other words stand here before it. "
    evaluation = ["Nothing of that is ever found anywhere .", text]
    tidy = text.replace(" ,", ",").replace(" .", ".").replace(" 's", "'s").replace(" n't", "n't")
    for planted in (text, tidy, text.upper()):
        documents = [other * 4, other + planted + " " + other, f"{other}\n{planted}\n{other}", planted]
        assert found(evaluation, *documents) == [(1, 1), (2, 1), (3, 1)]


def test_a_stretch_of_a_long_text_is_enough_and_of_a_short_one_is_not():
    words = LONG.split()
    assert found([LONG], "He wrote: " + " ".join(words[2:34]) + " so he did.") == [(0, 0)]
    assert found([LONG], "He wrote: " + " ".join(words[2:10]) + " so he did.") == []
    assert found([MIDDLE], "He wrote: a gorgeous witty seductive movie of mannerisms.") == []
    assert found([SHORT], "The film contains no wit at all. It is dull.") == []  # inside another sentence
    assert found([TINY, "the best"], "Great! The best.") == []


def test_nothing_crosses_the_ends_of_documents():
    a, b = LONG[:50], LONG[50:]
    assert found([LONG], a, b) == [] and found([SHORT], "Contains no wit", "at all.") == []
    assert found([SHORT], "", "An end. *", SHORT, "") == [(2, 0)]


def test_random_texts_are_found_and_no_others():
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 9))) for _ in range(3000)]

    def sentence(n):
        return " ".join(rng.choices(words, k=n)).capitalize() + "."

    texts = [sentence(rng.randint(5, 40)) for _ in range(500)]
    texts = [text for text in texts if sum(map(str.isalpha, text)) >= 12]
    planted, documents = {}, []
    for i in range(600):
        parts = [sentence(rng.randint(3, 30)) for _ in range(8)]
        if i < len(texts):
            parts.insert(rng.randint(0, 8), texts[i])
            planted[i] = i
        documents.append(" ".join(parts))
    assert dict(found(texts, *documents)) == planted
