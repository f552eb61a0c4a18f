"""Real runs under faults: signals, dead and hanging ranks, a lost file system, spikes, other numbers of ranks.

One of each kind runs by default or under `-m slow`, the stopped rank and the death of rank 0 under `make soak`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.job import Job
from tests.integration.conftest import end, logged, metrics, saved_step

pytestmark = pytest.mark.dist
slow, soak = pytest.mark.slow, pytest.mark.soak


def curve(run: Path) -> dict[int, dict]:
    return {m["step"]: m for m in metrics(run) if "train/loss" in m}


def losses_and_rows(run: Path) -> dict[int, tuple[float, str]]:
    return {step: (line["train/loss"], line["data/row_digest"]) for step, line in curve(run).items()}


def error_of(job: Job) -> str:
    (line,) = [text for text in job.output.splitlines() if "error:" in text]
    return line


# ---- signals

# a save that says so once, and takes longer
PAUSE = """
import time
from megabert.checkpoint import Checkpoints
def slow(self, *args, do=Checkpoints.save):
    print("saving", flush=True)
    time.sleep({seconds})
    return do(self, *args)
Checkpoints.save = slow
"""
LEAVES = """
import os
from megabert.distributed import ranks
def init(world, init=ranks.init):
    world = init(world)
    if world.rank == 1:
        os._exit(85)
    return world
ranks.init = init
"""


OTHER_END = """
import os
from megabert import train
def parse(argv, parse=train.parse):
    return parse([*argv, "--stop-after", str(5 + int(os.environ["RANK"]))])
train.parse = parse
"""


@pytest.fixture(scope="module")
def uninterrupted(dataset, tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    end(Job(dataset, run, "--stop-after", 60), 0, 0)
    return losses_and_rows(run)


@slow
def test_a_signal_to_one_rank_saves_on_all(dataset, tmp_path, uninterrupted):
    run = tmp_path / "run"
    job = Job(dataset, run, driver=PAUSE.format(seconds=2))
    job.wait_for("saving")
    job.signal(signal.SIGTERM, 1)
    end(job, 85, 85, within=30)
    step = saved_step(run)
    assert f"at step {step}," in end(Job(dataset, run, "--stop-after", step + 2), 0, 0)
    assert losses_and_rows(run) == {s: uninterrupted[s] for s in range(1, step + 3)}


def test_a_second_signal_ends_at_once(dataset, tmp_path):
    """Also where the main thread runs no Python signal handlers, as in a collective. To a launch script it is a failure."""
    blocked = "__import__('torch').distributed.HashStore().wait(['never'])"
    driver = PAUSE.replace("time.sleep({seconds})", blocked)
    (codes := tmp_path / "codes").mkdir()
    job = Job(dataset, tmp_path / "run", ranks=1, driver=driver, MEGABERT_EXIT_DIR=str(codes))
    job.wait_for("step       3/")
    job.signal(signal.SIGINT)
    job.wait_for("stopping: the run is saved after this update; Ctrl-C again ends it at once")
    job.wait_for("saving")
    time.sleep(1.5)
    job.signal(signal.SIGINT)
    end(job, 128 + signal.SIGINT, within=5)
    assert [code.read_text() for code in codes.iterdir()] == ["4\n"]


@slow
def test_a_run_ends_before_its_time_limit(dataset, tmp_path):
    started = time.time()
    end(Job(dataset, tmp_path / "run", "--max-time", "40s"), 85, 85, within=60)
    assert 20 < time.time() - started < 40
    assert saved_step(tmp_path / "run") == max(curve(tmp_path / "run"))


def test_rank_that_leaves_early_is_one_line(dataset, tmp_path):
    """As by a signal that only one rank got, between the rendezvous and the first agreement."""
    job = Job(dataset, tmp_path / "run", driver=LEAVES)
    end(job, 4, 85, within=60)
    assert "another rank exited before rank 0 connected to it" in error_of(job)
    assert not (tmp_path / "run/checkpoints").exists()


def test_ranks_that_end_at_other_steps_are_refused(dataset, tmp_path):
    job = Job(dataset, tmp_path / "run", driver=OTHER_END)
    end(job, 2, 2, within=60)
    assert "--stop-after must be the same on all ranks: 5 on rank 0" in error_of(job)


# ---- dead and hanging ranks

# seconds of the watchdog (an update takes 0.1), and of a full machine and rank 0, which keeps the store for the others
TIMEOUT, SLACK = 6, 8
WATCHED = f"watchdog.timeout_seconds={TIMEOUT}"
ENDLESS = """
from megabert.trainer import Trainer
def spin(self, lr, log=Trainer.write_log_line):
    log(self, lr)
    step = self.state.step  # the loop is in this function alone
    while self.world.rank == 1 and step == 3:
        pass
Trainer.write_log_line = spin
"""


def codes_within(job: Job, limit: float) -> list[int]:
    since = time.monotonic()
    codes = job.codes(limit + 30)
    assert time.monotonic() - since < limit, f"took {time.monotonic() - since:.1f} s:\n{job.output}"
    return codes


@pytest.mark.parametrize(
    ("number", "rank", "said"),
    [
        (signal.SIGKILL, 1, "died"),
        pytest.param(signal.SIGKILL, 0, "died|lost", marks=soak),
        pytest.param(signal.SIGSTOP, 1, "is stopped or lost", marks=soak),
        pytest.param(signal.SIGSTOP, 0, "is stopped or lost", marks=soak),
    ],
)
def test_a_dead_or_stopped_rank_ends_the_job(number, rank, said, dataset, tmp_path):
    stopped = number == signal.SIGSTOP
    job = Job(dataset, tmp_path / "run", *[WATCHED] * stopped)
    job.wait_for("step       3/")
    job.signal(number, rank)
    codes = codes_within(job, TIMEOUT + 5 + SLACK if stopped else 15)
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 4)
    line = error_of(job)
    assert re.search(rf"rank {rank} \(host .*pid {job.processes[rank].pid}\).*({said})", line), line


@slow
def test_an_endless_loop_is_named_with_its_place(dataset, tmp_path):
    job = Job(dataset, tmp_path / "run", WATCHED, driver=ENDLESS)
    job.wait_for("step       3/")
    assert codes_within(job, TIMEOUT + 5 + SLACK) == [4, 4]
    line = error_of(job)
    # the time-out, or three times the longest gap that this machine had before
    found = re.search(rf"rank 1 \(host .*pid {job.processes[1].pid}\) hangs: nothing finished in (\d+) s", line)
    assert found and TIMEOUT <= int(found[1]) <= TIMEOUT + SLACK, line
    assert "at step 3," in line and "driver-run.py" in line and "in spin" in line and "rank 0" not in line
    stacks = [(tmp_path / f"run/hang-{rank}.txt").read_text() for rank in range(2)]
    assert "in spin" in stacks[1], stacks[1]
    # rank 0 waits in a collective, or for the reason why that failed, if rank 1 has ended a moment before
    assert "distributed_c10d" in stacks[0] or "in exit_if_rank_died" in stacks[0], stacks[0]


# a sign each second: of rank 1, whose disk is slow at the end, or of both, whose updates are slow
SLOW = {
    "save": """
import os, time
from megabert.common import files
files.CHUNK, files.SYNCED = 1 << 12, 1 << 16
def sync(number, synced=os.fdatasync):
    time.sleep(1.2 * (os.environ["RANK"] == "1"))
    synced(number)
os.fdatasync = sync
""",
    "update": """
import time
from megabert.distributed import watchdog
from megabert.engine import Engine
watchdog.START_SECONDS = 60
def update(self, *given, do=Engine.train_update):
    time.sleep(5)
    return do(self, *given)
Engine.train_update = update
""",
}


@slow
@pytest.mark.parametrize("what", SLOW)
def test_what_is_slow_but_works_is_no_hang(what, dataset, tmp_path):
    job = Job(dataset, tmp_path / "run", "watchdog.timeout_seconds=3", "--stop-after", 3, driver=SLOW[what])
    start = time.monotonic()
    end(job, 0, 0)
    assert time.monotonic() - start > 10 and saved_step(tmp_path / "run") == 3


# ---- a lost file system


def mount(image: Path, folder: Path) -> None:
    done = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no loop device here: {done.stderr}")


@slow
def test_restart_survives_a_lost_file_system(dataset, tmp_path, uninterrupted):
    """The dataset is on a file system that goes while the run reads it, and is back when the run starts again."""
    image, data, run = tmp_path / "image", tmp_path / "mounted", tmp_path / "run"
    data.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-d", dataset, image, "64m"], check=True)
    mount(image, data)
    try:
        # each read maps its shard again, as in a dataset of more shards than are kept open
        job = Job(data, run, driver="import megabert.data.shards.dataset as part\npart.OPEN_SHARDS = 0")
        job.wait_for("step       8/")
        subprocess.run(["umount", "--lazy", data], check=True)
        start = time.monotonic()
        end(job, 4, 4, within=60)
        print(f"ended {time.monotonic() - start:.1f} s after the file system was gone")
        assert "is its file system still mounted?" in error_of(job) and "retrying in 5 s" in job.output
        mount(image, data)
        again = Job(data, run, "--stop-after", 60)
        again.wait_for("resuming from")
        again.wait_for("step ")
        print(f"trained on {time.monotonic() - start:.1f} s after it was gone, its return included")
        end(again, 0, 0)
    finally:
        subprocess.run(["umount", "--lazy", data], check=False)
    assert losses_and_rows(run) == uninterrupted


# ---- spikes

SPIKES = (
    *("spikes.window=8", "spikes.threshold=8", "--stop-after", "16", "checkpoint.interval=4"),
    *("optimizer.lr=1e-4", "model.dropout=0.1"),
)
# the update of data 9 has three times its loss and gradient
SPIKE = """
from megabert.engine import Engine
from megabert.model import BertForPreTraining
now = [0]
def update(self, update, *rest, do=Engine.train_update):
    now[0] = update.step
    return do(self, update, *rest)
def forward(self, *args, do=BertForPreTraining.forward, **named):
    out = do(self, *args, **named)
    return out._replace(mlm_loss_sum=out.mlm_loss_sum * 3) if self.training and now == [9] else out
Engine.train_update, BertForPreTraining.forward = update, forward
"""


def with_spikes(dataset, run, *extra, ranks=1, command=()):
    job = Job(dataset, run, *SPIKES, *extra, driver=SPIKE, ranks=ranks, command=command)
    return end(job, *[0] * ranks, within=150)


def trouble(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "trouble.jsonl").read_text().splitlines()]


def test_rollback_leaves_out_the_data_through_the_spike(dataset, tmp_path):
    run = tmp_path / "run"
    assert "rolled back to step 8" in with_spikes(dataset, run, "spikes.policy=rollback")
    found = curve(run)
    assert sorted(found) == list(range(1, 17))
    assert [found[s]["data/cursor"] for s in (8, 9, 10, 16)] == [8, 11, 12, 18]  # data 8 and 9 were left out
    assert found[16]["train/spikes"] == 1
    assert [entry["action"] for entry in trouble(run)] == ["rollback"]


@slow
def test_a_skipped_spike_is_applied_nowhere_and_replayable(dataset, tmp_path):
    run = tmp_path / "run"
    with_spikes(dataset, run, "spikes.policy=skip", "zero.stage=2", ranks=2)
    (entry,) = trouble(run)
    assert (entry["step"], entry["cursor"], entry["kind"], entry["action"]) == (10, 9, "spike", "skip")
    assert entry["score"] > 8 and len(set(entry["row_ids"])) == 16
    found = curve(run)
    assert 10 not in found and found[16]["train/spikes"] == found[16]["train/skipped"] == 1
    before = (run / "metrics.jsonl").read_bytes(), sorted(run.rglob("*"))
    for step, first in ((10, entry), (15, found[15])):
        shown = with_spikes(dataset, run, ranks=2, command=("replay", run, "--to", step))
        assert "are equal bit for bit" in shown
        (replayed,) = [json.loads(text) for text in shown.splitlines() if text.startswith("{")]
        assert replayed["skipped"] == (step == 10) and replayed["cursor"] == step - 1
        for name in ("train/loss", "train/mlm_loss", "train/nsp_loss", "train/grad_norm"):
            assert replayed[name] == first[name], name
    assert before == ((run / "metrics.jsonl").read_bytes(), sorted(run.rglob("*")))


# ---- other numbers of ranks

COMMON = (
    *("precision=fp32", "schedule.total_steps=16", "model.dropout=0.0", "model.attention_dropout=0.0"),
    *("watchdog.timeout_seconds=0", "optimizer.name=lamb", "optimizer.lr=2e-2"),
)
# ranks, ZeRO stage, rows of a micro-step, loader's workers, the step where it is stopped; 16 rows an update, which 3 ranks
# share unevenly
LEGS = ((1, 0, 16, 0, 4), (2, 1, 4, 2, 7), (3, 3, 3, 1, 10), (4, 2, 2, 1, 13), (1, 3, 8, 3, 16))


@slow
def test_a_run_moves_between_ranks_and_stages(dataset, tmp_path):
    straight, moving = tmp_path / "straight", tmp_path / "moving"
    for run, legs in ((straight, [(*LEGS[0][:4], 16)]), (moving, LEGS)):
        for ranks, stage, micro, workers, until in legs:
            settings = (f"zero.stage={stage}", f"batch.micro_size={micro}", f"data.workers={workers}")
            job = Job(dataset, run, *COMMON, *settings, "--stop-after", until, ranks=ranks)
            shown = end(job, *[0] * ranks, within=240)
            assert f"ZeRO-{stage}" in shown and f"{ranks} rank(s)" in shown
    losses = logged(straight)
    assert list(losses) == list(range(1, 17)) and losses[16] < losses[1] - 0.2, "nothing was learned"
    assert logged(moving) == pytest.approx(losses, rel=1e-5)
    assert logged(moving, "data/row_digest") == logged(straight, "data/row_digest")
