"""The comparison of data_prep with other tools reads each one's own figures, and sees the memory that a side takes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_prep_peers
from tests.conftest import ROOT
from tests.helpers import wordpiece


def test_the_memory_of_a_child_is_seen() -> None:
    inner = "import time; held = b'x' * 150_000_000; time.sleep(0.6)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}]); print('done')"
    printed, most = bench_prep_peers.run([sys.executable, "-c", outer])
    assert printed == "done\n"
    assert 150e6 < most["largest_process_bytes"] < 250e6
    assert most["largest_process_bytes"] * 0.9 < most["all_processes_bytes"] < 300e6


def test_a_side_that_fails_ends_the_comparison() -> None:
    with pytest.raises(SystemExit, match="no such side"):
        bench_prep_peers.run([sys.executable, "-c", "raise ValueError('no such side')"])


@pytest.mark.slow
def test_all_sides_read_the_same_text(tmp_path: Path) -> None:
    for name in bench_prep_peers.PEERS:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (the extra prep-peers)")
    wordpiece.write(tmp_path / "vocab.txt")
    words = [word for word in wordpiece.WORDS if not word.startswith("##")]
    texts = [" ".join(words[i % len(words)] for i in range(n, n + 50)) + "." for n in range(400)]
    (tmp_path / "text").write_text("\n\n".join(texts))
    command = [sys.executable, "benchmarks/bench_prep_peers.py", "--input", str(tmp_path / "text")]
    command += ["--vocab", str(tmp_path / "vocab.txt"), "--workers", "2", "--repeats", "1"]
    done = subprocess.run([*command, "--json", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sides = json.loads((tmp_path / "out.json").read_text())["sides"]
    assert sides.keys() == {"ours", "datasets", "datatrove"}
    tokens = {name: side["tokens"] for name, side in sides.items()}
    assert max(tokens.values()) < 1.1 * min(tokens.values()) and min(tokens.values()) > 15_000, tokens
