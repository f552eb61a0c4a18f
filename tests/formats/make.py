"""The files of a release in miniature: a dataset, a run in the middle of a phase, a fine-tuned model and an export.

python tests/formats/make.py VERSION        writes tests/formats/VERSION, which must not exist

Made once by a release that changes a format; `test_formats.py` opens the files of every release, and changes none.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a clone need not be installed

import megabert
from megabert.data.shards import Dataset

ROOT = Path(__file__).resolve().parents[2]
WORDS = {"calm": "quiet lake still harbour slow tide low wind", "wild": "storm wave loud gale broken mast high sea"}
COMMON = ["the", "a", "boat", "of", "near", "on", "under", "by", "was", "and", "sailor", "rope", "sail"]
TEXTS, TASK = "texts.txt", "task.tsv"
STEPS, STOPPED = 12, 8
# 1.5 phases of AdamW for embeddings and Muon for matrices
TRAINING = f"""phases = [{{ share = 0.5 }}, {{ share = 0.5, optimizer.lr = 1e-3 }}]
precision = "fp32"
peak_tflops = 1.0
model = {{ layers = 1, hidden = 16, heads = 2, max_positions = 32 }}
batch = {{ global_size = 8, micro_size = 4 }}
optimizer = {{ name = "muon" }}
schedule = {{ total_steps = {STEPS}, warmup_steps = 2 }}
data = {{ workers = 0 }}
checkpoint = {{ keep = 1 }}
eval = {{ interval = 4, rows = 16 }}
log = {{ interval = 2, tensorboard = false }}
"""


def run(folder: Path, *words: str) -> None:
    """A command in `folder`. Training, which records its command, is called by a relative path."""
    script = (
        [os.path.relpath(ROOT / "megabert/train.py", folder)] if words[0] == "train" else ["-m", "megabert", words[0]]
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, *script, *words[1:]], cwd=folder, env=environment, check=True)


def rows_digest(folder: Path) -> str:
    """SHA-256 of all rows as they are read, those of the held-out part after the others."""
    sha256 = hashlib.sha256()
    for part in (folder, folder / "held_out"):
        for row in Dataset(part):
            for name in ("ids", "bounds", "isnext"):
                sha256.update(row[name].tobytes())
    return sha256.hexdigest()


def weights_digest(source: Path) -> str:
    """SHA-256 of the weights of a run or a folder of Hugging Face, by their names."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(megabert.load(source).pretrained.weights.items()):
        sha256.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return sha256.hexdigest()


def sentence(rng: random.Random, label: str) -> str:
    words = [*rng.choices(WORDS[label].split(), k=3), *rng.choices(COMMON, k=5)]
    rng.shuffle(words)
    return " ".join(words).capitalize() + "."


def write_texts(folder: Path) -> None:
    rng = random.Random(1)
    documents = ["\n".join(sentence(rng, rng.choice([*WORDS])) for _ in range(8)) for _ in range(40)]
    (folder / TEXTS).write_text("\n\n".join(documents) + "\n")
    rows = [f"{sentence(rng, label)}\t{label}" for label in [*WORDS] * 12]
    (folder / TASK).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")


def main(version: str) -> None:
    folder = Path(__file__).parent / version
    folder.mkdir()
    write_texts(folder)
    (folder / "run.toml").write_text(TRAINING)
    sizes = ("--seq-len", "32", "--vocab-size", "96", "--held-out", "0.1")
    documents = ("--nsp", "--text-documents", "blank-line")
    run(folder, "prep", "build", "--input", TEXTS, "--output", "data", *documents, *sizes)
    training = ("--config", "run.toml", "--data", "data", "--run", "run")
    run(folder, "train", *training, "--stop-after", str(STOPPED))
    shutil.rmtree(folder / "run/lock")  # of this machine
    task = ("--kind", "classify", "--text", "sentence", "--label", "label", "--train", TASK, "--dev", TASK)
    tuning = ("--output", "trained", "--lr", "1e-2", "--epochs", "40", "--batch", "8")
    run(folder, "finetune", "--model", "run", *task, *tuning)
    shutil.move(folder / "trained/seed1/best", folder / "finetuned")
    shutil.rmtree(folder / "trained")
    run(folder, "finetune", "--model", "finetuned", "--predict", TASK, "--output", "predictions.tsv")
    run(folder, "export", "--model", "run", "--output", "export")
    copy = folder / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("copy"))
    run(copy, "train", *training)
    last: dict[str, Any] = json.loads((copy / "run/metrics.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(copy)
    expected = {"rows": rows_digest(folder / "data"), "weights": weights_digest(folder / "run"), "step": STEPS}
    expected |= {"eval/mlm_loss": last["eval/mlm_loss"]}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
