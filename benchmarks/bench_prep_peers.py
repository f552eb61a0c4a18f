"""Text to tokens on all cores: data_prep beside Hugging Face `datasets` and datatrove, in speed and memory.

    pip install -c constraints.txt -e '.[prep-peers]'
    python benchmarks/bench_prep_peers.py [--json FILE] [--input PATH…] [--megabytes N] [--workers N] [--repeats N]

Every side reads the same unpacked text files with the same WordPiece vocabulary (`--vocab`) in as many processes, in turn,
which one first changes every round; the median counts. Ours does the most: it filters, drops duplicates, makes sentence
pairs, shuffles all rows and writes shards with checksums. `datasets` maps as transformers' run_mlm.py does, datatrove writes
its tokenizer's shuffled files. A megabyte is 10^6 bytes of text. Seconds are each side's own, without its imports; memory is
looked at five times a second: the largest process (resident), and all of them (proportional, so that shared pages count once).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import psutil

from benchmarks.bench_prep import DATA, RECORDED, build_command, unpack, usual_input
from benchmarks.common import hardware

ROOT = hardware.ROOT
PEERS = {"datasets": "datasets_prep.py", "datatrove": "datatrove_prep.py"}  # by the package they need
INTERVAL = 0.2  # seconds between looks at memory


@contextmanager
def watched(process: subprocess.Popen[str]) -> Iterator[dict[str, int]]:
    """Fills in the most memory that `process` and its children were seen with, while it runs."""
    most = {"largest_process_bytes": 0, "all_processes_bytes": 0}
    ended = threading.Event()

    def look() -> None:
        whole = psutil.Process(process.pid)
        while not ended.wait(INTERVAL):
            resident, shared_out = [], []
            try:
                for one in [whole, *whole.children(recursive=True)]:
                    found = one.memory_full_info()
                    resident.append(found.rss)
                    shared_out.append(found.pss)
            except psutil.NoSuchProcess:  # it ended between two looks; the next one sees the others
                continue
            most["largest_process_bytes"] = max(most["largest_process_bytes"], *resident)
            most["all_processes_bytes"] = max(most["all_processes_bytes"], sum(shared_out))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def run(command: list[str]) -> tuple[str, dict[str, int]]:
    """What a command printed, and its memory. Raises SystemExit with the end of its errors where it failed."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=hardware.clone_environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )  # fmt: skip
        with watched(process) as most:
            printed, _ = process.communicate()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{hardware.shown(command[:6])} …: {errors.read()[-2000:]}")
    return printed, most


def ours(args: argparse.Namespace, files: list[str], output: Path) -> dict[str, Any]:
    summary = output.with_suffix(".json")
    extra = ("--tokenizer", args.vocab, "--workers", str(args.workers), "--json", str(summary))
    _, most = run(build_command(files, output, *extra))
    found = json.loads(summary.read_text())
    return {"seconds": found["seconds"], "tokens": found["read"]["tokens"], **most}


def peer(name: str, args: argparse.Namespace, files: list[str], output: Path) -> dict[str, Any]:
    script = str(ROOT / "benchmarks/peers" / PEERS[name])
    printed, most = run([sys.executable, script, args.vocab, str(output), str(args.workers), *files])
    return json.loads(printed.splitlines()[-1]) | most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    hardware.add_json(parser)
    parser.add_argument("--input", nargs="+", metavar="PATH")
    parser.add_argument("--megabytes", type=float, default=210, help="of unpacked input")
    parser.add_argument("--vocab", metavar="FILE", default=str(DATA / "bert-base-uncased-vocab.txt"))
    parser.add_argument("--workers", type=int, default=hardware.cores())
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    if missing := [name for name in PEERS if importlib.util.find_spec(name) is None]:
        parser.error(f"peers are not installed: pip install {' '.join(missing)}")
    if not os.path.isfile(args.vocab):
        parser.error(f"--vocab {args.vocab}: no such file")
    inputs = args.input or usual_input()
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], **{name: [] for name in PEERS}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = unpack(inputs, args.megabytes, folder / "text")
        text = sum(os.path.getsize(file) for file in files)
        for turn in range(args.repeats):
            first = turn % len(runs)
            for side in [*runs][first:] + [*runs][:first]:
                output = folder / f"{side}-{turn}"
                found = ours(args, files, output) if side == "ours" else peer(side, args, files, output)
                runs[side].append(found)
                print(f"{side:10} {text / 1e6 / found['seconds']:8.2f} MB/s", flush=True)
                subprocess.run(["rm", "-r", str(output)], check=True)
    print(f"{hardware.describe()}; {text / 1e6:.1f} MB of text, {args.workers} processes")
    print(f"{'':10} {'MB/s':>8} {'MB, largest':>12} {'MB, all':>8} {'M tokens':>9}")
    sides: dict[str, dict[str, Any]] = {}
    for side, turns in runs.items():
        rates = sorted(text / 1e6 / one["seconds"] for one in turns)
        sides[side] = {
            "mb_per_second": statistics.median(rates), "all_mb_per_second": rates, "tokens": turns[-1]["tokens"],
            **{key: max(one[key] for one in turns) for key in ("largest_process_bytes", "all_processes_bytes")},
        }  # fmt: skip
        one = sides[side]
        print(
            f"{side:10} {one['mb_per_second']:8.2f} {one['largest_process_bytes'] / 1e6:12.0f} "
            f"{one['all_processes_bytes'] / 1e6:8.0f} {one['tokens'] / 1e6:9.1f}"
        )
    if args.json:
        packages = {name: importlib.metadata.version(name) for name in PEERS}
        result = {"unit": "MB/s", "workers": args.workers, "text_bytes": text, "vocabulary": Path(args.vocab).name}
        hardware.write_json(args.json, result | {"sides": sides, "peers": packages, "recorded": RECORDED})


if __name__ == "__main__":
    main()
