"""Every character of a cleaned text has its place in the original."""

import json
import random
import re
from pathlib import Path

import pytest

from megabert.data.text import Form, clean_word, prepared
from megabert.data.tokenizer import Tokenizer
from megabert.finetune.offsets import encode_with_offsets, prepared_with_places
from tests.helpers import fast_tokenizers

PARTS = ["a", "&amp;", "&lt", "\u200b", "\u2066", "\xad", "é", " ", "文", "\u0301", "\u0323", "\u1112\u1161", "\u11ab", "か", "\u3099", "。", "」", "\x0b", "\x01", "\x00", "ﬁ", "x²", "\uff76", "\uff9e", "㈱", "\u314f", "\u3131", "\u200c", "\xa8"]  # fmt: skip


@pytest.mark.parametrize("form", ["NFC", "NFKC", ""])
def test_cleaned_characters_have_their_original_places(form: Form) -> None:
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(PARTS, k=rng.randint(0, 9)))
        found, places = prepared_with_places(text, form)
        assert found == prepared(text, form)
        cleaned = re.sub(r"(。+」*)(?=[^\s。」])", r"\1 ", re.sub("[\x00\x01\x0b]", " ", text))
        assert found.split() == " ".join(clean_word(word, form) for word in cleaned.split()).split()
        assert all(clean_word(word, form) == word for word in found.split()), text
        assert places.shape == (len(found), 2) and (places[:, 0] < places[:, 1]).all()
        for character, (first, last) in zip(found, places.tolist(), strict=True):
            assert character in f"{prepared(text[first:last], form)} ", (text, character)


def test_vowels_of_two_marks_are_reordered() -> None:
    """Of Tibetan; their own combining class is 0."""
    for form in ("NFC", "NFKC"):
        found, places = prepared_with_places("\u0f40\u0f74\u0f73", form)
        assert found == prepared("\u0f40\u0f74\u0f73", form) == "\u0f40\u0f71\u0f72\u0f74"
        assert places.tolist() == [[0, 3]] * 4


@pytest.mark.parametrize("change", [{"prepend_scheme": "first"}, {"split": False}])
def test_a_token_has_not_the_space_before_it(change: dict[str, object], tmp_path: Path) -> None:
    path, text = fast_tokenizers.write(tmp_path / "tokenizer.json", "unigram"), "the  fox,\tshe sells <mask> shells"
    tree = json.loads(path.read_text())
    tree["pre_tokenizer"] |= change
    path.write_text(json.dumps(tree))
    ((_, places),) = encode_with_offsets(Tokenizer.load(path), [text])
    shown = [text[start:end] for start, end in places.tolist() if text[start:end].strip()]
    assert "".join(shown) == "".join(text.split()) and "<mask>" in shown
