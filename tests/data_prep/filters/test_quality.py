"""Every rule with a document on its limit and one just beyond; facts of words; hashes that ignore whitespace only."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.filters import quality, rules
from data_prep.filters.quality import BULLET, ELLIPSIS, ELLIPSIS_END, LETTER, MARK_END, NUMBER_SIGN, SENTENCE_END
from data_prep.filters.rules import REASONS, Rules
from data_prep.text import sentences
from tests.helpers.prep_texts import batch_of

ROOT = Path(__file__).resolve().parents[3]
A10, A11 = "a b c d e f g h i j", "a b c d e f g h i j k"


def described(words):
    return quality.describe(words, sentences.ends(words))


def reasons(documents, chosen: Rules) -> list[str]:
    return [REASONS[i] for i in quality.judge(batch_of(documents), chosen)]


# name, limit, a document on the limit, one just beyond
CASES = [
    ("min_words", 3, "a b c", "a b"),
    ("max_words", 3, "a b c", "a b c d"),
    ("min_mean_word", 2, "aaa b", "aa b"),
    ("max_mean_word", 2, "aaa b", "aaaa b"),
    ("min_letter_words", 0.8, "a é 3c 中 5", "a b 3 c 5"),
    ("max_symbol_share", 0.1, f"{A10[:-2]} #j", f"{A10[:-4]} #i #j"),
    ("max_symbol_share", 0.2, "a... b… #c # e f g h i j", "a... b… c...d # #f g h i j"),
    ("max_bullet_lines", 0.5, "• a\n- b\nc -\n-5", "•a\n* b\n– c\nd"),
    ("max_ellipsis_lines", 0.5, "a...\nb…\n...c\nd... e", "a...\n\nb…\n...\nd"),
    ("min_lines", 2, "a\n\nb", "a b\n\n"),
    ("min_sentences", 2, "A bb. C dd! E", "A bb. C dd, Mr. E"),
    ("max_short_lines", 0.5, "a b\nc d e\n\n", "a b\n\nc d\ne f g"),
    ("max_duplicate_lines", 0.5, "a\nb\na\n\n a", "a\nb\na\na\na"),
    ("max_duplicate_line_characters", 0.5, "ab c\nabc\nab  c\nabc", "ab c\nab c\nab c\nd"),
    ("max_curly_brackets", 1, "a {b} c", "a {b c}"),
    ("max_lorem_ipsum", 0, "Lorem a ipsum", "a Lorem, IPSUM dolor"),
    ("max_top_2_gram", 0.4, "a b x a b yyyyy", "a b x a b yyyy"),
    ("max_top_3_gram", 0.6, "a b c x a b c yyy", "a b c x a b c yy"),
    ("max_top_4_gram", 0.8, "a b c d x a b c d y", "a b c d a b c d y"),
] + [
    (
        f"max_duplicate_{n}_gram",
        0.5,
        f"{A11[: 2 * n]}{'z' * 2 * n} {A11[: 2 * n]}",
        f"{A11[: 2 * n]}{'z' * (2 * n - 1)} {A11[: 2 * n]}",
    )
    for n in range(5, 11)
]


@pytest.mark.parametrize(("name", "limit", "on", "beyond"), CASES, ids=[case[0] for case in CASES])
def test_a_document_on_the_limit_stays_and_one_beyond_goes(name, limit, on, beyond) -> None:
    chosen = Rules(**{name: limit})
    assert reasons([on, beyond, on], chosen) == ["", name.replace("_", "-"), ""]
    assert reasons([on, beyond], Rules()) == ["", ""]


def test_every_rule_has_a_case() -> None:
    cases = [name for name, *_ in CASES] + [name for name, *_ in LINE_CASES]
    assert {name.replace("_", "-") for name in cases} == set(REASONS[1:])


# name, limit, a line on the limit, one just beyond
LINE_CASES = [
    ("min_line_words", 3, "a b c", "a b"),
    ("min_line_ends", 1, "So he said “go.”", "So he said, go:"),
    ("min_line_ends", 1, "by Mr. Smith etc.", "1. by Mr Smith)"),
    ("min_line_ends", 1, "他说。", "他说"),
    ("max_line_notices", 0, "Java script is a privacy matter.", "Please enable JavaScript!"),
    ("max_line_notices", 0, "The terms of its use of cookie jars.", "By the Terms of Use, go."),
]


@pytest.mark.parametrize(("name", "limit", "on", "beyond"), LINE_CASES)
def test_a_line_on_the_limit_stays_and_one_beyond_goes(name, limit, on, beyond) -> None:
    verdicts = quality.judge_lines(batch_of([f"{on}\n\n{beyond}", on]), Rules(**{name: limit}))
    assert [REASONS[i] for i in verdicts] == ["", "", name.replace("_", "-"), ""]
    assert not quality.judge_lines(batch_of([beyond]), Rules()).any()
    assert not quality.judge_lines(batch_of(["", []]), Rules(**{name: limit})).any()


def test_the_first_rule_in_order_is_the_reason() -> None:
    chosen = Rules(min_words=5, max_mean_word=3, min_sentences=1)
    assert reasons(["abcde", "abcde b c d e", "abcdefghijkl b c d e", "a b c d ee."], chosen) == [
        "min-words",
        "min-sentences",
        "max-mean-word",
        "",
    ]


def test_documents_without_words_fail_counts_alone() -> None:
    shares = {name: limit for name, limit, *_ in CASES if name not in ("min_words", "min_lines", "min_sentences")}
    assert reasons(["", "\n\n", []], Rules(**shares)) == ["", "", ""]
    for name in ("min_words", "min_lines", "min_sentences"):
        assert reasons(["", "A b cc."], Rules(**{name: 1})) == [name.replace("_", "-"), ""]
    none = batch_of([])
    assert len(quality.judge(none, Rules.preset("gopher"))) == 0
    assert len(quality.document_hashes(none, 0)) == 0 and len(quality.describe([], np.zeros(0, np.uint8))) == 0


def test_a_verdict_depends_on_the_document_alone(monkeypatch) -> None:
    rng = random.Random(3)
    vocabulary = ["the", "of", "and", "a", "#", "...", "-", "end.", *(f"word{i}" for i in range(60))]
    documents = []
    for _ in range(150):
        lines = [" ".join(rng.choices(vocabulary, k=rng.randint(0, 30))) for _ in range(rng.randint(0, 8))]
        documents.append(lines + rng.choices(lines, k=rng.randint(0, 3)) if lines else lines)
    chosen = rules.parse(["gopher", "c4", "min-words=10", "max-symbol-share=0.2", "min-letter-words=0.5"])
    together = quality.judge(batch_of(documents), chosen)
    assert len(set(together.tolist())) >= 6, "the documents should break several rules"
    assert [int(quality.judge(batch_of([document]), chosen)[0]) for document in documents] == together.tolist()
    monkeypatch.setattr(quality, "CHUNK_WORDS", 100)
    assert quality.judge(batch_of(documents), chosen).tolist() == together.tolist()


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("word", LETTER),
        ("naïve", LETTER),
        ("中文", LETTER),
        ("1,234", 0),
        ("№", 0),
        ("", 0),
        ("-", BULLET),
        ("*", BULLET),
        ("–", BULLET),
        ("•", BULLET),
        ("•word", BULLET | LETTER),
        ("-5", 0),
        ("#1", NUMBER_SIGN),
        ("C#…x", LETTER | NUMBER_SIGN | ELLIPSIS),
        ("a...b", LETTER | ELLIPSIS),
        ("..", 0),
        ("end....", LETTER | ELLIPSIS | ELLIPSIS_END | SENTENCE_END),
        ("end…", LETTER | ELLIPSIS | ELLIPSIS_END | SENTENCE_END),
        ("end.", LETTER | SENTENCE_END),
        ('"end!"', LETTER | SENTENCE_END),
        ("конец.»", LETTER | SENTENCE_END),
        ("Mr.", LETTER),
    ],
)
def test_flags_of_a_word(word: str, flags: int) -> None:
    facts = described(["...", word, "."])  # neighbours must not leak in
    ends = np.uint8(SENTENCE_END | MARK_END)  # of which others are tested
    assert facts["flags"][1] & ~ends == flags & ~int(ends)
    if word not in ("..", ""):
        assert facts["flags"][1] & ~np.uint8(MARK_END) == flags
    assert facts["characters"].tolist() == [3, len(word), 1]


def test_facts_of_many_words_equal_those_of_each() -> None:
    words = [f"w{i}" + "é" * (i % 3) + "." * (i % 5) for i in range(quality.WORDS_AT_ONCE + 50)]
    together = described(words)
    assert (together["characters"] == [len(word) for word in words]).all()
    assert len(np.unique(together["hash"])) == len(words)
    for i in (0, 1, 7, quality.WORDS_AT_ONCE - 1, quality.WORDS_AT_ONCE, len(words) - 1):
        assert described([words[i]])[0] == together[i]


def test_document_hashes_see_order_and_words_but_no_whitespace() -> None:
    texts = ["a b c", " a\tb\n\nc ", "c b a", "a b", "ab c", "a b c c", "", "\n"]
    hashes = quality.document_hashes(batch_of(texts), 5)
    assert hashes[0] == hashes[1] and len(set(hashes[[0, 2, 3, 4, 5]].tolist())) == 5
    assert hashes[6] == hashes[7] == 0 and hashes[:6].all()
    assert (quality.document_hashes(batch_of(texts), 6)[:6] != hashes[:6]).all()
    lines = batch_of(["a b\nc\n\na  b", "c\na b"])
    hashes = quality.paragraph_hashes(lines)
    assert hashes[0] == hashes[3] == hashes[5] and hashes[1] == hashes[4] and hashes[2] == 0
    assert len(set(hashes.tolist())) == 3


def test_document_hashes_choose_a_fair_share() -> None:
    """Of 20,000 similar documents 10% are below 10% of the range, within 4 sigma (170)."""
    hashes = quality.document_hashes(batch_of([f"article {i} is short" for i in range(20_000)]), 0)
    assert len(np.unique(hashes)) == 20_000
    assert abs(int((hashes < 2**64 // 10).sum()) - 2_000) < 170


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from tests.helpers.prep_texts import batch_of; from data_prep.filters import quality; from data_prep.text import minhash\n"
        "b = batch_of(['A few words.', 'of two\\ndocuments'])\n"
        "h = quality.document_hashes(b, 3).tolist(), quality.paragraph_hashes(b).tolist()\n"
        "s = minhash.signatures(b.facts['hash'], b.documents)\n"
        "print(h, b.facts.tolist(), s.tolist(), minhash.band_keys(s).tolist())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("1", "1"), ("2", "4"))
    }
    assert len(printed) == 1
    assert quality.document_hashes(batch_of(["A few words."]), 3).tolist() == [1586674951424065701]
