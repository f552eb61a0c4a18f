"""Commands in messages can be copied to a shell, whatever the folders are called."""

import ast
import os
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabert import __main__ as command_line
from megabert import config as configuration
from megabert import hf, train
from megabert.checkpoint.compatibility import refuse_other_tokenizer
from megabert.commands import average, convert, distill, export
from megabert.commands.evaluate import evaluate_run
from megabert.data.shards import Dataset
from megabert.distributed.ranks import World
from megabert.finetune import huggingface, tasks
from megabert.finetune.run import closing
from megabert.hf import model_card
from megabert.objectives import distillation
from tests.helpers import runs
from tests.test_held_out_by_dataset import DATA, random_rows

# a folder with a space and both kinds of quotes
NAME = 'my run\'s "data"'


def averaged(folder: Path, world: World, monkeypatch: Any) -> list[Path]:
    monkeypatch.setattr(average, "average", lambda *_: [1, 2])
    assert average.main(["--run", str(folder / "run"), "--output", str(folder / "mean")]) == 0
    return [folder / "mean"]


def converted(folder: Path, world: World, monkeypatch: Any) -> list[Path]:
    assert export.main(["--model", str(runs.make(folder / "run")), "--output", str(folder / "hf")]) == 0
    assert convert.main(["--model", str(folder / "hf"), "--run", str(folder / "start")]) == 0
    return [folder / "start/tokenizer.model", folder / "start/config.toml"]


def distilled(folder: Path, world: World, monkeypatch: Any) -> list[Path]:
    monkeypatch.setattr(os, "execv", lambda *_: None)
    data = random_rows(folder / "data", 8, seed=1)
    distill.main(
        ["--model", str(runs.make(folder / "run")), "--layers", "1", "--data", str(data), "--run", str(folder / "new")]
    )
    return [data, folder / "new"]


def distilled_on_other_data(folder: Path, world: World, monkeypatch: Any) -> list[Path]:
    run = runs.make(folder / "run")
    cfg = configuration.load("tiny", [f"distill.teacher={run}"])
    with pytest.raises(ValueError) as error:
        distillation.build(cfg, "0" * 64, torch.device("cpu"))
    print(error.value)
    return [run / "tokenizer.model"]


def evaluated_on_other_data(folder: Path, world: World, monkeypatch: Any) -> list[Path]:
    export.export(runs.make(folder / "run"), folder / "hf")
    with pytest.raises(ValueError) as error:
        evaluate_run(folder / "hf", str(DATA))
    print(error.value)
    return [folder / "hf/tokenizer.model"]


def started_from_another_vocabulary(folder: Path, world: World, monkeypatch: Any) -> list[Path]:
    run, data = runs.make(folder / "run"), random_rows(folder / "data", 8, seed=1)
    cfg = configuration.load("tiny", [f"init_from={run}", f"data.path={data}"])
    state = {"tokenizer": "0" * 64, "config": {"model": {"vocab_size": 9}}}
    with pytest.raises(ValueError) as error:
        refuse_other_tokenizer(cfg, state, Dataset(data).manifest)
    print(error.value)
    return [run / "tokenizer.model", run, data]


def finished(folder: Path, world: World, monkeypatch: Any) -> list[Path]:
    state: Any = SimpleNamespace(step=9, best_step=7, best_loss=1.0)
    cfg: Any = SimpleNamespace(data=SimpleNamespace(path=str(folder / "data")))
    trainer: Any = SimpleNamespace(
        state=state,
        last_eval={"eval/mlm_loss": 1.0},
        config=cfg,
        schedule=SimpleNamespace(complete=True, limit="schedule.total_steps=9"),
    )
    print(train.ending(trainer, Namespace(run=str(folder / "run"))))
    return [folder / "run/best", folder / "data", folder / "run-sst2", folder / "run-hf"]


def fine_tuned(folder: Path, world: World, monkeypatch: Any) -> list[Path]:
    best = {"model": str(folder / "seed1/best"), "epoch": 1, "epochs": 2, "metric": "f1", "dev": 0.5}
    print(closing(best))
    return [folder / "seed1/best"]


@pytest.mark.parametrize("message", [
    averaged, converted, distilled, distilled_on_other_data, evaluated_on_other_data, started_from_another_vocabulary,
    finished, fine_tuned,
])  # fmt: skip
def test_a_shell_reads_the_paths_of_a_command(
    message: Any, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shlex.split` of what each message shows from a command's first word on gives these paths back."""
    folder = tmp_path / NAME
    folder.mkdir()
    paths = message(folder, world, monkeypatch)
    commands = re.findall(r"(?:megabert [a-z]+|deepspeed|--[a-z]+) [^`\n]*", capsys.readouterr().out)
    words = [word for text in commands for word in shlex.split(text)]
    assert [str(path) for path in paths if str(path) not in words] == []


def test_usage_names_a_script_as_a_shell_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{NAME}/train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert shlex.split(command_line.called()) == [f"{NAME}/train.py"]


def strings_of_code(card: str) -> list[str]:
    """The string constants of the Python code in a model card."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]


@pytest.mark.parametrize("causal", [False, True])
def test_python_reads_the_name_in_a_model_card(causal: bool, tmp_path: Path) -> None:
    run = hf.load(runs.make(tmp_path / "run", causal=causal))
    assert NAME in strings_of_code(model_card.render(run, NAME, "BertForMaskedLM"))


@pytest.mark.parametrize("name", ["sst2", "squad1.1"])
def test_python_reads_the_name_in_a_finetuned_card(name: str) -> None:
    task = tasks.preset(name)
    described: Any = SimpleNamespace(
        task=task, labels=(), threshold=0.5, max_length=9, config=configuration.load("tiny"), layers="last"
    )
    finetuned: Any = SimpleNamespace(described=described, results={}, tokenizer=SimpleNamespace(sha256=""))
    assert NAME in strings_of_code(huggingface.card(finetuned, NAME))
