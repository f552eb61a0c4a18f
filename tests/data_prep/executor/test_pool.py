"""Results come back in the order of the items, whoever made them, and a free worker is never kept waiting."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from data_prep.common.errors import BadInput, Unfinished
from data_prep.executor import pool
from megabert.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.helpers.prep_builds import ROOT, build, mpirun, report
from tests.helpers.prep_reading import write

RANKS = """
import os, sys, time
from data_prep.executor import pool
from data_prep.common.errors import BadInput

def work(item):
    if item == "bad":
        raise BadInput("this item is bad")
    time.sleep(item)
    return item, os.environ["OMPI_COMM_WORLD_RANK"]

items = eval(sys.argv[1])
received = []
with pool.opened(None) as executor:
    if executor is None:
        sys.exit(0)
    try:
        for _ in range(2):
            found = executor.map(work, items, received.append)
        assert [item for item, _ in found] == items and len(received) == 2 * len(items)
        print("ranks", *(rank for _, rank in found))
    except BadInput as error:
        print("stopped by:", error, "after", len(received))
"""


def mpi(ranks, items):
    """What RANKS prints with so many ranks; with 0 it fails in a process alone."""
    command = [*(mpirun(ranks) if ranks else ()), sys.executable, "-c", RANKS, repr(items)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert bool(result.returncode) == (ranks == 0), result.stderr
    return result


@pytest.mark.dist
@pytest.mark.parametrize("slow", [30, pytest.param(0, marks=pytest.mark.slow)])
def test_a_slow_item_holds_up_one_rank_alone(slow):
    items = [1.5 if i == slow else 0.01 for i in range(31)]
    ranks = mpi(3, items).stdout.split()[1:]
    # In a round-robin deal the rank of the slow item would have ten more.
    assert ranks.count(ranks[slow]) == 1 and set(ranks) == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("tasks", "hard"),
    [pytest.param(40, resource.getrlimit(resource.RLIMIT_NOFILE)[1], marks=pytest.mark.slow), (200, 200)],
)
def test_more_tasks_than_open_files(tasks, hard, tokenizer_file, topics, tmp_path):
    """A shell's limit of 1,024 was too low for 500 tasks, 2 GB of text: two files of each were mapped at once. Each task has a near
    duplicate of one text."""
    words, rng = " ".join(topics).split(), random.Random(1)
    texts = (f"{' '.join(words[:300])} {i}\n{' '.join(rng.sample(words, 50))}\n" for i in range(tasks))
    inputs = [f"c{i}={write(tmp_path / f'{i}.txt', text)}" for i, text in enumerate(texts)]
    options = {
        "tokenizer": tokenizer_file,
        "text_documents": "line",
        "seq_len": 64,
        "held_out": 0,
        "workers": 2,
        "dedup": "near",
    }
    limits = (64, hard)
    build(inputs, tmp_path / "out", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits), **options)
    assert report(tmp_path / "out")["dropped"]["reasons"]["near duplicate"] == tasks - 1


def test_ranks_are_counted_from_the_environment(monkeypatch):
    for environment, ranks in (
        ("", 0),
        ("OMPI_COMM_WORLD_SIZE=4 PMIX_RANK=1 SLURM_STEP_NUM_TASKS=1", 4),
        ("PMIX_RANK=0 SLURM_STEP_NUM_TASKS=3", 3),
        ("SLURM_STEP_NUM_TASKS=3", 0),  # of a batch script or of srun without an MPI
        ("PMI_SIZE=1", 1),
    ):
        for name in (*pool.MPI_SIZES, pool.PMIX, pool.SRUN_SIZE):
            monkeypatch.delenv(name, raising=False)
        for item in environment.split():
            monkeypatch.setenv(*item.split("="))
        assert pool.launched_ranks() == ranks
    # `srun -n1 -c32` under PMI: a single rank works on all its cores
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _: {0, 1})
    with pool.opened(None) as executor:
        assert executor.size == 2


def test_ranks_unseen_by_mpi_are_refused(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    assert "2 ranks were started, but MPI sees one" in mpi(0, [0]).stderr


@pytest.mark.dist
@pytest.mark.parametrize("bad", [2, 203])
def test_error_of_any_rank_reaches_rank_0(bad):
    """Rank 0 works from the last item on: of the two bad items one is its own."""
    result = mpi(3, ["bad" if i == bad else 0.05 for i in range(204)])
    assert "stopped by: this item is bad" in result.stdout
    assert int(result.stdout.split()[-1]) < 100 and "Traceback" not in result.stderr


def negative(item):
    if item == 3:
        raise BadInput("three is bad")
    if item == 9:
        os.kill(os.getpid(), 9)
    return -item


@pytest.mark.parametrize("workers", [1, 3])
def test_results_are_in_the_order_of_items(workers):
    received = []
    with pool.opened(workers) as executor:
        assert executor.map(negative, [5, 4, 2, 1, 0], received.append) == [-5, -4, -2, -1, 0]
        assert sorted(received) == [-5, -4, -2, -1, 0]
        assert executor.map(negative, [], received.append) == []
        with pytest.raises(BadInput, match="three is bad"):
            executor.map(negative, list(range(6)), received.append)


def leave_a_mark(item):
    folder, number, bad = item
    if number == bad:
        raise BadInput("no")
    (folder / str(number)).touch()
    time.sleep(0.05)


@pytest.mark.parametrize(("bad", "done"), [(0, None), (None, BadInput("no"))], ids=["worker", "parent"])
def test_nothing_runs_after_an_error(bad, done, tmp_path):
    with pool.opened(2) as executor:
        with pytest.raises(BadInput, match="no"):
            executor.map(leave_a_mark, [(tmp_path, i, bad) for i in range(50)], Mock(side_effect=done))
        marks = len(list(tmp_path.iterdir()))
        time.sleep(0.2)
        assert len(list(tmp_path.iterdir())) == marks <= 5


def test_a_killed_worker_is_one_clear_error():
    with pool.opened(2) as executor, pytest.raises(Unfinished, match="a worker process died"):
        executor.map(negative, [1, 9, 2, 4], lambda _: None)


def test_worker_killed_at_its_start_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(pool, "_init_worker", lambda parent: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(Unfinished, match="a worker process died"), pool.opened(2):
        pytest.fail("the build began")


def encode_batch(path):
    return Tokenizer.load(path).encode_batch(["one word", "two words", "three"])


def test_workers_encode_after_threads_of_the_parent(tmp_path, monkeypatch):
    """Whose environment allows the tokenizers library's threads, which a fork does not copy."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    path = write(tmp_path / "vocab.txt", "\n".join((*SPECIAL_TOKENS, "one", "two", "three", "word", "##s", "")))
    expected = [[5, 8], [6, 8, 9], [7]]
    assert encode_batch(path) == expected
    with pool.opened(2) as workers:
        assert workers.map(encode_batch, [path] * 4, lambda result: None) == [expected] * 4
