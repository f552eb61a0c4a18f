"""The loop in one process on a tiny model: what the ranks agree on, and what is the same after a restart."""

import errno
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megabert.agreement import Sync
from megabert.checkpoint import Checkpoints, newest_step
from megabert.common.errors import FAILED, USER_ERROR, Failed, exit_code
from megabert.config import Config
from megabert.distributed import ranks
from megabert.distributed.ranks import World, raise_on_all_ranks
from megabert.distributed.watchdog import Watchdog
from megabert.optim.rate_record import FILE, RECORD
from megabert.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.loop import Killed, StopAt, Workload, make_spike
from tests.helpers.ranks import run_ranks
from tests.integration.conftest import metrics


def ranks_of(reports: list[list[Any]]) -> Any:
    """A world in which each rank reports this."""
    worst = max(code for _, code in reports)
    return SimpleNamespace(size=3, max_ints=lambda own: [worst], gather=lambda own: reports)


@pytest.mark.parametrize(
    ("reports", "code", "text"),
    [
        ([["", 0], ["a row is damaged", USER_ERROR], ["", 0]], USER_ERROR, "rank 1: a row is damaged"),
        ([["", 0], ["", 0], ["Input/output error", FAILED]], FAILED, "rank 2: Input/output error"),
        ([["no such file", USER_ERROR], ["", 0], ["Stale file handle", FAILED]], FAILED, "rank 2: Stale"),
    ],
)
def test_a_fault_of_one_rank_outranks_a_mistake(reports, code, text) -> None:
    with pytest.raises(ValueError, match=text) as found:
        raise_on_all_ranks(ranks_of(reports), "", 0)
    assert exit_code(found.value) == code
    raise_on_all_ranks(ranks_of([["", 0]] * 3), "", 0)


def test_ranks_agree_field_by_field() -> None:
    def of(r: int) -> Sync:
        return Sync(r + 5, r == 1, 2 - r, 0, 10, {"high": 1, "damaged": r}, {"b": r, "a": 3}, {"wait": 7 * r})

    rows = [of(rank).values() for rank in range(3)]
    want = Sync(7, 1, 2, 0, 30, {"high": 3, "damaged": 3}, {"a": 9, "b": 3}, {"wait": [0, 7, 14]})
    assert all(of(rank).reduce(rows) == want for rank in range(3))


def quiet(**overrides: Any) -> Config:
    """Settings of a run that logs to its folder alone and saves before it goes on."""
    return tiny.config(**{"zero__stage": 0, "log__tensorboard": False, "checkpoint__asynchronous": False} | overrides)


def trainer(cfg: Config, world: World, folder: Path, *, updates: int = 9, stop_at: int = -1) -> Trainer:
    """The trainer of a run folder as a command would open it, to be saved at step 3; behind `updates` the process ends."""
    folder.mkdir(exist_ok=True)
    engine, checkpoints = tiny.engine(cfg, world), Checkpoints(folder, world, cfg.checkpoint)
    newest = checkpoints.latest()
    return Trainer(
        config=cfg,
        engine=engine,
        workload=Workload(cfg, world, engine, updates, saved_at=3),
        checkpoints=checkpoints,
        stop=StopAt(stop_at),
        watchdog=Watchdog(world, folder, 0),
        provenance={"config": cfg.model_dump()},
        saved=None if newest is None else checkpoints.load(engine, newest),
        stop_after=7,
    )


def test_a_stop_before_any_update_is_one_line(world, tmp_path, capsys):
    ours = trainer(quiet(), world, tmp_path / "run", stop_at=1)
    ours.checkpoints.finish_mirror = uploaded = Mock()  # what the last job may have left to upload
    assert not ours.train() and ours.state.step == 0 and uploaded.called
    assert capsys.readouterr().out == "stopped: nothing was trained since the start; the same command resumes\n"
    ours.close()


def test_a_stop_after_the_end_changes_nothing(world, tmp_path):
    """As of a rank that was killed after its last save, and restarts in place behind the time limit."""
    for stop_at in (-1, 1):
        ours = trainer(quiet(checkpoint__asynchronous=True), world, tmp_path / "run", stop_at=stop_at)
        assert ours.train() and ours.state.step == 7
        ours.close()


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: {k: v for k, v in line.items() if "perf/" not in k} for line in metrics(folder)}


def test_checkpoints_are_due_by_minutes_too(world, tmp_path):
    """By the training time that all ranks know of before an update: here each update is longer than the interval."""
    ours = trainer(quiet(log__interval=5, checkpoint__minutes=1e-9, checkpoint__keep=9), world, tmp_path)
    seen = []
    ours.engine.progress = lambda: seen.append(ours.state.step)
    assert ours.train()
    assert seen == [step for step in range(7) for _ in range(ours.engine.accumulation)]  # after each micro-step
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == [f"step-{step:08d}" for step in (2, 3, 5, 7)]


def test_minutes_count_from_the_last_checkpoint(world, tmp_path):
    """Not from a copy in memory."""
    cfg = quiet(checkpoint__minutes=1, log__seconds=60)
    ours = trainer(cfg, world, tmp_path)
    for saved, due in ((10.0, False), (45.0, False), (75.0, True)):
        ours.resume(ours.checkpoint_state() | {"seconds": saved, "saved_seconds": 10.0, "logged_seconds": 10.0})
        assert ours.schedule.checkpoint_due(1, was_due=False) == ours.schedule.log_due(cfg.log.interval) == due
    ours.close()


def test_a_save_waits_for_an_update_that_is_applied(world, tmp_path):
    """Weights with NaN push no checkpoint out."""
    ours = trainer(quiet(checkpoint__keep=1, max_bad_steps=9), world, tmp_path)
    train_update, weights = ours.engine.train_update, ours.engine._weights

    def failing(update: Any, *rest: Any) -> Any:
        ours.engine._weights = weights * (math.nan if update.step in (2, 3) else 1.0)
        return train_update(update, *rest)

    ours.engine.train_update = failing
    saved = []
    ours.checkpoints.saved = lambda seconds: saved.append(ours.state.step)
    assert ours.train() and ours.state.skipped == 2
    assert saved == [5, 7]  # due at 3
    ours.close()


def test_the_first_update_has_a_line(world, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("megabert.trainer.log.info", said.append)
    cfg = quiet(log__interval=5)
    assert trainer(cfg, world, tmp_path).train()
    (first,) = (line for line in said if line.startswith("step       1  "))
    assert re.fullmatch(r"step       1  masked loss \d\.\d{4}  in \d+\.\d s; a line every 5 updates", first)
    said.clear()
    assert trainer(cfg, world, tmp_path).train() and not [line for line in said if "step       1" in line]


def test_a_spike_seen_later_changes_no_result(world, tmp_path, monkeypatch):
    """Data 3 and 4 are left out, whether the spike of 4 is seen at once or one update later; lines follow the clock."""
    guard = {"spikes__policy": "rollback", "spikes__window": 8, "spikes__threshold": 300.0}
    found = []
    for unread, seconds in ((64, 0.0), (3, 1e9)):
        monkeypatch.setattr("megabert.progress.MOST_UNREAD", unread)
        cfg = quiet(**guard, log__interval=1, log__seconds=seconds, batch__micro_size=8)
        ours, seen = trainer(cfg, world, tmp_path / str(unread)), []
        make_spike(ours, 4, seen)
        assert ours.train()
        logged = sorted(lines(ours.run_dir)) if (ours.run_dir / "metrics.jsonl").exists() else []
        results = {name: w.tolist() for name, w in ours.engine.consolidated_weights().items()}
        trained = [cursor for _, cursor, _ in seen]
        found.append((trained, logged, ours.state.cursor, (ours.run_dir / "trouble.jsonl").read_text(), results))
    assert [trained for trained, *_ in found] == [[*range(5), *range(5, 9)], [*range(6), *range(5, 9)]]
    assert [logged for _, logged, *_ in found] == [[1, 2, 3, 4, 5, 6, 7], []]
    assert found[0][2:] == found[1][2:] and found[0][2] == 9


def test_a_stop_at_a_rollback_repeats_no_spike(world, tmp_path):
    guard, seen = {"spikes__policy": "rollback", "spikes__window": 8, "spikes__threshold": 300.0}, []
    for stop_at in (6, -1):  # by update 5, whose loss is the spike
        ours = trainer(quiet(**guard, log__interval=1, batch__micro_size=8), world, tmp_path, stop_at=stop_at)
        make_spike(ours, 4, seen)
        assert ours.train() == (stop_at < 0)
    assert [cursor for _, cursor, _ in seen] == [*range(9)]
    assert (tmp_path / "trouble.jsonl").read_text().count("\n") == 1


def test_a_repeated_update_has_its_first_learning_rate(world, tmp_path):
    by = {"schedule__name": "budget", "schedule__budget_minutes": 0.5, "schedule__warmup_steps": 0}
    cfg = quiet(**by, log__interval=1, batch__micro_size=8)
    with pytest.raises(Killed):
        trainer(cfg, world, tmp_path, updates=6).train()
    logged = lines(tmp_path)
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    assert len({line["train/lr"] for line in logged.values()}) == 6
    record = tmp_path / FILE
    record.write_bytes(record.read_bytes()[:-3])  # the last one, of update 6, was torn
    resumed = trainer(cfg, world, tmp_path)
    assert resumed.state.step == 3 and resumed.train()
    again = lines(tmp_path)
    assert sorted(again) == [1, 2, 3, 4, 5, 6, 7]
    for step in (4, 5):
        for name in ("train/lr", "train/loss", "train/grad_norm"):
            assert again[step][name] == logged[step][name], (step, name)
    assert again[5]["time/train_seconds"] > logged[4]["time/train_seconds"]  # the clock continued from there
    assert len(record.read_bytes()) == 7 * RECORD.size


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("stopped", [False, True])
def test_runs_end_only_with_their_last_updates_saved(stopped, asynchronous, world, tmp_path, monkeypatch):
    def write(self, folder, snapshot):
        if not folder.name.startswith(".saving-00000003-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(self, folder, snapshot)

    whole = Checkpoints._write
    monkeypatch.setattr(Checkpoints, "_write", write)
    cfg = quiet(schedule__warmup_steps=0, batch__micro_size=8, checkpoint__asynchronous=asynchronous)
    ours = trainer(cfg, world, tmp_path, stop_at=6 if stopped else -1)
    with pytest.raises(Failed, match="could not be written") as found:
        ours.train()
    assert exit_code(found.value) == FAILED
    assert newest_step(tmp_path) == ours.checkpoints.saved_step == 3


STEPS, LINES = 12, 4  # updates, updates between log lines
CALLS = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast", "gather")


def collectives(world, folder):
    """The collectives between the hosts of a run that only trains, and the waits for them, for each update."""
    updates: list[list[str]] = [[]]

    def hook(module, name):
        call = getattr(module, name)

        def counted(*args, **kwargs):
            if sys._getframe(1).f_code.co_filename.endswith("ranks.py"):
                updates[-1].append(name)
            return call(*args, **kwargs)

        setattr(module, name, counted)

    cfg = quiet(precision="bf16", zero__stage=1, log__interval=LINES, schedule__warmup_steps=0)
    ours = trainer(cfg, world, Path(folder), updates=STEPS)
    ours.workload.checkpoint_due = lambda step: False
    ours.schedule.stop_after = None
    train_update = ours.train_update
    ours.train_update = lambda: updates.append([]) or train_update()
    for name in (*CALLS, "recv", "reduce", "send"):
        hook(dist, name)
    hook(ranks, "wait_for_ranks")
    with pytest.raises(Killed):
        ours.train()
    return updates[1:-1]


@pytest.mark.slow
@pytest.mark.dist
def test_hosts_exchange_one_record_an_update(tmp_path) -> None:
    for found in run_ranks(2, collectives, str(tmp_path)):
        assert len(found) == STEPS
        lines = {step for step in range(STEPS + 1) if step <= 1 or step % LINES == 0}
        for step, calls in enumerate(found, 1):
            before = ["wait_for_ranks"] * (step - 1 not in lines)  # for the record of the update before
            own = ["wait_for_ranks"] * (step in lines)
            assert calls == [*before, "all_gather_into_tensor", *own], (step, calls)
