"""Builds on a Ray cluster of two nodes on this machine: the bytes of a local build, also where a node or the command is killed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.prep_reading import contents

ROOT = Path(__file__).resolve().parents[2]
on_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray (pip install 'megabert[ray]')")

# prints the cluster's address; a line on stdin adds a node and prints the process id of its raylet
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
print(cluster.address, flush=True)
for line in sys.stdin:
    print(cluster.add_node(**node).all_processes["raylet"][0].process.pid, flush=True)
cluster.shutdown()
"""
# names the raylets whose workers have begun to read, and takes some seconds
SLOW = """
import os, time

def keep(text):
    open(os.path.join({folder!r}, str(os.getppid())), "w").close()
    time.sleep(0.003)
    return True
"""


class RayCluster:
    """A process that runs a cluster. `node()` adds a node of one CPU and returns the process id of its raylet."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            env=os.environ | {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the cluster ended"
        return line

    def node(self) -> int:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return int(self._line())

    def processes(self, name: bytes = b"") -> list[int]:
        """Processes of the cluster whose command line has `name`."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.folder.encode() in (path / "environ").read_bytes() and name in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:  # ended meanwhile
                continue
        return found

    def close(self) -> list[int]:
        """End the cluster; returns its processes that had to be killed."""
        self._process.communicate(timeout=60)
        left = [number for number in self.processes() if wait_for(lambda n=number: not Path(f"/proc/{n}").exists())]
        for number in left:
            os.kill(number, signal.SIGKILL)
        return left


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Whether the condition is still false after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    folder = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets have at most 107 bytes
    cluster = RayCluster(folder)
    try:
        cluster.node()
        yield cluster
    finally:
        left = cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    assert left == []


@pytest.fixture(scope="module")
def reading(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reading")


@pytest.fixture(scope="module")
def options(corpus, tokenizer_file, reading, tmp_path_factory) -> list[str]:
    function = tmp_path_factory.mktemp("filter") / "slow.py"
    function.write_text(SLOW.format(folder=str(reading)))
    inputs = [f"{path.name}={path}" for path in sorted(corpus.iterdir())]  # an item of work each
    return [
        "build", "--input", *inputs, "--tokenizer", str(tokenizer_file), "--filters", f"{function}:keep", "--dedup", "documents",
        "near", "--seq-len", "64", "128", "--rows-per-shard", "4096", "--save-text", "--quiet",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def local(options, command, tmp_path_factory) -> tuple[dict[str, bytes], str]:
    """The bytes and the warnings of a build by processes of this machine."""
    output = tmp_path_factory.mktemp("local") / "out"
    done = command(*options, "--output", output, "--executor", "local", "--workers", 2)
    assert done.returncode == 0, done.stderr
    return contents(output), done.stderr


def start(cluster: RayCluster, *arguments: str | Path, folder: Path = ROOT) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "data_prep", *arguments, "--executor", "ray"],
        cwd=folder,
        env=os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop(process: subprocess.Popen[str], number: int, output: Path) -> str:
    """Send the signal when an item is read, and others are being read; returns what the command printed on stderr."""
    assert not wait_for(lambda: process.poll() is not None or any(output.glob(".work/journal/read/*.json")), 60)
    process.send_signal(number)
    return process.communicate(timeout=60)[1]


@on_ray
@pytest.mark.slow
def test_a_killed_node_does_not_change_the_bytes(options, local, cluster, reading, tmp_path):
    raylet = cluster.node()
    process = start(cluster, *options, "--output", tmp_path / "out")
    assert not wait_for(lambda: process.poll() is not None or (reading / str(raylet)).exists(), 60)
    workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    os.kill(raylet, signal.SIGKILL)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and error == local[1], error
    assert "by 3 workers" in out
    assert contents(tmp_path / "out") == local[0]
    assert workers and not [number for number in workers if Path(f"/proc/{number}/exe").exists()]


@on_ray
@pytest.mark.slow
def test_a_killed_command_resumes_to_the_same_bytes(options, local, cluster, tmp_path):
    arguments = (*options, "--output", tmp_path / "out")
    stop(start(cluster, *arguments), signal.SIGKILL, tmp_path / "out")
    process = start(cluster, *arguments, "--workers", "1")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and "resumed" in out and "by 1 worker" in out, error
    assert contents(tmp_path / "out") == local[0]


@on_ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_items_end_with_the_command(number, options, cluster, tmp_path):
    process = start(cluster, *options, "--output", tmp_path / "out")
    error = stop(process, number, tmp_path / "out")
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert error == "\nerror: interrupted: finished parts are kept, the same command resumes\n"
        assert cluster.processes(b"ray::_run_item") == []
    else:
        assert process.returncode == -number and error == ""
        assert not wait_for(lambda: not cluster.processes(b"ray::_run_item"))


@on_ray
@pytest.mark.slow
def test_an_error_in_an_item_is_one_line(corpus, options, cluster, tmp_path):
    shutil.copy(corpus / "wiki_03", tmp_path / "bad")
    with open(tmp_path / "bad", "r+b") as file:
        file.seek(1_000_000)
        file.write(b"\xff")
    process = start(cluster, *options, "--input", corpus, tmp_path / "bad", "--output", tmp_path / "out")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith(f"error: {tmp_path}/bad: byte 1000000: invalid UTF-8") and error.count("\n") == 1


@on_ray
@pytest.mark.slow
def test_an_item_that_ends_its_process_is_one_line(options, cluster, tmp_path):
    (tmp_path / "ends.py").write_text("import os\n\ndef keep(text):\n    os._exit(1)\n")
    process = start(cluster, *options, "--filters", f"{tmp_path}/ends.py:keep", "--output", tmp_path / "out")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 4
    assert error.startswith("error: --executor ray: The worker died") and error.count("\n") == 1


def node_with(cluster: RayCluster, mount: str) -> subprocess.Popen[str]:
    """A node of the cluster with an own `mount`."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces for this user")
    joined = f"{sys.executable} -m ray.scripts.scripts start --address={cluster.address} --num-cpus=1 --block"
    return subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"mount {mount} && exec {joined} --object-store-memory=80000000"],
        env=os.environ | {"RAY_TMPDIR": cluster.folder, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@on_ray
@pytest.mark.slow
@pytest.mark.parametrize("differs", ["output", "current folder", "code"])
def test_a_node_with_other_files_is_refused(differs, options, cluster, tmp_path):
    shared, pipeline = tmp_path / "shared", ROOT / "data_prep/pipeline.py"
    mount, folder, expected = {
        "output": (f"-t tmpfs none {shared}", ROOT, f"does not see {shared}/out/.work; name an --output"),
        "current folder": (f"-t tmpfs none {shared}", shared / "here", f"does not see {shared}/here; start the"),
        "code": (f"--bind {tmp_path}/changed.py {pipeline}", ROOT, "has other code (source was "),
    }[differs]
    (shared / "here").mkdir(parents=True)
    (tmp_path / "changed.py").write_text(pipeline.read_text() + "\n")
    node = node_with(cluster, mount)
    try:
        assert any("Ray runtime started" in line for line in iter(node.stdout.readline, ""))
        process = start(cluster, *options, "--output", shared / "out", folder=folder)
        _, error = process.communicate(timeout=60)
    finally:
        node.terminate()
        node.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith("error: --executor ray: node ") and expected in error and error.count("\n") == 1
    assert (shared / "out/.work/journal").is_dir()  # the same command resumes


@on_ray
@pytest.mark.parametrize(
    "address, code, expected", [("x", 2, "found no Ray cluster"), ("127.0.0.1:1", 4, "does not answer")]
)
def test_no_cluster_is_one_line(address, code, expected, command, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", address)
    done = command("build", "--input", "pydoc", "--output", tmp_path / "out", "--executor", "ray")
    assert done.returncode == code and done.stdout == ""
    assert (
        done.stderr.startswith("error: --executor ray: ") and expected in done.stderr and done.stderr.count("\n") == 1
    )


def test_missing_package_is_one_line(tmp_path):
    code = "import sys; sys.modules['ray'] = None; from data_prep.__main__ import main; sys.exit(main())"
    arguments = ("build", "--input", "pydoc", "--output", str(tmp_path / "out"), "--executor", "ray")
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: --executor ray: the package ray is not installed; pip install 'megabert[ray]'\n"


@pytest.mark.parametrize("executor, ranks", [("mpi", ""), ("local", "2"), ("ray", "2")])
def test_executor_contradicts_the_launcher(executor, ranks, command, monkeypatch, tmp_path):
    monkeypatch.setenv("PMI_SIZE", ranks)
    done = command("build", "--input", "pydoc", "--output", tmp_path / "out", "--executor", executor)
    assert done.returncode == 2 and done.stderr.startswith(f"error: --executor {executor}: ")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
