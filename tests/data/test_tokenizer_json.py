"""A tokenizer.json of any kind: its library's ids, its own special tokens, the same in a dataset, in use and exported."""

import json
from itertools import chain

import numpy as np
import pytest

from megabert.data.tokenizer import Tokenizer
from megabert.hf.tokenizer_export import pad_encoded
from tests.helpers import fast_tokenizers, tokenizers
from tests.helpers.prep_reading import write_all
from tests.helpers.prep_texts import ids_of_build
from tests.helpers.runs import TEXT

TEXTS = [*TEXT[:3], '"Hello," it’s <s> a naïve sea [MASK] 你好!', "shells", "I &amp; you", "shells" * 100]
TEXTS.append("the  sea\nand\n\nthe <mask> river")


@pytest.fixture(params=fast_tokenizers.KINDS)
def tokenizer(request, tmp_path) -> Tokenizer:
    return Tokenizer.load(fast_tokenizers.write(tmp_path / "tokenizer.json", request.param))


def test_ids_are_the_librarys_own(tokenizer):
    import tokenizers

    plain = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    assert tokenizer.encode_batch(TEXT[:3]) == [plain.encode(text, add_special_tokens=False).ids for text in TEXT[:3]]
    assert not {0, 1, 2, 4} & set(chain(*tokenizer.encode_batch(["<s> <mask> </s><pad>"])))
    assert tokenizer.special_ids == {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 4}
    if not tokenizer.continuation:
        for text, ids in zip(TEXT[:3], tokenizer.encode_batch(TEXT[:3]), strict=True):
            assert "".join(tokenizer.tokens[i] for i in ids).strip() == text == tokenizer.decode(ids).strip()
    shown = [tokenizer.tokens[i] for i in np.flatnonzero(tokenizer.word_start)]
    assert " she" in shown or " sells" in shown or " shells" in shown
    assert not tokenizer.word_start[[0, 1, 2, 4]].any()


def test_a_build_encodes_as_in_use(tokenizer):
    assert ids_of_build(TEXTS, tokenizer) == tokenizer.encode_texts([" ".join(text.split()) for text in TEXTS])


def test_transformers_loads_the_same_ids(tokenizer, tmp_path):
    peer = tokenizers.peer(tokenizer, tmp_path, 64)
    texts = [*TEXT[:3], "the <mask> shells, <mask> sea", "<mask> sea", "a naïve 你好"]
    assert peer(texts)["input_ids"] == [pad_encoded(tokenizer, text)[0].tolist() for text in texts]
    assert pad_encoded(tokenizer, "the [MASK] sea")[0].tolist() == peer("the <mask> sea")["input_ids"]
    assert peer("the sea", "the shells")["input_ids"].count(2) == 2
    assert (peer.pad_token_id, peer.mask_token_id) == (1, 4)
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert pad_encoded(again, texts).equal(pad_encoded(tokenizer, texts))


def test_bytes_of_tokens_are_those_of_the_text(tmp_path):
    """Characters of several tokens included, which count their own bytes alone."""
    tokenizer = Tokenizer.load(fast_tokenizers.write(tmp_path / "tokenizer.json"))
    text = "the naïve sea, 你好 \x7f\xad"
    ids = tokenizer.encode_batch([text])[0]
    assert len(ids) > 10 and "\ufffd" in tokenizer.tokens[ids[-1]]
    assert b"".join(tokenizer.token_bytes()[i] for i in ids) == text.encode()


def test_special_tokens_are_named_beside_or_refused(tmp_path):
    path = fast_tokenizers.write(tmp_path / "tokenizer.json", special=["<pad>", "<a>", "<b>", "<unk>", "<mask>"])
    with pytest.raises(ValueError, match=r"tokenizer\.json: has no cls token \(none of \[CLS\], <cls>, <s>, <bos>\)"):
        Tokenizer.load(path)
    fast_tokenizers.name_special(path, cls_token="<a>", eos_token="<b>")
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id) == (1, 2, 0)
    again = Tokenizer.load(write_all(tmp_path / "moved", tokenizer.files()) / "tokenizer.json")
    assert again.sha256 == tokenizer.sha256 and again.special_ids == tokenizer.special_ids
    for sep, pad, message in (
        ("<a>", "<pad>", "two of its special tokens are one"),
        ("<c>", "<pad>", "no token '<c>', which the files beside it name as its sep_token"),
        ("<pad>", "<b>", "<pad> has id 0"),
    ):
        fast_tokenizers.name_special(path, cls_token="<a>", sep_token=sep, pad_token=pad)
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(path)
    fast_tokenizers.write(path, special=["<s>", "</s>", "<mask>", "<unk>"])
    fast_tokenizers.name_special(path, pad_token="</s>")  # padding may be the end token, as EuroBERT's is
    assert Tokenizer.load(path).pad_id == Tokenizer.load(path).sep_id == 1


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    tree = json.loads(fast_tokenizers.write(path).read_text())
    bare = tree | {"decoder": None, "pre_tokenizer": {"type": "Whitespace"}}
    ended = tree | {"model": tree["model"] | {"end_of_word_suffix": "</w>"}}
    tokens = tree["model"]["vocab"]
    twice = tree | {"model": tree["model"] | {"vocab": tokens | {"the": 9, "sea": 9}}}
    random = tree | {"model": tree["model"] | {"dropout": 0.5}}
    for content, message in (
        (json.dumps(twice), "its tokens '.*' and '.*' both have the id 9"),
        (json.dumps(random), r"model\.dropout=0\.5 gives a text other tokens each time"),
        ("{", "not valid JSON"),
        ('{"version": "1.0"}', r"not a tokenizer\.json of the tokenizers library"),
        (json.dumps(bare), "its tokens do not show where words begin"),
        (json.dumps(ended), "mark the ends of words"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(path)
