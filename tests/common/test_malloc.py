"""A freed array's memory is there for the next one, without page faults."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
import numpy as np
from megabert.common.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        arrays = [np.ones(3 << 20, np.uint8) for _ in range(4)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_arrays_are_reused_without_page_faults():
    root = Path(__file__).resolve().parents[2]

    def run(mode: str) -> int:
        # the trim threshold that glibc starts with; it learns a larger one only from the sizes it sees freed
        env = os.environ | {
            "PYTHONPATH": str(root),
            "MALLOC_TRIM_THRESHOLD_": "131072",
            "MALLOC_MMAP_THRESHOLD_": "131072",
        }
        done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert run("default") > 50 * 4 * 2  # each array is mapped anew (at least a huge page and the rest)
    assert run("keep") < 50
