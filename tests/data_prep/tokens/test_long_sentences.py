"""Sentences far longer than a row are cut where a clause or a word ends, and nothing of them is lost or moved."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.stages import sequences
from data_prep.tokens.encoder import Encoded
from megabert.data.tokenizer import Tokenizer
from tests.helpers import wordpiece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(wordpiece.write(tmp_path_factory.mktemp("vocab") / "vocab.txt"))


def encoded(tokenizer, documents):
    """Documents as lists of sentences, each a string."""
    ids = [tokenizer.encode_batch(sentences) for sentences in documents]
    flat = [sentence for document in ids for sentence in document]
    tokens = np.array([token for sentence in flat for token in sentence], np.uint16)
    sizes = np.array([len(document) for document in ids], np.int64)
    return Encoded(tokens, np.array([len(s) for s in flat], np.int64), sizes)


def test_only_documents_without_sentence_ends_are_split_unasked(tokenizer):
    short = encoded(tokenizer, [["the fox over the river"] * 90, ["the sea " * 150]])
    assert 0.2 < 300 / len(short.tokens) < 0.5
    assert sequences.sentence_limit(short, 125, 0) == 10
    assert sequences.sentence_limit(short, 150, 0) == 0  # nothing is longer than two rows
    most = encoded(tokenizer, [["the fox over the river"] * 300, ["the sea " * 150]])
    assert sequences.sentence_limit(most, 125, 0) == 0 and sequences.sentence_limit(most, 125, 40) == 40


def test_cuts_are_at_the_best_places(tokenizer):
    text = "the river over foxing, " * 40 + "the end"
    before = encoded(tokenizer, [["the fox", text], [], ["the sea " * 3]])
    after = sequences.split_long(before, 30, tokenizer)
    assert after.tokens is before.tokens and after.sentence_lengths.sum() == len(before.tokens)
    assert after.document_sizes.tolist()[1:] == [0, 1] and after.document_sizes[0] > 8
    assert after.sentence_lengths.max() <= 30 * 5 // 4 and after.sentence_lengths[1:-1].min() >= 10
    ends = np.cumsum(after.sentence_lengths)
    last = [tokenizer.tokens[i].strip() for i in before.tokens[ends[1 : after.document_sizes[0] - 1] - 1]]
    assert set(last) == {","}


def test_without_clauses_words_stay_whole(tokenizer):
    before = encoded(tokenizer, [["foxing rivers " * 200]])
    after = sequences.split_long(before, 16, tokenizer)
    begins = np.cumsum(after.sentence_lengths)[:-1]
    assert len(begins) > 30 and tokenizer.word_start[before.tokens[begins]].all()
