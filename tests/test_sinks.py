"""Sinks besides the metrics file: samples that survive kills, curves in TensorBoard, and the packages that may be missing."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from megabert import config as configuration
from megabert import metrics
from megabert.metrics import JsonLines, MLflow, SampleLines, Shown, Sink, Sinks, TensorBoard

SAMPLES = [{"row": 3, "tokens": ["a", " b"], "masks": [{"at": 1, "shown": "[MASK]", "said": [[" b", 0.5]]}]}]


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed (megabert[{package}])")


def test_samples_after_the_newest_checkpoint_are_cut_and_recorded_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    first = SampleLines(path, -1)
    first.show(0, Shown())
    assert not path.exists()  # nothing was looked at
    for step in (0, 10, 20):
        first.show(step, Shown(SAMPLES))
    first.close()
    whole = path.read_bytes()
    with open(path, "a") as file:
        file.write('{"step": 3')
    again = SampleLines(path, 10)
    again.show(20, Shown(SAMPLES))
    again.close()
    assert path.read_bytes() == whole
    assert json.loads(whole.splitlines()[1]) == {"step": 10, "samples": SAMPLES}


def test_tensorboard_has_the_samples_and_the_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, configuration.load("tiny"), 0)
    truth, probable = np.array([True, True, False, False]), np.array([0.9, 0.6, 0.7, 0.1])
    board.show(10, Shown(SAMPLES, {"1": (truth, probable)}))
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("samples/text_summary")
    assert text.step == 10 and text.tensor_proto.string_val[0].decode().startswith("a **[1]**\n")
    (curve,) = events.Tensors("dev/precision_recall/1")
    of = np.frombuffer(curve.tensor_proto.tensor_content, np.float32)
    if not of.size:
        of = np.array(curve.tensor_proto.float_val, np.float32)
    positives, false, _, missed, precision, recall = of.reshape(6, -1)
    at = int(0.65 * (len(precision) - 1))  # between 0.6 and 0.7: one of each
    assert (positives[at], false[at], missed[at]) == (1, 1, 1)
    assert (precision[at], recall[at]) == (0.5, 0.5) and recall[0] == 1.0


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named_with_its_setting(name: str, monkeypatch) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda package: None)
    config = configuration.load("tiny", [f"log.{name}=mine"])
    said = rf"log\.{name}=mine: {name} is not installed; pip install 'megabert\[{name}\]'"
    with pytest.raises(ValueError, match=said):
        metrics.check_packages(config)
    metrics.check_packages(configuration.load("tiny"))  # nothing is asked for


def run_twice(folder: Path, *overrides: str) -> dict[str, str]:
    """Figures of a run that was stopped after step 10 and went on; under which names it is known elsewhere."""
    config = configuration.load("tiny", ["log.tensorboard=false", *overrides])
    names = []
    for step, saved in ((0, -1), (10, 10)):
        opened = Sinks(folder, config, step, saved)
        opened.write({"step": step + 10, "train/loss": 9.0 - step / 10, "data/row_digest": "text"})
        opened.show(step + 10, Shown(SAMPLES))
        opened.hparams({"eval/mlm_loss": 7.5})
        opened.close()
        names.append(json.loads((folder / "sinks.json").read_text()))
    assert names[0] == names[1]
    return names[1]


@pytest.mark.slow
@needs("wandb")
def test_weights_and_biases_keeps_the_figures_in_the_runs_folder_when_offline(tmp_path: Path, monkeypatch) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "mini"
    folder.mkdir()
    name = run_twice(folder, "log.wandb=mine")["wandb"]
    files = sorted((folder / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    history, begun = [], []
    for file in files:
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
            elif kind == "run":
                begun.append((record.run.project, record.run.run_id, record.run.display_name))
    logged = [(line["step"], line["train/loss"]) for line in history if "train/loss" in line]
    assert sorted(logged) == [(10, 9.0), (20, 8.0)]
    assert set(begun) == {("mine", name, "mini")}
    other = Sinks(folder, configuration.load("tiny", ["log.tensorboard=false", "log.wandb=mine"]), 0, -1)
    other.close()  # begun anew
    assert json.loads((folder / "sinks.json").read_text())["wandb"] != name


def records(data: bytes) -> list[bytes]:
    """The records of a file in LevelDB's log format, behind a head of 7 bytes, that is shorter than a block."""
    assert len(data) < 32768
    found, at = [], 7
    while at + 7 <= len(data):
        _crc, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a whole record"
        found.append(data[at + 7 : at + 7 + length])
        at += 7 + length
    return found


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_keeps_the_figures_in_the_runs_folder_where_no_server_is_named(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    from mlflow import MlflowClient

    for variable in ("MLFLOW_TRACKING_URI", *metrics.MLFLOW_PATIENCE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mini"
    folder.mkdir()
    name = run_twice(folder, "log.mlflow=mine")["mlflow"]
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run = client.get_run(name)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mini")
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    assert [(m.step, m.value) for m in client.get_metric_history(name, "train/loss")] == [(10, 9.0), (20, 8.0)]
    assert run.data.metrics["final/mlm_loss"] == 7.5 and run.data.params["log.mlflow"] == "mine"
    assert "data/row_digest" not in run.data.metrics
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mini"]  # nothing where the command was given
    for variable, value in metrics.MLFLOW_PATIENCE.items():
        assert os.environ[variable] == value

    config = configuration.load("tiny", ["log.tensorboard=false", "log.mlflow=mine"])
    opened, idle = Sinks(folder, config, 20, 20), MLflow(folder, config, fresh=False)
    (folder / "mlflow.db").unlink()
    (folder / "mlflow.db").mkdir()  # as a server that no longer answers
    for step in (30, 40):
        opened.write({"step": step, "train/loss": 7.0})
    opened.close()
    assert capsys.readouterr().err.count("no more is sent to it") == 1
    idle.close()  # which hears of it only now
    assert capsys.readouterr().err.count("no more is sent to it") == 1
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 30, 40]


@pytest.mark.slow
@needs("mlflow")
def test_a_server_that_does_not_answer_when_a_run_goes_on_is_left_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "sinks.json").write_text('{"mlflow": "0123456789abcdef"}')
    config = configuration.load("tiny", ["log.tensorboard=false", "log.mlflow=mine"])
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for variable, value in zip(metrics.MLFLOW_PATIENCE, ("1", "0"), strict=True):
            monkeypatch.setenv(variable, value)
        opened = Sinks(tmp_path, config, 20, 20)
        opened.write({"step": 30, "train/loss": 7.0})
        opened.close()
        with pytest.raises(ValueError, match=r"log\.mlflow=mine: "):
            Sinks(tmp_path, config, 0, -1)
    assert capsys.readouterr().err.count("no more is sent to it") == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 30


class Broken(Sink):
    def close(self) -> None:
        raise OSError("its disk is full")


def test_a_sink_that_fails_at_the_end_leaves_none_open(tmp_path: Path) -> None:
    opened = Sinks(tmp_path, configuration.load("tiny", ["log.tensorboard=false"]), 0, -1)
    lines = opened._sinks[0]
    assert isinstance(lines, JsonLines)
    opened.write({"step": 1})
    opened._sinks.insert(0, Broken())
    with pytest.raises(OSError, match="its disk is full"):
        opened.close()
    assert lines._file is not None and lines._file.closed
