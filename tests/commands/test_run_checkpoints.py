"""Checkpoints of a run: their mean, updates repeated, and pushed to a hub, a stand-in on this machine."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megabert import checkpoint, hf, train
from megabert.checkpoint import load_weights
from megabert.commands import average, convert, export, fill, replay, verify
from megabert.commands.evaluate import evaluate_run
from megabert.common import chain, logs
from megabert.common.files import canonical
from megabert.config import Config, replace
from megabert.data import mixture, shards
from megabert.distributed.ranks import World
from megabert.trainer import Trainer
from tests.finetune.test_huggingface import problem
from tests.helpers import finetuned, runs
from tests.helpers.golden_runs import DATA, SMALL, random_rows, trained
from tests.helpers.hub import PRIVATE, READ_TOKEN, TOKEN, Hub
from tests.helpers.prep_reading import contents
from tests.helpers.refusal import refusal
from tests.integration.conftest import command, metrics

ROOT = Path(__file__).resolve().parents[2]
MODEL = "models/some/bert"
THREE = ("schedule.total_steps=3", "checkpoint.interval=1", "checkpoint.keep=3", "optimizer.lr=1e-2")
# logits of one text by transformers, from a name and a revision or from folders
READ = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
def logits(name, **options):
    model, tokenizer = (kind.from_pretrained(name, **options) for kind in (AutoModelForMaskedLM, AutoTokenizer))
    return model.eval()(**tokenizer("the quick [MASK] of one", return_tensors="pt")).logits
found = {name: logits("some/bert", revision=name) for name in ("step-1", "step-2", "step-3", "main")}
for name in ("step-1", "step-2", "step-3"):
    assert torch.equal(found[name], logits(f"{sys.argv[1]}/{name}")), name
assert torch.equal(found["main"], found["step-3"]) and not torch.equal(found["step-1"], found["step-2"])
print("equal")
"""


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "run"
    trained(world, folder, *THREE)
    shutil.copytree(folder / "checkpoints/step-00000002", folder / "checkpoints/step-00000002-mine")
    return folder


@pytest.mark.parametrize(("options", "steps"), [("", (1, 2, 3)), ("--last 2", (2, 3)), ("--steps 3 1", (1, 3))])
def test_tensors_are_the_mean_to_the_last_bit(run, tmp_path, capsys, monkeypatch, options, steps) -> None:
    monkeypatch.chdir(run)
    assert average.main(["--run", ".", "--output", str(tmp_path / "mean"), *options.split()]) == 0
    ours, state = load_weights(tmp_path / "mean")
    each = [load_weights(run / f"checkpoints/step-{step:08d}")[0] for step in steps]
    assert state["step"] == 0 and ours.keys() == each[0].keys()
    assert f"the mean of steps {list(steps)} of run: " in state["dataset"]
    for name, weight in ours.items():
        mean = np.mean([weights[name].numpy() for weights in each], axis=0, dtype=np.float64).astype(np.float32)
        assert weight.numpy().tobytes() == mean.tobytes(), name
    assert not np.array_equal(ours["layers.0.qkv.weight"], each[-1]["layers.0.qkv.weight"])
    assert "mean: was converted or averaged, not trained" in refusal(capsys, verify.main, tmp_path / "mean")


def test_verified_data_is_named_without_a_password(monkeypatch) -> None:
    dataset = SimpleNamespace(place="https://me:secret@host/data", rows=3, manifest=SimpleNamespace(fingerprint="f"))
    monkeypatch.setattr(mixture, "open_mixture", lambda *folders, **options: dataset)
    monkeypatch.setattr(mixture, "members", lambda opened: [opened])
    monkeypatch.setattr(shards, "verify", lambda folder: [])
    state = {"config": {"data": {"path": "data"}}, "phase_datasets": ["f"]}
    assert verify.check_data(state, [dataset.place]) == "3 rows of https://host/data"


def test_a_run_in_training_is_verified(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """It saves a checkpoint, and removes one, while its files are read."""
    now = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(now / "checkpoints/step-00000003")
    chain.cut(now / "checkpoints", 2)
    kept = checkpoint.kept_manifests

    def save(folder: Path) -> Iterator[dict[str, Any]]:
        shutil.copytree(run, folder, dirs_exist_ok=True)
        shutil.rmtree(folder / "checkpoints/step-00000001", ignore_errors=True)
        return kept(folder)

    monkeypatch.setattr(checkpoint, "kept_manifests", save)
    assert verify.main([str(now)]) == 0
    assert "checkpoints  of steps 2, 3: every file as it was saved" in capsys.readouterr().out


def test_every_reader_takes_the_mean(world: World, run: Path, tmp_path: Path) -> None:
    mean, parts = tmp_path / "mean", [evaluate_run(run / f"checkpoints/step-{n:08d}", str(DATA)) for n in (1, 2, 3)]
    assert average.average(run, mean) == [1, 2, 3]
    found = evaluate_run(mean, str(DATA))
    assert found["step"] == 0 and found["eval/mlm_loss"] < max(part["eval/mlm_loss"] for part in parts)
    assert export.main(["--model", str(mean), "--output", str(tmp_path / "hf")]) == 0
    assert hf.load(tmp_path / "hf").weights.keys() == hf.load(mean).weights.keys()
    assert fill.main(["--model", str(mean), "one [MASK] two"]) == 0
    start = trained(world, tmp_path / "next", f"init_from={mean}", "schedule.total_steps=1", "eval.interval=1")
    assert metrics(tmp_path / "next")[0]["eval/mlm_loss"] == pytest.approx(found["eval/mlm_loss"], rel=1e-5) and start
    with pytest.raises(ValueError, match="the mean of steps"):
        trained(world, mean, *THREE)


def test_other_models_cannot_be_averaged(world: World, run: Path, tmp_path: Path, capsys) -> None:
    other, first = Path(shutil.copytree(run, tmp_path / "other")), "checkpoints/step-00000001"
    trained(world, tmp_path / "wider", "model.hidden=64", "schedule.total_steps=1")
    shutil.rmtree(other / first)
    shutil.copytree(tmp_path / "wider" / first, other / first)
    said = refusal(capsys, average.main, "--run", other, "--output", tmp_path / "mean")
    assert "its hidden is 64, the newest one's 32" in said and not (tmp_path / "mean").exists()


def test_what_cannot_be_averaged_or_repeated_is_named(run: Path, tmp_path: Path, capsys) -> None:
    said = refusal(capsys, average.main, "--run", run, "--output", tmp_path / "mean", "--last", 4)
    assert f"--last 4: {run} has 3 checkpoints; lower --last, or train with checkpoint.keep=4\n" in said
    average.average(run, tmp_path / "mean")
    said = refusal(capsys, replay.main, tmp_path / "mean")
    assert f"{tmp_path / 'mean'}: has no updates to repeat; it was converted, averaged or saved" in said
    said = refusal(capsys, convert.main, "--model", run, "--vocab", DATA, "--no-nsp", "--run", tmp_path / "other")
    assert f"--no-nsp: {run} is a run, whose heads stay as they are; leave --no-nsp out" in said
    runs.make(tmp_path / "start", "uncased")
    with pytest.raises(ValueError, match=f"^{DATA}/tokenizer.model: is not the tokenizer that"):
        evaluate_run(tmp_path / "start", str(DATA))


def test_rates_by_the_clock_need_a_checkpoint(world: World, tmp_path: Path) -> None:
    clock = ("schedule.by=minutes", "schedule.budget_minutes=1.0")
    trained(world, tmp_path / "run", *clock, "checkpoint.keep=1")
    (last,) = (tmp_path / "run/checkpoints").glob("step-*")
    step = int(last.name.removeprefix("step-"))
    needs = f"run: its rates follow the clock, so a replay needs a checkpoint before step {step}; kept: {step}"
    with pytest.raises(ValueError, match=needs):
        replay.interval(tmp_path / "run", None, None, "")


def test_an_extended_run_is_replayed(tmp_path: Path, capfd, own_signals: None, monkeypatch) -> None:
    data, run = str(random_rows(tmp_path / "data", 40, seed=1)), str(tmp_path / "run")
    words = ["--config", "tiny", "--data", data, "--run", run, *SMALL, "checkpoint.interval=1", "checkpoint.keep=5"]
    assert train.main(words) == 0
    assert train.main([*words, "--extend", "schedule.total_steps=3"]) == 0
    assert replay.main([run, "--from", "2", "--to", "3"]) == 0
    assert "digests of weights of steps 3 to 3 are equal bit for bit" in capfd.readouterr().out
    assert replay.main([run, "--from", "1", "--to", "3"]) == 2
    assert "--from 1 --to 3: the configuration changed at step 2; replay up to it" in capfd.readouterr().err
    (tmp_path / "more.json").write_text('{"unheard_of": 1}')
    assert replay.main([run, "--deepspeed_config", str(tmp_path / "more.json")]) == 2
    assert "--deepspeed_config: DeepSpeed has no unheard_of" in capfd.readouterr().err
    started = Trainer.start
    monkeypatch.setattr(Trainer, "start", lambda self: (started(self), os.kill(os.getpid(), signal.SIGINT)))
    assert replay.main([run]) == 130
    output, errors = capfd.readouterr()
    assert "stopping after this step; Ctrl-C again" in errors and "saved" not in output + errors
    monkeypatch.setattr(Trainer, "start", lambda self: monkeypatch.setattr(logs, "write_error", BrokenPipeError()))
    assert replay.main([run]) == 4 and "Broken pipe: stdout or stderr is closed\n" in capfd.readouterr().err


def test_a_repetition_has_no_tracker_and_no_mirror(tmp_path: Path) -> None:
    """They are the run's, which a repetition leaves as it is."""
    config = Config()
    for name, value in (("log.to", ["mlflow"]), ("log.wandb", "mine"), ("checkpoint.mirror", "s3://runs/one")):
        config = replace(config, name, value)
    (tmp_path / "config.json").write_bytes(canonical({"config": config.model_dump()}))
    found = replay.read_config(tmp_path, config.digest(), "")
    assert (found.log.to, found.log.wandb, found.log.tensorboard, found.checkpoint.mirror) == ([], "", False, "")


def push(model: Path, *options: object) -> int:
    return export.main(["--model", str(model), "--push", "some/bert", *map(str, options)])


def assert_checkpoints_are_branches(run: Path, hub: Hub, folder: Path) -> None:
    """Each one's own export, `folder`/step-N."""
    for step in (1, 2, 3):
        export.export(run / f"checkpoints/step-{step:08d}", folder / f"step-{step}", name="some/bert")
        assert hub.files(MODEL, f"step-{step}") == contents(folder / f"step-{step}")


def test_each_checkpoint_is_a_revision_pushed_once(run: Path, model_hub: Hub, tmp_path: Path, capsys) -> None:
    assert push(run, "--revisions") == 0
    assert_checkpoints_are_branches(run, model_hub, tmp_path / "local")
    done = command("-c", READ, tmp_path / "local")
    assert done.stdout == "equal\n", done.stderr
    summary = f"MegaBERT {load_weights(run)[1]['revision']}"
    steps = [(f"step-{step}", f"Step {step}, {summary}") for step in (1, 2, 3)]
    assert model_hub.commits == [*steps, ("main", f"Step 3, {summary}")]
    assert 'pipeline("fill-mask", "some/bert")' in model_hub.files(MODEL)["README.md"].decode()
    assert len(model_hub.uploads) == len(set(model_hub.uploads)) == 4  # three weights, one tokenizer
    commits, branches = list(model_hub.commits), {**model_hub.branches[MODEL]}
    capsys.readouterr()
    assert push(run, "--revisions") == 0
    assert model_hub.commits == commits and len(model_hub.uploads) == 4 and model_hub.branches[MODEL] == branches
    out = capsys.readouterr().out
    assert out.count("has the same files already") == 4 and "pushed" not in out


def test_a_checkpoint_that_its_run_removes_meanwhile_is_no_revision(run: Path, model_hub: Hub, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", symlinks=True)

    def remove(method: str, path: str) -> None:
        if "/commit/" in path:
            shutil.rmtree(tmp_path / "run/checkpoints/step-00000002", ignore_errors=True)

    model_hub.fault = remove
    assert push(tmp_path / "run", "--revisions") == 0
    assert [branch for branch, _ in model_hub.commits] == ["step-1", "step-3", "main"]


@pytest.mark.parametrize("at", ["branch", "large", "commit"])
def test_a_killed_push_is_completed_by_another(at: str, run: Path, model_hub: Hub, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "megabert", "export", "--model", run, "--push", "some/bert", "--revisions"]
    words += ["--output", tmp_path / "hf"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*map(str, words)], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, **quiet)
    # of the second checkpoint, or of the first one's second file
    model_hub.kill(process, 2, lambda method, path: method != "GET" and f"/{at}/" in path)
    before = list(model_hub.uploads)
    # a branch has its whole commit or no model
    for branch in model_hub.branches[MODEL]:
        files = model_hub.files(MODEL, branch).keys()
        assert not files or files >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert not (tmp_path / "hf").exists()
    assert push(run, "--revisions", "--output", tmp_path / "hf") == 0
    assert len(set(model_hub.uploads)) == len(model_hub.uploads) and model_hub.uploads[: len(before)] == before
    assert_checkpoints_are_branches(run, model_hub, tmp_path / "local")
    assert contents(tmp_path / "hf") == model_hub.files(MODEL)


def test_a_push_removes_what_an_earlier_one_wrote(run: Path, model_hub: Hub) -> None:
    """As pooling, beside which another model would be read; not what the user added."""
    assert push(run, "--sentence-transformers", "mean") == 0
    before = model_hub.files(MODEL)
    assert {"modules.json", "1_Pooling/config.json"} <= before.keys()
    assert push(run) == 0
    gone = before.keys() - model_hub.files(MODEL).keys()
    assert {"modules.json", "1_Pooling/config.json"} <= gone and "model.safetensors" not in gone


def test_fine_tuned_models_are_pushed_in_one_commit(model_hub: Hub, tmp_path: Path) -> None:
    task, path = problem("classify", tmp_path)
    best = finetuned.make(tmp_path, task, path)
    assert push(best, "--private", "--output", tmp_path / "hf") == 0
    assert model_hub.repositories == {MODEL: PRIVATE}
    assert model_hub.commits == [("main", "BertForSequenceClassification for custom")]
    files = model_hub.files(MODEL)
    assert files == contents(tmp_path / "hf")
    assert b"\n# some/bert\n" in files["README.md"] and "model.safetensors" in files
    assert push(best, "--revisions") == 2


def test_what_cannot_be_pushed_is_one_line(model_hub: Hub, tmp_path: Path, monkeypatch, capsys) -> None:
    run = runs.make(tmp_path / "run")

    def refused(*options: object) -> str:
        return refusal(capsys, export.main, "--model", run, *options)

    assert "--revisions: is for --push OWNER/NAME" in refused("--revisions", "--output", "x")
    said = refused("--revisions", "--push", "a/b", "--model", "s3://a/b")
    assert "--revisions: only the newest checkpoint of a URL" in said
    for wrong in ("a/b/c", "a/b c", "a/b--c"):
        assert wrong in refused("--push", wrong)
    assert model_hub.branches == {}
    for token in (READ_TOKEN, "hf_unknown"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert "some/bert: access denied; check the credentials" in refused("--push", "some/bert")
    monkeypatch.delenv("HF_TOKEN")
    assert "some/bert: the hub asks for a token; `hf auth login`, or set HF_TOKEN" in refused("--push", "some/bert")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert push(run) == 0
    assert "some/bert: is public on the hub" in refused("--push", "some/bert", "--private")
    model_hub.fault = lambda method, path: 413 if path.endswith("/commit/main") else None
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/mlm_loss": 3.0}\n')
    assert push(run) == 2 and capsys.readouterr().err == "error: some/bert: refused (of the test)\n"


def test_failing_hubs_are_class_4_without_the_token(model_hub: Hub, tmp_path: Path, capsys) -> None:
    run, asked = runs.make(tmp_path / "run"), []

    def fail(method: str, path: str) -> int | None:
        asked.append(path)
        # not one of those that the library itself repeats for a minute
        return 507 if "/large/" in path else None

    model_hub.fault = fail
    for gone in (False, True):
        if gone:
            model_hub.fault = lambda method, path: None
            model_hub.close()
        assert push(run) == 4
        captured = capsys.readouterr()
        assert captured.err.splitlines()[-1].startswith("error: some/bert: ")
        for secret in (TOKEN, "signature=secret", "Traceback"):
            assert secret not in captured.out + captured.err
    assert sum("/large/" in path for path in asked) >= 3  # two more tries of a file at least


def test_hubs_that_fail_once_get_the_whole_model(model_hub: Hub, tmp_path: Path) -> None:
    run, failed = runs.make(tmp_path / "run"), set()

    def fail(method: str, path: str) -> int | None:
        """The first request of each kind."""
        kind = path.split("/some/bert")[-1] if "/large/" not in path else "large"
        if kind in failed:
            return None
        failed.add(kind)
        return 503

    model_hub.fault = fail
    assert push(run) == 0
    assert len(failed) >= 5 and "model.safetensors" in model_hub.files(MODEL)
    assert [branch for branch, _ in model_hub.commits] == ["main"]
