"""Two ranks train from a bucket: rows and losses of a local dataset, also where the store fails now and then, and after a stop."""

from __future__ import annotations

import shutil
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest

from megabert.common import storage
from tests.helpers.job import Job
from tests.helpers.object_store import DROP, KEYS, PASS, UNAVAILABLE, Proxy
from tests.integration.conftest import end, logged, output_of

pytest.importorskip("s3fs")
# a lock that is given up soon, and updates that are slower than uploads
SLOW = """
import time
from megabert.checkpoint import mirror
from megabert.trainer import Trainer
mirror.BEAT, mirror.LIMIT, mirror.POLL = 0.5, 4.0, 0.2
train_update = Trainer.train_update
def slowly(self):
    time.sleep(0.2)
    return train_update(self)
Trainer.train_update = slowly
"""
STEPS = ("schedule.total_steps=12", "eval.interval=6")


def figures(run: Path) -> list[dict[int, object]]:
    return [logged(run, name) for name in ("train/loss", "data/row_digest", "eval/mlm_loss")]


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_train_from_a_bucket(dataset: Path, tmp_path: Path, proxy: Proxy) -> None:
    for path in dataset.rglob("*"):
        if path.is_file():
            storage.put(path, f"s3://trained/set/{path.relative_to(dataset).as_posix()}")
    faults = (DROP, UNAVAILABLE)
    proxy.fault = lambda method, path, number: PASS if zlib.crc32(b"%d" % number) % 4 else faults[number % 2]
    end(Job(dataset, tmp_path / "local", *STEPS), 0, 0)
    url: Any = "s3://trained/set"
    for more in (("--stop-after", 7), ()):
        shown = end(Job(url, tmp_path / "remote", *STEPS, *more), 0, 0)
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in shown
    assert figures(tmp_path / "remote") == figures(tmp_path / "local")
    proxy.fault = lambda *_: UNAVAILABLE
    impatient = "from megabert.common import storage\nstorage.WAITS = (0.01,)\n"
    lost = Job(url, tmp_path / "lost", *STEPS, driver=impatient, XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert lost.codes() == [4, 4] and "s3://trained/set/manifest.json: " in lost.output


@pytest.mark.slow
@pytest.mark.dist
def test_run_goes_on_with_an_empty_disk(dataset: Path, tmp_path: Path, proxy: Proxy) -> None:
    """Killed at some requests of its uploads, on a new disk each time: the same losses as undisturbed, and no checkpoint in parts."""
    steps = ("schedule.total_steps=20", "checkpoint.interval=2", "checkpoint.keep=2", "eval.interval=10")
    end(Job(dataset, tmp_path / "whole", *steps), 0, 0)
    url = "s3://trained/run"
    mirrored = (*steps, f"checkpoint.mirror={url}")
    killed, manifests, starts = list[Job](), 0, []

    def kill(method: str, path: str, request: int) -> str:
        """The first job before the first manifest is there, the others at the next upload after one."""
        nonlocal manifests
        if method == "PUT" and "/lock/" not in path and (manifests or (len(killed) == 1 and "manifest" in path)):
            killed[-1].signal(signal.SIGKILL)
            return DROP
        answer = UNAVAILABLE if zlib.crc32(b"%d" % request) % 7 == 0 else PASS
        of_step = method == "PUT" and path.startswith("/trained/run/checkpoints/step-") and "manifest" in path
        manifests += of_step and answer == PASS
        return answer

    proxy.fault = kill
    for number in range(4):
        manifests, run = 0, tmp_path / f"disk{number}" / "run"
        killed.append(job := Job(dataset, run, *mirrored, driver=SLOW))
        codes = job.codes()
        starts.append(next((line for line in job.output.splitlines() if "resuming from" in line), ""))
        # where uploads are slow, the whole run may be there before the fourth kill
        assert codes == [0 if "at step 20" in starts[-1] else -signal.SIGKILL] * 2, job.output
        shutil.rmtree(run.parent)
    proxy.fault = lambda *_: PASS
    run = tmp_path / "last" / "run"
    end(Job(dataset, run, *mirrored, driver=SLOW), 0, 0)
    assert figures(run) == figures(tmp_path / "whole")
    assert len(set(filter(None, starts))) >= 2 and starts[:2] == ["", ""], starts
    names = {found.url.removeprefix(f"{url}/") for found in storage.find(url)}
    assert {name.split("/")[1] for name in names if "step-" in name} == {"step-00000018", "step-00000020"}
    for name in ("config.json", "metrics.jsonl", "starts.jsonl", "checkpoints/chain.jsonl", "checkpoints/pointer.json"):
        assert storage.read(f"{url}/{name}") == (run / name).read_bytes()
    output_of("verify", run)
    # its users need no run folder
    asked = ("evaluate", "--data", dataset, "--model")
    there, here = (output_of(*asked, model).splitlines()[-1] for model in (url, run))
    assert there == here
    output_of("report", url, "--output", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    refused = output_of(*asked, "s3://trained/nothing", code=2)
    assert "s3://trained/nothing: not a model" in refused
