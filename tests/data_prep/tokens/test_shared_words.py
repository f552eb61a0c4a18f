"""Words that one encoder learnt give another what it would have learnt itself."""

import numpy as np
import pytest

from data_prep.tokens import encoder as encoder_module
from data_prep.tokens.encoder import WordEncoder
from data_prep.tokens.shared_words import TASKS, SharedWords
from megabert.data.tokenizer import Tokenizer

DOCUMENTS = 2 * [["One two. Three four!", "\u00dcber \u201cone\u201d u.s. 2,000"], ["two " + "long" * 400]]


def encoded(encoder, documents):
    for document in documents:
        encoder.add(document)
    batch = encoder.finish()
    return batch.encoded.tokens, batch.encoded.sentence_lengths, batch.words.facts, batch.words.folded


@pytest.mark.parametrize("folded", [False, True])
def test_words_taken_over_are_words_learnt(tokenizer_file, tmp_path, folded):
    tokenizer = Tokenizer.load(tokenizer_file)
    one, other = (WordEncoder(tokenizer, np.dtype(np.uint16), folded=folded) for _ in range(2))
    encoded(one, 2 * [["two three"]])
    SharedWords(tmp_path, "key").give(0, one.learnt())
    encoded(one, DOCUMENTS)
    giver = SharedWords(tmp_path, "key")
    giver.give(1, one.learnt())
    assert one.learnt() is None
    encoded(other, [["Three and five and five"]])  # the two know words of each other
    assert len(other.learnt().hashes) == 2  # "Three" stood there once
    taker = SharedWords(tmp_path, "key")
    for words in taker.take():
        other.take_over(words)
    assert not list(taker.take()) and not list(SharedWords(tmp_path, "other").take())
    assert len(list(giver.take())) == 1  # not its own
    for found, want in zip(encoded(other, DOCUMENTS), encoded(one, DOCUMENTS), strict=True):
        np.testing.assert_array_equal(found, want)
    assert (encoded(other, DOCUMENTS)[3] is not None) is folded
    assert other.learnt() is None  # nothing was left to learn


def test_a_file_that_a_loss_of_power_cut_off_is_passed_over(tokenizer_file, tmp_path):
    encoder = WordEncoder(Tokenizer.load(tokenizer_file), np.dtype(np.uint16))
    encoded(encoder, DOCUMENTS)
    words = encoder.learnt()
    for task in range(3):
        SharedWords(tmp_path, "key").give(task, words)
    first, second, _ = sorted(tmp_path.rglob("*.npz"))
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-100])
    (found,) = SharedWords(tmp_path, "key").take()
    assert (found.rows == words.rows).all() and (found.tokens == words.tokens).all()


def test_later_tasks_keep_their_words(tokenizer_file, tmp_path, monkeypatch):
    encoder = WordEncoder(Tokenizer.load(tokenizer_file), np.dtype(np.uint16))
    encoded(encoder, DOCUMENTS)
    words = encoder.learnt()
    SharedWords(tmp_path, "key").give(TASKS, words)
    assert not list(tmp_path.rglob("*"))
    monkeypatch.setattr(encoder_module, "MAX_WORDS", 2 * encoder._lexicon.size + 1)
    before = encoder._lexicon.size
    encoder.take_over(words._replace(hashes=words.hashes ^ np.uint64(1)))
    assert encoder._lexicon.size == before  # the cache would be more than half full
