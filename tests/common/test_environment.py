"""The environment is described without importing what it describes; freed memory is reused."""

import errno
import importlib.metadata
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megabert.common import environment
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
FAULTS = """
import resource, sys
import numpy as np
from megabert.common.environment import disable_malloc_trimming
if sys.argv[1] == "keep":
    assert disable_malloc_trimming()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        arrays = [np.ones(3 << 20, np.uint8) for _ in range(4)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def printed(program: str, *args: str, **env: str) -> str:
    command, env = [sys.executable, "-c", program, *args], os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=env).stdout.strip()


def test_missing_packages_are_named_with_their_extra() -> None:
    environment.require_packages("--dedup near", "near", "json", "numpy")
    for missing, verb in ((["no_a"], "no_a is"), (["no_a", "json", "no_b"], "no_a, no_b are")):
        with pytest.raises(ValueError, match=rf"^--x: {verb} not installed; pip install 'megabert\[near\]'$"):
            environment.require_packages("--x", "near", *missing)


def test_addresses_of_an_unknown_family_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(999, *known[0][1:]), *known])
    assert environment.address_to_bind("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("limit", "found"), [("max 100000", 4), ("50000 100000", 1), ("150000 100000", 2), ("900000 100000", 4)]
)
def test_cores_are_at_most_those_of_the_container(limit, found, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/self/cgroup": "1:cpu:/\n0::/box\n", "/sys/fs/cgroup/box/cpu.max": f"{limit}\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert environment.cores() == found


def test_pressure_that_the_kernel_does_not_measure_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is there, and reading it fails."""

    def read_text(path: Path) -> str:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(path))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert environment.cpu_pressure_seconds() is None


def test_versions_are_read_without_importing_packages():
    program = (
        "import sys\nfrom megabert.common import environment\nprint(environment.versions()['torch'])\n"
        "environment.cpu_model(), environment.cpu_flags(), environment.gpus(), environment.revision()\n"
        "assert not {'torch', 'numpy', 'deepspeed'} & sys.modules.keys()"
    )
    assert printed(program) == importlib.metadata.version("torch")
    assert environment.version("no-such-package") is None and "no-such-package" not in environment.versions()


def test_the_revision_shows_uncommitted_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.revision() == "unknown" and environment.changes() == []
    (tmp_path / "results").mkdir()
    for name in ("code", "results/one"):
        (tmp_path / name).write_text("1")
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["rev-parse", "HEAD"]):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        head = subprocess.run(git, cwd=tmp_path, check=True, capture_output=True, text=True).stdout[:12]
    assert environment.revision() == head
    (tmp_path / "results" / "one").write_text("2")
    assert environment.revision() == f"{head}+changes" and environment.revision(["results"]) == head
    (tmp_path / "code").write_text("2")
    assert environment.revision(["results"]) == f"{head}+changes"
    assert environment.changes(["results"]) == [" M code"]
    monkeypatch.setattr(environment, "ROOT", tmp_path / "results")  # as installed somewhere in a repository of its user
    assert environment.revision() == "unknown"


def test_freed_arrays_are_reused_without_page_faults():
    # the trim threshold that glibc starts with; it learns a larger one only from the sizes it sees freed
    env = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    default, kept = (int(printed(FAULTS, mode, **env)) for mode in ("default", "keep"))
    assert default > 50 * 4 * 2  # each array is a new mapping (at least a huge page and the rest)
    assert kept < 50


def test_open_files_are_limited_by_the_hard_limit():
    """With a shell's 1,024 a rank of 512 would end with EMFILE: its sockets, its maps, and its loader processes inherit them."""
    program = (
        "import resource\nfrom megabert.common.environment import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\nraise_descriptor_limit()\n"
        "files = [open('/dev/null') for _ in range(300)]\nprint(len(files))"
    )
    assert printed(program) == "300"


def test_threads_at_a_barrier_soon_sleep():
    """As libgomp itself says when torch loads it. A setting of the user stays."""
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-m", "megabert", "train", "--config", "mini", "--run", "missing", "--data", "missing"]
    env |= {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr
    program = "import os; from megabert.common import environment as e; e.limit_openmp_spinning(); print(os.environ['GOMP_SPINCOUNT'])"
    assert printed(program, GOMP_SPINCOUNT="7") == "7"


@pytest.mark.skipif(environment.cpu_pressure_seconds() is None, reason="no pressure stall information in this kernel")
def test_waiting_for_a_core_is_counted():
    before = environment.cpu_pressure_seconds()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(environment.cores() + 2)]
    try:
        wait_until(lambda: environment.cpu_pressure_seconds() - before >= 0.5, 60)
    finally:
        for process in busy:
            process.kill()
            process.wait()
