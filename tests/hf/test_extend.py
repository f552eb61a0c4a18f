"""An added word is one token, starts from the mean of its former tokens, and changes no other text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_prep.options import BuildOptions
from data_prep.stages.train_tokenizer import train
from megabert import hf as pretrained
from megabert.commands import convert, export
from megabert.data.tokenizer import Tokenizer
from megabert.hf import extend
from tests.helpers import runs

WORDS = {"uncased": ["foxes", "seafox", "Oversea", "the"], "unigram": ["shellsea", "riverbank", "the"]}
TEXTS = ["the quick brown fox", "sea shells by the river, over words"]


@pytest.mark.parametrize(("kind", "tied"), [("uncased", True), ("unigram", False)])
def test_words_are_added_to_tokenizer_and_model(kind: str, tied: bool, tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", kind, tied=tied)
    export.export(run, tmp_path / "hf")
    before = pretrained.load(run)
    (tmp_path / "words.txt").write_text("\n".join([*WORDS[kind], WORDS[kind][0], ""]))
    arguments = ["--model", tmp_path / "hf", "--run", tmp_path / "more", "--add-words", tmp_path / "words.txt"]
    assert convert.main([str(argument) for argument in arguments]) == 0
    after = pretrained.load(tmp_path / "more")
    old, new, size = before.tokenizer, after.tokenizer, before.tokenizer.vocab_size
    added = [word for word in WORDS[kind] if word != "the"]
    assert new.vocab_size == size + len(added) == after.config.model.vocab_size and new.sha256 != old.sha256
    assert new.encode_batch(added) == [[size + i] for i in range(len(added))]
    assert new.encode_batch(TEXTS) == old.encode_batch(TEXTS) and new.special_ids == old.special_ids
    rows = {"embeddings.word.weight", "embeddings.word.bias"} | (set() if tied else {"embeddings.word.decoder"})
    for name in rows:
        was, now = before.weights[name], after.weights[name]
        assert now[:size].equal(was[:size])
        for i, ids in enumerate(old.encode_batch(added)):
            assert len(ids) > 1 and torch.allclose(now[size + i], was[ids].mean(0))
    assert all(after.weights[name].equal(before.weights[name]) for name in before.weights.keys() - rows)


def test_a_word_without_spaces_is_found_inside_a_text(tmp_path: Path) -> None:
    lines = ["他在清晨的市场里买菜。", "图书馆在城市的中心。", "老王卖豆腐和蔬菜。"] * 9
    (tmp_path / "m").write_bytes(train(lines, BuildOptions(vocab_size=30, character_coverage=1.0)))
    tokenizer = Tokenizer.load(tmp_path / "m")
    more, parts = extend.extended(tokenizer, ["城市的中心"])
    assert len(parts[0]) > 1 and tokenizer.vocab_size in more.encode_batch(["图书馆在城市的中心。"])[0]


def test_words_that_cannot_be_tokens_are_named(tmp_path: Path) -> None:
    for kind, word, message in (
        ("cased", "covid-19", "'covid-19' is 3 words to BERT's tokenizer"),
        ("unigram", "two words", "'two words' is no single word"),
        ("bpe", "foxes", "is no unigram model"),
    ):
        with pytest.raises(ValueError, match=message):
            extend.extended(runs.tokenizer(tmp_path / kind, kind), [word])
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty.txt: is empty; give a word a line"):
        extend.read_words(tmp_path / "empty.txt")
