"""Commands in messages can be copied to a shell, whatever the folders are called."""

import ast
import re
import shlex
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megabert import __main__ as command_line
from megabert import config as configuration
from megabert import hf, train
from megabert.checkpoint.compatibility import refuse_other_tokenizer
from megabert.commands import average, convert, distill, export
from megabert.commands.evaluate import evaluate_run
from megabert.data.shards import Dataset
from megabert.finetune import huggingface, tasks
from megabert.finetune.run import closing
from megabert.hf import model_card
from megabert.objectives import distillation
from tests.helpers import runs
from tests.helpers.golden_runs import DATA, random_rows

# a folder with a space and both kinds of quotes
NAME = 'my run\'s "data"'


def refused(function, *arguments):
    with pytest.raises(ValueError) as error:
        function(*arguments)
    print(error.value)


def averaged(folder, monkeypatch):
    monkeypatch.setattr(average, "average", lambda *_: [1, 2])
    assert average.main(["--run", str(folder / "run"), "--output", str(folder / "mean")]) == 0
    return [folder / "mean"]


def converted(folder, monkeypatch):
    assert export.main(["--model", str(runs.make(folder / "run")), "--output", str(folder / "hf")]) == 0
    assert convert.main(["--model", str(folder / "hf"), "--run", str(folder / "start")]) == 0
    return [folder / "start/tokenizer.model", folder / "start/config.toml"]


def distilled(folder, monkeypatch):
    monkeypatch.setattr("os.execv", lambda *_: None)
    data, run, new = random_rows(folder / "data", 8, seed=1), runs.make(folder / "run"), folder / "new"
    distill.main(["--model", str(run), "--layers", "1", "--data", str(data), "--run", str(new)])
    return [data, new]


def distilled_on_other_data(folder, monkeypatch):
    run = runs.make(folder / "run")
    cfg = configuration.load("tiny", [f"distill.teacher={run}"])
    refused(distillation.build, cfg, "0" * 64, torch.device("cpu"))
    return [run / "tokenizer.model"]


def evaluated_on_other_data(folder, monkeypatch):
    export.export(runs.make(folder / "run"), folder / "hf")
    refused(evaluate_run, folder / "hf", str(DATA))
    return [folder / "hf/tokenizer.model"]


def started_from_another_vocabulary(folder, monkeypatch):
    run, data = runs.make(folder / "run"), random_rows(folder / "data", 8, seed=1)
    cfg = configuration.load("tiny", [f"init_from={run}", f"data.path={data}"])
    manifest = Dataset(data).manifest
    state = {"tokenizer": "0" * 64, "config": {"model": {"vocab_size": manifest.vocab_size}}}  # of as many tokens
    refused(refuse_other_tokenizer, cfg, state, manifest)
    return [run / "tokenizer.model", run, data]


def finished(folder, monkeypatch):
    trainer = SimpleNamespace(
        state=SimpleNamespace(step=9, best_step=7, best_loss=1.0),
        last_eval={"eval/mlm_loss": 1.0},
        config=SimpleNamespace(data=SimpleNamespace(path=str(folder / "data"))),
        schedule=SimpleNamespace(complete=True, limit="schedule.total_steps=9"),
    )
    print(train.ending(trainer, Namespace(run=f"{folder}/run/")))
    return [folder / "run/best", folder / "data", folder / "run-sst2", folder / "run-hf"]


def fine_tuned(folder, monkeypatch):
    print(closing({"model": str(folder / "seed1/best"), "epoch": 1, "epochs": 2, "metric": "f1", "dev": 0.5}))
    return [folder / "seed1/best"]


@pytest.mark.parametrize("message", [
    averaged, converted, distilled, distilled_on_other_data, evaluated_on_other_data, started_from_another_vocabulary,
    finished, fine_tuned,
])  # fmt: skip
def test_a_shell_reads_the_paths_of_a_command(message, tmp_path, monkeypatch, capsys):
    """`shlex.split` of what each message shows from a command's first word on gives these paths back."""
    folder = tmp_path / NAME
    folder.mkdir()
    paths = message(folder, monkeypatch)
    commands = re.findall(r"(?:megabert [a-z]+|deepspeed|--[a-z]+) [^`\n]*", capsys.readouterr().out)
    words = [word for text in commands for word in shlex.split(text)]
    assert [str(path) for path in paths if str(path) not in words] == []


def test_usage_names_scripts_as_a_shell_reads_them(monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{NAME}/train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert shlex.split(command_line.called()) == [f"{NAME}/train.py"]


def strings_of_code(card):
    """The string constants of the Python code in a model card."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]


@pytest.mark.parametrize("causal", [False, True])
def test_python_reads_the_name_in_a_model_card(causal, tmp_path):
    run = hf.load(runs.make(tmp_path / "run", causal=causal))
    assert NAME in strings_of_code(model_card.render(run, NAME, "BertForMaskedLM"))


@pytest.mark.parametrize("name", ["sst2", "squad1.1"])
def test_python_reads_the_name_in_a_finetuned_card(name):
    fields = {"labels": (), "threshold": 0.5, "max_length": 9, "config": configuration.load("tiny"), "layers": "last"}
    described = SimpleNamespace(task=tasks.preset(name), **fields)
    finetuned = SimpleNamespace(described=described, results={}, tokenizer=SimpleNamespace(sha256=""))
    assert NAME in strings_of_code(huggingface.card(finetuned, NAME))
