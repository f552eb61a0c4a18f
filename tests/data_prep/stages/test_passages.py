"""Held-out passages of a corpus of few documents: the share, no text in both parts, no sequence over a cut, the same bytes."""

import re
from itertools import pairwise

import numpy as np
import pytest

from data_prep.build import BuildPlan, build
from data_prep.common.records import Corpus
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob, ItemResult
from data_prep.options import BuildOptions
from data_prep.stages import passages, sequences
from data_prep.stages.kept import DOCUMENT
from data_prep.tokens.encoder import Encoded
from megabert.data.shards import Dataset, verify
from megabert.data.tokenizer import Tokenizer
from tests.helpers.prep_builds import report, sequences_of
from tests.helpers.prep_reading import contents, write, write_all

SENTENCES = 1500


@pytest.fixture(scope="module")
def novels(tmp_path_factory):
    """Three documents of numbered sentences, each number once."""
    days = [f"It was day {number} of the long journey home, and nobody spoke." for number in range(3 * SENTENCES)]
    books = {f"{i}.txt": " ".join(days[i * SENTENCES : (i + 1) * SENTENCES]) for i in range(3)}
    return write_all(tmp_path_factory.mktemp("novels"), books)


@pytest.fixture
def make(novels, tokenizer_file, tmp_path):
    def run(name, source=novels, workers=1, **options):
        given = BuildOptions(**{"held_out": 0.05, "seq_len": (64, 128), **options})
        plan = BuildPlan([Corpus("input", (str(source),))], tmp_path / name, given, Tokenizer.load(tokenizer_file))
        build(plan, Pool(workers), progress=False)
        return tmp_path / name

    return run


def days(folder):
    """(label, numbers of the days) of each sequence of a dataset, those of A and of B in a list each."""
    tokenizer = Tokenizer.load(Dataset(folder).tokenizer_path)
    for ids, first, label in sequences_of(folder):
        texts = map(tokenizer.decode, (ids[:first], ids[first:]))
        # a number may be cut at the ends of a sequence
        yield label, [[int(n) for n in re.findall(r"day (\d+) of", text)] for text in texts]


@pytest.mark.parametrize("nsp", [False, True])
def test_passages_of_three_novels_are_held_out(nsp, make, capsys):
    folder = make("data", nsp=nsp)
    kind, line = capsys.readouterr().out.splitlines()
    assert "a document of plain text is a file" in kind
    facts = report(folder)
    for length in (64, 128):
        dataset = folder / f"seq{length}"
        assert list(verify(dataset)) == []
        entry, figures = Dataset(dataset).manifest.held_out, facts["datasets"][str(length)]["held_out"]
        assert line.startswith(f"held out: {entry['passages']} passages of about 1,024 tokens, ")
        share = figures["tokens"] / facts["read"]["tokens"]
        assert share == pytest.approx(0.05, abs=0.01) and figures["passages"] == entry["passages"] > 2
        assert entry["passage_tokens"] == 1024 and figures["documents"] == 0
        trained, held = list(days(dataset)), list(days(dataset / "held_out"))
        for label, (a, b) in trained + held:
            assert all(after - before == 1 for part in (a, b) for before, after in pairwise(part)), (a, b)
            # what does not fit a pair is cut off between its parts; a passage has 60 sentences
            assert label or not (a and b) or 1 <= b[0] - a[-1] < 12, (a, b)
        numbers = [{number for _, parts in part for of in parts for number in of} for part in (trained, held)]
        assert not numbers[0] & numbers[1] and len(numbers[1]) > 0.03 * 3 * SENTENCES
        # of pairs tokens are cut off
        assert nsp or len(numbers[0] | numbers[1]) > 0.8 * 3 * SENTENCES


def test_workers_and_stops_do_not_change_the_bytes(make, monkeypatch):
    whole = contents(make("whole"))
    assert contents(make("workers", workers=2)) == whole
    with monkeypatch.context() as patch:
        patch.setattr(sequences, "_held_unit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make("stopped")

    def find(*_):
        pytest.fail("found before")

    monkeypatch.setattr(passages, "find", find)
    assert contents(make("stopped")) == whole


@pytest.mark.parametrize(("length", "held_out"), [(32, True), (192, False)])
def test_text_of_a_row_is_not_held_out(length, held_out, topics, make, tmp_path):
    source = write(tmp_path / "in.txt", topics[1][:1400])
    folder = make("out", source, seq_len=(length,), held_out=BuildOptions().held_out)
    assert 256 < report(folder)["read"]["tokens"] < 320
    assert (Dataset(folder).manifest.held_out is not None) == held_out


def test_equal_passages_are_in_one_part(tokenizer_file, tmp_path):
    """Two documents that begin alike; a text without a sentence end is cut in front of words."""
    draw = np.random.default_rng(0)
    tokenizer = Tokenizer.load(tokenizer_file)
    same, rest = draw.integers(5, 3000, 20_000), draw.integers(5, 3000, 7000)
    tokens = np.concatenate([same, same, rest]).astype(np.uint16)
    unit = Encoded(tokens, np.array([len(same), len(tokens) - len(same)]), np.array([1, 0, 1]))
    job = BuildJob(BuildOptions(), str(tokenizer_file), str(tmp_path), "stop", passage=500, held_limit=1 << 62)
    table = np.zeros(3, DOCUMENT)
    table["bytes"] = 60_000, 9, 90_000
    found = passages.split(job, table, unit)
    assert found.encoded.document_tokens().sum() == len(tokens) and found.sentences.sum() == 2
    assert found.bytes.sum() == pytest.approx(150_000, abs=len(found.bytes)) and set(found.document) == {0, 2}
    edges = np.append(0, np.cumsum(found.encoded.document_tokens()))
    assert tokenizer.word_start[tokens[edges[1:-1]]].all()
    sizes = np.diff(edges)[found.held]
    assert len(sizes) > 10 and sizes.min() > 400 and sizes.max() < 1100
    held = np.repeat(found.held, np.diff(edges))
    # the last passage of the first document is longer; it begins before a word
    last = np.flatnonzero(tokenizer.word_start[same[: 20_000 // 500 * 500 - 499]])[-1]
    assert (held[:last] == held[20_000 : 20_000 + last]).all() and 0.1 < held.mean() < 0.4


@pytest.mark.parametrize(
    ("documents", "tokens", "needed"),
    [(5, 1000, False), (4, 1000, True), (9, 499, True), (9, 2000, False), (9, 2001, True)],
)
def test_few_documents_or_another_share_need_passages(documents, tokens, needed):
    result = ItemResult()
    result.counts.update({"tokens read": 110_000, "dropped tokens": 10_000, "held-out documents": documents})
    result.counts["held-out tokens"] = tokens
    assert passages.needs_passages(0.01, result) == needed and not passages.needs_passages(0, result)
