"""Shares of n-grams against counting strings in plain Python."""

import random
from collections import Counter

import numpy as np
import pytest

from data_prep.filters import repetition
from tests.helpers.prep_texts import batch_of

ALL = dict.fromkeys(repetition.TOP + repetition.AGAIN, 0.0)


def counted(text: str) -> dict[int, float]:
    """The same shares by the definition, n-gram by n-gram."""
    words = text.split()
    total = sum(map(len, words))
    found = {}
    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        times = Counter(grams)
        if n <= 4:
            best = max(((k, sum(map(len, gram))) for gram, k in times.items() if k > 1), default=(0, 0))
            covered = best[0] * best[1]
        else:
            inside = {j for i, gram in enumerate(grams) if times[gram] > 1 for j in range(i, i + n)}
            covered = sum(len(words[j]) for j in inside)
        found[n] = covered / total if total else 0.0
    return found


def shares(texts: list[str], limits: dict[int, float]) -> dict[int, np.ndarray]:
    batch = batch_of(texts)
    facts = batch.facts
    return repetition.shares(
        np.ascontiguousarray(facts["hash"]),
        np.ascontiguousarray(facts["characters"]),
        batch.documents,
        limits,
        np.ones(len(texts), bool),
    )


def random_texts(seed: int) -> list[str]:
    """Documents of 0 to 400 words of vocabularies of 1 to 300 words, some with passages copied."""
    rng = random.Random(seed)
    texts = []
    for _ in range(150):
        vocabulary = ["x" * rng.randint(1, 6) + str(i) for i in range(rng.choice([1, 2, 5, 30, 300]))]
        words = rng.choices(vocabulary, k=rng.choice([0, 1, 2, 3, 4, 5, 12, 60, 400]))
        for _ in range(rng.choice([0, 0, 1, 4])):
            start = rng.randrange(len(words) + 1)
            words[rng.randrange(len(words) + 1) : 0] = words[start : start + rng.randint(2, 15)]
        texts.append(" ".join(words))
    return texts


def test_shares_by_hand() -> None:
    # 2-grams: "a bb" three times (9 of 12 characters); 5-grams: "a bb a bb c" once, none again.
    found = shares(["a bb a bb c a bb cc", "", "a", "a a a"], ALL)
    assert found[2].tolist() == [9 / 12, 0, 0, 4 / 3]  # "a a" twice, overlapping
    assert found[3].tolist() == [0, 0, 0, 0]
    assert found[5].tolist() == [0, 0, 0, 0]
    # "1 2 3 4 5" twice, 10 of 16 characters; overlapping "1 1 1 1 1" covers each word once.
    found = shares(["1 2 3 4 5 abcdef 1 2 3 4 5", "1 1 1 1 1 1 1 222"], ALL)
    assert found[5].tolist() == [10 / 16, 7 / 10]
    assert found[6].tolist() == [0, 7 / 10]
    assert found[7].tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_shares_equal_a_count_of_strings(seed: int) -> None:
    texts = random_texts(seed)
    expected = [counted(text) for text in texts]
    found = shares(texts, ALL)
    for n in ALL:
        np.testing.assert_allclose(found[n], [e[n] for e in expected], rtol=1e-12, atol=0, err_msg=f"{n}-grams")


@pytest.mark.parametrize("seed", range(4, 8))
def test_the_screen_misses_no_share_above_its_limit(seed: int) -> None:
    texts = random_texts(seed)
    expected = [counted(text) for text in texts]
    for limits in (dict.fromkeys(ALL, 0.3), {2: 0.9}, {4: 0.1, 10: 0.5}, {7: 0.05}):
        found = shares(texts, limits)
        for n, limit in limits.items():
            wanted = np.array([e[n] for e in expected])
            assert ((found[n] > limit) == (wanted > limit)).all(), (n, limit)
            assert ((found[n] == wanted) | (found[n] == 0)).all()


def test_a_document_that_is_not_wanted_is_left_out() -> None:
    batch = batch_of(["a b a b", "a b a b"])
    found = repetition.shares(
        batch.facts["hash"], batch.facts["characters"], batch.documents, ALL, np.array([False, True])
    )
    assert found[2].tolist() == [0, 1]
