"""Every rule with a document on its limit and one beyond; limits from a command line; hashes of documents; n-gram shares."""

import random
import re
import textwrap
from collections import Counter

import numpy as np
import pytest

from data_prep import filters
from data_prep.common.errors import BadInput
from data_prep.filters import measures, repetition, rules
from data_prep.filters.rules import REASONS, judge, judge_lines, parse
from tests.helpers.prep_texts import batch_of

A10, A11 = "a b c d e f g h i j", "a b c d e f g h i j k"
Z = "z" * 20
ALL = dict.fromkeys(repetition.TOP + repetition.REPEATED, 0.0)


def reasons(documents, limits):
    return [REASONS[i] for i in judge(batch_of(documents), limits)]


# name, limit, a document on the limit, one just beyond
CASES = [
    ("min-words", 3, "a b c", "a b"), ("max-words", 3, "a b c", "a b c d"), ("min-mean-word", 2, "aaa b", "aa b"),
    ("max-mean-word", 2, "aaa b", "aaaa b"), ("min-letter-words", 0.8, "a é 3c 中 5", "a b 3 c 5"),
    ("min-letter-words", 0.5, "naïve 1,234 C# №", "naïve 1,234 -5 №"),
    ("max-symbol-share", 0.1, f"{A10[:-2]} #j", f"{A10[:-4]} #i #j"),
    ("max-symbol-share", 0.2, "a... b… #c # e f g h i j", "a... b… c...d # #f g h i j"),
    ("max-symbol-share", 0.25, "C#…x .. c d", "C#…x .. #1 d"),
    ("max-bullet-lines", 0.5, "• a\n- b\nc -\n-5", "•a\n* b\n– c\nd"),
    ("max-ellipsis-lines", 0.5, "a...\nb…\n...c\nd... e", "a...\n\nb…\n...\nd"),
    ("min-sentences", 2, "A bb. C dd! E", "A bb. C dd, Mr. E"),
    ("min-sentences", 2, 'Вот конец.» "end!"', "Вот конец.» end,"),
    ("max-duplicate-lines", 0.5, "a\nb\na\n\n a", "a\nb\na\na\na"),
    ("max-duplicate-line-characters", 0.5, "ab c\nabc\nab  c\nabc", "ab c\nab c\nab c\nd"),
    ("max-curly-brackets", 1, "a {b} c", "a {b c}"), ("max-lorem-ipsum", 0, "Lorem a ipsum", "a Lorem, IPSUM dolor"),
    ("max-top-2-gram", 0.4, "a b x a b yyyyy", "a b x a b yyyy"),
    ("max-top-3-gram", 0.6, "a b c x a b c yyy", "a b c x a b c yy"),
    ("max-top-4-gram", 0.8, "a b c d x a b c d y", "a b c d a b c d y"),
]  # fmt: skip
for n in range(10, 22, 2):
    words = A11[:n]
    CASES.append((f"max-duplicate-{n // 2}-gram", 0.5, f"{words}{Z[:n]} {words}", f"{words}{Z[1:n]} {words}"))
# name, limit, a line on the limit, one just beyond
LINE_CASES = [
    ("min-line-words", 3, "a b c", "a b"), ("min-line-ends", 1, "So he said “go.”", "So he said, go:"),
    ("min-line-ends", 1, "by Mr. Smith etc.", "1. by Mr Smith)"), ("min-line-ends", 1, "他说。", "他说"),
    ("max-line-notices", 0, "Java script is a privacy matter.", "Please enable JavaScript!"),
    ("max-line-notices", 0, "The terms of its use of cookie jars.", "By the Terms of Use, go."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "limit", "on", "beyond"), CASES, ids=[case[0] for case in CASES])
def test_document_on_the_limit_is_kept(name, limit, on, beyond):
    assert reasons([on, beyond, on], {name: limit}) == ["", name, ""]
    assert reasons([on, beyond], {}) == ["", ""]


@pytest.mark.parametrize(("name", "limit", "on", "beyond"), LINE_CASES)
def test_line_on_the_limit_is_kept(name, limit, on, beyond):
    verdicts = judge_lines(batch_of([f"{on}\n\n{beyond}", on]), {name: limit})
    assert [REASONS[i] for i in verdicts] == ["", "", name, ""]
    assert not judge_lines(batch_of([beyond]), {}).any()
    assert not judge_lines(batch_of(["", []]), {name: limit}).any()


def test_phrase_ends_in_its_document_or_line():
    found = reasons(["a Lorem", "ipsum b", "lorem\nipsum"], {"max-lorem-ipsum": 0})
    assert found == ["", "", "max-lorem-ipsum"]
    batch = batch_of(["Our privacy\npolicy.", "By the terms of", "use it."])
    assert not judge_lines(batch, {"max-line-notices": 0}).any()


def test_the_example_of_a_rule_runs():
    names: dict = {}
    exec(textwrap.dedent("".join(re.findall(r"^(?: {4}.*)?\n", filters.__doc__, re.M))), names)
    (rule,) = names["RULES"]
    documents = measures.DocumentMeasures(batch_of(["a b", "a " + "b" * 31]), {rule.name: rule.limit})
    assert rule.measure(documents).tolist() == [0, 0.5] and rule.broken(documents).tolist() == [False, True]


def test_every_rule_has_a_case_and_help():
    assert {name for name, *_ in (*CASES, *LINE_CASES)} == set(REASONS[1:])
    lines = rules.describe_rules().splitlines()
    assert [line.split()[0] for line in lines] == list(REASONS[1:])
    assert " ".join(lines[0].split()) == "min-words at least this many words (gopher 50)"


def test_first_rule_in_order_is_the_reason():
    limits = parse(["min-words=5", "max-mean-word=3", "min-sentences=1"])
    texts = ["abcde", "abcde b c d e", "abcdefghijkl b c d e", "a b c d ee."]
    assert reasons(texts, limits) == ["min-words", "min-sentences", "max-mean-word", ""]


def test_empty_documents_fail_counts_alone():
    counts = ("min-words", "min-sentences")
    assert reasons(["", "\n\n", []], {name: limit for name, limit, *_ in CASES if name not in counts}) == ["", "", ""]
    for name in counts:
        assert reasons(["", "A b cc."], {name: 1}) == [name, ""]
    none = batch_of([])
    assert len(judge(none, parse(["gopher"]))) == 0
    assert len(none.document_hashes(0)) == 0


def test_verdict_depends_on_the_document_alone(monkeypatch):
    rng = random.Random(3)
    vocabulary = ["the", "of", "and", "a", "#", "...", "-", "end.", *(f"word{i}" for i in range(60))]
    documents = []
    for _ in range(150):
        lines = [" ".join(rng.choices(vocabulary, k=rng.randint(0, 30))) for _ in range(rng.randint(0, 8))]
        documents.append(lines + rng.choices(lines, k=rng.randint(0, 3)) if lines else lines)
    limits = parse(["gopher", "c4", "min-words=10", "max-symbol-share=0.2", "min-letter-words=0.5"])
    together = judge(batch_of(documents), limits)
    assert len(set(together.tolist())) >= 6, "the documents should break several rules"
    assert [int(judge(batch_of([document]), limits)[0]) for document in documents] == together.tolist()
    monkeypatch.setattr(rules, "CHUNK_WORDS", 100)
    monkeypatch.setattr(measures, "WORDS_AT_ONCE", 7)
    assert judge(batch_of(documents), limits).tolist() == together.tolist()


def test_presets_have_the_published_limits():
    assert parse(["gopher"]) == {
        "min-words": 50, "max-words": 100_000, "min-mean-word": 3, "max-mean-word": 10, "min-letter-words": 0.8,
        "max-symbol-share": 0.1, "max-bullet-lines": 0.9, "max-ellipsis-lines": 0.3, "max-duplicate-lines": 0.3,
        "max-duplicate-line-characters": 0.2, "max-top-2-gram": 0.2, "max-top-3-gram": 0.18, "max-top-4-gram": 0.16,
    } | {f"max-duplicate-{n}-gram": (20 - n) / 100 for n in range(5, 11)}  # fmt: skip
    lines = {"min-line-words": 3, "min-line-ends": 1, "max-line-notices": 0}
    assert parse(["c4"]) == lines | {"min-sentences": 5, "max-curly-brackets": 0, "max-lorem-ipsum": 0}


def test_later_limits_replace_earlier_bad_are_refused():
    assert parse([]) == parse(["gopher", "off"]) == {} and parse(["max-top-2-gram"]) == {"max-top-2-gram": 0.2}
    mixed = parse(["gopher", "min-words=20", "max-words=off", "min-sentences"])
    assert (mixed["min-words"], mixed["min-sentences"], mixed["max-top-3-gram"]) == (20, 5, 0.18)
    assert "max-words" not in mixed
    for item, error in (
        ("min-word=3", "no rule 'min-word'; the nearest is 'min-words'"),
        ("max-symbol-share=2", "give a share in 0..1 or off"),
        ("min-words=nan", "give a number >= 0 or off"),
    ):
        with pytest.raises(BadInput, match=f"--filters {item}: {error}"):
            parse([item])


def test_document_hashes_ignore_whitespace_alone():
    texts = ["a b c", " a\tb\n\nc ", "c b a", "a b", "ab c", "a b c c", "", "\n"]
    hashes = batch_of(texts).document_hashes(5)
    assert hashes[0] == hashes[1] and len(set(hashes[[0, 2, 3, 4, 5]].tolist())) == 5
    assert hashes[6] == hashes[7] == 0 and hashes[:6].all()
    assert (batch_of(texts).document_hashes(6)[:6] != hashes[:6]).all()
    assert batch_of(["A few words."]).document_hashes(3).tolist() == [1586674951424065701]


def count_shares(text):
    """Shares of n-grams by their definition, n-gram by n-gram."""
    words = text.split()
    total = sum(map(len, words))
    shares = {}
    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        times = Counter(grams)
        if n <= 4:
            best = max(((k, sum(map(len, gram))) for gram, k in times.items() if k > 1), default=(0, 0))
            covered = best[0] * best[1]
        else:
            inside = {j for i, gram in enumerate(grams) if times[gram] > 1 for j in range(i, i + n)}
            covered = sum(len(words[j]) for j in inside)
        shares[n] = covered / total if total else 0.0
    return shares


def n_gram_shares(texts, limits, wanted=None):
    batch = batch_of(texts)
    hashes, characters = (np.ascontiguousarray(batch.facts[name]) for name in ("hash", "characters"))
    wanted = np.ones(len(texts), bool) if wanted is None else wanted
    return repetition.shares(hashes, characters, batch.documents, limits, wanted)


def random_texts(seed):
    """Documents of 0 to 400 words of vocabularies of 1 to 300 words, some with passages copied."""
    rng, texts = random.Random(seed), []
    for _ in range(150):
        vocabulary = ["x" * rng.randint(1, 6) + str(i) for i in range(rng.choice([1, 2, 5, 30, 300]))]
        words = rng.choices(vocabulary, k=rng.choice([0, 1, 2, 3, 4, 5, 12, 60, 400]))
        for _ in range(rng.choice([0, 0, 1, 4])):
            start = rng.randrange(len(words) + 1)
            words[rng.randrange(len(words) + 1) : 0] = words[start : start + rng.randint(2, 15)]
        texts.append(" ".join(words))
    return texts


@pytest.mark.parametrize("seed", range(4))
def test_n_gram_shares_equal_counted_strings(seed):
    texts = random_texts(seed)
    expected = [count_shares(text) for text in texts]
    shares = n_gram_shares(texts, ALL)
    for n in ALL:
        np.testing.assert_allclose(shares[n], [e[n] for e in expected], rtol=1e-12, atol=0, err_msg=f"{n}-grams")
    for limits in (dict.fromkeys(ALL, 0.3), {2: 0.9}, {4: 0.1, 10: 0.5}, {7: 0.05}):
        screened = n_gram_shares(texts, limits)
        for n, limit in limits.items():
            wanted = np.array([e[n] for e in expected])
            assert ((screened[n] > limit) == (wanted > limit)).all(), (n, limit)
            assert ((screened[n] == wanted) | (screened[n] == 0)).all()
    assert n_gram_shares(["a b a b", "a b a b"], ALL, np.array([False, True]))[2].tolist() == [0, 1]
