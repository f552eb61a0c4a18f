"""Words through the cache give the tokens, sentences and paragraphs of the text itself."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from data_prep.options import BuildOptions
from data_prep.stages.train_tokenizer import train
from data_prep.text import clean, sentences
from data_prep.tokens.encoder import WordEncoder, word_facts
from megabert.data.text import clean_word
from megabert.data.tokenizer import Tokenizer
from tests.helpers.prep_texts import encoded


@pytest.mark.parametrize("kind", ["unigram", "bpe", "bpe-lowercase"])
def test_the_word_cache_gives_sentencepiece_s_tokens(kind, tokenizer_file, topics, tmp_path):
    tokenizer = Tokenizer.load(tokenizer_file)
    if kind != "unigram":
        options = BuildOptions(vocab_size=2000, model_type="bpe", lowercase="lower" in kind)
        tokenizer = Tokenizer.parse(train("\n".join(topics).splitlines(), options), tmp_path / kind)
    assert tokenizer.word_local
    encoder = WordEncoder(tokenizer, np.dtype(np.uint16))
    extra = ["ﬁne ½ e\u0301 \u4f60\u597d\u3002\u518d\u89c1 \u200b", "", "x" * 40 + " [MASK] \u2581"]
    documents = [clean.paragraphs(text, False) for text in [*topics, *extra]]
    found = encoded(documents, tokenizer, encoder).encoded
    want = [[" ".join(map(clean_word, s.split())) for p in d for s in sentences.split(p)] for d in documents]
    per_document = [[ids for ids in tokenizer.encode_batch(s) if ids] for s in want]
    assert found.document_sizes.tolist() == [len(d) for d in per_document]
    flat = [ids for d in per_document for ids in d]
    assert found.sentence_lengths.sum() == len(found.tokens)
    cut = np.split(found.tokens, np.cumsum(found.sentence_lengths)[:-1])
    different = [(a.tolist(), b) for a, b in zip(cut, flat, strict=True) if a.tolist() != b]
    # Drawn tables have ties: "-----" is "-" "----" or "----" "-".
    assert len(flat) > 3000 and not different
    # A full cache, an empty one and one that was just dropped give the same tokens.
    for _ in range(2):
        np.testing.assert_array_equal(encoded(documents, tokenizer, encoder).encoded.tokens, found.tokens)
        encoder._reset_cache()


def test_megabyte_without_a_space_is_cut(tokenizer_file):
    tokenizer = Tokenizer.load(tokenizer_file)
    found = encoded([["ab" * 500_000]], tokenizer).encoded
    assert found.document_sizes.tolist() == [1]
    assert tokenizer.decode(found.tokens).replace(" ", "") == "ab" * 500_000


def test_arrow_splits_where_python_does():
    """At every character that is space for either; Arrow adds an empty word at an end, which the encoder drops."""
    spaces = [chr(c) for c in range(sys.maxunicode + 1) if chr(c).isspace()]
    assert len(spaces) > 20
    others = [chr(c) for c in range(0x3100) if not chr(c).isspace()]
    texts = [f"a{c}{c}b{c}" for c in spaces] + [f"a{c}b" for c in others]
    found = [[word for word in words if word] for words in pc.utf8_split_whitespace(pa.array(texts)).to_pylist()]
    assert found == [text.split() for text in texts]


def test_memory_after_a_batch_changes_no_word(tokenizer_file, monkeypatch):
    split = pc.utf8_split_whitespace

    def split_before_half_a_character(texts):
        _, edges, data = texts.buffers()
        size = np.frombuffer(edges, np.int32)[len(texts)]
        followed = pa.py_buffer(data.to_pybytes()[:size] + b"\x80" * 64)
        return split(pa.StringArray.from_buffers(len(texts), edges, followed.slice(0, size)))

    tokenizer = Tokenizer.load(tokenizer_file)
    want = encoded([["One two"]], tokenizer).words.document_hashes(0)
    monkeypatch.setattr(pc, "utf8_split_whitespace", split_before_half_a_character)
    for space in (" ", "\xa0", "\u3000"):
        assert encoded([["One two" + space]], tokenizer).words.document_hashes(0) == want


def test_paragraphs_and_documents_keep_their_places(tokenizer_file):
    documents = [["One two. Three four.", "", "  ", " Five \u3000 six "], [], ["\u200b"], [" "], ["Seven."]]
    tokenizer = Tokenizer.load(tokenizer_file)
    batch = encoded(documents, tokenizer)
    assert batch.words.documents.tolist() == [0, 6, 6, 6, 6, 7]
    assert batch.words.paragraphs.tolist() == [0, 4, 4, 4, 6, 6, 6, 7]
    assert batch.paragraph_sizes.tolist() == [2, 0, 0, 1, 0, 0, 1]
    assert batch.encoded.document_sizes.tolist() == [3, 0, 0, 0, 1]
    assert batch.encoded.document_tokens().sum() == len(batch.encoded.tokens)
    alone = word_facts(documents)
    for name in ("documents", "paragraphs"):
        assert getattr(alone, name).tolist() == getattr(batch.words, name).tolist()
    assert (alone.facts == batch.words.facts).all()
    padded = [["One \u200b two. Three four.", "\ufeff", "Five six \u200e"], *documents[1:]]  # the same words
    for words in (encoded(padded, tokenizer).words, word_facts(padded)):
        assert (words.document_hashes(0) == alone.document_hashes(0)).all()
    empty = encoded([["", " "], []], tokenizer, WordEncoder(tokenizer, np.dtype(np.uint16), texts=True))
    assert empty.paragraph_sizes.tolist() == [0, 0] and empty.encoded.document_texts() == ["", ""]
