"""Every command of README.md, run in the order it stands in, in a fresh clone of the repository.

`STEPS` has a line for each of them; one that is missing there fails a default test. Commands, flags and order are the README's.
What is added are sizes that take seconds, and options that a machine shared with other tests needs (ports, nodes).
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.common.hardware import free_port
from tests.helpers import glue_folder, wordpiece
from tests.integration.conftest import BIN, MPI_AS_ROOT, ROOT, logged
from tests.slurm.cluster import Cluster

README = (ROOT / "README.md").read_text()
FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TINY = "model.hidden=32 model.heads=2 batch.global_size=32 batch.micro_size=16 log.interval=4 eval.rows=64"
SECONDS = f"{TINY} schedule.budget_minutes=0.2 checkpoint.interval=10"
PHASES = f"{TINY} model.layers=1 schedule.total_steps=2 schedule.warmup_steps=1 eval.interval=0"
JOB = "--cpus-per-task=1 --time=10 --wait"
Worked = Callable[[str, Path], bool]  # of what was printed, and the clone


def blocks(readme: str) -> Iterator[tuple[str, list[str]]]:
    """Language of each fenced block, with its commands if that is bash (no comments, continued lines joined), else its text."""
    for language, text in FENCES.findall(readme):
        lines = [re.sub(r"(^|\s+)#.*", "", line) for line in text.replace("\\\n", " ").splitlines()]
        yield language, [line for line in lines if line.strip()] if language == "bash" else [text]


class Step(NamedTuple):
    """A command by its first words; whether it worked; arguments behind it, a replacement in it, its environment."""

    starts: str
    worked: Worked
    more: str = ""
    replaced: tuple[str, str] = ("", "")
    env: dict[str, str] = {}  # noqa: RUF012 - never changed


def has(*patterns: str) -> Worked:
    return lambda shown, clone: all(re.search(pattern, shown) for pattern in patterns)


def wrote(*files: str) -> Worked:
    return lambda shown, clone: all((clone / file).is_file() for file in files)


def quickstart_worked(shown: str, clone: Path) -> bool:
    """The loss falls over three evaluations, the run was stopped and resumed, and the results are where the README says."""
    table = [line.split() for line in shown.splitlines() if ", step " in line]
    found = {row[row.index("step") + 1]: float(row[row.index("step") + 2]) for row in table}
    assert list(found) == ["0", "12", "24"] and found["0"] > found["12"] > found["24"], shown
    assert has("resuming from .* at step 12", "training loss, updates")(shown, clone) and accuracy(shown)
    folder = clone / "runs/quickstart"
    page = (folder / "run/report.html").read_text()
    assert ">update 0<" in page and ">update 24<" in page and ">restart</td>" in page
    assert list((folder / "run/tensorboard").glob("events*")) and (folder / "data/manifest.json").is_file()
    return list(logged(folder / "run", "eval/mlm_loss")) == [0, 24]


def evaluated(shown: str, clone: Path) -> bool:
    """The figures are those that the run itself logged at its end."""
    (_, first), *_, last = logged(clone / "runs/mini", "eval/mlm_loss").items()
    figures = json.loads(shown)
    return (figures["step"], figures["eval/mlm_loss"]) == last and last[1] < first


def phases_trained(shown: str, clone: Path) -> bool:
    return all('"step": 2,' in (clone / f"runs/large_phase{n}/metrics.jsonl").read_text() for n in (1, 2))


STEPS = (
    Step(
        "make quickstart",
        quickstart_worked,
        env={"CORPUS": "corpus", "STEPS": "24", "VOCAB": "600", "SEQ_LEN": "64", "EXTRA": TINY},
    ),
    Step(
        "make test",
        has("All checks passed", "no issues found", r"\d passed"),
        env={"PYTEST_ARGS": "tests/common/test_tables.py", "WORKERS": "1"},
    ),
    Step("python -m data_prep build", has(r"report +data/seq128"), "--vocab-size 600"),
    Step(
        "deepspeed",
        has(r"2 rank\(s\) on cpu", "finished: held-out loss"),
        SECONDS,
        replaced=("deepspeed", f"deepspeed --master_port {free_port()}"),
    ),
    Step("python -m megabert evaluate", evaluated),
    Step("python -m data_prep verify", has(r"data/seq128: complete, \d+ rows")),
    Step("python -m data_prep inspect", has(r"rows +\d+ of 128 tokens")),
    Step("tensorboard", has("1_loss/training", "train/loss", "eval/mlm_loss"), "--inspect"),
    Step("megabert doctor", has("training can run here")),
    Step("megabert plan --config mini_modern", has("hours on this CPU|updates on this CPU")),
    Step("megabert plan --config large_phase1", has("projection, not measured: h100", r"\n +512 ")),
    Step("megabert report", wrote("runs/mini/report.html")),
    Step("megabert verify", has("every file as it was saved", "every byte as it was written")),
    Step("mpirun -n 2 megabert replay", has("metrics and digests .* are equal bit for bit")),
    Step("python examples/train_loop.py", has(r"update +19  loss \d"), "20"),
    Step("megabert train", has("finished: held-out loss"), f"{SECONDS} model.layers=2"),
    Step(
        "sbatch -N 4 launch/prep.slurm",
        wrote("on_slurm/seq128/manifest.json", "on_slurm/seq512/manifest.json"),
        replaced=("-N 4", f"-N 1 --ntasks-per-node=2 {JOB}"),
        env={"VOCAB": "600"},
    ),
    Step(
        "sbatch -N 4 launch/pretrain_large.slurm",
        phases_trained,
        PHASES,
        replaced=("-N 4", f"-N 2 --ntasks-per-node=1 --gpus-per-node=1 {JOB}"),
    ),
    Step("megabert convert", wrote("runs/start/config.toml")),
    Step("megabert fill", lambda shown, clone: shown.count("%") == 5),
    Step("megabert pairs", has(r"mean of \d+ paradigms")),
    Step("megabert finetune", has("best model: runs/sst2/.*/best")),
    Step("megabert glue", has(r"\| SST-2 \|", r"\| RTE \|"), "--seeds 1"),
    Step("megabert features", lambda shown, clone: np.load(clone / "vectors.npy").shape == (2, 32)),
    Step("megabert distill", has("finished: held-out loss .* in runs/student")),
    Step("megabert export", wrote("hf/mini/model.safetensors")),
)


def run(command: str, folder: Path, timeout: int = 900, **env: str) -> str:
    """Runs one line as a user's shell in `folder` would, in the environment that runs the tests; returns what it printed."""
    environment = os.environ | MPI_AS_ROOT | {"PATH": f"{BIN}:{os.environ['PATH']}", "VENV": ""}
    environment |= {"MAKEFLAGS": "", "MFLAGS": ""}  # variables given to the make that runs the tests
    environment |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | env
    words = ["bash", "-c", command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    logs = "".join(log.read_text()[-4000:] for log in folder.glob("*.log"))
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{logs}"
    return done.stdout


def accuracy(shown: str) -> tuple[float, float]:
    """Accuracy of the model and of the most frequent token under the held-out masks, in percent."""
    (found,) = re.findall(r"accuracy: ([\d.]+)% of [\d,]+ held-out masks; .*: ([\d.]+)%", shown)
    return float(found[0]), float(found[1])


def write_inputs(folder: Path) -> None:
    """What the README takes for given: text, a published model, a task, two tasks of GLUE, minimal pairs."""
    from pydoc_data.topics import topics

    from transformers import BertConfig, BertForMaskedLM

    (folder / "corpus").mkdir()
    for name, text in sorted(topics.items())[:40]:
        (folder / f"corpus/{name}.txt").write_text(re.sub(r"[*`\\]+", "", text))
    tokenizer = wordpiece.peer(wordpiece.write(folder / "vocab.txt"))
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for part in (BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **shape)), tokenizer):
        part.save_pretrained(folder / "google-bert/bert-base-uncased")
    for task in {*glue_folder.write_folder(folder / "glue").iterdir()} - {folder / "glue/SST-2", folder / "glue/RTE"}:
        shutil.rmtree(task)
    for name in ("train.tsv", "dev.tsv"):
        shutil.copy(folder / "glue/SST-2" / name, folder / name)
    (folder / "lines.txt").write_text("One line of text.\nAnd another one.\n")
    (folder / "blimp").mkdir()
    pair = {"sentence_good": "The doors are old.", "sentence_bad": "The doors is old.", "field": "syntax"}
    pair |= {"linguistics_term": "agreement", "UID": "agreement"}
    (folder / "blimp/agreement.jsonl").write_text(f"{json.dumps(pair)}\n")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What is committed here, with the native library of this folder and the README's inputs."""
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    shutil.copy(ROOT / "megabert/_native.abi3.so", tmp_path / "clone/megabert")
    write_inputs(tmp_path / "clone")
    return tmp_path / "clone"


def take(command: str, clone: Path, **env: str) -> None:
    """Runs a command of the README by its step, and asserts that it worked."""
    (step,) = (step for step in STEPS if command.startswith(step.starts))
    line = f"{command.replace(*step.replaced)} {step.more}"
    shown = run(line, clone, **(env | step.env))
    assert step.worked(shown, clone), f"{line}\n{shown}"


def test_every_command_has_a_step() -> None:
    """In the order of the README, each once; and no command stands where none is looked for."""
    elsewhere = [text for language, lines in blocks(README) if language not in ("bash", "python") for text in lines]
    elsewhere += re.findall(r"^ {4}.*", FENCES.sub("", README), re.M)
    programs = "|".join({step.starts.split()[0] for step in STEPS})
    assert not re.findall(rf"^[ $]*(?:{programs}) .*", "\n".join(elsewhere), re.M), "mark this block ```bash"
    found = [line for language, lines in blocks(README) if language == "bash" for line in lines]
    missing = [line for line in found if not any(line.startswith(step.starts) for step in STEPS)]
    assert not missing, f"README.md has commands that no step of this test runs: {missing}"
    starts = [step.starts for line in found for step in STEPS if line.startswith(step.starts)]
    assert starts == [step.starts for step in STEPS]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)
def test_every_command_runs_in_a_fresh_clone(clone) -> None:
    """All but the jobs for SLURM, which are the next test's: about twenty steps of up to a minute."""
    for language, lines in blocks((clone / "README.md").read_text()):
        for line in lines:
            # the other Python block, the training loop, is run by its command
            if language == "python" and "megabert.load" in line:
                (clone / "block.py").write_text(f"{line}\nassert model.encode(['one', 'two']).shape == (2, 32)\n")
                run("python block.py", clone)
            elif language == "bash" and not line.startswith("sbatch"):
                take(line, clone)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.slurm
def test_both_jobs_run_on_two_nodes(clone, tmp_path) -> None:
    site = {"VENV": str(BIN.parent), "DATA": str(clone / "on_slurm")}
    with Cluster(tmp_path / "slurm") as cluster:
        site["SLURM_CONF"] = cluster.env["SLURM_CONF"]
        for line in re.findall(r"^sbatch .*", (clone / "README.md").read_text(), re.M):
            take(line, clone, **site)


@pytest.mark.slow
def test_quickstart_as_written(tmp_path) -> None:
    """Everything as a stranger runs it but the folder: about four minutes on two cores."""
    shown = run("make quickstart", ROOT, timeout=1200, OUT=str(tmp_path), OMP_NUM_THREADS="")
    figures = logged(tmp_path / "run", "eval/mlm_loss")
    assert min(figures) == 0 and max(figures) == 600
    assert figures[600] < figures[0] - 2, figures
    assert "resumed and finished" in shown and shown.count("  untrained: ") == shown.count("  trained: ") == 3
    model, most_frequent = accuracy(shown)
    assert model > 2 * most_frequent, shown
