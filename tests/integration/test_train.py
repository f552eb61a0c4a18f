"""`megabert train` as its users run it: launched, stopped, resumed, misused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time

import pytest

from megabert.commands.evaluate import evaluate_run
from megabert.data.shards import write_manifest
from tests.helpers.job import Job
from tests.helpers.rows import flip
from tests.integration.conftest import ROOT, SHORT, SMALL, command, end, logged, metrics, output_of, saved_step, train

ENDLESS = "schedule.total_steps=100000"


@pytest.mark.dist
def test_two_ranks_stop_resume_and_evaluate(dataset, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    (tmp_path / "order-of_words.txt").write_text("function the returns\nthe function returns\n")
    pairs = f"eval.pairs={tmp_path / 'order-of_words.txt'}"
    for run, stop in ((straight, ()), (broken, ("--stop-after", 7))):
        end(Job(dataset, run, *SMALL, "zero.stage=2", "log.tensorboard=true", pairs, *stop), 0, 0)
    resumed = train(dataset, broken, "zero.stage=2", pairs, ranks=2)
    assert "resuming from" in resumed and "at step 7" in resumed

    losses = logged(straight)
    assert list(losses) == list(range(1, 17)) and losses[16] < losses[1] - 0.5
    assert logged(broken) == losses
    final = logged(broken, "eval/mlm_loss")
    assert list(final) == [0, 16] and final[16] < final[0] - 0.5
    for name in ("eval/pairs_accuracy", "eval/pairs_order"):
        assert set(logged(broken, name).values()) <= {0.0, 0.5, 1.0} and list(logged(broken, name)) == [0, 16]
    for name in ("train/mlm_accuracy", "train/lr", "perf/tokens_per_sec", "perf/mfu", "train/grad_norm"):
        assert logged(straight, name).keys() >= losses.keys(), name
    assert list((straight / "tensorboard").glob("events*"))

    alone = json.loads(output_of("evaluate", "--model", broken, "--data", dataset, "--rows", 64))
    assert alone["step"] == 16 and alone["eval/mlm_loss"] == pytest.approx(final[16], rel=2e-3)


@pytest.mark.slow
def test_run_starts_from_the_weights_of_another(dataset, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    shown = train(dataset, first, *SHORT)
    assert f"; ended by schedule.total_steps=4; saved at step 4 in {first}. Next:\n" in shown
    assert f"  megabert evaluate --model {first} --data {dataset}\n" in shown
    assert "finished: held-out loss " in shown and f"megabert export   --model {first} --output " in shown
    one_step = ("schedule.total_steps=1", "schedule.warmup_steps=0", "optimizer.name=lamb")
    shown = train(dataset, second, f"init_from={first}", *one_step, "--debug", "--profile", "1:1")
    assert "starting from the weights of" in shown and "at update 4 of the data" in shown
    assert logged(second, "data/cursor") == {1: 5}, "not the rows of the first four again"
    profile = second / "profile/rank0-steps1-1.txt"
    assert sorted(profile.parent.iterdir()) == [profile.with_suffix(".pt.trace.json"), profile]
    assert "Self CPU time total" in profile.read_text()
    assert logged(second, "perf/peak_memory_gib")[1] > 0.1
    before, after = (logged(run, "eval/mlm_loss") for run in (first, second))
    assert after[0] == pytest.approx(before[4], rel=2e-3)


@pytest.mark.slow
def test_causal_run_learns(dataset, tmp_path):
    run = tmp_path / "run"
    train(dataset, run, "data.masking.strategy=causal", "model.nsp=false")
    losses, last = logged(run, "train/mlm_loss"), [line for line in metrics(run) if "eval/mlm_loss" in line][-1]
    assert losses[16] < losses[1] - 0.5
    assert last["eval/predictions"] > 20 * 64  # of at most 64 rows of 64 tokens
    assert evaluate_run(str(run), str(dataset))["eval/mlm_loss"] == pytest.approx(last["eval/mlm_loss"], rel=2e-3)


def test_signal_saves_and_run_resumes(dataset, tmp_path):
    run = tmp_path / "run"
    job = Job(dataset, run, *SMALL, ENDLESS, ranks=1)
    job.wait_for("step       3/")
    job.signal(signal.SIGTERM)
    said = job.wait_for("stopped: saved at step ")
    end(job, 85, within=60)
    saved = saved_step(run)
    assert saved >= 3 and f"at step {saved};" in said
    assert f"at step {saved}," in train(dataset, run, ENDLESS, "--stop-after", saved + 2)
    assert list(logged(run)) == list(range(1, saved + 3))


SLOW_SINK = """
import os, time
from pathlib import Path
from megabert import sinks
from megabert.distributed import ranks
closed = Path({closed!r})
def close(self, do=sinks.JsonLines.close):
    do(self)
    if type(self) is sinks.JsonLines:
        time.sleep(2)
        closed.touch()
def shutdown(do=ranks.shutdown):
    closed.with_name("left-" + os.environ["RANK"]).write_text(str(closed.exists()))
    do()
sinks.JsonLines.close, ranks.shutdown = close, shutdown
"""


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_leave_after_rank_0_closed_its_sinks(dataset, tmp_path):
    """`srun --wait=10` would kill a rank 0 that still uploads when the others have ended."""
    driver = SLOW_SINK.format(closed=str(tmp_path / "closed"))
    end(Job(dataset, tmp_path / "run", "--stop-after", 1, driver=driver), 0, 0)
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
    end(job, 4, 4, within=60)
    broken = (
        f"error: Broken pipe: stdout or stderr is closed; saved at step {saved_step(run)}; the same command resumes"
    )
    assert [line for line in job.output.splitlines() if "error" in line] == [broken]
    assert list(logged(run)) == list(range(1, saved_step(run) + 1))


def test_non_finite_updates_stop_the_run(dataset, tmp_path):
    run = tmp_path / "run"
    extra = ("optimizer.lr=1e38", "optimizer.clip=0.0", "precision=fp32", "max_bad_steps=3", "schedule.warmup_steps=0")
    done = command("-m", "megabert", "train", "--config", "tiny", "--data", dataset, "--run", run, *SMALL, *extra)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("the update is skipped on every rank") == 3
    assert "3 updates in a row were not applied" in done.stderr and "Traceback" not in done.stderr
    reports = [json.loads(line) for line in (run / "trouble.jsonl").read_text().splitlines()]
    assert [r["step"] for r in reports] == [r["cursor"] + 1 for r in reports] and len(reports) == 3
    assert all(r["kind"] == "non-finite" and len(set(r["row_ids"])) == 32 for r in reports)


def flip_payload(folder):
    shard = folder / "shard-000000.tar"
    for at in range(2000, shard.stat().st_size, 4000):
        flip(shard, at, bit=2)


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        pytest.param(flip_payload, 2, "shard-000000.tar: block ", marks=pytest.mark.dist),
        (lambda folder: (folder / "tokenizer.model").write_bytes(b"nonsense"), 1, "tokenizer.model"),
    ],
    ids=["damaged rows", "wrong tokenizer"],
)
def test_damaged_data_is_one_clear_line(change, ranks, message, dataset, tmp_path):
    data = shutil.copytree(dataset, tmp_path / "damaged")
    change(data)
    job = Job(data, tmp_path / "run", ranks=ranks)
    (error,) = [line for line in end(job, *[2] * ranks).splitlines() if "error:" in line]
    assert error.startswith("error:") and message in error


GOLDEN = ROOT / "tests/data/golden/dataset"
NO_PAIRS = "model.nsp=true but the dataset has no sentence pairs; build it with --nsp, or set model.nsp=false"


@pytest.mark.parametrize(
    ("nsp", "override", "message"),
    [
        (False, "model.nsp=true", NO_PAIRS),
        (True, "model.max_positions=32", "model.max_positions=32 is below the dataset's seq_len=64"),
        (True, "model.vocab_size=77", "model.vocab_size=77 but the tokenizer has"),
        (True, "data.seq_len=128", "data.seq_len=128 but "),
    ],
)
def test_plan_and_train_refuse_the_same_data(nsp, override, message, tmp_path):
    data = shutil.copytree(GOLDEN, tmp_path / "data")
    tree = json.loads((data / "manifest.json").read_text())
    tree["options"]["nsp"] = nsp
    del tree["fingerprint"]
    write_manifest(data, tree)
    for head in (("plan",), ("train", "--run", tmp_path / "run")):
        assert f"error: {message}" in output_of(*head, "--config", "tiny", "--data", data, override, code=2)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["plan", pytest.param("train", marks=pytest.mark.slow)])
def test_pairs_without_their_head_are_warned_of_once(name, tmp_path):
    more = {
        "plan": ("phases=[{share=0.5},{share=0.3},{share=0.2}]",),
        "train": ("--run", tmp_path / "run", *SMALL, "schedule.total_steps=1", "schedule.warmup_steps=0"),
    }[name]
    done = command("-m", "megabert", name, "--config", "tiny", "--data", GOLDEN, "model.nsp=false", *more)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("warning: the dataset's rows are sentence pairs") == 1
    assert name == "train" or done.stdout.count("phase ") == 3


@pytest.mark.slow
def test_large_takes_three_real_steps_under_zero_2(tmp_path):
    data, run, buckets = tmp_path / "data", tmp_path / "large", tmp_path / "deepspeed.json"
    # of DeepSpeed's usual size two ranks and a machine of 24 GiB have no room to spare
    buckets.write_text('{"zero_optimization": {"reduce_bucket_size": 50000000}}')
    output_of("prep", "build", "--input", "pydoc", "--output", data, "--vocab-size", 20_000, "--nsp")
    shown = output_of(
        *("train", "--config", "large_phase1", "--data", data, "--run", run, "--deepspeed_config", buckets),
        *("batch.global_size=16", "batch.micro_size=4", "zero.stage=2"),
        *("optimizer.name=adamw", "optimizer.split_qkv=false"),
        "optimizer.lr=4e-5",  # post-LN LARGE without warm-up diverges at 1e-4
        *("schedule.total_steps=3", "schedule.warmup_steps=0", "schedule.name=constant", "log.interval=1"),
        *("log.seconds=0", "eval.rows=16", "data.workers=0"),
        ranks=2,
        timeout=900,
    )
    # 336.2 M with the published vocabulary of 30,522, and rows of padding
    assert re.search("325.5 M parameters, (bf16|fp32), adamw, ZeRO-2", shown)
    losses = list(logged(run, "train/mlm_loss").values())
    print("BERT-LARGE, three updates:", losses)
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0] and losses[2] < losses[0] - 0.2, losses
