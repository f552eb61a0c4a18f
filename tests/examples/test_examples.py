"""Every example runs as it is, on a small dataset, and does what its first line says."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megabert import hf as pretrained
from megabert.checkpoint import write_start
from megabert.commands import quickstart
from megabert.commands.quickstart import results
from megabert.config import Config, ModelConfig
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.helpers import runs
from tests.helpers.golden_runs import random_rows
from tests.integration.conftest import BIN, ROOT

SMALL = (
    "model.hidden=32 batch.global_size=32 schedule.total_steps=8 schedule.warmup_steps=2 log.interval=4 eval.rows=64"
)
SIZES = {"VOCAB": "600", "SEQ_LEN": "64"}
OLD = ROOT / "tests/data/golden/dataset"  # 28 held-out rows


def run(*command: object, cwd: Path = ROOT, **env: str) -> str:
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "2"} | env
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run_here() -> None:
    own = Path(__file__).read_text()
    for path in sorted((ROOT / "examples").iterdir()):
        assert path.suffix not in (".py", ".sh", ".ipynb") or f'"examples/{path.name}"' in own, path.name


def test_read_shards(dataset) -> None:
    shown = run(sys.executable, "examples/read_shards.py", dataset)
    rows = re.search(r"([\d,]+) rows of 64 tokens", shown)
    assert rows and int(rows[1].replace(",", "")) > 500, shown
    assert re.search(r"input_ids +int32 +\[4, 64\]", shown)
    assert shown.count("->") == 1 + shown.count("' ->") + shown.count("[MASK] ->"), shown
    assert shown.count("[MASK] ->") >= 2, "of nine or ten predictions about eight are shown as [MASK]"


@pytest.mark.slow
def test_train_loop(dataset, tmp_path) -> None:
    shown = run(sys.executable, "examples/train_loop.py", dataset, 20)
    losses = [float(loss) for loss in re.findall(r"update +\d+  loss (\d+\.\d+)", shown)]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.8, losses
    assert "update    9" in run(sys.executable, "examples/train_loop.py", dataset, 10)
    assert "update    0" in run(sys.executable, "examples/train_loop.py", random_rows(tmp_path, 64, 0, seq_len=600), 1)


@pytest.mark.slow
@pytest.mark.dist
def test_own_text(corpus, tmp_path) -> None:
    out = tmp_path / "out"
    shown = run("examples/own_text.sh", out, corpus, **SIZES, EXTRA=SMALL)
    assert '"step": 8' in shown and np.load(out / "vectors.npy").shape == (2, 32)
    (out / "hf/model.safetensors").unlink()
    run("examples/own_text.sh", out, corpus, **SIZES, EXTRA=SMALL)
    assert (out / "hf/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.dist
def test_continue(corpus, tmp_path) -> None:
    """General text and one's own are halves of the corpus, told apart by name in the figures before and after."""
    lines = (corpus / "topics.jsonl").read_text().splitlines(keepends=True)
    for name, half in (("general", lines[::2]), ("own", lines[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(half))
    sizes = {**SIZES, "BASE": SMALL, "EXTRA": f"{SMALL} eval.interval=2 checkpoint.interval=2"}
    sizes["PHASES"] = '[{share = 0.3, data.masking.strategy = "causal"}, {share = 0.7}]'
    out = tmp_path / "out"
    shown = run("examples/continue.sh", out, tmp_path / "general.jsonl", tmp_path / "own.jsonl", **sizes)
    before, after, mean = (json.loads(line) for line in shown.splitlines() if line.startswith('{"step"'))
    for figures in (before, after, mean):
        assert {f"eval/loss_by_dataset/{name}" for name in ("general", "own")} <= figures.keys()
    assert before["step"] == 8 and 0 < after["step"] <= 8 and mean["step"] == 0
    assert (out / "continued/best").resolve().name == f"step-{after['step']:08d}"
    assert re.search(r"step +1  causal loss", shown) and "step 4: phase 2 of 2" in shown


def write_constant(folder: Path) -> tuple[int, Tokenizer]:
    """Writes the run of a model that predicts the dataset's most frequent token whatever it reads: that, and its tokenizer."""
    tokenizer = Tokenizer.load(shutil.copy(OLD / "tokenizer.model", folder))
    rows = Dataset(OLD).read(np.arange(536)).ids.ravel()
    most = int(np.bincount(rows[rows > 4]).argmax())
    cfg = ModelConfig(layers=1, hidden=16, heads=1, vocab_size=tokenizer.vocab_size, max_positions=64, nsp=False)
    weights = runs.model(cfg).state_dict()
    weights["embeddings.word.bias"][most] = 1e3
    state = {"config": Config(model=cfg).model_dump(), "dataset": "d" * 64, "tokenizer": tokenizer.sha256}
    write_start(folder, weights, state | {"seconds": 1.0})
    return most, tokenizer


def test_python_api(tmp_path, monkeypatch, capsys) -> None:
    write_constant(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python_api.py", str(tmp_path), str(OLD)])
    runpy.run_path(str(ROOT / "examples/python_api.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "(2, 16)\n" in shown and ", 800]) True\n" in shown and "536 rows: {'ids': [4, 64]" in shown
    assert float(shown.split("loss ")[1]) > 100, "a wrong answer given with certainty"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.warmup_steps=50", "schedule.warmup_steps=50 exceeds schedule.total_steps=40"),
        ("schedule.total_steps=100", "schedule.total_steps=100: give --steps"),
        ("model.max_positions=64", "data.seq_len=128 is above model.max_positions=64"),
    ],
)
def test_the_quickstart_refuses_before_it_replaces(override: str, message: str, tmp_path, capsys) -> None:
    earlier = tmp_path / "run/report.html"
    earlier.parent.mkdir()
    earlier.touch()
    (tmp_path / quickstart.MARK).touch()
    assert quickstart.main([override, "--output", str(tmp_path), "--steps", "40", "--input", "nowhere"]) == 2
    assert message in capsys.readouterr().err and earlier.is_file()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--input", "nowhere"), "--input nowhere: no such file"),
        (("--vocab-size", "1"), "--vocab-size: must lie in 16.."),
    ],
)
def test_the_quickstart_replaces_after_the_build_has_begun(
    option: tuple[str, str], message: str, tmp_path, capfd
) -> None:
    earlier = tmp_path / "run/report.html"
    earlier.parent.mkdir()
    earlier.touch()
    (tmp_path / quickstart.MARK).touch()
    with pytest.raises(SystemExit, match="2"):
        quickstart.main(["--output", str(tmp_path), *option])
    assert message in capfd.readouterr().err and earlier.is_file()


def test_an_interrupted_quickstart_waits_for_its_command_and_says_what_is_left(tmp_path) -> None:
    """Ctrl-C reaches both. The command, which takes a second to save, is no longer there afterwards."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), print('saved', flush=True), os._exit(85)))\n"
        "os.kill(os.getppid(), signal.SIGINT)\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    code = (
        "import sys; from megabert.commands import quickstart\n"
        "quickstart.quickstart = lambda args: quickstart.run('slow')\nsys.exit(quickstart.main(['--output', 'x']))"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=60
    )
    assert done.returncode == 130 and done.stdout == "saved\n"
    assert done.stderr == "\nerror: interrupted: x is unfinished; the same command begins again\n"


def test_the_quickstart_shows_what_was_learned(tmp_path, capsys) -> None:
    """The two accuracies are one, counted here too."""
    most, tokenizer = write_constant(tmp_path)
    lines = [{"step": n, "train/loss": 9.0 - n / 10} for n in range(1, 61)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results.main(str(tmp_path), str(OLD))
    shown = capsys.readouterr().out
    figures = re.search(r"accuracy: ([\d.]+%) of ([\d,]+) held-out masks; .*? \('(.*)'\): ([\d.]+%)", shown)
    assert figures and figures[1] == figures[4] and figures[3] == "a blank" and tokenizer.tokens[most] == " "
    held_out = Dataset(OLD / "held_out").read(np.arange(28)).ids
    share = (held_out == most).sum() / (held_out > 4).sum()
    assert abs(float(figures[1][:-1]) / 100 - share) < 0.03
    assert 150 < int(figures[2]) < 0.16 * held_out.size
    assert shown.count("[MASK]") == 1 + 3 and shown.count("untrained: ") == shown.count("  trained:   ") == 3
    trained = [line.split(": ")[1].lstrip() for line in shown.splitlines() if "  trained:" in line]
    assert all(words.startswith("'' 100%") for words in trained)
    assert shown.splitlines()[:2] == [
        "training loss, updates 1 to 60, the mean of each tenth",
        "  8.65 8.05 7.45 6.85 6.25 5.65 5.05 4.45 3.85 3.25",
    ]


@pytest.mark.slow
def test_notebook(tmp_path) -> None:
    """Its cells in one process, with fewer updates."""
    cells = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(code.replace("UPDATES = 300", "UPDATES = 40"))
    shown = run(sys.executable, "cells.py", cwd=tmp_path, MPLBACKEND="Agg", PYTHONPATH=str(ROOT))
    assert "(3, 128)" in shown and len(re.findall(r"^ *\d+\.\d% ", shown, re.MULTILINE)) == 5, shown
    assert (tmp_path / "runs/notebook/curve.png").stat().st_size > 5000
    assert "eval/mlm_loss" in shown and (tmp_path / "runs/notebook/run/metrics.jsonl").is_file()


@pytest.mark.slow
def test_sentence_vectors_text_is_no_negative_of_itself(tmp_path) -> None:
    """Of pairs (a, b), (b, c): no batch has both, and a search by b does not find b."""
    from sentence_transformers import SentenceTransformer

    example = runpy.run_path(str(ROOT / "examples/train_sentence_vectors.py"))
    runs.make(tmp_path / "run")
    example["export"](str(tmp_path / "run"), str(tmp_path / "start"), pool="mean")
    model = SentenceTransformer(str(tmp_path / "start"), device="cpu")
    words = sorted(set(re.findall(r"[a-z]{4,}", " ".join(runs.TEXT))))[:40]
    pairs = [*pairwise(words), *pairwise(words[::-1])]
    loader = example["trainer_of"](model, pairs, str(tmp_path)).get_train_dataloader()
    batches = list(loader.batch_sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(pairs)))
    for batch in batches:
        texts = [text for i in batch for text in pairs[i]]
        assert len(set(texts)) == len(texts)
    searched = [("one two", "one two three"), ("one two three", "one two")]
    assert example["evaluator_of"](searched)(model)["held-out_cosine_mrr@10"] == 1.0


@pytest.mark.slow
def test_train_sentence_vectors(tmp_path) -> None:
    """The nDCG of a search is printed before and after, and the trained folder is read by the library and by us."""
    rng = np.random.default_rng(1)
    words = sorted(set(re.findall(r"\w+", " ".join(runs.TEXT[:3]))))
    paragraphs = []
    for _ in range(80):
        context = rng.permutation(words)[:8].tolist()
        question = " ".join(rng.permutation(context)[:4])
        paragraphs.append({"context": " ".join(context), "qas": [{"question": question}]})
    articles = [{"paragraphs": paragraphs[first : first + 4]} for first in range(0, 80, 4)]
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    start = pretrained.load(runs.make(tmp_path / "run"))
    files = (tmp_path / "run", tmp_path / "squad.json", tmp_path / "out")
    shown = run(sys.executable, "examples/train_sentence_vectors.py", *files, 5)
    for metric in ("ndcg", "mrr"):
        assert re.search(rf"{metric}@10: 0\.\d{{3}} before, 0\.\d{{3}} after; 72 pairs trained on", shown), shown
    trained = pretrained.load(tmp_path / "out/model")
    assert trained.tokenizer.sha256 == start.tokenizer.sha256
    change = trained.weights["layers.1.qkv.weight"] - start.weights["layers.1.qkv.weight"]
    assert 0 < change.abs().max() < 0.1
