"""The peer of the text-to-shards benchmark makes what run_mlm makes, with the vocabulary that ours reads."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks import bench_prep
from megabert.data.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.helpers import wordpiece


def test_the_peers_instances_are_the_texts_ids_in_order(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    wordpiece.write(vocabulary)
    words = [word for word in wordpiece.WORDS if not word.startswith("##")]
    texts = [" ".join(words[i % len(words)] for i in range(n, n + 50)) for n in range(40)]
    (tmp_path / "a").write_text('<doc id="1" url="u" title="t">\n' + "\n\n".join(texts[:20]) + "\n</doc>\n")
    (tmp_path / "b").write_text("\n".join(texts[20:]))
    files = [str(tmp_path / name) for name in "ab"]
    found = bench_prep.hugging_face(files, str(vocabulary), tmp_path / "out.npy", text_bytes=1_000_000)
    tokenizer = Tokenizer.load(vocabulary)
    ids = list(chain.from_iterable([7, *one, 8] for one in tokenizer.encode_batch(texts)))
    assert (tokenizer.special_ids["cls"], tokenizer.special_ids["sep"]) == (7, 8)
    rows = np.load(tmp_path / "out.npy")
    assert rows.shape == (len(ids) // 128, 128) and found["instances"] == len(rows) > 5
    assert rows.ravel().tolist() == ids[: rows.size]
    assert found["mb_per_second"] == 1 / found["seconds"]


def test_without_a_vocabulary_no_ratio_is_made(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A sentence of a few words stands here. Another one follows it.\n\n" * 400)
    command = [sys.executable, "benchmarks/bench_prep.py", "--input", str(tmp_path / "text"), "--workers", "1"]
    command += ["--repeats", "1", "--vocab", str(tmp_path / "none.txt")]
    tokenizer = tmp_path / "vocab.txt"
    wordpiece.write(tokenizer)
    done = subprocess.run([*command, "--tokenizer", str(tokenizer)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ratio not measured" in done.stdout
