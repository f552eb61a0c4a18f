"""Megabytes of text a second and core from raw files to verified shards, with a given tokenizer.

    python benchmarks/bench_prep.py [--json FILE] [--input PATH…] [--megabytes N] [--tokenizer FILE] [--workers N]

Runs the command with one worker, one worker with near-duplicate removal, one with BERT's vocabulary like its peer, and `--workers`
workers (default: the cores), alternately, `--repeats` times; the median is reported. A megabyte is 10^6 bytes of unpacked document
text. Compressed input is unpacked beforehand, so that the time is from text to shards. Stage times are measured in the workers and
add up to a little less than the run.

`ratio` is ours over Hugging Face's fast tokenizer with packing in Python (`benchmarks/peers/hf_prep.py`), both measured in
the run, on one core, with the same WordPiece vocabulary (`--vocab`) and the same text. tokie in its place is another comparison
where it is installed (`pip install tokie==0.1.4`); its ids are Hugging Face's (all of 25 M characters of Wikipedia; they differ at
characters new in Unicode, unassigned ones and DEL).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
from benchmarks.common import hardware
from benchmarks.race.dataset import default_text
from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.readers import decompress
from data_prep.readers.documents import PYDOC
from data_prep.readers.tasks import group, list_ranges

OURS = "wordpiece"
# module of each peer; those that are not installed are left out
PEERS = {"hugging face": "tokenizers", "tokie": "tokie"}


def unpack(inputs: list[str], megabytes: float, folder: Path) -> list[str]:
    """Files of the inputs in order up to `megabytes`, unpacked into `folder`."""
    folder.mkdir()
    paths: list[str] = []
    left = megabytes * 1e6
    tasks = group(list_ranges([Corpus("input", tuple(inputs))], ReadOptions(), Problems("stop")))
    for part in {part.path: part for task in tasks for part in task.ranges}.values():
        if left <= 0:
            break
        path = folder / f"{len(paths):05d}-{Path(part.path).stem}"
        with open(path, "wb") as file:
            for chunk in decompress.read_chunks(part.path, part.compression):
                left -= file.write(chunk)
        paths.append(str(path))
    return paths


def build(inputs: list[str], output: Path, *extra: str) -> dict[str, Any]:
    """Summary of one run of the command."""
    summary = output.with_suffix(".json")
    command = [sys.executable, "-m", "data_prep", "build", "--input", *inputs, "--output", str(output)]
    hardware.output_of([*command, "--nsp", "--quiet", "--overwrite", "--json", str(summary), *extra])
    return json.loads(summary.read_text())


def hugging_face(files: list[str], vocabulary: str, output: Path, text_bytes: int, peer: str) -> dict[str, Any]:
    """One run of a peer on one core."""
    command = [sys.executable, "benchmarks/peers/hf_prep.py", PEERS[peer], vocabulary, str(output), *files]
    result = json.loads(hardware.output_of(command, RAYON_NUM_THREADS="1"))
    rates = {f"{what}mb_per_second": text_bytes / 1e6 / result[f"{what}seconds"] for what in ("", "encode_")}
    return result | rates


def run_in_turn(args: argparse.Namespace, files: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Summaries of the runs of each kind of build, and of the peers if there is a vocabulary for all."""
    peers = [name for name, module in PEERS.items() if find_spec(module)]
    for name in PEERS.keys() - peers:
        print(f"{name}: left out, pip install {PEERS[name]}")
    if args.tokenizer is None:
        build(files, folder / "trained")
    given = ("--tokenizer", args.tokenizer or str(folder / "trained" / "tokenizer.model"))
    kinds: dict[str, tuple[str, ...]] = {"one": given, "near": (*given, "--dedup", "documents", "near")}
    if os.path.isfile(args.vocab):
        kinds[OURS] = ("--tokenizer", args.vocab)
    if args.workers > 1:
        kinds["all"] = (*given, "--workers", str(args.workers))
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(args.repeats):
        for name, extra in kinds.items():
            made = {name: build(files, folder / "timed", "--workers", "1", *extra)}
            if name == OURS:
                size = made[name]["read"]["bytes"]
                made |= {peer: hugging_face(files, args.vocab, folder / "peer.npy", size, peer) for peer in peers}
            for side, run in made.items():
                runs[side].append(run)
                print(f"{side:12} {run['mb_per_second']:8.2f} MB/s", flush=True)
    return runs


def speed(args: argparse.Namespace, inputs: list[str], folder: Path) -> dict[str, Any]:
    files = unpack(inputs, args.megabytes, folder / "text")
    runs = run_in_turn(args, files, folder)
    ordered = {name: sorted(of_kind, key=lambda run: run["mb_per_second"]) for name, of_kind in runs.items()}
    middle = {name: of_kind[(len(of_kind) - 1) // 2] for name, of_kind in ordered.items()}
    one = middle["one"]
    text, dataset = one["read"]["bytes"], one["datasets"]["128"]
    print(f"{hardware.describe()}; {len(files)} files, {text / 1e6:.1f} MB of text")
    stages = {name: figures["seconds"] for name, figures in one["stages"].items()}
    for name, seconds in sorted(stages.items(), key=lambda item: -item[1]):
        print(f"{name:18} {seconds:8.2f} s {seconds * 1e9 / text:8.1f} ns a byte")
    comparisons = []
    for peer in (peer for peer in PEERS if peer in middle):
        mine, theirs = (middle[name]["mb_per_second"] for name in (OURS, peer))
        encode, ratio = middle[peer]["encode_mb_per_second"], mine / theirs
        what = f"MB/s of text to instances of 128 tokens, one core, the same WordPiece vocabulary; peer: {peer}"
        about = {"what": what, "vocabulary": Path(args.vocab).name}
        comparisons.append(about | {"ours": mine, "peer": theirs, "ratio": ratio, "peer_encodes": encode})
        print(f"ratio {ratio:.2f}   {mine:.2f} over {theirs:.2f} MB/s of {peer}, which encodes {encode:.2f}")
    if not comparisons:
        print("ratio not measured: it needs --vocab vocab.txt")
    scaling = {}
    if "all" in middle:
        over = middle["all"]["mb_per_second"] / one["mb_per_second"]
        scaling = {"scaling": {"workers": args.workers, "over one": over}}
        print(f"{args.workers} workers: {over:.2f} x one")
    return scaling | {
        "unit": "MB/s a core", "text_bytes": text, "ours": one["mb_per_second"],
        "ratio": comparisons[0]["ratio"] if comparisons else None, "comparisons": comparisons,
        "near_duplicates_add": middle["near"]["seconds"] / one["seconds"] - 1, "stages_seconds": stages,
        "peak_memory_bytes": max(run.get("peak_memory", 0) for of_kind in runs.values() for run in of_kind),
        "shard_bytes_over_text_bytes": dataset["shard_bytes"] / dataset["text_bytes"],
        "fill": dataset["fill"], "random_next_share": dataset["random_next_share"],
        "seconds": {name: [run["seconds"] for run in of_kind] for name, of_kind in runs.items()},
    }  # fmt: skip


def main() -> None:
    parser, data = hardware.Parser(__doc__), default_text()
    add = parser.add_argument
    add("--input", nargs="+", metavar="PATH")
    add("--megabytes", type=float, default=210, help="megabytes of unpacked input")
    add("--repeats", type=int, default=3)
    add("--tokenizer", metavar="FILE", help="default: trained on the input with 30,000 tokens, not timed")
    add("--vocab", metavar="FILE", default=str(data / "bert-base-uncased-vocab.txt"), help="vocabulary of `ratio`")
    add("--workers", type=int, default=hardware.cores())
    args = parser.parse()
    # English Wikipedia if available, else Python's documentation
    inputs = args.input or [str(data / "enwiki") if (data / "enwiki").is_dir() else PYDOC]
    with tempfile.TemporaryDirectory() as folder:
        hardware.write_json(args.json, speed(args, inputs, Path(folder)))


if __name__ == "__main__":
    hardware.run(main)
