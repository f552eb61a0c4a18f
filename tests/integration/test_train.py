"""`train.py` as its users run it: launched, stopped, resumed, misused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pytest

from megabert.commands.evaluate import evaluate_run
from tests.helpers.job import Job
from tests.integration.conftest import command, metrics

SMALL = (
    *("model.layers=2", "model.hidden=64", "model.heads=2", "batch.global_size=32", "batch.micro_size=8"),
    *("optimizer.lr=2e-3", "schedule.total_steps=16", "schedule.warmup_steps=4", "log.interval=1", "eval.interval=0"),
    *("checkpoint.interval=6", "eval.rows=64", "data.workers=1", "peak_tflops=1.0"),
)


def train(data, run, *extra, ranks=1, **kwargs):
    return command(
        *("megabert/train.py", "--config", "tiny", "--data", data, "--run", run), *SMALL, *extra, ranks=ranks, **kwargs
    )


@pytest.mark.dist
def test_two_ranks_stop_resume_and_evaluate(dataset, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    (tmp_path / "order-of_words.txt").write_text("function the returns\nthe function returns\n")
    pairs = f"eval.pairs={tmp_path / 'order-of_words.txt'}"
    for run, stop in ((straight, ()), (broken, ("--stop-after", 7))):
        job = Job(dataset, run, *SMALL, "zero.stage=2", "log.tensorboard=true", pairs, *stop)
        assert job.codes() == [0, 0], job.output
    done = train(dataset, broken, "zero.stage=2", pairs, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout and "at step 7" in done.stdout

    whole, parts = metrics(straight), metrics(broken)
    losses = {m["step"]: m["train/loss"] for m in whole if "train/loss" in m}
    assert list(losses) == list(range(1, 17))
    assert losses[16] < losses[1] - 0.5
    assert {m["step"]: m["train/loss"] for m in parts if "train/loss" in m} == losses
    final = [m for m in parts if "eval/mlm_loss" in m]
    assert [m["step"] for m in final] == [0, 16]
    assert final[1]["eval/mlm_loss"] < final[0]["eval/mlm_loss"] - 0.5
    assert {m["eval/pairs_accuracy"] for m in final} | {m["eval/pairs_order"] for m in final} <= {0.0, 0.5, 1.0}

    for line in whole:
        if "train/loss" in line:
            assert {"train/mlm_accuracy", "train/lr", "perf/tokens_per_sec", "perf/mfu", "train/grad_norm"} <= set(line)
    assert list((straight / "tensorboard").glob("events*"))

    done = command("-m", "megabert", "evaluate", "--model", broken, "--data", dataset, "--rows", 64)
    assert done.returncode == 0, done.stderr
    alone = json.loads(done.stdout)
    assert alone["step"] == 16
    assert alone["eval/mlm_loss"] == pytest.approx(final[1]["eval/mlm_loss"], rel=2e-3)


def test_one_rank_and_init_from(dataset, tmp_path):
    first = tmp_path / "first"
    done = train(dataset, first, "schedule.total_steps=4", "schedule.warmup_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"; ended by schedule.total_steps=4; saved at step 4 in {first}. Next:\n  megabert evaluate --model {first} --data {dataset}\n"
        in done.stdout
    )
    assert "finished: held-out loss " in done.stdout and f"megabert export   --model {first} --output " in done.stdout
    second = tmp_path / "second"
    done = train(
        dataset,
        second,
        f"init_from={first}",
        "schedule.total_steps=1",
        "schedule.warmup_steps=0",
        "optimizer.name=lamb",
        *("log.interval=1", "--debug", "--profile", "1:1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting from the weights of" in done.stdout and "at update 4 of the data" in done.stdout
    # not the rows of the first four again
    assert [m["data/cursor"] for m in metrics(second) if "train/loss" in m] == [5]
    assert sorted(path.name for path in (second / "profile").iterdir()) == [
        "rank0-steps1-1.pt.trace.json",
        "rank0-steps1-1.txt",
    ]
    assert "Self CPU time total" in (second / "profile/rank0-steps1-1.txt").read_text()
    assert next(m for m in metrics(second) if "train/loss" in m)["perf/peak_memory_gib"] > 0.1
    before = [m for m in metrics(first) if "eval/mlm_loss" in m][-1]["eval/mlm_loss"]
    after = next(m for m in metrics(second) if "eval/mlm_loss" in m)["eval/mlm_loss"]
    assert after == pytest.approx(before, rel=2e-3)

    longer = "schedule.total_steps=5", "schedule.warmup_steps=1"
    done = train(dataset, first, *longer, "batch.global_size=64")
    assert done.returncode == 2
    assert "batch.global_size" in done.stderr and "Traceback" not in done.stderr
    done = train(dataset, first, *longer)
    assert done.returncode == 2 and "this run is finished" in done.stderr and "--extend" in done.stderr
    done = train(dataset, first, *longer, "--extend")
    assert done.returncode == 0 and "schedule.total_steps was 4 and is 5 from here on" in done.stdout, done.stderr


@pytest.mark.slow
def test_causal_run_learns_and_is_replayed(dataset, tmp_path):
    run, causal = tmp_path / "run", ("data.masking.strategy=causal", "model.nsp=false")
    done = train(dataset, run, *causal)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(run)
    losses = {m["step"]: m["train/mlm_loss"] for m in lines if "train/loss" in m}
    assert losses[16] < losses[1] - 0.5
    last = [m for m in lines if "eval/mlm_loss" in m][-1]
    assert last["eval/predictions"] > 20 * 64  # of at most 64 rows of 64 tokens
    assert evaluate_run(str(run), str(dataset))["eval/mlm_loss"] == pytest.approx(last["eval/mlm_loss"], rel=2e-3)
    done = train(dataset, run, "model.nsp=false")
    assert done.returncode == 2 and "data.masking.strategy is 'token'" in done.stderr

    for step in (14, 3):
        done = command("-m", "megabert", "replay", run, "--to", step)
        assert done.returncode == 0 and "are equal bit for bit" in done.stdout, done.stdout + done.stderr
        assert json.loads(done.stdout.splitlines()[-2])["train/mlm_loss"] == losses[step]


def test_signal_saves_and_run_resumes(dataset, tmp_path):
    run = tmp_path / "run"
    job = Job(dataset, run, *SMALL, "schedule.total_steps=100000", ranks=1)
    job.wait_for("  lr ")
    job.signal(signal.SIGTERM)
    assert job.codes(60) == [85], job.output
    saved = json.loads((run / "checkpoints/pointer.json").read_text())["step"]
    assert saved >= 1
    done = train(dataset, run, "schedule.total_steps=100000", "--stop-after", saved + 2)
    assert done.returncode == 0, done.stderr
    assert f"at step {saved}," in done.stdout
    assert [m["step"] for m in metrics(run) if "train/loss" in m] == list(range(1, saved + 3))


SLOW_SINK = """
import os
import time
from pathlib import Path
from megabert import sinks
from megabert.distributed import ranks
closed, rank = Path({closed!r}), os.environ["RANK"]
class Uploads(sinks.JsonLines):
    def close(self):
        super().close()
        time.sleep(2)
        closed.touch()
sinks.JsonLines = Uploads
end = ranks.shutdown
def shutdown():
    closed.with_name("left-" + rank).write_text(str(closed.exists()))
    end()
ranks.shutdown = shutdown
"""


@pytest.mark.dist
def test_ranks_leave_after_rank_0_closed_its_sinks(dataset, tmp_path):
    """`srun --wait=10` would kill a rank 0 that still uploads when the others have ended."""
    job = Job(dataset, tmp_path / "run", "--stop-after", 1, driver=SLOW_SINK.format(closed=str(tmp_path / "closed")))
    assert job.codes() == [0, 0], job.output
    assert [(tmp_path / f"left-{rank}").read_text() for rank in (0, 1)] == ["True", "True"]


@pytest.mark.dist
def test_ranks_save_when_nobody_reads_rank_0(dataset, tmp_path):
    """As of `torchrun … | head -1`: the run's folder has the lines that the pipe has not."""
    run, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    driver = f"import os\nif os.environ['RANK'] == '0':\n    os.dup2(os.open({str(pipe)!r}, os.O_WRONLY), 1)\n"
    job = Job(dataset, run, driver=driver)
    os.set_blocking(reading, True)
    while b"M parameters" not in (line := os.read(reading, 4096)):
        assert not line
        time.sleep(0.05)
    os.close(reading)
    assert job.codes(60) == [4, 4], job.output
    saved = json.loads((run / "checkpoints/pointer.json").read_text())["step"]
    broken = f"error: Broken pipe: nobody reads the output; saved at step {saved}; the same command resumes"
    assert [line for line in job.output.splitlines() if "error" in line] == [broken]
    assert [m["step"] for m in metrics(run) if "train/loss" in m] == list(range(1, saved + 1))


def test_non_finite_updates_stop_the_run(dataset, tmp_path):
    run = tmp_path / "run"
    extra = ("optimizer.lr=1e38", "optimizer.clip=0.0", "precision=fp32", "max_bad_steps=3", "schedule.warmup_steps=0")
    done = train(dataset, run, *extra)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("the update is skipped on every rank") == 3
    assert "3 updates in a row were not applied" in done.stderr and "Traceback" not in done.stderr
    reports = [json.loads(line) for line in (run / "trouble.jsonl").read_text().splitlines()]
    assert [r["step"] for r in reports] == [r["cursor"] + 1 for r in reports] and len(reports) == 3
    assert all(r["kind"] == "non-finite" and len(set(r["row_ids"])) == 32 for r in reports)


def damaged(dataset, tmp_path, change):
    copy = tmp_path / "damaged"
    shutil.copytree(dataset, copy)
    change(copy)
    return copy


def flip_payload(folder):
    shard = sorted(folder.glob("shard-*.tar"))[0]
    data = bytearray(shard.read_bytes())
    for at in range(2000, len(data), 4000):
        data[at] ^= 4
    shard.write_bytes(data)


MISTAKES = {
    "unknown key": ((), ("modle.layers=2",), "unknown config key modle; did you mean model?"),
    "no rows in a batch": ((), ("batch.global_size=0",), "batch.global_size: Input should be"),
    "missing data": ((lambda f: shutil.rmtree(f),), (), "manifest.json"),
    "missing shard": ((lambda f: sorted(f.glob("shard-*.tar"))[0].unlink(),), (), "shard-000000.tar"),
    "damaged shard": ((flip_payload,), (), "shard-000000.tar"),
    "wrong tokenizer": ((lambda f: (f / "tokenizer.model").write_bytes(b"nonsense"),), (), "tokenizer.model"),
    "damaged manifest": ((lambda f: (f / "manifest.json").write_text("{"),), (), "manifest.json"),
    "deepspeed file": ((), ("--deepspeed_config", "missing.json"), "missing.json"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_clear_line(name, dataset, tmp_path):
    changes, extra, message = MISTAKES[name]
    data = damaged(dataset, tmp_path, changes[0]) if changes else dataset
    done = train(data, tmp_path / "run", *extra)
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_large_takes_three_real_steps_under_zero_2(tmp_path):
    data = tmp_path / "data"
    done = command("-m", "data_prep", "build", "--input", "pydoc", "--output", data, "--vocab-size", 20_000, "--nsp")
    assert done.returncode == 0, done.stderr
    done = command(
        *("megabert/train.py", "--config", "large_phase1", "--data", data, "--run", tmp_path / "large"),
        *(
            "batch.global_size=16",
            "batch.micro_size=4",
            "zero.stage=2",
            "optimizer.name=adamw",
            "optimizer.split_qkv=false",
            "optimizer.lr=4e-5",  # post-LN LARGE without warm-up diverges at 1e-4
        ),
        *("schedule.total_steps=3", "schedule.warmup_steps=0", "schedule.name=constant", "log.interval=1"),
        *("log.seconds=0", "eval.rows=16", "data.workers=0"),
        ranks=2,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # 336.2 M with the published vocabulary of 30,522, and rows of padding
    assert "325.5 M parameters, bf16, adamw, ZeRO-2" in done.stdout
    losses = [m["train/mlm_loss"] for m in metrics(tmp_path / "large") if "train/loss" in m]
    print("BERT-LARGE, three updates:", losses)
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0] and losses[2] < losses[0] - 0.2, losses
