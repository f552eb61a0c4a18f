"""A run folder is verified from rows to weights, and its updates repeated: what was changed is found, in one line."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megabert.checkpoint import chain
from megabert.commands import replay as repetition
from megabert.commands import verify
from megabert.common.files import canonical, compact, digest
from megabert.config import replace
from tests.helpers import once, runs
from tests.helpers.forked import Forked
from tests.helpers.job import SMALL
from tests.integration.conftest import command

# of losses that are scaled
OTHER_CODE = """
from megabert.common import environment
from megabert.model import BertForPreTraining
def forward(self, *args, do=BertForPreTraining.forward, **named):
    out = do(self, *args, **named)
    return out._replace(mlm_loss_sum=out.mlm_loss_sum * SCALE) if self.training else out
BertForPreTraining.forward, environment.source = forward, lambda: "another"
"""
OPTIONS = ("eval.interval=6", "log.interval=2", "checkpoint.interval=4", "schedule.total_steps=14", "data.workers=0")


def train(data: Path, run: Path, *more: object, **env: str) -> None:
    done = command(
        "megabert/train.py", "--config", "tiny", "--data", data, "--run", run, *SMALL, *OPTIONS, *more, **env
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data` and `run` in a folder: 14 updates in two starts, of whose checkpoints those of steps 8, 12 and 14 are kept."""

    def make(folder: Path) -> None:
        shutil.copytree(dataset, folder / "data")
        for more in (("--stop-after", 7), ()):
            train(folder / "data", folder / "run", "checkpoint.keep=3", *more)

    return once.folder(tmp_path_factory, "trained", make)


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """One that may be changed; its configuration names the dataset of the other."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def checked(folder: Path, *more: str) -> list[str]:
    return ["verify", str(folder / "run"), "--data", str(folder / "data"), *more]


def write_again(run: Path, changes: dict[int, dict[str, object]]) -> None:
    """Rewrite a run's chain with other values in the entries of these steps."""
    previous, lines = "", []
    for entry in chain.read(run / "checkpoints"):
        entry |= changes.get(entry["step"], {}) | {"previous": previous}
        previous = digest(entry, "sha256", compact)
        lines.append(compact(entry | {"sha256": previous}))
    (run / "checkpoints/chain.jsonl").write_bytes(b"\n".join([*lines, b""]))


def test_a_run_is_verified_up_to_its_published_head(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = chain.read(copy / "run/checkpoints")
    assert [entry["step"] for entry in entries] == [4, 7, 8, 12, 14]
    assert verify.main(checked(copy)[1:]) == 0
    shown = capsys.readouterr().out
    assert "checkpoints  of steps 8, 12, 14" in shown and shown.splitlines()[-1].endswith(entries[-1]["sha256"])
    assert verify.main([*checked(copy)[1:], "--head", entries[1]["sha256"]]) == 0
    assert "as published, at step 7" in capsys.readouterr().out
    # all of it written again: only the published head finds that
    write_again(copy / "run", {7: {"revision": "another"}})
    assert verify.main(checked(copy)[1:]) == 0
    assert verify.main([*checked(copy)[1:], "--head", entries[-1]["sha256"]]) == 2
    assert "is not the run whose head was published" in capsys.readouterr().err


def test_a_run_that_was_not_trained_here_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(runs.make(tmp_path / "run", "uncased"))]) == 2
    assert "run: was converted or averaged, not trained" in capsys.readouterr().err


def flip(path: Path, draw: random.Random) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def change_a_row(folder: Path, draw: random.Random) -> None:
    flip(draw.choice(sorted((folder / "data").rglob("*.tar"))), draw)


def change_the_config(folder: Path, draw: random.Random) -> None:
    path = folder / "run/config.json"
    tree = json.loads(path.read_bytes())
    section = draw.choice(["optimizer", "schedule", "batch", "model"])
    name = draw.choice([name for name, value in tree["config"][section].items() if isinstance(value, int | float)])
    tree["config"][section][name] = tree["config"][section][name] * 1.01 + 1e-6
    path.write_bytes(canonical(tree))


def change_a_checkpoint(folder: Path, draw: random.Random) -> None:
    flip(draw.choice(sorted((folder / "run/checkpoints").glob("step-*/*"))), draw)


def change_a_log_line(folder: Path, draw: random.Random) -> None:
    path = folder / "run" / draw.choice(["metrics.jsonl", "starts.jsonl"])
    lines = path.read_text().splitlines()
    at = draw.randrange(len(lines))
    values = json.loads(lines[at])
    lines[at] = json.dumps(values | {draw.choice(sorted(values)): draw.random()})
    path.write_text("".join(f"{line}\n" for line in lines))


def change_the_entries(folder: Path, draw: random.Random) -> None:
    """One is changed, removed, repeated, or moved."""
    path = folder / "run/checkpoints/chain.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at, other = draw.sample(range(len(lines)), 2)
    kind = draw.randrange(4)
    if kind == 0:
        flip(path, draw)
    elif kind == 1:
        path.write_bytes(b"".join(lines[:at] + lines[at + 1 :]))
    elif kind == 2:
        path.write_bytes(b"".join([*lines[:at], lines[at], *lines[at:]]))
    else:
        lines[at], lines[other] = lines[other], lines[at]
        path.write_bytes(b"".join(lines))


CHANGES = (change_a_row, change_the_config, change_a_checkpoint, change_a_log_line, change_the_entries)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_random_change_is_named(
    copy: Path, change: Callable[[Path, random.Random], None], seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    change(copy, random.Random(seed))
    (changed,) = [path for path, data in before.items() if path.read_bytes() != data]
    assert verify.main(checked(copy)[1:]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert changed.name in line or changed.parent.name in line, f"{changed}: {line}"


def replay(folder: Path, *more: object, **env: str) -> tuple[int, str]:
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    done = command("-m", "megabert", "replay", folder / "run", "--data", folder / "data", *more, **env)
    assert {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")} == before
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).splitlines()[-1]


def test_updates_are_repeated_bit_for_bit(trained: Path) -> None:
    code, line = replay(trained, "--from", 8, "--to", 13)
    assert code == 0 and "of steps 10 to 12 are equal bit for bit" in line, line


def test_only_what_was_compared_is_called_equal(copy: Path) -> None:
    other, data = copy / "other", str(copy / "data")
    shutil.copytree(copy / "run", other)
    write_again(other, {12: {"weights": "another"}, 14: {"threads": 99}})
    of = repetition.interval(copy / "run", 8, 13, data)
    assert "equal to rounding, as not as then are threads" in repetition.compare(of, other)
    shutil.rmtree(other / "checkpoints/step-00000012")
    assert "the weights were not compared, as their checkpoints are not kept" in repetition.compare(of, other)
    logged = other / "metrics.jsonl"
    lines = [json.loads(line) for line in logged.read_text().splitlines()]
    logged.write_text("".join(json.dumps(line | {"train/loss": "nan"}) + "\n" for line in lines) + '{"cut')
    with pytest.raises(ValueError, match=r"train/loss of step 10 was .* and is nan, compared to rounding"):
        repetition.compare(of, other)
    logged.unlink()
    with pytest.raises(ValueError, match="not kept, and there is no log line of steps 9 to 13"):
        repetition.compare(of, other)
    # means between log lines that the clock decided
    slow = of._replace(config=replace(of.config, "log.seconds", 5.0))
    names = {name for _, name in repetition.recorded(copy / "run", slow)}
    assert {"train/lr", "data/row_digest", "weights"} <= names and not {"train/loss", "train/grad_norm"} & names


@pytest.mark.slow
def test_updates_that_are_not_repeated_are_named(copy: Path) -> None:
    assert "of steps 2 to 14 are equal bit for bit" in replay(copy, "--from", 0)[1]
    logged = copy / "run/metrics.jsonl"
    text = logged.read_text()
    (line,) = (line for line in text.splitlines() if '"step": 10,' in line)
    norm = json.loads(line)["train/grad_norm"]
    logged.write_text(text.replace(f'"train/grad_norm": {norm}', f'"train/grad_norm": {norm * (1 + 1e-12)}'))
    code, line = replay(copy)
    assert code == 0 and "of steps 14 to 14" in line, line
    code, line = replay(copy, "--from", 8)
    assert code == 2 and "train/grad_norm of step 10 was" in line and "compared bit for bit" in line, line
    assert replay(copy, "--from", 5)[0] == 2 and "has checkpoints of steps 8, 12, 14" in replay(copy, "--from", 5)[1]
    assert "must be above 8 and at most 14" in replay(copy, "--from", 8, "--to", 15)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "code", "said"), [(1 + 1e-6, 0, "(loss 0.01"), (1.05, 2, "loss of step ")])
def test_other_code_repeats_to_rounding(trained: Path, tmp_path: Path, scale: float, code: int, said: str) -> None:
    (tmp_path / "driver.py").write_text(OTHER_CODE.replace("SCALE", str(scale)))
    arguments = ["replay", str(trained / "run"), "--from", "8"]
    job = Forked(arguments, os.environ | {"OMP_NUM_THREADS": "1"}, tmp_path / "log", driver=str(tmp_path / "driver.py"))
    assert job.wait(60) == code
    *_, line = (tmp_path / "log").read_text().splitlines()
    assert said in line and "not as then are source" in line, line
