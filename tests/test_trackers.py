"""Trackers: a run resumed by another job continues the same tracker run; one that fails or hangs never delays training."""

import importlib.util
import json
import re
import shutil
import threading
import time
from unittest.mock import Mock

import pytest

from megabert import sinks
from megabert.common.run_files import METRICS, append_line
from megabert.config import load
from megabert.sinks import Guarded, JsonLines, Sinks
from tests.integration.conftest import command

SAMPLES = [{"row": 3, "tokens": ["a", " b"], "masks": [{"at": 1, "shown": "[MASK]", "predicted": [[" b", 0.5]]}]}]


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def config(setting):
    return load("tiny", [setting, "log.tensorboard=false"])


def run_twice(folder, tracker, setting='log.to=["{}=mine"]'):
    """A run that was stopped after step 10 and resumed; the id under which the tracker knows it."""
    folder.mkdir()
    ids = []
    for saved in (-1, 10):
        run = Sinks(folder, config(setting.format(tracker)), saved)
        run.write({"step": saved + 11, "train/loss": 9.0 - saved / 10, "data/row_digest": "text"})
        run.show(saved + 11, SAMPLES)
        run.hparams({"eval/mlm_loss": 7.5})
        run.close()
        ids.append(json.loads((folder / "sinks.json").read_text())[tracker])
    assert ids[0] == ids[1]
    return ids[0]


@pytest.mark.slow
@needs("wandb")
def test_weights_and_biases_has_one_run_over_restarts(tmp_path, monkeypatch):
    """Offline; another run in the same folder has its own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "mini"
    run_id = run_twice(folder, "wandb", "log.{}=mine")
    written = b"".join(path.read_bytes() for path in (folder / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert written.count(b"train/loss") >= 2 and b"final/mlm_loss" in written and b"row_digest" not in written
    Sinks(folder, config("log.wandb=mine"), -1).close()
    assert json.loads((folder / "sinks.json").read_text())["wandb"] != run_id


@needs("mlflow")
def test_mlflow_has_one_run_over_a_restart(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    number = run_twice(tmp_path / "mini", "mlflow")
    import mlflow

    client = mlflow.MlflowClient((tmp_path / "mini/mlruns").as_uri())
    found = client.get_run(number)
    assert found.info.status == "FINISHED" and found.info.run_name == "mini"
    history = [(entry.step, entry.value) for entry in client.get_metric_history(number, "train/loss")]
    assert history == [(10, 9.1), (21, 8.0)] and found.data.metrics["final/mlm_loss"] == 7.5
    assert found.data.params["model.hidden"] == "128" and "data/row_digest" not in found.data.metrics
    samples = {file.path for file in client.list_artifacts(number, "samples")}
    assert samples == {"samples/00000010.json", "samples/00000021.json"}
    assert client.get_experiment(found.info.experiment_id).name == "mine"
    Sinks(tmp_path / "mini", config('log.to=["mlflow=other"]'), 21).close()
    other = client.get_run(json.loads((tmp_path / "mini/sinks.json").read_text())["mlflow"])
    assert client.get_experiment(other.info.experiment_id).name == "other"


@needs("mlflow")
def test_an_mlflow_run_that_is_gone_is_begun_again(tmp_path, monkeypatch, caplog):
    """As on another machine, whose copy of the run's folder has no `mlruns`."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "elsewhere" / "mini"
    first = run_twice(tmp_path / "mini", "mlflow")
    shutil.copytree(tmp_path / "mini", folder, ignore=shutil.ignore_patterns("mlruns"))
    Sinks(folder, config('log.to=["mlflow=mine"]'), 21).close()
    assert json.loads((folder / "sinks.json").read_text())["mlflow"] not in ("", first)
    assert f"log.to=mlflow: run {first} does not exist any more; another is begun" in caplog.text


@needs("trackio")
def test_trackio_has_one_run_over_a_restart(tmp_path):
    """In a process of its own, since the package reads its folder when it is imported."""
    code = (
        "import json, sys; from pathlib import Path; from tests.test_trackers import run_twice\n"
        "name = run_twice(Path(sys.argv[1]), 'trackio')\n"
        "from trackio.sqlite_storage import SQLiteStorage as S\n"
        "print(json.dumps([name, S.get_runs('mine'), S.get_logs('mine', name)]))"
    )
    done = command("-c", code, tmp_path / "mini", TRACKIO_DIR=str(tmp_path / "db"))
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("["))
    name, runs, logs = json.loads(line)
    assert name in str(runs) and len(runs) == 1
    losses = [entry["train/loss"] for entry in logs if "train/loss" in entry]
    assert losses == [9.1, 8.0] and any(entry.get("final/mlm_loss") == 7.5 for entry in logs)


OWN = """
from megabert.sinks import Sink
class Mine(Sink):
    def __init__(self, folder, config, resume_step, project):
        self.file = open(folder / "mine.txt", "a")
        print("resumed", resume_step, project, file=self.file)
    def write(self, values):
        print(values["step"], file=self.file)
    def close(self):
        self.file.close()
"""


def test_a_class_of_ones_own_is_a_tracker(tmp_path, monkeypatch):
    (tmp_path / "own_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for saved in (-1, 5):
        run = Sinks(tmp_path, config('log.to=["own_tracker:Mine=here"]'), saved)
        run.write({"step": saved + 3, "train/loss": 1.0})
        run.close()
    assert (tmp_path / "mine.txt").read_text().split("\n")[:-1] == ["resumed -1 here", "2", "resumed 5 here", "8"]


@pytest.mark.parametrize("name", ["json:dumps", "os:getcwd", "json:JSONDecoder", ".x:y", "no_module:x", "broken:X"])
def test_what_is_no_tracker_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("class X(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=f"^log.to={re.escape(name)}: "):
        Sinks(tmp_path, config(f'log.to=["{name}"]'), -1)


def test_an_unknown_tracker_is_refused():
    for tracker, message in (
        ("wandbb", "choose of tensorboard, wandb, mlflow, trackio, or name a class"),
        ("nowhere.here:Mine", "No module named 'nowhere'"),
        ("json:Mine", "module 'json' has no attribute 'Mine'"),
    ):
        with pytest.raises(ValueError, match=f"log.to={tracker}: {message}"):
            sinks.check_packages(config(f'log.to=["{tracker}"]'))


def test_two_projects_of_a_tracker_are_refused():
    """Both would continue the run whose id is kept."""
    with pytest.raises(ValueError, match=r"log\.to=tensorboard=b: tensorboard is asked for twice"):
        sinks.check_packages(config('log.to=["tensorboard=a", "tensorboard=b"]'))
    sinks.check_packages(config('log.to=["tensorboard", "tensorboard"]'))


def test_a_missing_package_is_named_with_its_setting(monkeypatch):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda package: None)
    for setting, key, package in (
        ("log.wandb=mine", "wandb=mine", "wandb"),
        ('log.to=["mlflow"]', "to=mlflow", "mlflow"),
    ):
        with pytest.raises(ValueError, match=rf"log\.{key}: {package} is not installed; .*'megabert\[{package}\]'"):
            sinks.check_packages(config(setting))
    sinks.check_packages(config("log.wandb="))  # nothing is asked for


def test_a_tracker_that_fails_is_one_warning(caplog):
    """Here at its second line."""
    tracker = Mock(write=Mock(side_effect=[None, ConnectionError("the server is gone")]))
    guarded = Guarded("mine", lambda step: tracker, 0)
    for step in range(5):
        guarded.write({"step": step})
    guarded.close()
    assert [call.args[0]["step"] for call in tracker.write.mock_calls] == [0, 1] and tracker.close.called
    assert caplog.text.count("log.to=mine fails and is left out from here on (the server is gone)") == 1


def test_a_tracker_gone_at_a_restart_ends_only_a_new_run(caplog):
    make, lines = Mock(side_effect=ValueError("the server is gone")), [{"step": 6}, {"step": 7}]
    with pytest.raises(ValueError, match="the server is gone"):
        Guarded("mine", make, -1)
    guarded = Guarded("mine", make, 5)
    for line in lines:
        guarded.write(line)
    guarded.close()
    assert [call.args for call in make.call_args_list] == [(-1,), (5,)]
    assert caplog.text.count("log.to=mine fails and is left out from here on (the server is gone)") == 1


def test_a_tracker_gone_at_rollback_is_one_warning(tmp_path, caplog):
    """It is closed and opened again from there, in its thread, and metrics.jsonl goes on."""
    tracker = Mock()
    make = Mock(side_effect=[tracker, ConnectionError("the server is gone")])
    run = Sinks(tmp_path, config("log.wandb="), -1)
    run._sinks.append(Guarded("mine", make, -1))
    for step in (1, 2):
        run.write({"step": step})
    run.resume(1)
    run.write({"step": 2, "train/loss": 1.0})
    run.close()
    assert [call.args for call in make.call_args_list] == [(-1,), (1,)]
    assert [call.args[0]["step"] for call in tracker.write.mock_calls] == [1, 2] and tracker.close.called
    assert caplog.text.count("log.to=mine fails and is left out from here on (the server is gone)") == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2, "train/loss": 1.0}]


def test_a_tracker_that_hangs_delays_nothing(monkeypatch, caplog):
    monkeypatch.setattr(sinks, "MOST_WAITING", 3)
    monkeypatch.setattr(sinks, "CLOSING", 0.4)
    go = threading.Event()
    hanging, started = Mock(write=lambda values: go.wait()), time.monotonic()
    guarded = Guarded("mine", lambda step: hanging, 0)
    for step in range(10):
        guarded.write({"step": step})
    assert time.monotonic() - started < 0.3
    guarded.close()
    assert time.monotonic() - started < 2
    go.set()
    assert caplog.text.count("is 3 lines behind and loses some") == 1
    assert caplog.text.count("did not finish within 0.4 s") == 1


def test_a_full_disk_names_the_file(tmp_path):
    """An error of a write has no file name of its own."""
    lines = JsonLines(tmp_path / METRICS, -1)
    (tmp_path / METRICS).symlink_to("/dev/full")
    for write in (lambda: append_line(tmp_path / METRICS, "{}"), lambda: lines.write({"step": 1}), lines.close):
        with pytest.raises(OSError, match="No space left") as caught:
            write()
        assert caught.value.filename == str(tmp_path / METRICS)
