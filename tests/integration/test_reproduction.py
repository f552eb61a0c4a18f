"""A run folder is verified from rows to weights, and its updates repeated: what was changed is found, in one line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megabert.commands import replay as repetition
from megabert.commands import verify
from megabert.common import chain
from megabert.common.files import canonical, compact, digest
from megabert.config import replace
from tests.helpers import once, rows, runs
from tests.helpers.job import SMALL, Job
from tests.integration.conftest import end, logged, metrics, output_of, train

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


@pytest.fixture(scope="session")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data` and `run` in a folder: 14 updates in two starts, of whose checkpoints those of steps 8, 12 and 14 are kept."""

    def make(folder: Path) -> None:
        shutil.copytree(dataset, folder / "data")
        for more in (("--stop-after", 7), ()):
            train(folder / "data", folder / "run", *SMALL, *OPTIONS, "checkpoint.keep=3", *more)

    return once.folder(tmp_path_factory, "trained", make)


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """One that may be changed; its configuration names the dataset of the other."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def verified(folder: Path, *more: str) -> int:
    return verify.main([str(folder / "run"), "--data", str(folder / "data"), *more])


def write_again(run: Path, changes: dict[int, dict[str, object]]) -> None:
    """Rewrite a run's chain with other values in the entries of these steps."""
    previous, lines = "", []
    for entry in chain.read(run / "checkpoints"):
        entry |= changes.get(entry["step"], {}) | {"previous": previous}
        previous = digest(entry, "sha256", compact)
        lines.append(compact(entry | {"sha256": previous}))
    (run / "checkpoints/chain.jsonl").write_bytes(b"\n".join([*lines, b""]))


def test_run_is_verified_up_to_its_published_head(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = chain.read(copy / "run/checkpoints")
    assert [entry["step"] for entry in entries] == [4, 7, 8, 12, 14]
    assert verified(copy) == 0
    shown = capsys.readouterr().out
    assert all(shown.splitlines())
    assert "checkpoints  of steps 8, 12, 14" in shown and shown.splitlines()[-1].endswith(entries[-1]["sha256"])
    assert verified(copy, "--head", entries[1]["sha256"]) == 0
    assert "as published, at step 7" in capsys.readouterr().out
    # all of it written again: only the published head finds that
    write_again(copy / "run", {7: {"revision": "another"}})
    assert (verified(copy), verified(copy, "--head", entries[-1]["sha256"])) == (0, 2)
    assert "is not the run whose head was published" in capsys.readouterr().err


def test_run_that_was_not_trained_here_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(runs.make(tmp_path / "run", "uncased"))]) == 2
    assert "run: was converted or averaged, not trained" in capsys.readouterr().err


def flip(path: Path, draw: random.Random) -> None:
    """Change one bit of a file."""
    rows.flip(path, draw.randrange(path.stat().st_size), draw.randrange(8))


def change_the_config(folder: Path, draw: random.Random) -> None:
    path = folder / "run/config.json"
    tree = json.loads(path.read_bytes())
    section = draw.choice(["optimizer", "schedule", "batch", "model"])
    name = draw.choice([name for name, value in tree["config"][section].items() if isinstance(value, int | float)])
    tree["config"][section][name] = tree["config"][section][name] * 1.01 + 1e-6
    path.write_bytes(canonical(tree))


def change_line_ends(folder: Path, draw: random.Random) -> None:
    """Of the configuration: the same values in other bytes."""
    path = folder / "run/config.json"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def change_a_log_line(folder: Path, draw: random.Random) -> None:
    path = folder / "run" / draw.choice(["metrics.jsonl", "starts.jsonl"])
    lines = path.read_text().splitlines()
    at = draw.randrange(len(lines))
    values = json.loads(lines[at])
    lines[at] = json.dumps(values | {draw.choice(sorted(values)): draw.random()})
    path.write_text("".join(f"{line}\n" for line in lines))


def change_the_entries(folder: Path, draw: random.Random) -> None:
    """One is removed, repeated, or moved."""
    path = folder / "run/checkpoints/chain.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at, to = draw.sample(range(len(lines)), 2)
    rest, entry = lines[:at] + lines[at + 1 :], lines[at : at + 1]
    changed = draw.choice([rest, lines[:at] + entry + lines[at:], rest[:to] + entry + rest[to:]])
    path.write_bytes(b"".join(changed))


CHANGES = {
    "a row": lambda folder, draw: flip(draw.choice(sorted((folder / "data").rglob("*.tar"))), draw),
    "a checkpoint": lambda folder, draw: flip(draw.choice(sorted(folder.glob("run/checkpoints/step-*/*"))), draw),
    "an entry": lambda folder, draw: flip(folder / "run/checkpoints/chain.jsonl", draw),
    "entries": change_the_entries,
    "the configuration": change_the_config,
    "line ends": change_line_ends,
    "a log line": change_a_log_line,
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_random_change_is_named(
    copy: Path, change: Callable[[Path, random.Random], None], seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    change(copy, random.Random(seed))
    (changed,) = [path for path, data in before.items() if path.read_bytes() != data]
    assert verified(copy) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert changed.name in line or changed.parent.name in line, f"{changed}: {line}"


def replay(folder: Path, *more: object, code: int = 0) -> str:
    """The last line, after the run was left as it is."""
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    shown = output_of("replay", folder / "run", "--data", folder / "data", *more, code=code)
    assert {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")} == before
    return shown.splitlines()[-1]


def test_updates_are_repeated_bit_for_bit(trained: Path) -> None:
    assert "of steps 10 to 12 are equal bit for bit" in replay(trained, "--from", 8, "--to", 13)


def test_only_what_was_compared_is_called_equal(copy: Path) -> None:
    other, data = copy / "other", str(copy / "data")
    shutil.copytree(copy / "run", other)
    write_again(other, {12: {"weights": "another"}, 14: {"threads": 99}})
    (copy / "run/config.json").write_text('{"config": {')  # damaged; the checkpoints have it too
    of = repetition.interval(copy / "run", 8, 13, data)
    assert "equal to rounding, since these differ from the run: threads" in repetition.compare(of, other)
    shutil.rmtree(other / "checkpoints/step-00000012")
    assert "the weights were not compared, as their checkpoints are not kept" in repetition.compare(of, other)
    log, lines = other / "metrics.jsonl", metrics(other)
    log.write_text("".join(json.dumps(line | {"train/loss": "nan"}) + "\n" for line in lines) + '{"cut')
    with pytest.raises(ValueError, match=r"train/loss of step 10 was .* and is nan, compared to rounding"):
        repetition.compare(of, other)
    log.unlink()
    with pytest.raises(ValueError, match="not kept, and there is no log line of steps 9 to 13"):
        repetition.compare(of, other)
    # means between log lines that the clock decided
    slow = of._replace(config=replace(of.config, "log.seconds", 5.0))
    names = {name for _, name in repetition.recorded(copy / "run", slow)}
    assert {"train/lr", "data/row_digest", "weights"} <= names and not {"train/loss", "train/grad_norm"} & names


@pytest.mark.slow
def test_updates_that_are_not_repeated_are_named(copy: Path) -> None:
    assert "of steps 2 to 14 are equal bit for bit" in replay(copy, "--from", 0)
    log, norm = copy / "run/metrics.jsonl", logged(copy / "run", "train/grad_norm")[10]
    text = log.read_text()
    log.write_text(text.replace(f'"train/grad_norm": {norm}', f'"train/grad_norm": {norm * (1 + 1e-12)}'))
    assert "of steps 14 to 14" in replay(copy)
    line = replay(copy, "--from", 8, code=2)
    assert "train/grad_norm of step 10 was" in line and "compared bit for bit" in line, line
    assert "has checkpoints of steps 8, 12, 14" in replay(copy, "--from", 5, code=2)
    assert "must be above 8 and at most 14" in replay(copy, "--from", 8, "--to", 15, code=2)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "code", "said"), [(1 + 1e-6, 0, "(loss 0.01"), (1.05, 2, "loss of step ")])
def test_other_code_repeats_to_rounding(trained: Path, tmp_path: Path, scale: float, code: int, said: str) -> None:
    driver = OTHER_CODE.replace("SCALE", str(scale))
    job = Job(trained, tmp_path / "job", ranks=1, command=("replay", trained / "run", "--from", 8), driver=driver)
    line = end(job, code, within=60).splitlines()[-1]
    assert said in line and "these differ from the run: source" in line, line
