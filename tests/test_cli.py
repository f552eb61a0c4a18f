"""`megabert NAME …` names every command, answers at once, and is the same as every other way of starting one."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from megabert import __main__ as cli
from megabert.commands import convert
from megabert.common import arguments
from megabert.common.arguments import Parser

ROOT = Path(__file__).resolve().parents[1]
SLOW_MACHINE = 5  # a shared one, against the 0.3 s of a quiet one
# what no command's help may leave out: (command and subcommand, option) -> its default
EXAMPLES = {
    ("finetune", "--lr"): "5e-05; of models narrower than 768: 0.0003",
    ("finetune", "--precision"): "auto",
    ("finetune", "--seeds"): "1",
    ("prep build", "--vocab-size"): "30000",
    ("prep build", "--dedup"): "documents",
    ("prep inspect", "--rows"): "3",
    ("features", "--layers"): "last",
    ("fill", "--top"): "5",
    ("evaluate", "--rows"): "0",
}
CALLS = [*cli.COMMANDS, "prep build", "prep verify", "prep inspect"]


def python(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("call", ["", "import", *CALLS])
def test_help_answers_before_slow_imports(call: str) -> None:
    args = ("-c", "import megabert") if call == "import" else ("-m", "megabert", *call.split(), "--help")
    started = time.perf_counter()
    done = python("-X", "importtime", *args)
    seconds = time.perf_counter() - started
    print(f"{args}: {seconds:.3f} s")
    assert done.returncode == 0 and seconds < 0.3 * SLOW_MACHINE
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    # quality rules, which the help of a build lists, are functions of arrays
    slow = {"torch", "pydantic", "deepspeed", "tqdm", "pyarrow"} | ({"numpy"} if "prep" not in call else set())
    assert "megabert" in imported and not imported & slow


def test_help_names_every_command_and_version_is_the_packages() -> None:
    done = python("-m", "megabert", "--help")
    assert re.findall(r"^  (\w+)  ", done.stdout, re.M) == list(cli.COMMANDS)
    assert python("-m", "megabert", "--version").stdout == "megabert 0.1.0\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "error: unknown command 'trian'; did you mean train?"),
        (["fine-tune", "--model", "x"], "error: unknown command 'fine-tune'; did you mean finetune?"),
        (["zzz"], "error: unknown command 'zzz'; choose one of doctor, prep, "),
        (["--model"], "error: unknown command '--model'; "),
        ([], "error: no command; choose one of doctor, "),
    ],
)
def test_a_misspelt_command_is_refused_with_the_nearest_one(args: list[str], message: str, capsys) -> None:
    assert cli.main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def shown(call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, Parser]:
    """The help of a command, and the parser that printed it."""
    printed: list[Parser] = []
    real = Parser.print_help
    monkeypatch.setattr(arguments, "_called_as", f"megabert {call.split()[0]}")
    monkeypatch.setattr(Parser, "print_help", lambda self, file=None: (printed.append(self), real(self, file))[1])
    name, *rest = call.split()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(cli.COMMANDS[name].module).main([*rest, "--help"])
    assert end.value.code == 0
    (parser,) = printed
    return capsys.readouterr().out, parser


@pytest.mark.parametrize("call", CALLS)
def test_help_of_every_command_shows_every_default(call: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text, parser = shown(call, monkeypatch, capsys)
    assert text.startswith(f"usage: megabert {call} ")
    assert "(default: None)" not in text and "(default: )" not in text and "(default: False)" not in text
    for action in parser._actions:
        assert action.help, f"{call}: {action.dest} says nothing"
        value = action.default
        if not action.option_strings or value in (None, "", [], False, argparse.SUPPRESS):
            continue
        value = " ".join(map(str, value)) if isinstance(value, list) else value
        name = action.option_strings[-1]
        (about,) = re.findall(rf"^  (?:-\w, )?{name}(?![-\w]).*(?:\n {{4,}}.*)*", text, re.M)
        assert " ".join(about.split()).endswith(f"(default: {value})"), about
    for (of, option), default in EXAMPLES.items():
        if of == call:
            assert re.search(rf"^  {option}\b[^()]*(?:\([^)]*\)[^()]*)*\(default: {default}\)$", text, re.M), option


@pytest.mark.parametrize(
    ("start", "usage"),
    [
        (("-m", "megabert", "doctor"), "python -m megabert doctor "),
        (("-m", "data_prep"), "python -m data_prep "),
        (("-m", "megabert", "prep", "build"), "python -m megabert prep build "),
        (("megabert/train.py",), "megabert/train.py "),
        (("-c", "import sys; sys.argv[0] = '/bin/megabert'; from megabert.__main__ import main; main()", "prep"), "megabert prep "),
    ],
)  # fmt: skip
def test_usage_says_how_it_was_called(start: tuple[str, ...], usage: str) -> None:
    done = python(*start, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {usage}"), done.stdout[:200] + done.stderr


def test_train_is_the_same_by_every_name() -> None:
    arguments = ("--config", "tiny", "--print-config", "schedule.total_steps=4321")
    ways = (("megabert/train.py",), ("-m", "megabert.train"), ("-m", "megabert", "train"))
    first, *others = (python(*way, *arguments) for way in ways)
    assert first.returncode == 0 and tomllib.loads(first.stdout)["schedule"]["total_steps"] == 4321
    for done in others:
        assert (done.returncode, done.stdout) == (0, first.stdout)


# mistakes of every command, and what its one line says
MISTAKES = {
    "train --config tiny --dta x": "unknown option --dta; did you mean --data?",
    "train --config tinny": "--config tinny: no such preset or file; presets: ",
    "train --config tiny model.layres=3": "unknown config key model.layres; did you mean model.layers?",
    "train --config tiny model.layers=three": "model.layers: Input should be a valid integer (got 'three')",
    "train --config tiny": "--data is missing: name a folder",
    "train --config tiny --data nowhere --run x": "--data nowhere: no dataset (manifest.json) there; ",
    "train --config tiny --explain shedule": "--explain shedule: no such section or key; did you mean schedule?",
    "prep build --inptu x --output y": "unknown option --inptu; did you mean --input?",
    "prep build --no-nsp --input x --output y": "unknown option --no-nsp; did you mean --nsp?",
    "prep biuld": "argument command: invalid choice: 'biuld'",
    "plan --config tiny --over 8": "--over belongs to a forecast: name the GPU with --gpus",
    "plan --config tinny --gpus h100": "--config tinny: no such preset or file; presets: ",
    "evaluate --model nowhere --data x": "nowhere: no such folder; ",
    "evaluate --model . --data nowhere": "nowhere/manifest.json: not found; a dataset is made by ",
    "distill --model nowhere --layers 2 --data x --run y": "nowhere: no such folder; ",
    "finetune --taks sst2 --model x --output y": "unknown option --taks; did you mean --task?",
    "glue --model x --dta y --output z": "unknown option --dta; did you mean --data?",
    "features --model nowhere --input a --output b.npy": "nowhere: no such folder; ",
    "features --model . --input absent.txt --output b.npy": "--input absent.txt: no such file",
    "pairs --model nowhere --pairs x": "nowhere: no such folder; ",
    "report nowhere": "nowhere: ",
    "fill --modle x text": "unknown option --modle; did you mean --model?",
    "fill --model . text": "the text has no [MASK]; ",
    "fill --model nowhere [MASK]": "nowhere: no such folder; ",
    "export --model nowhere --output x": "nowhere: no such folder; ",
    "convert --model nowhere --run x": "nowhere: no such folder; ",
    "doctor --clustr": "unknown option --clustr",
    "verify nowhere": "nowhere/checkpoints: no such folder; ",
    "replay nowhere": "nowhere/checkpoints: no such folder; ",
}
MISTAKEN = """
import contextlib, io, json, sys
from megabert import __main__ as cli
found = []
for call in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = cli.main(call.split())
    found.append([code, stderr.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""


def test_mistakes_are_one_line_before_torch_is_imported() -> None:
    assert {call.split()[0] for call in MISTAKES} == set(cli.COMMANDS)
    done = python("-c", MISTAKEN, json.dumps([*MISTAKES]))
    assert done.returncode == 0 and not done.stdout.startswith("\n"), done.stderr
    for (call, said), (code, error, torch) in zip(MISTAKES.items(), json.loads(done.stdout), strict=True):
        assert code == 2 and error.startswith(f"error: {said}") and error.count("\n") == 1, (call, error)
        assert not torch, f"{call}: torch is imported before its mistake is answered"
        assert len(error) < 350, error


WAITING = """
import importlib, sys, time
def slow(name):  # as imports on a cold disk are
    print("importing", name, flush=True)
    time.sleep(60)
importlib.import_module = slow
from megabert import __main__ as cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("name", "code"), [("train", 85), ("finetune", 85), ("fill", -signal.SIGTERM)])
def test_a_signal_before_the_imports_ends_a_training_to_be_started_again(name: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("importing megabert.")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == code
    finally:
        process.kill()
        process.wait()


def test_a_run_folder_that_is_written_stays_run(tmp_path, capsys) -> None:
    assert convert.main(["--model", str(tmp_path / "nowhere"), "--run", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_profile_needs_its_rank(tmp_path, capsys) -> None:
    from megabert import train

    data = Path(__file__).parent / "data/golden/dataset"
    arguments = ["--config", "tiny", "--data", str(data), "--run", str(tmp_path / "missing")]
    assert train.main([*arguments, "--profile-rank", "9"]) == 2
    assert "--profile-rank 9: this run has 1 rank(s), from 0 on" in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()
