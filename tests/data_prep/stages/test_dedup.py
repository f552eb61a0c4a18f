"""What a build drops as repeated is what was planted, wherever in the input it stands, and everything adds up."""

import contextlib
import json
import random

import pytest

from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.executor import work_files
from data_prep.executor.journal import Journal, Stages
from data_prep.executor.pool import Pool
from data_prep.options import BuildOptions
from data_prep.readers.tasks import group, list_ranges
from data_prep.stages import dedup
from data_prep.stages.read import read_task
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def planted(topics, tmp_path_factory):
    """A folder: 300 documents of distinct sentences; 40 exact copies, 30 near copies and 25 repeated paragraphs."""
    folder = tmp_path_factory.mktemp("planted")
    vocabulary = sorted({word for text in topics for word in text.split() if word.isalpha()})
    rng = random.Random(11)

    def paragraph():
        return " ".join(" ".join(rng.choices(vocabulary, k=12)).capitalize() + "." for _ in range(4))

    documents = [[paragraph() for _ in range(5)] for _ in range(300)]
    for i in range(25):  # the second paragraph of i stands again in 100 + i
        documents[100 + i][2] = documents[i][1]
    copies = [list(documents[i]) for i in range(40, 80)]
    near = []
    for i in range(200, 230):
        words = documents[i][0].split()
        words[5] = rng.choice(vocabulary)
        near.append([" ".join(words), *documents[i][1:]])
    everything = documents + copies + near
    order = list(range(len(everything)))
    rng.shuffle(order)
    for part in range(4):
        lines = []
        for n, i in enumerate(order[part::4]):
            body = "\n".join(everything[i])
            if i >= 300 and n % 2:
                body = body.replace(". ", ".   ")  # whitespace is no difference
            lines.append(f'<doc id="{i}" url="u" title="T">\nT\n\n{body}\n</doc>\n')
        (folder / f"wiki_{part}").write_text("".join(lines), encoding="utf-8")
    return folder


def run(command, folder, tokenizer_file, output, *extra):
    result = command(
        "build", "--input", folder, "--tokenizer", tokenizer_file, "--output", output, "--held-out", 0, "--quiet",
        "--no-nsp", *extra,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads((output / "report.json").read_text()), result.stdout


def test_planted_copies_are_dropped_and_nothing_else(planted, tokenizer_file, command, tmp_path):
    report, _ = run(command, planted, tokenizer_file, tmp_path / "none", "--dedup", "none")
    assert report["read"]["documents"] == 370 and report["dropped"]["documents"] == 0
    report, stdout = run(command, planted, tokenizer_file, tmp_path / "exact")
    assert report["dropped"]["reasons"] == {"exact duplicate": 40}
    assert "exact duplicate 40" in stdout and len(report["examples"]["exact duplicate"]) == 3
    report, _ = run(command, planted, tokenizer_file, tmp_path / "near", "--dedup", "documents", "near")
    assert report["dropped"]["reasons"] == {"exact duplicate": 40, "near duplicate": 30}
    report, _ = run(command, planted, tokenizer_file, tmp_path / "all", "--dedup", "documents", "near", "paragraphs")
    assert report["dropped"]["reasons"] == {"exact duplicate": 40, "near duplicate": 30}
    # 25 planted ones; those of near copies went with them
    assert report["dropped"]["repeated_paragraphs"] == 25


def test_repeated_paragraphs_stand_once_in_the_rows(planted, tokenizer_file, command, tmp_path):
    run(command, planted, tokenizer_file, tmp_path / "all", "--dedup", "documents", "near", "paragraphs")
    run(command, planted, tokenizer_file, tmp_path / "none", "--dedup", "none")
    counts = {}
    for name in ("all", "none"):
        dataset = Dataset(tmp_path / name)
        tokenizer = Tokenizer.load(tmp_path / name / "tokenizer.model")
        rows = dataset.read(range(dataset.rows))
        text = " ".join(tokenizer.decode(ids[ids > 0]) for ids in rows.ids)
        sentences = [s.strip() for s in text.split(".") if len(s.split()) == 12]
        counts[name] = len(sentences) / len(set(sentences))
    # Rows cut some sentences; of the whole ones none is there twice but those of kept near-equal text.
    assert counts["none"] > 1.2 and counts["all"] < 1.01


@pytest.mark.parametrize(("size", "merged"), [(64, False), (64, True), (1 << 21, False)])
def test_many_key_ranges_find_what_one_finds(planted, tokenizer_file, tmp_path, monkeypatch, size, merged):
    monkeypatch.setattr(dedup, "RANGE_RECORDS", size)
    if merged:
        monkeypatch.setattr(work_files, "MAX_OPENS", 1)
        monkeypatch.setattr(work_files, "MERGED_RUNS", 1)
    options = BuildOptions(dedup=("documents", "near"))
    job = work_files.BuildJob(options, str(tokenizer_file), str(tmp_path), "stop", weights=(1.0, 1.0))
    tasks = group(
        list_ranges(
            [Corpus("input", (str(planted / "wiki_0"),)), Corpus("b", (str(planted),))], ReadOptions(), Problems("stop")
        )
    )
    read = [read_task(job, task) for task in tasks]
    documents = sum(done.facts["documents"] for done in read)
    drops = []
    with contextlib.closing(Journal(tmp_path, Pool(1))) as journal:
        stages = Stages(journal, progress=False)
        for kind, records in (("documents", documents), ("near", documents * dedup.minhash.BANDS)):
            runs = dedup.SortedRuns(kind, "read", len(tasks))
            assert (len(dedup.ranges(runs, records)) > 1) == (size == 64)
            assert len(dedup.merges(runs, records)) == merged
            drops.append(dedup.find_duplicates(stages, job, runs, records, []))
            assert isinstance(drops[-1], list) == merged
        journal.flush()
    masks = [dedup.mask_documents(job, mask) for mask in dedup.task_masks(len(tasks), drops)]
    assert work_files.total(masks).dropped == {"exact duplicate": 40, "near duplicate": 30}
