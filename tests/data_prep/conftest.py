"""Real text that every Python has (pydoc's topics), a small tokenizer trained on it, and the real command."""

import ast
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_command(*args, prefix=(), preexec_fn=None):
    """`python -m data_prep ARGS` from the repository's root, output captured."""
    command = [*prefix, sys.executable, "-m", "data_prep", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=preexec_fn, timeout=120)


@pytest.fixture(scope="session")
def command():
    return run_command


@pytest.fixture(scope="session")
def topics():
    """About 80 documents of real English, 600 KB."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    tree = ast.parse(path.read_bytes())
    return list(next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)).values())


@pytest.fixture(scope="session")
def corpus(topics, tmp_path_factory):
    """A folder of six WikiExtractor-like files, 12 MB together: documents of sentences drawn from the topics."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [" ".join(line.split()) for text in topics for line in text.split("\n\n") if len(line.strip()) > 30]
    rng = random.Random(7)
    number = 0
    for i in range(6):
        with open(folder / f"wiki_{i:02}", "w", encoding="utf-8") as file:
            while file.tell() < 2_000_000:
                number += 1
                body = "\n".join(rng.choices(lines, k=rng.randint(1, 30)))
                file.write(f'<doc id="{number}" url="u" title="Title {number}">\nTitle {number}\n\n')
                file.write(f"Marker{number} opens this text. {body}\n</doc>\n")
    return folder


@pytest.fixture(scope="session")
def tokenizer_file(topics, tmp_path_factory):
    """A unigram model of 3,000 tokens made by the command itself."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for i, text in enumerate(topics):
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    output = folder / "out"
    result = run_command(
        "build", "--input", folder / "*.txt", "--output", output, "--vocab-size", 3000, "--workers", 1, "--quiet"
    )
    assert result.returncode == 0, result.stderr
    return output / "tokenizer.model"
