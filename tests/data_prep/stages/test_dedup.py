"""Duplicates: signatures, keys, planted copies in builds, many key ranges."""

import random
from pathlib import Path

import numpy as np
import pytest

from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.executor.journal import Stages
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob
from data_prep.options import BuildOptions
from data_prep.readers.tasks import group, list_ranges
from data_prep.stages import dedup, minhash, read
from data_prep.stages.minhash import BANDS, PERMUTATIONS, ROWS, Units
from megabert.data.tokenizer import Tokenizer
from tests.helpers.prep_builds import build_here
from tests.helpers.prep_reading import records, write, write_all
from tests.helpers.prep_texts import encoded

WORDS, CHARACTERS = 3, 5


def test_shingles_stay_inside_documents(tokenizer_file: Path) -> None:
    texts = ["a b c d", "b c d", "a b", "b a", "a", "", "d c b", "b c d a b c"]
    texts += ["東京に行く", "私は東京に行く", "go 東京 \u200b b c d"]
    documents = [[text] for text in texts]
    units = minhash.units(encoded(documents, Tokenizer.load(tokenizer_file)), documents)
    found, edges = minhash.shingles(units, WORDS, CHARACTERS)
    places = [(words, range(max(len(words) - WORDS + 1, bool(words)))) for words in map(str.split, texts)]
    expected = [[tuple(words[i : i + WORDS]) for i in starts] for words, starts in places]
    expected[-3:] = [[tuple("東京に行く")], [tuple("私は東京に"), tuple("は東京に行"), tuple("東京に行く")]]
    expected += [[("go", "東", "京"), ("東", "京", "b", "c", "d"), ("b", "c", "d")]]
    assert np.diff(edges).tolist() == [len(e) for e in expected] == [2, 1, 1, 1, 1, 0, 1, 4, 1, 3, 3]
    flat = [shingle for e in expected for shingle in e]
    names = dict(zip(flat, found.tolist(), strict=True))
    assert [names[shingle] for shingle in flat] == found.tolist()
    assert len(set(names.values())) == len(names) == len(set(flat))


def test_signatures_estimate_the_exact_similarity() -> None:
    """600 pairs of similarity 0 to 1: no bias, and the error that PERMUTATIONS independent places would have."""
    rng = np.random.default_rng(11)
    documents = []
    for _ in range(600):
        words = rng.integers(1, 1 << 63, rng.integers(60, 900), dtype=np.uint64)
        copy = words.copy()
        changed = rng.random(len(copy)) < rng.uniform(0, 0.4)
        copy[changed] = rng.integers(1, 1 << 63, int(changed.sum()), dtype=np.uint64)
        documents += [words, copy]
    edges = np.cumsum([0, *map(len, documents)])
    rows = minhash.signatures(Units(np.concatenate(documents), np.zeros(edges[-1], bool), edges), WORDS, CHARACTERS)
    assert rows.shape == (1200, PERMUTATIONS) and rows.dtype == np.uint32
    estimate = (rows[::2] == rows[1::2]).mean(1)
    sets = [set(zip(*(d[k:].tolist() for k in range(WORDS)), strict=False)) for d in documents]
    exact = np.array([len(a & b) / len(a | b) for a, b in zip(sets[::2], sets[1::2], strict=True)])
    assert exact.min() < 0.15 and exact.max() > 0.95
    expected = np.sqrt((exact * (1 - exact)).mean() / PERMUTATIONS)
    error = estimate - exact
    assert abs(error.mean()) < 4 * expected / 600**0.5, error.mean()
    assert np.sqrt((error**2).mean()) < 1.1 * expected, (np.sqrt((error**2).mean()), expected)


def test_band_keys_equal_for_equal_bands() -> None:
    rows = np.random.default_rng(2).integers(0, 1 << 32, (3, PERMUTATIONS), dtype=np.uint32)
    rows[1] = rows[0]
    rows[1, 2 * ROWS + 1] += 1  # in band 2
    rows[2] = rows[0]
    rows[2, [BANDS * ROWS - 1, -1]] += 1  # in the last band, and in a place that is in none
    keys = minhash.band_keys(rows)
    assert keys.shape == (3, BANDS) and keys.dtype == np.uint64
    assert np.flatnonzero(keys[1] != keys[0]).tolist() == [2]
    assert np.flatnonzero(keys[2] != keys[0]).tolist() == [BANDS - 1]
    assert len(np.unique(minhash.band_keys(np.zeros((1, PERMUTATIONS), np.uint32)))) == BANDS


def test_candidates_pair_first_and_previous() -> None:
    keys = np.array([5, 9, 5, 7, 9, 5, 5], np.uint64)
    ids = np.array([30, 8, 10, 1, 2, 20, 40], np.uint64)
    assert dedup.exact_duplicates(keys, ids).tolist() == [8, 20, 30, 40]
    pairs = dedup.near_candidates(keys, ids)
    assert sorted(map(tuple, pairs.tolist())) == [(2, 8), (10, 20), (10, 30), (10, 40), (20, 30), (30, 40)]
    rng = np.random.default_rng(4)
    keys, ids = rng.integers(0, 300, 2_000, dtype=np.uint64), rng.permutation(2_000).astype(np.uint64)
    pairs = dedup.near_candidates(keys, ids)
    of = dict(zip(ids.tolist(), keys.tolist(), strict=True))
    assert len(pairs) < 4_000 and len({tuple(pair) for pair in pairs.tolist()}) == len(pairs)
    assert all(a < b and of[a] == of[b] for a, b in pairs.tolist())
    first = {key: min(i for i in of if of[i] == key) for key in set(of.values())}
    assert {b for _, b in pairs.tolist()} == set(of) - set(first.values())


@pytest.fixture(scope="module")
def planted(topics, tmp_path_factory):
    """A folder: 300 documents of distinct sentences; 40 exact copies, 30 near copies and 25 repeated paragraphs."""
    vocabulary = sorted({word for text in topics for word in text.split() if word.isalpha()})
    rng = random.Random(11)

    words = ([rng.choices(vocabulary, k=12) for _ in range(4)] for _ in range(1500))
    paragraphs = [" ".join(" ".join(sentence).capitalize() + "." for sentence in part) for part in words]
    documents = [paragraphs[i : i + 5] for i in range(0, 1500, 5)]
    for i in range(25):  # the second paragraph of i stands again in 100 + i
        documents[100 + i][2] = documents[i][1]
    copies = [list(documents[i]) for i in range(40, 80)]
    near = []
    for i in range(200, 230):
        words = documents[i][0].split()
        words[5] = rng.choice(vocabulary)
        near.append([" ".join(words), *documents[i][1:]])
    bodies = ["\n".join(document) for document in documents + copies + near]
    bodies[300::2] = [body.replace(". ", ".   ") for body in bodies[300::2]]  # whitespace is no difference
    rng.shuffle(bodies)
    lines = [f'<doc id="1" url="u" title="T">\nT\n\n{body}\n</doc>\n' for body in bodies]
    return write_all(tmp_path_factory.mktemp("planted"), {f"wiki_{i}": "".join(lines[i::4]) for i in range(4)})


EXACT, NEAR = {"exact duplicate": 40}, {"near duplicate": 30}


@pytest.mark.parametrize(
    ("dedup", "reasons", "paragraphs"),
    # 25 planted paragraphs; those of near copies went with them
    [("none", {}, 0), (None, EXACT, 0), (("documents", "near", "paragraphs"), EXACT | NEAR, 25)],
)
def test_planted_copies_alone_are_dropped(dedup, reasons, paragraphs, planted, tokenizer_file, tmp_path, capsys):
    more = {"dedup": dedup} if dedup else {}
    facts = build_here(planted, tmp_path / "out", tokenizer=tokenizer_file, held_out=0, **more)
    assert facts["read"]["documents"] == 370 and facts["dropped"]["reasons"] == reasons
    assert facts["dropped"]["repeated_paragraphs"] == paragraphs
    shown = capsys.readouterr().out
    assert ("exact duplicate 40" in shown) == bool(reasons) and "random next none" in shown
    statistics = facts["datasets"]["128"]  # full sentences, of which nothing is lost
    assert statistics["tokens"] - 2 * statistics["sequences"] == statistics["corpus_tokens"]


@pytest.mark.parametrize(("characters", "repeated"), [(38, 39), (1, 3 * 39), (39, 0)])
def test_short_paragraphs_are_never_repeated_ones(characters, repeated, tokenizer_file, tmp_path) -> None:
    """Headings and answers stay; the line of 38 characters and 8 spaces goes from all documents but the first."""
    notice = "All rights of this text belong to its authors."
    bodies = [f"History\n{f'Sentence number {i} ends. ' * 9}\nYes.\n{notice}" for i in range(40)]
    path = write(tmp_path / "in.jsonl", records(bodies))
    options = {"dedup": "paragraphs", "paragraph_characters": characters, "workers": 1}
    facts = build_here(path, tmp_path / "out", tokenizer=tokenizer_file, **options)
    assert facts["dropped"]["repeated_paragraphs"] == repeated


def test_many_key_ranges_find_what_one_finds(planted, tokenizer_file, tmp_path, monkeypatch):
    monkeypatch.setattr(dedup, "RANGE_RECORDS", 64)
    options = BuildOptions(dedup=("documents", "near"))
    job = BuildJob(options, str(tokenizer_file), str(tmp_path), "stop", weights=(1.0, 1.0))
    corpora = [Corpus("input", (str(planted / "wiki_0"),)), Corpus("b", (str(planted),))]
    tasks = group(list_ranges(corpora, ReadOptions(), Problems("stop")))
    with Stages(tmp_path, Pool(1), progress=False) as stages:
        kept = dedup.run(stages, job, tasks, read.run(stages, job, tasks))
    assert {part.mask for part in kept} == {"keep"} and stages.everything.dropped == EXACT | NEAR
    assert all(len(list(tmp_path.glob(f"{kind}-*.drop"))) > 1 for kind in ("documents", "near"))
