"""Figures by the published arithmetic, counted over ranks and restarts; sinks that survive kills and are read back."""

import json
import logging.handlers
import os
import queue
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megabert import config as configuration
from megabert.common import run_files
from megabert.common.datasheets import datasheet_tflops
from megabert.common.environment import host_name
from megabert.common.logs import duration, log
from megabert.common.run_files import SLOW_RANKS, read_step
from megabert.config import Config, ModelConfig
from megabert.distributed.ranks import World
from megabert.engine import rank_times
from megabert.engine.rank_times import SlowRanks
from megabert.metrics import Meter, attending_pairs, progress_line, training_flops
from megabert.sinks import JsonLines, SampleLines, Sinks
from megabert.trackers.tensorboard import TensorBoard, as_markdown
from tests.helpers.loop import Killed
from tests.helpers.ranks import run_ranks
from tests.integration.conftest import metrics
from tests.test_trainer import quiet, trainer

LARGE = ModelConfig(layers=24, hidden=1024, heads=16, vocab_size=30_528)
SAMPLES = [{"row": 3, "tokens": ["a", " b"], "masks": [{"at": 1, "shown": "[MASK]", "predicted": [[" b", 0.5]]}]}]
RANKS = 8


def config(*overrides: str) -> Config:
    return configuration.load("tiny", ["log.tensorboard=false", *overrides])


@pytest.mark.parametrize(("length", "predictions", "gflop"), [(128, 20, 240.6), (512, 77, 1020.0)])
def test_flops_of_large_match_the_worked_figures(length: int, predictions: int, gflop: float) -> None:
    pairs = 24 * length**2
    assert training_flops(LARGE, length, pairs, predictions, 1) / 1e9 == pytest.approx(gflop, rel=5e-4)
    halves = training_flops(LARGE, length, pairs // 2, predictions, 2)
    whole = training_flops(LARGE, length, pairs, predictions, 1)
    assert whole - halves == 12 * 24 * 1024 * length**2 // 2 - 6 * 1024**2  # two sequences attend less, and pool twice


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_local_layers_and_shared_heads(causal: bool) -> None:
    """Two of three layers of sequences that are longer and shorter than 64 tokens, the reach of a window; keys and values have half of the
    heads."""
    shape: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "vocab_size": 100, "nsp": False}
    models = [ModelConfig(**shape, **c) for c in ({}, {"window": 128}, {"kv_heads": 2})]
    lengths, apart = np.array([900, 65, 34, 1, 0]), [np.subtract.outer(*[np.arange(n)] * 2) for n in (900, 65, 34, 1)]
    seen = [sum(((d <= side) & (d >= (0 if causal else -side))).sum() for d in apart) for side in (10**4, 64)]
    pairs = [attending_pairs(model, lengths, causal) for model in models]
    assert pairs == [3 * seen[0], seen[0] + 2 * seen[1], 3 * seen[0]]
    flops = [training_flops(model, 1000, round(n), 10, 1) for model, n in zip(models, pairs, strict=True)]
    assert flops[0] - flops[1] == 12 * 64 * 2 * (seen[0] - seen[1])
    assert flops[0] - flops[2] == 6 * 3 * 64 * 64 * 1000


def test_the_datasheets_peak_is_of_the_very_device() -> None:
    peaks = {"NVIDIA H200": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA B200": 2250.0, "NVIDIA L40": 181.0}
    peaks |= {"Tesla V100-SXM2-16GB": 125.0, "Tesla V100-PCIE-32GB": 112.0}
    assert {name: datasheet_tflops(name) for name in peaks} == peaks


def test_durations_read_as_people_say_them() -> None:
    assert [duration(s) for s in (59, 61, 3661, 93784)] == ["0m59s", "1m01s", "1h01m", "1d02h03m"]


class Counting(Meter):
    def count_work(self, update: Any) -> dict[str, int]:
        return {"perf/rows_per_sec": update.rows, "data/odd_rows": update.rows % 2, "unlogged": 1}


def rows(count: int, objective: str = "masked") -> Any:
    return SimpleNamespace(rows=count, objective=objective)


def result(loss: float, applied: float = 1.0) -> Any:
    values = torch.tensor([loss, 2 * loss], dtype=torch.float64)
    norm, applied_tensor = torch.tensor(3.0), torch.tensor(applied)
    return SimpleNamespace(loss=values[0], losses=values, accuracies=values / 8, grad_norm=norm, applied=applied_tensor)


def test_a_window_around_a_restart_is_logged_whole() -> None:
    straight, first, second = (Counting(("mlm", "")) for _ in range(3))
    for meter, results in ((straight, (1.0, 2.0, 3.0)), (first, (1.0, 2.0))):
        for number, loss in enumerate(results):
            meter.add(result(loss, applied=float(loss != 2.0)), rows(number + 4))
            meter.synced(0.5, {name: 2 * count for name, count in meter.counts.items()})  # of two ranks
    second.resume(json.loads(json.dumps(first.state(), sort_keys=True)))
    second.add(result(3.0), rows(6))
    second.synced(0.5, {name: 2 * count for name, count in second.counts.items()})
    want = {"train/loss": 2.0, "train/mlm_loss": 2.0, "train/mlm_accuracy": 0.25, "train/grad_norm": 3.0}
    want |= {"perf/rows_per_sec": 2 * 15 / 1.5, "data/odd_rows": 2, "train/objective": "masked"}
    assert straight.drain() == second.drain() == want
    assert straight.state() == {"seconds": 0.0, "totals": {}, "by_objective": {}}


def test_causal_updates_have_figures_apart() -> None:
    meter, after = Counting(("mlm", "")), Counting(("mlm", ""))
    meter.add(result(4.0), rows(1, "causal"))
    meter.add(result(1.0), rows(1))
    after.resume(json.loads(json.dumps(meter.state(), sort_keys=True)))
    for one in (meter, after):
        one.add(result(3.0), rows(1))
        found = one.drain()
        assert found["train/objective"] == "masked" and found["train/loss"] == 2.0 and found["train/causal_loss"] == 4.0
        assert found["train/mlm_accuracy"] == 0.25 and found["train/causal_mlm_accuracy"] == 0.5
        one.add(result(5.0), rows(1, "causal"))
        found = one.drain()
        assert found["train/objective"] == "causal" and found["train/loss"] == 5.0 and "train/causal_loss" not in found


def seconds(updates: int, **slow: float) -> list[float]:
    """Of eight ranks, within 2% of each other; `slow`: times as long, of rank `r<number>`."""
    return [updates * 0.2 * (1 + 0.0025 * rank) * slow.get(f"r{rank}", 1.0) for rank in range(RANKS)]


HOSTS = ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
# of each rank: nothing lost, and the round trip of a message
ZEROS, LINKS = [0.0] * RANKS, [1e-4] * 2 + [4e-4] * 6


def judge(slow, updates, each=0.3, **figures):
    """So many updates of `each` seconds, with a rank's sums as `seconds` gives them; the new slow ranks."""
    links = [updates * seconds for seconds in LINKS]
    given = {"compute": seconds(updates), "host": ZEROS, "data_wait": ZEROS, "message": links} | figures
    return [tuple(found) for found in slow.add(updates, updates * each, given)]


def scaled(values: list[float], rank: int, to: float) -> list[float]:
    return [*values[:rank], to, *values[rank + 1 :]]


@pytest.mark.parametrize("interval", [10, 30, 200])
def test_a_rank_10_percent_slower_is_named_once(interval: int) -> None:
    found, slow = [], SlowRanks(HOSTS, 1.08, 30.0)
    for done in range(interval, 400 + interval, interval):
        found += [(done, rank) for rank in judge(slow, interval, compute=seconds(interval, r3=1.1))]
    ((done, rank),) = found
    assert rank == (3, "n2", 1.1, "device") and [rank.rank for rank in slow.named] == [3]
    # by 50 updates and 30 seconds, whichever takes longer
    assert 100 <= done < 100 + interval


def test_ranks_slow_over_50_updates_are_named_again() -> None:
    slow = SlowRanks(HOSTS, 1.08, 30.0)
    assert not judge(slow, 40, each=10.0, compute=seconds(40, r3=1.5))
    assert judge(slow, 10, each=10.0, compute=seconds(10, r3=1.5))
    slow = SlowRanks(HOSTS, 1.08, 15.0)
    factors = (1.0, 1.0, 1.2, 1.2, 1.0, 1.0, 1.2, 1.2)
    named = [[one[0] for one in judge(slow, 25, compute=seconds(25, r5=factor))] for factor in factors]
    assert named == [[], [], [5], [], [], [], [5], []]


def test_noise_and_equal_slowness_name_nobody() -> None:
    slow = SlowRanks(HOSTS, 1.08, 15.0)
    for number in range(40):
        assert not judge(slow, 5, compute=seconds(5, **{f"r{number % RANKS}": 1.3}))
    for times in (1.0, 3.0):  # all ranks: a hot room, a slow file system, a slow network
        same = {name: [times * 5.0] * RANKS for name in ("compute", "host", "data_wait", "message")}
        assert not judge(SlowRanks(HOSTS, 1.08, 15.0), 50, each=times, **same)


COSTLY = {"compute": seconds(50, r6=1.4)}
SLOW_LINK = [50 * (0.08 if rank in (6, 7) else link) for rank, link in enumerate(LINKS)]


@pytest.mark.parametrize(
    ("causes", "figures"),
    [
        (["data"], {"data_wait": [4.0 * (rank == 6) for rank in range(RANKS)]}),
        # late with its work, as the others are a tenth of the time
        (["host"], COSTLY | {"host": scaled([t / 10 for t in seconds(50)], 6, 5.0)}),
        # on a machine where every rank waits for cores
        (["host"], {"compute": seconds(50, r6=2.0), "host": scaled([t * 0.67 for t in seconds(50)], 6, 17.0)}),
        # a host that is as late as the others' is not the cause
        (["device"], COSTLY | {"host": [t / 2 for t in seconds(50, r6=1.4)]}),
        # rows that come late are not, where the device loses more
        (["device"], COSTLY | {"data_wait": [0.5 * (rank == 6) for rank in range(RANKS)]}),
        (["network"], {"message": scaled(SLOW_LINK, 7, 50 * LINKS[7])}),
        (["network", "network"], {"message": SLOW_LINK}),
        # 10 ms are Python's own
        ([], {"message": [t / 8 for t in SLOW_LINK]}),
        # ranks that compute all the time wait for no link
        ([], {"message": SLOW_LINK, "each": 0.205}),
    ],
)
def test_slow_ranks_have_a_cause(causes: list[str], figures: dict[str, Any]) -> None:
    found = judge(SlowRanks(HOSTS, 1.08, 15.0), 50, **figures)
    assert [(one[0], one[1], one[3]) for one in found] == [(6 + i, "n4", cause) for i, cause in enumerate(causes)]
    # between two hosts either may be the cause
    assert not judge(SlowRanks(["n1"] * 6 + ["n4"] * 2, 1.08, 15.0), 50, message=SLOW_LINK)
    figures = {"compute": [10.0, 11.0]} | {name: [0.0, 0.0] for name in ("host", "data_wait", "message")}
    assert [*SlowRanks(["n1", "n1"], 1.08, 3.0).add(50, 11.0, figures)] == [(1, "n1", 1.1, "device")], "of two ranks"


BUSY, LATE, STEPS = 0.01, 0.05, 90  # seconds a micro-batch, on every rank and more on the slow one; updates
ONCE = 5.0  # seconds that rank 1 takes longer in its first update, its evaluation and its save
STOPS = 'trap "kill -CONT $0; exit" TERM; while kill -STOP $0; do sleep 0.1; kill -CONT $0; sleep 0.05; done'


def compute_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def trains_with_a_slow_rank(world: World, folder: str, cause: str) -> list[str]:
    """Rank 1 waits for its rows, is stopped two thirds of the time, computes more, or is late elsewhere. What is logged."""
    logged = logging.handlers.QueueHandler(queue.Queue())
    log.addHandler(logged)
    limits = {"watchdog__slow_ratio": 1.5, "watchdog__slow_minutes": 0.02}
    cfg = quiet(precision="bf16", zero__stage=1, log__interval=10, **limits)
    ours = trainer(cfg, world, Path(folder), updates=STEPS)
    ours.workload.saved_at = 35
    ours.workload.evaluation_due = lambda step: step == 25
    ours.schedule.stop_after = None
    slow = cause if world.rank == 1 else ""
    ours.engine.module.register_forward_pre_hook(lambda *_: compute_for(BUSY + LATE * (slow == "device")))
    stops = subprocess.Popen(["sh", "-c", STOPS, str(os.getpid())]) if slow == "host" else None
    if slow == "data":
        ours.updates = (time.sleep(2 * LATE) or update for update in ours.updates)
    if slow == "elsewhere":
        first, save = iter([ONCE]), ours.checkpoints.save
        ours.engine.module.register_forward_pre_hook(lambda *_: time.sleep(next(first, 0.0)))
        ours.workload.evaluate = lambda *_: time.sleep(ONCE) or {}
        ours.checkpoints.save = lambda *state: (time.sleep(ONCE), save(*state))
    with pytest.raises(Killed):
        ours.train()
    if stops is not None:
        stops.terminate()
        stops.wait()
    log.removeHandler(logged)
    return [logged.queue.get().getMessage() for _ in range(logged.queue.qsize())]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("cause", ["data", "host", "device", "elsewhere"])
def test_the_slow_of_two_real_ranks_is_named(cause: str, tmp_path: Path) -> None:
    (tmp_path / SLOW_RANKS).write_text("of an earlier start")
    texts, others = run_ranks(2, trains_with_a_slow_rank, str(tmp_path), cause)
    lines = metrics(tmp_path)
    assert not any("is slow:" in text for text in others)
    named = [text for text in texts if "is slow:" in text]
    if cause == "elsewhere":
        assert not named and not (tmp_path / SLOW_RANKS).exists() and not lines[-1]["perf/slow_ranks"]
        return
    (slow,) = lines[-1]["perf/slow_ranks"]
    assert lines[-1]["perf/slowest_rank"] == 1
    assert slow == {"rank": 1, "host": host_name(), "ratio": slow["ratio"], "cause": cause} and slow["ratio"] > 1.5
    # more than one where other processes take the cores now and then
    assert all(f"rank 1 (host {host_name()}) is slow: " in line for line in named)
    assert f"minutes; cause: {cause} (" in named[-1], named
    record = json.loads((tmp_path / SLOW_RANKS).read_text())
    assert [(one["rank"], one["cause"]) for one in record["slow_ranks"]] == [(1, cause)]


def test_shared_cores_are_warned_of_once(monkeypatch, caplog) -> None:
    now, short = [0.0], [0.0]
    monkeypatch.setattr(rank_times.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rank_times, "cpu_pressure_seconds", lambda: short[0])
    cores = rank_times.SharedCores()
    for waited, warnings in (0.8, 0), (5.0, 1), (9.0, 1):  # of ten seconds each: alone, shared, shared
        now[0], short[0] = now[0] + 10.0, short[0] + waited
        cores.look()
        assert len(caplog.records) == warnings
    assert "waited for a core 50%" in caplog.text


def test_lines_past_the_resumed_step_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 10, "x": 1}\n{"step": 1\xff}\n{"step": 20, "x": 2}\n{"step": 30, "x": 3}\n{"step": 3')
    sink = JsonLines(path, resume_step=20)
    sink.write({"step": 21, "x": float("nan")})
    sink.close()
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [10, 20, 21] and lines[-1]["x"] == "nan"


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 16])
def test_only_the_end_of_a_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path, read = tmp_path / "metrics.jsonl", []
    lines = [b'{"step": %d, "x": %d}\n' % (step, 10**step) for step in (0, 3, 3, 3, 7, 8)]
    path.write_bytes(b"".join(lines))
    monkeypatch.setattr(run_files, "TAIL", size)
    monkeypatch.setattr(run_files, "read_step", lambda line: [read.append(line), read_step(line)][1])
    for step, kept in ((-1, 0), (0, 0), (1, 1), (3, 1), (4, 4), (8, 5), (9, 6)):
        before = lines[kept - 1] if kept else b""
        assert run_files.read_tail(path, step) == (sum(map(len, lines[:kept])), before, lines[kept:])
    path.write_bytes(b"".join(b'{"step": %d}\n' % step for step in range(100_000)))
    read.clear()
    JsonLines(path, resume_step=99_990)
    assert len(read) < 10_000
    assert path.read_bytes().endswith(b'{"step": 99989}\n{"step": 99990}\n') and path.stat().st_size > 1_500_000


def test_samples_have_a_file_once_there_are_any(tmp_path: Path) -> None:
    sink = SampleLines(tmp_path / "samples.jsonl", -1)
    sink.show(0, [])
    sink.write({"step": 0, "train/loss": 1.0})
    assert not list(tmp_path.iterdir())
    sink.show(10, SAMPLES)
    sink.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"step": 10, "samples": SAMPLES}


@pytest.mark.parametrize(
    ("overrides", "place", "objective"),
    [
        (["schedule.total_steps=40", "schedule.warmup_steps=1"], "step      20/40  ", "NSP 60.00%"),
        (["schedule.by=minutes", "schedule.budget_minutes=30"], "step      20   10.0% of 30 minutes", "masked 25.00%"),
        (["schedule.by=tokens", "schedule.budget_tokens=4000"], "step      20   25.0% of 4,000 token", "causal 25.00%"),
    ],
)
def test_a_line_names_budget_and_objective(overrides: list[str], place: str, objective: str) -> None:
    values = {"step": 20, "time/train_seconds": 180.0, "data/tokens": 1000}
    values |= {"train/loss": 5.0, "train/mlm_accuracy": 0.25}
    values |= {"perf/sequences_per_sec": 9.0, "perf/tokens_per_sec": 99.0, "perf/mfu": 0.1, "train/lr": 1e-3}
    values |= {"train/grad_norm": 1.0} | ({"train/nsp_accuracy": 0.6} if "NSP" in objective else {})
    cfg = config(*overrides)
    line = progress_line(values, cfg.schedule, objective.split()[0], 60.0)
    assert line.startswith(place) and objective in line and "1,000,000,000" not in line and "causal loss" not in line
    values |= {"train/causal_loss": 6.0, "train/causal_mlm_accuracy": 0.125}
    assert "%  causal loss 6.0000 12.50%  " in progress_line(values, cfg.schedule, "masked", 60.0)


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    before = TensorBoard(tmp_path, config(), -1)
    before.write({"step": 0, "train/loss": 11.0})  # killed before its first checkpoint, so this point is dropped
    before.close()
    time.sleep(1)  # files are read in the order of the seconds in their names
    sink = TensorBoard(tmp_path, config(), -1)
    for step in (1, 2, 3):
        sink.write({"step": step, "train/loss": 10.0 - step, "note": 1})
    sink.write({"step": 4, "perf/rank_compute_seconds": [0.5, 0.75], "perf/slow_ranks": [{"rank": 1}]})
    sink.write({"step": 5, "perf/rank_compute_seconds": [0.5] * 65})
    sink.show(10, SAMPLES)
    sink.conclude({"eval/mlm_loss": 7.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 9.0), (2, 8.0), (3, 7.0)]
    each = [f"perf/rank_compute_seconds/{rank:02}" for rank in range(2)]
    assert sorted(events.Tags()["scalars"]) == ["1_loss/training", *each, "train/loss"], "it opens on the first"
    assert events.Scalars("1_loss/training")[2].value == 7.0
    assert [events.Scalars(name)[0].value for name in each] == [0.5, 0.75]
    assert events.Histograms("perf/rank_compute_seconds")[0].histogram_value.num == 65
    assert "config/text_summary" in events.Tags()["tensors"]
    final = EventAccumulator(str(tmp_path / "tensorboard/hparams")).Reload().Scalars("final/mlm_loss")
    assert [event.value for event in final] == [7.5]
    (text,) = events.Tensors("samples/text_summary")
    assert text.step == 10 and text.tensor_proto.string_val[0].decode().startswith("a **[1]**\n")


def test_tensorboards_text_numbers_masks_and_escapes_markup() -> None:
    masks = [{"at": 1, "shown": "[MASK]", "predicted": [[" <b>*", 0.5], ["x", 0.25]]}]
    shown = as_markdown([{"row": 0, "tokens": ["[CLS]", " cat", "#", "\n"], "masks": masks}])
    assert shown.splitlines() == [r"\[CLS\] **[1]**\#'\\n'", "", r"1. ** cat**:  \<b\>\* 50%, x 25%"]


def test_an_evaluation_that_is_repeated_has_one_line(tmp_path: Path) -> None:
    """One was killed behind the lines of an evaluation that it owed. The same in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for owed in (False, True, True):
        sinks = Sinks(tmp_path, config("log.tensorboard=true"), -1 if not owed else 8, owed)
        if not owed:
            sinks.write({"step": 8, "train/loss": 7.0})
        sinks.write({"step": 8, "eval/mlm_loss": 6.0})
        sinks.show(8, SAMPLES)
        sinks.close()
        time.sleep(1)  # TensorBoard reads files in the order of the seconds in their names
    assert metrics(tmp_path) == [{"step": 8, "train/loss": 7.0}, {"step": 8, "eval/mlm_loss": 6.0}]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(e.step, e.value) for name in ("train/loss", "eval/mlm_loss") for e in events.Scalars(name)]
    assert points == [(8, 7.0), (8, 6.0)]


def test_a_sink_that_fails_leaves_none_open(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path, config(), -1)
    lines = sinks._sinks[0]
    assert isinstance(lines, JsonLines)
    sinks.write({"step": 1})
    sinks._sinks.insert(0, Mock(close=Mock(side_effect=OSError("its disk is full"))))
    with pytest.raises(OSError, match="its disk is full"):
        sinks.close()
    assert lines._file.closed
