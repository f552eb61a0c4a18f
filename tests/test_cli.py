"""`megabert NAME …` names every command, answers at once, and is the same as every other way of starting one."""

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megabert import __main__ as cli
from megabert.common import arguments
from megabert.common.arguments import Parser
from megabert.distributed import signals

ROOT = Path(__file__).resolve().parents[1]
SLOW_MACHINE = 5  # a shared one, against the 0.3 s of a quiet one
# what no command's help may leave out: an option of a command, and its default
EXAMPLES = {
    "finetune --lr": "5e-05; of models narrower than 768: 0.0003; with --freeze: 0.01", "finetune --precision": "auto",
    "finetune --seeds": "1", "prep build --vocab-size": "30000", "prep build --dedup": "documents",
    "prep inspect --rows": "3", "features --layers": "last", "fill --top": "5", "evaluate --rows": "0",
}  # fmt: skip
CALLS = [*cli.COMMANDS, "prep build", "prep verify", "prep inspect", "prep push"]


def python(*args: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *map(str, args)], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


# calls, each in a child of one process that has imported the named modules
FORKED = """
import contextlib, importlib, io, json, os, sys, time
from megabert import __main__ as cli
for name in sys.argv[2:]:
    importlib.import_module(name)
sys.argv[0] = "megabert"
def answer(call):
    read, write = os.pipe()
    if not os.fork():
        started = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()) as stdout:
            code = cli.main(call.split())
        took, modules = time.perf_counter() - started, sorted({name.split(".")[0] for name in sys.modules})
        with open(write, "w") as file:
            json.dump({"end": (code, stdout.getvalue(), stderr.getvalue()), "modules": modules, "seconds": took}, file)
        os._exit(0)
    os.close(write)
    with open(read) as file:
        return json.load(file)
print(json.dumps({call: answer(call) for call in json.load(open(sys.argv[1]))}))
"""


def answers_of(calls: Iterable[str], folder: Path, *imports: str) -> dict[str, Any]:
    """What `megabert call` answers in `folder`, in which it leaves nothing."""
    before = sorted(folder.rglob("*"))
    (folder / "calls").write_text(json.dumps([*calls]))
    done = python("-c", FORKED, folder / "calls", *imports, cwd=folder)
    (folder / "calls").unlink()
    assert done.returncode == 0, done.stderr
    assert sorted(folder.rglob("*")) == before, "a call left files"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answers_of(["--version", *(f"{call} --help" for call in ["", *CALLS])], tmp_path_factory.mktemp("helps"))


@pytest.mark.parametrize("call", ["", *CALLS])
def test_help_answers_before_slow_imports(call: str, helps: dict[str, Any]) -> None:
    (code, shown, _), seconds = helps[f"{call} --help"]["end"], helps[f"{call} --help"]["seconds"]
    print(f"{call}: {seconds:.3f} s")
    assert code == 0 and seconds < 0.3 * SLOW_MACHINE
    # quality rules, which the help of a build lists, are functions of arrays
    slow = {"torch", "pydantic", "deepspeed", "tqdm", "pyarrow"} | ({"numpy"} if "prep" not in call else set())
    assert shown.startswith(f"usage: megabert {call}".rstrip()) and not slow & {*helps[f"{call} --help"]["modules"]}
    if not call:
        assert re.findall(r"^  (\w+)  ", shown, re.M) == list(cli.COMMANDS)
        assert helps["--version"]["end"] == [0, "megabert 0.1.0\n", ""]


@pytest.mark.parametrize("call", CALLS)
def test_help_of_every_command_shows_every_default(call: str, monkeypatch, capsys) -> None:
    printed: list[Parser] = []
    real = Parser.print_help
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(arguments, "_called_as", f"megabert {call.split()[0]}")
    monkeypatch.setattr(Parser, "print_help", lambda self, file=None: (printed.append(self), real(self, file))[1])
    name, *rest = call.split()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(cli.COMMANDS[name].module).main([*rest, "--help"])
    (parser,), text = printed, capsys.readouterr().out
    assert end.value.code == 0 and text.startswith(f"usage: megabert {call} ")
    assert not any(f"(default: {nothing})" in text for nothing in (None, "", False))
    for action in parser._actions:
        assert action.help, f"{call}: {action.dest} says nothing"
        value = action.default
        if not action.option_strings or value in (None, "", [], False, argparse.SUPPRESS):
            continue
        value = " ".join(map(str, value)) if isinstance(value, list) else value
        name = action.option_strings[-1]
        (about,) = re.findall(rf"^  (?:-\w, )?{name}(?![-\w]).*(?:\n {{4,}}.*)*", text, re.M)
        assert " ".join(about.split()).endswith(f"(default: {value})"), about
    for example, default in EXAMPLES.items():
        of, _, option = example.rpartition(" ")
        if of == call:
            assert re.search(rf"^  {option}\b[^()]*(?:\([^)]*\)[^()]*)*\(default: {default}\)$", text, re.M), option


@pytest.mark.parametrize(
    ("start", "usage"),
    [
        (("-m", "megabert", "doctor"), "python -m megabert doctor "),
        (("-m", "data_prep"), "python -m data_prep "),
        (("-m", "megabert", "prep", "build"), "python -m megabert prep build "),
        (("megabert/train.py",), "megabert/train.py "),
        (("-m", "megabert.train"), "python -m megabert.train "),
        (("-c", "import sys; sys.argv[0] = '/bin/megabert'; from megabert.__main__ import main; main()", "prep"), "megabert prep "),
    ],
)  # fmt: skip
def test_usage_says_how_it_was_called(start: tuple[str, ...], usage: str) -> None:
    done = python(*start, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {usage}"), done.stdout[:200] + done.stderr


def test_train_prints_its_configuration() -> None:
    done = python("megabert/train.py", "--config", "tiny", "--print-config", "schedule.total_steps=4321")
    assert done.returncode == 0 and tomllib.loads(done.stdout)["schedule"]["total_steps"] == 4321


NO_FOLDER = ": no such folder; name a run folder"
NO_MODEL = ": no checkpoint in it, so it is not a run"
NO_DATASET = ": no dataset (manifest.json) there; `megabert prep build"
NO_MANIFEST = "/manifest.json: not found; a dataset is made by "
CHECKPOINTS = "/checkpoints: no such folder; name a run folder"
NO_TASK, NO_FILE = "name one --task (cola, sst2, ", ": no such file"
TRAIN, DATA = "train --config tiny ", "train --config tiny --data data --run x "
BUILD, PLAN, TUNE = "prep build --input text.txt --output x ", "plan --config tiny ", "finetune --model run --output x "
FILES = "--task sst2 --train text.txt --dev text.txt"
VECTORS, PAIRS = "features --model run --input text.txt --output x.npy ", "pairs --model run --pairs text.txt "
# what a call lacks
REQUIRED = {
    "prep": "command", "prep build": "--input, --output", "prep verify": "DIR", "prep push data": "OWNER/NAME",
    "evaluate --data data": "--model", "distill --model run": "--layers, --data, --run", "pairs": "--model, --pairs",
    "finetune": "--model, --output", "glue": "--model, --data, --output", "report": "RUN", "fill text": "--model",
    "export --output x": "--model", "average --run run": "--output", "convert --model run": "--run", "verify": "RUN",
    "replay": "RUN",
}  # fmt: skip
# calls with a misspelt option, and what is meant
MISSPELT = {
    TRAIN + "--dta x": "dta data", PLAN + "--gpsu h100": "gpsu gpus", "prep verify --quite data": "quite quiet",
    "prep build --inptu x --output y": "inptu input", "prep build --no-nsp --input x --output y": "no-nsp nsp",
    "evaluate --modle run --data data": "modle model", "fill --modle x text": "modle model",
    "distill --model run --layers 2 --dta data --run x": "dta data", VECTORS + "--otuput y": "otuput output",
    "finetune --taks sst2 --model run --output x": "taks task", "glue --model run --dta glue --output x": "dta data",
    PAIRS + "--preciison bf16": "preciison precision", "report run --otuput x": "otuput output",
    "export --model run --otuput x": "otuput output", "average --rnu run --output x": "rnu run",
    "convert --model run --rnu x": "rnu run", "doctor --clustr": "clustr cluster", "verify --hed x run": "hed head",
    "replay run --form 2": "form from", "quickstart --stpes 3": "stpes steps",
}  # fmt: skip
# what is said of a folder that is missing and of an empty one, and the calls that end with it
FOLDERS = (
    (NO_DATASET, NO_DATASET, "prep verify", "prep inspect"),
    (NO_MANIFEST, NO_MANIFEST, "evaluate --model run --data", "distill --model run --layers 2 --run x --data"),
    (CHECKPOINTS, CHECKPOINTS, "verify", "replay"),
    (NO_FOLDER, NO_MODEL, "evaluate --data data --model", "distill --layers 2 --data data --run x --model"),
    (NO_FOLDER, NO_MODEL, f"finetune --output x {FILES} --model", "glue --data glue --output x --model"),
    (NO_FOLDER, NO_MODEL, "features --input text.txt --output x.npy --model", "pairs --pairs text.txt --model"),
    (NO_FOLDER, NO_MODEL, "export --output x --model", "convert --run x --model", "fill [MASK] --model"),
)
# mistakes of every command in a folder with a run (`run`, one checkpoint, empty), a dataset (`data`), an empty folder and files, and
# what the one line says
MISTAKES = {
    **{call: f"the following arguments are required: {names}" for call, names in REQUIRED.items()},
    **{call: "unknown option --{}; did you mean --{}?".format(*names.split()) for call, names in MISSPELT.items()},
    **{f"{call} nowhere": f"nowhere{said}" for said, _, *calls in FOLDERS for call in calls},
    **{f"{call} empty": f"empty{said}" for _, said, *calls in FOLDERS for call in calls},
    "": "no command; choose one of quickstart, doctor, ",
    "trian": "unknown command 'trian'; did you mean train?",
    "fine-tune --model x": "unknown command 'fine-tune'; did you mean finetune?",
    "zzz": "unknown command 'zzz'; choose one of quickstart, doctor, prep, ",
    "--model": "unknown command '--model'; ",
    "train": "--data is missing: name a folder",
    "train --config tinny": "--config tinny: no such preset or file; presets: ",
    "train --config bad.toml": "bad.toml: Invalid value (at line 1, ",
    "train --config empty": "--config empty: no such preset or file; ",
    "train --config": "argument --config: expected one argument",
    "train --explain shedule": "--explain shedule: no such section or key; did you mean schedule?",
    TRAIN + "--data data": "--run is missing: name a folder",
    TRAIN + "--data https://me:word@h/x --run x": "files of the run would show the password in a URL; ",
    TRAIN + "--data nowhere --run x": f"--data nowhere{NO_DATASET}",
    TRAIN + "--data empty --run x": f"--data empty{NO_DATASET}",
    TRAIN + "--data data --run text.txt": "--run text.txt: is a file; name a folder",
    DATA + "model.layres=3": "unknown config key model.layres; did you mean model.layers?",
    DATA + "init_from=nowhere": "init_from=nowhere: no checkpoint in it; ",
    DATA + "init_from=empty": "init_from=empty: no checkpoint in it; ",
    DATA + "init_moments=true": "init_moments=true: name the run whose weights and moments start this one",
    DATA + "schedule.budget_minutes=9": "schedule.budget_minutes: has no effect without schedule.by=minutes; ",
    DATA + "--deepspeed_config nowhere": "nowhere: No such file or directory",
    DATA + "--deepspeed_config text.txt": "--deepspeed_config text.txt: not valid JSON ",
    DATA + "--max-time soon": "--max-time soon: write 90 (minutes), ",
    DATA + "--profile 3": "--profile 3: write the first and the last update, as 10:20",
    DATA + "--profile-rank 9": "--profile-rank 9: must be in [0, 1)",
    DATA + "--stop-after 0": "--stop-after 0: must be 1 or more",
    "prep biuld": "argument command: invalid choice: 'biuld'",
    "prep build --input nowhere --output x": "--input nowhere: no such file or folder",
    "prep build --input empty --output x": "--input empty: no text there ",
    "prep build --input text.txt --output text.txt": "--output text.txt: is a file; name a folder",
    "prep build --input text.txt --output s3://texts/a[1]": "--output s3://texts/a[1]: has a wildcard (*, ? or [)",
    BUILD + "--tokenizer nowhere": "nowhere: tokenizer file not found",
    BUILD + "--tokenizer empty": "empty: is a folder; name the tokenizer file in it",
    BUILD + "--seq-len 1": "--seq-len: must lie in 8..8192, is 1",
    BUILD + "--filters min-wrds=3": "--filters min-wrds=3: no rule 'min-wrds'; the nearest is 'min-words'",
    BUILD + "--filters nowhere.py:f": "--filters nowhere.py:f: ",
    BUILD + "--part 3": "--part 3: give K/N with K from 1 to N",
    BUILD + "--part 3/2": "--part 3/2: give K/N with K from 1 to N",
    BUILD + "--part 1/2 --overwrite": "--part: excludes --overwrite and --json",
    BUILD + "--weight input=2 input=3": "--weight input=3: the corpus has another weight before",
    BUILD + "--json nowhere/x": "--json nowhere/x: its folder does not exist; ",
    BUILD + "--json empty": "--json empty: is a folder, or in --output, ",
    BUILD + "--near-words 4": "--near-words: is of --dedup near, which is not given",
    "prep verify data --workers 0": "--workers: must be at least 1, is 0",
    "prep inspect data --rows -1": "--rows: must be at least 0, is -1",
    "prep push nowhere some/rows": f"nowhere{NO_DATASET}",
    "prep push data rows": "rows: not a repository name; use OWNER/NAME",
    "plan --config base schedule.budget_minutes=9": "schedule.budget_minutes: has no effect without schedule.by=minutes; ",
    "plan --config tinny --gpus h100": "--config tinny: no such preset or file; presets: ",
    PLAN + "model.layres=3": "unknown config key model.layres; did you mean model.layers?",
    PLAN + "--data nowhere": f"nowhere{NO_MANIFEST}",
    PLAN + "--data empty --gpus h100": f"empty{NO_MANIFEST}",
    PLAN + "--deepspeed_config nowhere": "nowhere: No such file or directory",
    PLAN + "--world-size 0": "--world-size 0: give a number above 0",
    PLAN + "--over 8": "--over belongs to a forecast: name the GPU with --gpus",
    PLAN + "--gpus h1000": "--gpus h1000: not in the device table; choose one of v100, ",
    PLAN + "--gpus h100 --over 0": "--over 0: give numbers of GPUs from 1 on",
    PLAN + "--gpus h100 --over 20": "--over 20 is not a whole number of nodes of 8",
    PLAN + "--gpus h100 --nodes-of 0": "--nodes-of 0: a node has at least 1 GPU",
    PLAN + "--gpus h100 --network fast": "--network fast: write ADAPTERSxGBITS a node, ",
    "evaluate --model data --data data": f"data{NO_MODEL}",
    "evaluate --model run --data data empty": f"empty{NO_MANIFEST}",
    "evaluate --model some/bert --data empty": f"empty{NO_MANIFEST}",
    "evaluate --model run --data data --rows -1": "--rows -1: must be 0 or more",
    "distill --model run --layers 0 --data data --run x": "--layers 0: must be 1 or more",
    "distill --model run --layers 2 --data data --run text.txt": "--run text.txt: is a file; name a folder",
    "distill --model some/bert --layers 2 --data empty --run x": f"empty{NO_MANIFEST}",
    "distill --model run --layers 2 --data data --run x batch.micro=1": "unknown config key batch.micro; did you mean ",
    "finetune --model empty --output x --predict text.txt": "empty: not a fine-tuned model (no task.json in it)",
    TUNE: NO_TASK,
    TUNE + "--task sst2 --kind classify": NO_TASK,
    TUNE + "--task sst3": "no task 'sst3'; known are cola, sst2, ",
    TUNE + "--kind clasify": "argument --kind: invalid choice: 'clasify'",
    "finetune --model run --output s3://b/x --task sst2": "s3://b/x: is a URL; name a place on this machine, ",
    "glue --model run --data glue --output s3://b/x": "s3://b/x: is a URL; ",
    "quickstart --output s3://b/x": "s3://b/x: is a URL; ",
    TUNE + "--kind classify": "task custom: classify takes one or two text columns and a label column; ",
    TUNE + "--task sst2 --metric nosuch": "task sst2: metric 'nosuch' is none of those of classify: accuracy, ",
    TUNE + "--task sst2": "--train is missing: name a file",
    TUNE + "--task sst2 --train text.txt": "--dev is missing: name a file",
    TUNE + "--task sst2 --train nowhere --dev text.txt": f"--train nowhere{NO_FILE}",
    TUNE + f"{FILES} --lr 3": "--lr 3: must be above 0 and below 1",
    TUNE + f"{FILES} --lines": "--lines: is for --predict, not for training",
    TUNE + "--predict nowhere": f"--predict nowhere{NO_FILE}",
    TUNE + "--predict text.txt": "run: not a fine-tuned model (no task.json in it)",
    TUNE + "--predict text.txt --limit 3": "--limit: is for training, not for --predict",
    TUNE + "--predict text.txt --lines --id n": "--id: names a column, and with --lines the file has none",
    "glue --model run --data nowhere --output x": "nowhere: no such folder; name the folder of the tasks as --data",
    "glue --model run --data data --output x": "data: has no task of GLUE; ",
    "glue --model run --data glue --output x --tasks rte": "glue: has no rte; ",
    "glue --model run --data glue --output x --epochs 0": "--epochs 0: must be at least 1",
    VECTORS + "--pool none": "x.npy: .npy holds one vector a text; ",
    VECTORS + "--pool sum": "argument --pool: invalid choice: 'sum'",
    VECTORS + "--layers first": "--layers first: expected last, N",
    VECTORS + "--text a": "text.txt: --text names the column of a .tsv, ",
    VECTORS + "--max-length -1": "--max-length -1: must be 0 or more",
    VECTORS + "--batch-tokens 0": "--batch-tokens 0: must be 1 or more",
    VECTORS + "--tokenizer nowhere": f"--tokenizer nowhere{NO_FILE}",
    "features --model run --input nowhere --output x.npy": f"--input nowhere{NO_FILE}",
    "features --model run --input text.txt --output x.csv": "x.csv: must end in .parquet, .npy",
    "features --model run --input text.txt --output nowhere/x.npy": "nowhere: no such folder",
    "pairs --model run --pairs nowhere": "nowhere: neither a .jsonl or .txt file nor a folder",
    "pairs --model run --pairs empty": "empty: neither a .jsonl or .txt file nor a folder",
    PAIRS: "text.txt: has 1 lines, which are not pairs; ",
    PAIRS + "--precision fp8": "argument --precision: invalid choice: 'fp8'",
    PAIRS + "--each -1": "--each -1: must be 0 or more",
    PAIRS + "--json nowhere/x": "nowhere: no such folder",
    PAIRS + "--json empty": "--json empty: is a folder; name a file",
    "report nowhere": "nowhere: is not a run folder ",
    "report empty": "empty: is not a run folder ",
    "fill --model run [MASK] --top 0": "--top 0: must be 1 or more",
    "fill --model run [MASK] --tokenizer nowhere": f"--tokenizer nowhere{NO_FILE}",
    "export --model run": "name a folder with --output, a repository of the hub with --push, or both",
    "export --model run --output x --private": "--private: is for --push OWNER/NAME",
    "export --model run --push bert": "bert: not a repository name; use OWNER/NAME",
    "export --model run --output text.txt": "text.txt: exists and is not a folder; name another folder",
    "export --model some/bert --output glue": "glue: is not empty; name another folder",
    "export --model run --output glue": "glue: is not empty; name another folder",
    "export --model run --output x --sentence-transformers max": "argument --sentence-transformers: invalid choice: 'max'",
    "average --run nowhere --output x": f"nowhere{CHECKPOINTS}",
    "average --run run --output x": "run/checkpoints: 1 checkpoints to average, of 2; ",
    "average --run run --output x --last 1": "--last 1: give at least 2 checkpoints",
    "average --run run --output x --steps 3": "--steps 3: give at least 2 checkpoints",
    "average --run run --output x --steps 1 3": "--steps 3: run/checkpoints has no such checkpoint; it has 1",
    "convert --model run --run x": "run: holds no model.safetensors and no pytorch_model.bin",
    "convert --model run --run x --vocab nowhere": f"--vocab nowhere{NO_FILE}",
    "convert --model some/bert --run glue": "glue: is not empty; name another folder",
    "convert --model run --run glue --vocab data": "glue: is not empty; name another folder",
    "doctor --folder .": "--folder . belongs to --cluster: add that, or remove it",
    "doctor --cluster --folder nowhere": "--folder nowhere: no such folder",
    "verify run": "run/checkpoints/chain.jsonl: is missing or empty",
    "replay run --to 3": "run/checkpoints/chain.jsonl: is missing or empty",
}  # fmt: skip
IMPORTED = (
    "data_prep.build data_prep.report.inspect_dataset megabert.commands.plan.step_time megabert.finetune.__main__"
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each of MISTAKES."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("empty", "glue/SST-2", "run/checkpoints/step-00000001"):
        (folder / name).mkdir(parents=True)
    (folder / "data").symlink_to(ROOT / "tests/data/golden/dataset")
    (folder / "text.txt").write_text("one line\n")
    (folder / "bad.toml").write_text("text =\n")
    for name in ("train.tsv", "dev.tsv"):
        (folder / "glue/SST-2" / name).write_text("sentence\tlabel\n")
    return answers_of(MISTAKES, folder, *IMPORTED.split())


@pytest.mark.parametrize("call", MISTAKES)
def test_a_mistake_is_one_line_without_torch(call: str, answers: dict[str, Any]) -> None:
    code, shown, error = answers[call]["end"]
    assert (code, shown) == (2, "") and error.startswith(f"error: {MISTAKES[call]}") and error.count("\n") == 1, error
    assert "torch" not in answers[call]["modules"], "torch is imported before the mistake is answered"
    assert len(error) < 350, error


def test_every_command_has_mistakes() -> None:
    assert {" ".join(call.split()[: 2 if call.startswith("prep ") else 1]) for call in MISTAKES} >= {*CALLS}


NOTHING = signals.NOTHING.decode()
WAITING = """
import importlib, sys, time
def slow(name):  # as imports on a cold disk are; compiled code prints an exception and continues
    print("importing", name, flush=True)
    for _ in range(2):
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            print("lost", file=sys.stderr)
importlib.import_module = slow
from megabert import __main__ as cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("name", "number", "code", "said"),
    [
        ("train", signal.SIGTERM, 85, NOTHING),
        ("train", signal.SIGINT, 85, f"\n{NOTHING}"),
        ("finetune", signal.SIGTERM, 85, NOTHING),
        ("glue", signal.SIGINT, 85, f"\n{NOTHING}"),
        ("fill", signal.SIGTERM, -signal.SIGTERM, ""),
        ("fill", signal.SIGINT, 130, "error: interrupted\n"),
    ],
)
def test_a_signal_in_the_imports_is_one_line(name: str, number: int, code: int, said: str) -> None:
    command = [sys.executable, "-c", WAITING, name]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("importing megabert.")
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
        assert (process.returncode, error) == (code, said)
    finally:
        process.kill()
        process.wait()
