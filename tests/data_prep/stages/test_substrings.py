"""Repeated substrings: planted ones are cut but for the first, nothing else is, whoever does the work and however often it dies."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_prep import pipeline
from data_prep.__main__ import main
from data_prep.common import hashing
from data_prep.common.errors import Problems
from data_prep.executor import work_files
from data_prep.executor.journal import Journal
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import Job
from data_prep.options import BuildOptions
from data_prep.readers import tasks
from data_prep.readers.tasks import Corpus, ReadOptions
from data_prep.stages import dedup, read, sequences, substrings
from megabert.data.tokenizer import Tokenizer

OLD = Path(__file__).resolve().parents[2] / "data" / "old_formats"
TOKENIZER = OLD / "dataset" / "tokenizer.model"
SIZE = 12
FILES = 4


def corpus():
    """Documents, each a list of words: some repeat runs of 11 to 60 words of others or of their own."""
    rng = random.Random(5)
    known = {word for word in (OLD / "text" / "notes.txt").read_text().split() if word.isalpha()}
    known = sorted(word.lower() for word in known)
    documents = [rng.choices(known, k=rng.randint(30, 120)) for _ in range(80)]
    for length in (11, 12, 12, 13, 20, 35, 60):  # 11 are too few to be cut
        source = rng.choice([document for document in documents if len(document) >= length + 2])
        first = rng.randrange(len(source) - length)
        run = source[first : first + length]
        for other in rng.sample(documents, 3):
            at = rng.randrange(len(other))
            other[at:at] = run
    documents[7][:] = ["over", "and"] * 30  # one that repeats itself
    documents[40][:] = documents[9][:25]  # of which nothing stays
    documents[50][:] = documents[11][-8:] + documents[12][:8]  # stood together, but in no document
    return documents


def by_hand(documents):
    """What stays, found window by window."""
    seen, found = {}, []
    for d, words in enumerate(documents):
        gone = set()
        for i in range(len(words) - SIZE + 1):
            first = seen.setdefault(tuple(words[i : i + SIZE]), (d, i))
            if first != (d, i):
                stays = range(first[1], first[1] + SIZE) if first[0] == d else ()
                gone |= set(range(i, i + SIZE)) - set(stays)
        found.append([word for i, word in enumerate(words) if i not in gone])
    return found


def write(documents, folder):
    folder.mkdir()
    step = len(documents) // FILES
    for i in range(FILES):
        lines = [json.dumps({"text": " ".join(words)}) for words in documents[i * step : (i + 1) * step]]
        (folder / f"{i}.jsonl").write_text("\n".join(lines))


def left(folder, work, monkeypatch, before=()):
    """The text that is left of each document, by the stages themselves, each file a task."""
    monkeypatch.setattr(tasks, "TASK_BYTES", (1, 1))
    work.mkdir()
    options = BuildOptions(dedup=before, dedup_substrings=SIZE)
    job = Job(options, str(TOKENIZER), str(work), "stop")
    items = tasks.plan_tasks([Corpus("input", (str(folder),))], ReadOptions(), Problems("stop"))
    assert len(items) == FILES
    tokenizer = Tokenizer.load(TOKENIZER)
    texts = []
    with contextlib.closing(Journal(work, Pool(1))) as journal:
        stages = pipeline.Stages(journal, progress=False)
        documents = stages.map("read", read.read_task, job, items)
        made, mask = pipeline._mark_duplicates(stages, job, documents)
        kept = [
            sequences.Kept(item.index, tuple(done.facts["units"]), 0, mask)
            for item, done in zip(items, documents.results, strict=True)
        ]
        for its in pipeline._cut_substrings(stages, job, kept, made):
            for _, unit in its.load(job):
                edges = np.append(0, np.cumsum(unit.document_tokens()))
                texts += [tokenizer.decode(unit.tokens[a:b]) for a, b in pairwise(edges)]
        journal.settle()
    return texts, stages.everything


@pytest.mark.parametrize("large", [False, True])
def test_planted_substrings_are_cut_and_nothing_else(large, tmp_path, monkeypatch):
    monkeypatch.setattr(dedup, "RANGE_RECORDS", 500)
    if large:  # as of a corpus of thousands of tasks: runs are merged, drops gathered
        monkeypatch.setattr(work_files, "MAX_OPENS", 0)
        monkeypatch.setattr(work_files, "MERGED_RUNS", 2)
    documents = corpus()
    write(documents, tmp_path / "in")
    texts, everything = left(tmp_path / "in", tmp_path / "work", monkeypatch)
    expected = by_hand(documents)
    assert texts == [" ".join(words) for words in expected]
    gone = sum(map(len, documents)) - sum(map(len, expected))
    assert everything.counts[substrings.CUT_WORDS] == gone > 400
    assert everything.dropped == {substrings.LOST: sum(not words for words in expected)}
    assert expected[40] == [] and expected[7] == ["over", "and"] * (SIZE // 2)


def test_documents_that_are_dropped_hold_no_first_occurrence(tmp_path, monkeypatch):
    documents = corpus()[:40]
    documents[20] = list(documents[3])  # dropped as a whole, before anything is cut
    documents[30] = documents[3][:20] + documents[31][:20]
    write(documents, tmp_path / "in")
    texts, _ = left(tmp_path / "in", tmp_path / "work", monkeypatch, before=("documents",))
    documents[20] = []
    assert texts == [" ".join(words) for words in by_hand(documents)]


def test_windows_hash_alike_where_their_words_are_alike_and_differ_by_order():
    parts = np.random.default_rng(0).integers(0, 1 << 64, 300, np.uint64)
    parts[200:260] = parts[20:80]
    for size in (1, 2, 7, 50):
        found = hashing.of_windows(parts, size)
        assert len(found) == 300 - size + 1
        assert (found[200 : 261 - size] == found[20 : 81 - size]).all()
        assert len(np.unique(found)) == len(found) - (61 - size if size <= 60 else 0)
    assert hashing.of_windows(parts[:2], 2)[0] != hashing.of_windows(parts[1::-1], 2)[0]
    assert not len(hashing.of_windows(parts[:4], 5))


def arguments(folder, output, *options):
    return ["build", "--input", str(folder), "--no-nsp", "--seq-len", "32", "--tokenizer", str(TOKENIZER), "--output", str(output),
            "--held-out", "0.1", "--dedup-substrings", str(SIZE), "--dedup", "documents", "near", "paragraphs", "--quiet",
            *options]  # fmt: skip


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_bytes_from_any_number_of_workers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "TASK_BYTES", (1, 1))
    write(corpus(), tmp_path / "in")
    assert main(arguments(tmp_path / "in", tmp_path / "1", "--workers", "1")) == 0
    assert "repeated substrings (" in capsys.readouterr().out
    assert main(arguments(tmp_path / "in", tmp_path / "2", "--workers", "2")) == 0
    for part in (["--part", "2/2"], ["--part", "1/2"], ["--merge"]):
        assert main(arguments(tmp_path / "in", tmp_path / "3", "--workers", "1", *part)) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")
    report = json.loads((tmp_path / "1" / "report.json").read_text())
    assert report["dropped"]["repeated_substrings"] > 10 and report["options"]["dedup_substrings"] == SIZE
    assert "repeated substrings of" in (tmp_path / "1" / "report.html").read_text()
    assert main(arguments(tmp_path / "in", tmp_path / "4", "--dedup-substrings", "7")) == 2
    assert "--dedup-substrings: must be 0 or at least 8, is 7" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["windows-0000002", "substrings-000000", "cut-0000001", "train-32-0000000"])
def test_a_build_that_is_killed_goes_on_to_the_same_bytes(reached, tmp_path):
    rng = random.Random(1)
    documents = corpus()
    write([rng.choice(documents) + rng.choice(documents) for _ in range(20_000)], tmp_path / "in")
    command = [sys.executable, "-m", "data_prep"]
    subprocess.run([*command, *arguments(tmp_path / "in", tmp_path / "whole", "--workers", "2")], check=True)
    killed = [*command, *arguments(tmp_path / "in", tmp_path / "out", "--workers", "2")]
    process = subprocess.Popen(killed, start_new_session=True)
    while not any(tmp_path.rglob(f"{reached}*")):
        assert process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() != 0
    subprocess.run(killed, check=True)
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")
