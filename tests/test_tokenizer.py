"""The tokenizer is the file that was hashed, its special ids are fixed, and a file that is none is one clear line."""

from __future__ import annotations

import hashlib
import io
import pickle

import numpy as np
import pytest
import sentencepiece

from megabert.tokenizer import SPECIAL_IDS, Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "She sells sea shells by the sea shore, and the shells she sells are surely sea shells.",
    "A language model learns which words follow which, and how often they do so.",
] * 50
PIECES = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]"}


def train(path, **changes):
    model = io.BytesIO()
    options = {f"{k}_id": i for i, k in enumerate(PIECES)} | {f"{k}_piece": v for k, v in PIECES.items()}
    options |= {"control_symbols": ["[MASK]"], "vocab_size": 60, "model_type": "unigram"} | changes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, minloglevel=2, **options
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


def test_encoding_is_sentencepieces_own_and_decodes_to_the_text(path):
    tokenizer = Tokenizer.load(path)
    plain = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = [*TEXT[:3], "", "shells", "words and shells " * 200]
    got = tokenizer.encode_batch(texts)
    assert [list(ids) for ids in got] == [plain.encode(text) for text in texts]
    assert [tokenizer.decode(ids) for ids in got] == [" ".join(text.split()) for text in texts]
    assert tokenizer.encode_batch(texts, threads=2) == got
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.vocab_size == 60 and tokenizer.processor.get_piece_size() == 60
    assert tokenizer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_special_ids_never_come_from_text_but_unknown(path):
    tokenizer = Tokenizer.load(path)
    assert tokenizer.special_ids == SPECIAL_IDS == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    ids = tokenizer.encode_batch(["[MASK] [CLS] [SEP] [PAD] the fox", "\x00 \u4e2d"])
    assert not {0, 2, 3, 4} & {i for text in ids for i in text}
    assert tokenizer.decode([2, *tokenizer.encode_batch(["the fox"])[0], 3, 0, 4]) == "the fox"
    assert tokenizer.decode(np.array(tokenizer.encode_batch(["the fox"])[0], np.uint16)) == "the fox"
    for outside in ([-1], [60]):
        with pytest.raises(ValueError, match=r"0\.\.59"):
            tokenizer.decode(outside)


def test_word_starts_count_the_words(path):
    tokenizer = Tokenizer.load(path)
    assert tokenizer.word_start.shape == (60,) and tokenizer.word_start.dtype == bool
    assert not tokenizer.word_start[:5].any()
    for text in TEXT[:3]:
        assert tokenizer.word_start[tokenizer.encode_batch([text])[0]].sum() == len(text.split())


def test_it_survives_pickling(path):
    tokenizer = Tokenizer.load(path)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode_batch(TEXT[:3]) == tokenizer.encode_batch(TEXT[:3])


def test_every_malformed_file_is_one_line_naming_it(path, tmp_path):
    whole = path.read_bytes()
    bad = tmp_path / "bad.model"
    for data in (b"", b"text", b"\x00" * 5000, whole[: len(whole) // 2], whole[:100], whole[::-1]):
        bad.write_bytes(data)
        with pytest.raises(ValueError) as caught:
            Tokenizer.load(bad)
        assert str(bad) in str(caught.value) and "\n" not in str(caught.value)
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(
        0, len(whole), 200
    ).tolist():  # a flipped bit is refused or gives another hash: no crash
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        bad.write_bytes(data)
        try:
            assert Tokenizer.load(bad).sha256 != hashlib.sha256(whole).hexdigest()
        except ValueError as error:
            refused += str(bad) in str(error)
    assert refused > 0
    for missing in (tmp_path / "nothing.model", tmp_path):
        with pytest.raises(ValueError, match=str(missing)):
            Tokenizer.load(missing)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"control_symbols": ["[MSK]"]}, r"piece 4 must be \[MASK\]"),
        ({"pad_piece": "<pad>"}, r"piece 0 must be \[PAD\]"),
        ({"control_symbols": [], "user_defined_symbols": ["[MASK]"]}, r"\[MASK\] must be a control symbol"),
    ],
)
def test_a_tokenizer_with_other_special_pieces_is_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        Tokenizer.load(train(tmp_path / "other.model", **changes))
