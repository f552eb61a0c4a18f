"""Builds on a Ray cluster of two nodes on this machine: the bytes of a local build, also where a node or the command is killed."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data_prep.__main__ import main
from tests.helpers import prep_builds
from tests.helpers.prep_builds import ROOT, build, build_words, error_of
from tests.helpers.prep_reading import contents, write
from tests.helpers.refusal import refusal
from tests.helpers.waiting import wait_until

on_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray (pip install 'megabert[ray]')")


def on_cluster(test):
    return on_ray(pytest.mark.slow(test))


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
        self.folder, self.env = folder, os.environ | {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([sys.executable, "-c", CLUSTER], env=self.env, text=True, **pipes)
        self.address = self._line()

    def _line(self) -> str:
        line = self._process.stdout.readline().strip()
        assert line, "the cluster ended"
        return line

    def node(self) -> int:
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

    def close(self) -> None:
        """End the cluster; fails if any of its processes has to be killed."""
        self._process.communicate(timeout=60)
        try:
            wait_until(lambda: not self.processes())
        finally:
            for number in self.processes():
                os.kill(number, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # short: paths of sockets have at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(folder)
        try:
            cluster.node()
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def reading(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reading")


@pytest.fixture(scope="module")
def options(tokenizer_file, reading, tmp_path_factory) -> dict[str, object]:
    function = write(tmp_path_factory.mktemp("filter") / "slow.py", SLOW.format(folder=str(reading)))
    fixed = {"dedup": ("documents", "near"), "seq_len": (64, 128), "rows_per_shard": 4096, "save_text": True}
    return fixed | {"tokenizer": tokenizer_file, "filters": f"{function}:keep"}


@pytest.fixture(scope="module")
def inputs(corpus) -> list[str]:
    return [f"{path.name}={path}" for path in sorted(corpus.iterdir())]  # an item of work each


@pytest.fixture(scope="module")
def local(inputs, options, tmp_path_factory) -> tuple[dict[str, bytes], str]:
    """The bytes and the warnings of a build by processes of this machine."""
    output = tmp_path_factory.mktemp("local") / "out"
    done = build(inputs, output, executor="local", workers=2, **options)
    return contents(output), done.stderr


@pytest.fixture
def start(cluster, inputs, options, tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a build by the cluster."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": paths}

    def begin(inputs=inputs, output=tmp_path / "out", folder=ROOT, **more) -> subprocess.Popen[str]:
        return prep_builds.start(build_words(inputs, output, executor="ray", **options | more), folder, env)

    return begin


def failed(process: subprocess.Popen[str], code: int) -> str:
    """The one line of a build that ends with `code`."""
    _, error = process.communicate(timeout=60)
    assert process.returncode == code and error.startswith("error: ") and error.count("\n") == 1, error
    return error


def stop(process: subprocess.Popen[str], number: int, output: Path) -> str:
    """Send the signal when an item is read, and others are being read; returns what the command printed on stderr."""
    wait_until(lambda: process.poll() is not None or any(output.glob(".work/journal/read/*.json")), 60)
    process.send_signal(number)
    return process.communicate(timeout=60)[1]


@on_cluster
def test_a_killed_node_does_not_change_the_bytes(start, local, cluster, reading, tmp_path):
    raylet = cluster.node()
    process = start()
    wait_until(lambda: process.poll() is not None or (reading / str(raylet)).exists(), 60)
    workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    os.kill(raylet, signal.SIGKILL)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and error == local[1], error
    assert "by 3 workers" in out and contents(tmp_path / "out") == local[0]
    assert workers and not [number for number in workers if Path(f"/proc/{number}/exe").exists()]


@on_cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_items_end_with_the_command(number, start, local, cluster, tmp_path):
    process = start()
    error = stop(process, number, tmp_path / "out")
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert error == "\nerror: interrupted: finished parts are kept, the same command resumes\n"
        assert cluster.processes(b"ray::_run_item") == []
    else:
        assert process.returncode == -number and error == ""
        wait_until(lambda: not cluster.processes(b"ray::_run_item"))
    if number == signal.SIGKILL:
        again = start(workers=1)
        out, error = again.communicate(timeout=120)
        assert again.returncode == 0 and "resumed" in out and "by 1 worker" in out, error
        assert contents(tmp_path / "out") == local[0]


@on_cluster
def test_an_error_in_an_item_is_one_line(corpus, start, tmp_path):
    data = (corpus / "wiki_03").read_bytes()
    bad = write(tmp_path / "bad", data[:1_000_000] + b"\xff" + data[1_000_001:])
    assert failed(start([corpus, bad]), 2).startswith(f"error: {bad}: byte 1000000: invalid UTF-8")
    ends = write(tmp_path / "ends.py", "import os\n\ndef keep(text):\n    os._exit(1)\n")
    process = start(output=tmp_path / "ends", filters=f"{ends}:keep")
    assert failed(process, 4).startswith("error: --executor ray: The worker died")


def node_with(cluster: RayCluster, mount: str) -> subprocess.Popen[str]:
    """A node of the cluster with an own `mount`."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces for this user")
    joined = f"{sys.executable} -m ray.scripts.scripts start --address={cluster.address} --num-cpus=1 --block"
    command = ["unshare", "-m", "sh", "-c", f"mount {mount} && exec {joined} --object-store-memory=80000000"]
    return subprocess.Popen(command, env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@on_cluster
@pytest.mark.parametrize("differs", ["output", "current folder", "code"])
def test_a_node_with_other_files_is_refused(differs, start, cluster, tmp_path):
    shared, pipeline = tmp_path / "shared", ROOT / "data_prep/pipeline.py"
    mount, folder, expected = {
        "output": (f"-t tmpfs none {shared}", ROOT, f"does not see {shared}/out/.work; name an --output"),
        "current folder": (f"-t tmpfs none {shared}", shared / "here", f"does not see {shared}/here; start the"),
        "code": (f"--bind {tmp_path}/changed.py {pipeline}", ROOT, "runs different code (source was "),
    }[differs]
    (shared / "here").mkdir(parents=True)
    write(tmp_path / "changed.py", pipeline.read_text() + "\n")
    node = node_with(cluster, mount)
    try:
        assert any("Ray runtime started" in line for line in iter(node.stdout.readline, ""))
        error = failed(start(output=shared / "out", folder=folder), 2)
    finally:
        node.terminate()
        node.communicate(timeout=60)
    assert error.startswith("error: --executor ray: node ") and expected in error
    assert (shared / "out/.work/journal").is_dir()  # the same command resumes


@pytest.mark.parametrize(
    ("executor", "code", "name", "value", "expected"),
    [
        pytest.param("ray", 2, "RAY_ADDRESS", "x", "found no Ray cluster", marks=on_ray),
        pytest.param("ray", 4, "RAY_ADDRESS", "127.0.0.1:1", "does not answer", marks=on_ray),
        # contradicts the launcher
        ("mpi", 2, "PMI_SIZE", "", ""),
        ("local", 2, "PMI_SIZE", "2", ""),
        ("ray", 2, "PMI_SIZE", "2", ""),
    ],
)
def test_an_executor_that_cannot_work_is_one_line(executor, code, name, value, expected, monkeypatch, tmp_path):
    monkeypatch.setenv(name, value)
    done = build("pydoc", tmp_path / "out", code=code, executor=executor)
    assert error_of(done).startswith(f"error: --executor {executor}: ") and expected in done.stderr
    assert done.stdout == "" and (name == "RAY_ADDRESS" or not (tmp_path / "out").exists())


def test_missing_package_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    error = refusal(capsys, main, *build_words("pydoc", tmp_path / "out", executor="ray"))
    assert error == "error: --executor ray: ray is not installed; pip install 'megabert[ray]'\n"
