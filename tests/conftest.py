"""What cannot run here is skipped by name; test helpers are importable in spawned ranks too."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# a shell starts `make test &` without Ctrl-C, and nohup without a closed terminal; so would be what the tests start
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture(autouse=True)
def messages() -> None:
    """Warnings go to stderr as those of a command do, whatever the test before made of the logger."""
    from megabert.common import logs

    logs.setup()


@pytest.fixture(autouse=True)
def freed_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a slow test has freed is returned to the system: glibc keeps up to 9 GB of the largest models, and later tests start
    ranks beside this process."""
    yield
    if request.node.get_closest_marker("slow") and sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Operations work on two threads, whatever OMP_NUM_THREADS says: `make test` gives each of its processes one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """What the test makes of the signals that stop a run ends with it."""
    from megabert.distributed import signals

    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    yield
    signals.restore_handlers()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """This process as a world of one rank."""
    from megabert.distributed import ranks

    yield ranks.init(ranks.discover({}))
    ranks.shutdown()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 600 KB of English: the topics of Python's language reference, one a document."""
    from tests.helpers import once

    def make(folder: Path) -> None:
        from pydoc_data.topics import topics

        documents = [re.sub(r"[*`\\]+", "", text) for _, text in sorted(topics.items())]
        folder.mkdir()
        (folder / "topics.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))

    return once.folder(tmp_path_factory, "corpus", make)


@pytest.fixture(scope="session")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of that."""
    from tests.helpers import once
    from tests.integration.conftest import output_of

    def make(folder: Path) -> None:
        options = ("--seq-len", 64, "--vocab-size", 2000, "--workers", 2, "--held-out", 0.05, "--nsp")
        output_of("prep", "build", "--input", corpus, "--output", folder, *options)

    return once.folder(tmp_path_factory, "topics", make)


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """moto's S3 server, a process of its own."""
    from tests.helpers.object_store import s3_server

    with s3_server(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture
def proxy(s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A proxy before that server, which S3's libraries of this process and its children ask; copies go to an empty folder, and failing
    requests are soon repeated. A bucket for each file of tests."""
    import s3fs

    from megabert.common import storage
    from tests.helpers.object_store import Proxy, environment

    proxy = Proxy(s3_port)
    for name, value in (environment(proxy.port) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "WAITS", (0.01, 0.02, 0.03, 0.04, 0.05))
    s3fs.S3FileSystem.clear_instance_cache()  # of another proxy's port
    for bucket in ("shelf", "texts", "data", "runs", "trained"):
        s3fs.S3FileSystem(use_listings_cache=False).makedirs(bucket, exist_ok=True)
    yield proxy
    proxy.close()


@pytest.fixture
def model_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub that this process and its children push to and read, its library's cache in an empty folder; failing requests are soon
    repeated."""
    from huggingface_hub import HfFileSystem, constants

    from megabert.common import storage
    from tests.helpers.hub import Hub

    hub, home = Hub(), tmp_path / "hub_home"
    for name, value in (hub.environment(home) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    # the library read the environment when it was imported
    for name, constant in (
        ("ENDPOINT", hub.address),
        ("HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_CACHE", str(home / "hub")),
        ("HF_TOKEN_PATH", str(home / "token")),
    ):
        monkeypatch.setattr(constants, name, constant)
    monkeypatch.setattr(storage, "WAITS", (0.01, 0.02))
    HfFileSystem.clear_instance_cache()
    yield hub
    HfFileSystem.clear_instance_cache()
    hub.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    missing = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device on this machine",
        "slurm": None if shutil.which("sbatch") else "no SLURM on this machine (sbatch not found)",
    }
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
