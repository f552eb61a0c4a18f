"""Numbers of words against a dictionary; words shared between workers."""

import random

import numpy as np
import pyarrow as pa
import pytest

from data_prep.tokens import encoder as encoder_module
from data_prep.tokens.encoder import WordEncoder
from data_prep.tokens.word_cache import SHARING_TASKS, SharedWords, WordNumbers, word_hashes
from megabert.data.tokenizer import Tokenizer
from tests.helpers import prep_texts


def find_words(rng, count):
    letters = "abcdefghijklmnopqrstuvwxyzäöü東\u0301.,"
    return ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(count)]


def test_numbers_equal_those_of_a_dictionary():
    rng = random.Random(5)
    lexicon, expected = WordNumbers(), {}
    for _ in range(60):
        words = list(dict.fromkeys(find_words(rng, 4000)))
        unknown = [i for i, word in enumerate(words) if word not in expected]
        for i in unknown:
            expected[words[i]] = len(expected)
        numbers, new = lexicon.numbers(word_hashes(pa.array(words)))
        assert new.tolist() == unknown
        assert numbers.tolist() == [expected[word] for word in words]
    assert lexicon.size == len(expected) > 100_000


def test_hashes_distinguish_words():
    rng = random.Random(1)
    blocks = ["p" * 64 + "q" * 64, "q" * 64 + "p" * 64]
    words = list(dict.fromkeys(find_words(rng, 50_000) + ["a" * n for n in range(1, 300)] + blocks))
    hashes = word_hashes(pa.array(words))
    assert len(np.unique(hashes)) == len(words) and hashes.all()
    # Whatever a word lies beside: in a slice, in another order.
    assert (word_hashes(pa.array(["x", *words])[1:]) == hashes).all()
    assert (word_hashes(pa.array(words[::-1]))[::-1] == hashes).all()
    assert word_hashes(pa.array(["", "a", ""])).tolist() == [0, hashes[words.index("a")], 0]
    assert word_hashes(pa.array([], pa.string())).tolist() == []


DOCUMENTS = 2 * [["One two. Three four!", "\u00dcber \u201cone\u201d u.s. 2,000"], ["two " + "long" * 400]]


def encoded(encoder, documents):
    batch = prep_texts.encoded(documents, encoder.tokenizer, encoder)
    return batch.encoded.tokens, batch.encoded.sentence_lengths, batch.words.facts, batch.words.folded


@pytest.mark.parametrize("folded", [False, True])
def test_words_taken_over_are_words_learnt(tokenizer_file, tmp_path, folded):
    tokenizer = Tokenizer.load(tokenizer_file)
    one, other = (WordEncoder(tokenizer, np.dtype(np.uint16), folded=folded) for _ in range(2))
    encoded(one, 2 * [["two three"]])
    SharedWords(tmp_path, "key").write(0, one.take_new_words())
    encoded(one, DOCUMENTS)
    giver = SharedWords(tmp_path, "key")
    giver.write(1, one.take_new_words())
    assert one.take_new_words() is None
    encoded(other, [["Three and five and five"]])  # the two know words of each other
    assert len(other.take_new_words().hashes) == 2  # "Three" stood there once
    taker = SharedWords(tmp_path, "key")
    for words in taker.read_new():
        other.add_words(words)
    assert not list(taker.read_new()) and not list(SharedWords(tmp_path, "other").read_new())
    assert len(list(giver.read_new())) == 1  # not its own
    for found, want in zip(encoded(other, DOCUMENTS), encoded(one, DOCUMENTS), strict=True):
        np.testing.assert_array_equal(found, want)
    assert (encoded(other, DOCUMENTS)[3] is not None) is folded
    assert other.take_new_words() is None  # no new words


def test_truncated_files_and_later_tasks_are_not_shared(tokenizer_file, tmp_path, monkeypatch):
    encoder = WordEncoder(Tokenizer.load(tokenizer_file), np.dtype(np.uint16))
    encoded(encoder, DOCUMENTS)
    words = encoder.take_new_words()
    for task in range(3):
        SharedWords(tmp_path, "key").write(task, words)
    first, second, _ = sorted(tmp_path.rglob("*.npz"))
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-100])
    (found,) = SharedWords(tmp_path, "key").read_new()
    assert (found.rows == words.rows).all() and (found.tokens == words.tokens).all()
    SharedWords(tmp_path, "other").write(SHARING_TASKS, words)
    assert not list(SharedWords(tmp_path, "other").read_new())
    monkeypatch.setattr(encoder_module, "MAX_WORDS", 2 * encoder._numbers.size + 1)
    before = encoder._numbers.size
    encoder.add_words(words._replace(hashes=words.hashes ^ np.uint64(1)))
    assert encoder._numbers.size == before  # the cache would be more than half full
