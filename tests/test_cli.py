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
    assert first.returncode == 0 and json.loads(first.stdout)["schedule"]["total_steps"] == 4321
    for done in others:
        assert (done.returncode, done.stdout) == (0, first.stdout)


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


def test_a_replay_needs_a_run_and_a_profile_its_rank(tmp_path, capsys) -> None:
    from megabert import train

    arguments = ["--config", "tiny", "--data", str(tmp_path), "--run", str(tmp_path / "missing")]
    assert train.main([*arguments, "--replay", "2"]) == 2
    assert "missing: no run to --replay an update of (no config.json)" in capsys.readouterr().err
    assert train.main([*arguments, "--profile-rank", "9"]) == 2
    assert "--profile-rank 9: this run has 1 rank(s), from 0 on" in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()
