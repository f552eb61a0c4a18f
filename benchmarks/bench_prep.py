"""Megabytes of text a second and core from raw files to verified shards, with a tokenizer that exists.

    python benchmarks/bench_prep.py [--json FILE] [--input PATH…] [--megabytes N] [--tokenizer FILE] [--workers N]

Runs the real command with one worker and with `--workers` (default: the cores). A megabyte is 10^6 bytes of document
text, unpacked. Stage times are the workers' own and add up to a little less than the run. `ratio` is against
google-research/bert's create_training_instances (WordPiece, dupe factor 1, length 128), whose 0.93 MB/s on one core of a
2-core x86-64 machine is a recorded figure, not run here; its text was unpacked, ours is decompressed in the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hardware

from data_prep import sources, streams
from data_prep.problems import Problems

ROOT = hardware.ROOT
RECORDED_PEER = 0.93  # MB/s a core


def choose(inputs: list[str], megabytes: int) -> tuple[list[str], int, float]:
    """Files of the inputs in order until they hold `megabytes`; their unpacked bytes; seconds to unpack them alone."""
    chosen: list[str] = []
    unpacked, seconds = 0, 0.0
    for task in sources.plan(
        [sources.Corpus("input", tuple(inputs))], sources.ReadOptions(), Problems("stop")
    ):
        for piece in task.pieces:
            if unpacked >= megabytes * 1_000_000:
                return chosen, unpacked, seconds
            if piece.path in chosen:
                continue
            chosen.append(piece.path)
            before = time.perf_counter()
            unpacked += sum(len(chunk) for chunk in streams.read_chunks(piece.path, piece.compression))
            seconds += time.perf_counter() - before
    return chosen, unpacked, seconds


def build(files: list[str], output: Path, *extra: str) -> dict[str, Any]:
    """Summary of one run of the command."""
    summary = output.with_suffix(".json")
    command = [
        sys.executable,
        "-m",
        "data_prep",
        "build",
        "--input",
        *files,
        "--output",
        str(output),
        "--overwrite",
    ]
    subprocess.run(
        [*command, "--quiet", "--json", str(summary), *extra], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return json.loads(summary.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--input", nargs="+", metavar="PATH")
    parser.add_argument("--megabytes", type=int, default=200, help="of unpacked input")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="default: 30,000 pieces trained on the input, untimed"
    )
    parser.add_argument("--workers", type=int, default=hardware.cores())
    args = parser.parse_args()
    data = Path(os.environ.get("MEGABERT_DATA", ROOT.parent / "shared" / "data")) / "enwiki"
    inputs = args.input or [str(data) if data.is_dir() else sources.PYDOC]
    files, unpacked, unpacking = choose(inputs, args.megabytes)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = args.tokenizer
        if tokenizer is None:
            build(files, Path(folder) / "trained")
            tokenizer = str(Path(folder) / "trained" / "tokenizer.model")
        runs = {}
        for workers in sorted({1, args.workers}):
            output = Path(folder) / "timed"
            runs[workers] = build(files, output, "--tokenizer", tokenizer, "--workers", str(workers))
    one, text = runs[1], runs[1]["all_text_bytes"]
    stages = one["stage_seconds"]
    print(
        f"{hardware.describe()}; {len(files)} files, {unpacked / 1e6:.1f} MB unpacked, {text / 1e6:.1f} MB of text"
    )
    print(f"{'stage':18} {'seconds':>8} {'ns/byte':>8} {'MB/s':>8}")
    for name, seconds in sorted(stages.items(), key=lambda item: -item[1]):
        print(f"{name:18} {seconds:8.2f} {seconds * 1e9 / text:8.1f} {text / 1e6 / max(seconds, 1e-9):8.0f}")
    print(
        f"{'whole':18} {one['seconds']:8.2f} {one['seconds'] * 1e9 / text:8.1f} {one['mb_per_second']:8.2f}"
    )
    unpacked_rate = text / 1e6 / (one["seconds"] - unpacking)
    print(f"unpacking alone    {unpacking:8.2f} s; whole without it {unpacked_rate:.2f} MB/s")
    for workers, run in runs.items():
        print(
            f"{workers} worker(s): {run['mb_per_second']:.2f} MB/s, {run['mb_per_second_per_worker']:.2f} MB/s a core, "
            f"peak {run['peak_memory'] / 1e6:.0f} MB a process"
        )
    scaling = runs[args.workers]["mb_per_second"] / one["mb_per_second"]
    print(f"shards {one['shard_bytes'] / one['text_bytes']:.3f} of the text's bytes, fill {one['fill']:.2%}")
    ratio = one["mb_per_second_per_worker"] / RECORDED_PEER
    print(f"ratio {ratio:.1f} over the recorded {RECORDED_PEER} MB/s of create_training_instances")
    if args.json:
        result = {
            "unit": "MB/s a core",
            "text_bytes": text,
            "unpacked_bytes": unpacked,
            "ours": one["mb_per_second_per_worker"],
            "ours_without_unpacking": unpacked_rate,
            "peer_recorded": RECORDED_PEER,
            "ratio": {
                "create_training_instances": ratio,
                "create_training_instances, unpacking left out": unpacked_rate / RECORDED_PEER,
            },
            "scaling": {"workers": args.workers, "over one": scaling},
            "stages_seconds": stages,
            "peak_memory_bytes": max(run["peak_memory"] for run in runs.values()),
            "shard_bytes_over_text_bytes": one["shard_bytes"] / one["text_bytes"],
            "fill": one["fill"],
            "random_next_share": one["random_next_share"],
            "runs": {str(workers): run for workers, run in runs.items()},
        }
        hardware.write_json(args.json, result)


if __name__ == "__main__":
    main()
