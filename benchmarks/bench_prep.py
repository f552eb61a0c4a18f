"""Megabytes of text a second and core from raw files to verified shards, with a tokenizer that exists.

    python benchmarks/bench_prep.py [--json FILE] [--input PATH…] [--megabytes N] [--tokenizer FILE] [--workers N]
    python benchmarks/bench_prep.py --memory 20 200 2000 [--json FILE]

Runs the real command: one worker, `--workers` of them (default: the cores), as many builds of one worker each at the same time
(`apart`: what the machine itself leaves of twice the speed), one worker with near-duplicate removal, and one with BERT's
vocabulary beside its peer, in turn, `--repeats` times; the median counts. A megabyte is 10^6 bytes of document
text, unpacked. Compressed input is unpacked beforehand, so that the time is from text to shards.
Stage times are the workers' own and add up to a little less than the run.

`ratio` is ours over Hugging Face's fast tokenizer with packing in Python (`benchmarks/peers/hf_prep.py`), both measured in
the run, on one core, with the same WordPiece vocabulary (`--vocab`) and the same text.

`--memory` builds corpora of these sizes with all deduplication and reports the largest process. They are the input over and
over with one letter in fifty changed: new words keep coming, and copies are near duplicates, the most there is to hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import numpy as np

from benchmarks.common import hardware
from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, FileRange, ReadOptions
from data_prep.readers import decompress
from data_prep.readers.documents import PYDOC
from data_prep.readers.tasks import group, list_ranges

ROOT = hardware.ROOT
DATA = Path(os.environ.get("MEGABERT_DATA", ROOT.parent / "shared" / "data"))
# none of the tag `<doc`
LETTERS = np.frombuffer(b"abefghijklmnpqrstuvwxyz", np.uint8)
# share of letters changed in a copy
CHANGED = 0.02


def files(inputs: list[str]) -> list[FileRange]:
    """A range of each file of the inputs."""
    tasks = group(list_ranges([Corpus("input", tuple(inputs))], ReadOptions(), Problems("stop")))
    by_path = {part.path: part for task in tasks for part in task.ranges}
    return list(by_path.values())


def unpack(inputs: list[str], megabytes: float, folder: Path) -> list[str]:
    """Files of the inputs in order until they hold `megabytes`, unpacked into `folder`."""
    folder.mkdir()
    paths: list[str] = []
    left = megabytes * 1e6
    for part in files(inputs):
        if left <= 0:
            break
        path = folder / f"{len(paths):05d}-{Path(part.path).stem}"
        with open(path, "wb") as file:
            for chunk in decompress.read_chunks(part.path, part.compression):
                left -= file.write(chunk)
        paths.append(str(path))
    return paths


def grow(paths: list[str], megabytes: float, folder: Path) -> None:
    """Copies of files until `folder` holds `megabytes`; from the second round on with letters changed."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    left, copy = megabytes * 1e6, 0
    while left > 0:
        for path in paths:
            data = np.fromfile(path, np.uint8)
            if copy:
                changed = np.isin(data, LETTERS) & (rng.random(len(data)) < CHANGED)
                data[changed] = rng.choice(LETTERS, int(changed.sum()))
            data.tofile(folder / f"{copy:04d}-{Path(path).name}")
            left -= len(data)
            if left <= 0:
                return
        copy += 1


def usual_input() -> list[str]:
    """English Wikipedia where it is at hand, else Python's documentation."""
    return [str(DATA / "enwiki") if (DATA / "enwiki").is_dir() else PYDOC]


def build_command(inputs: list[str], output: Path, *extra: str) -> list[str]:
    """That builds a dataset without a word."""
    start = [sys.executable, "-m", "data_prep", "build", "--input", *inputs, "--output", str(output)]
    return [*start, "--quiet", *extra]


def build(inputs: list[str], output: Path, *extra: str) -> dict[str, Any]:
    """Summary of one run of the command."""
    summary = output.with_suffix(".json")
    subprocess.run(
        build_command(inputs, output, "--overwrite", "--json", str(summary), *extra),
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return json.loads(summary.read_text())


def builds_apart(number: int, inputs: list[str], folder: Path, *extra: str) -> dict[str, Any]:
    """Summary of one of so many builds at the same time, with the rate of all of them together."""
    outputs = [folder / f"apart-{i}" for i in range(number)]
    with ThreadPoolExecutor(number) as threads:
        found = list(threads.map(lambda output: build(inputs, output, *extra), outputs))
    return found[0] | {"mb_per_second": sum(its["mb_per_second"] for its in found)}


def hugging_face(files: list[str], vocabulary: str, output: Path, text_bytes: int) -> dict[str, Any]:
    """One run of the peer on one core."""
    command = [sys.executable, str(ROOT / "benchmarks/peers/hf_prep.py"), vocabulary, str(output), *files]
    env = hardware.clone_environment(RAYON_NUM_THREADS="1")
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout)
    return result | {"mb_per_second": text_bytes / 1e6 / result["seconds"]}


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median rate."""
    middle = statistics.median_low(run["mb_per_second"] for run in runs)
    return next(run for run in runs if run["mb_per_second"] == middle)


def speed(args: argparse.Namespace, inputs: list[str], folder: Path) -> dict[str, Any]:
    files = unpack(inputs, args.megabytes, folder / "text")
    tokenizer = args.tokenizer
    if tokenizer is None:
        build(files, folder / "trained")
        tokenizer = str(folder / "trained" / "tokenizer.model")
    one_core, given = ("--workers", "1"), ("--tokenizer", tokenizer)
    kinds: dict[str, tuple[str, ...]] = {
        "one": (*one_core, *given),
        "near": (*one_core, *given, "--dedup", "documents", "near"),
    }
    versus = args.vocab if all(map(os.path.isfile, [args.vocab, *files])) else None
    if versus:
        kinds["wordpiece"] = (*one_core, "--tokenizer", versus)
    if args.workers > 1:
        kinds["all"] = ("--workers", str(args.workers), *given)
        kinds["apart"] = (*one_core, *given)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    peer: list[dict[str, Any]] = []
    for _ in range(args.repeats):
        for name, extra in kinds.items():
            if name == "apart":
                runs[name].append(builds_apart(args.workers, files, folder, *extra))
            else:
                runs[name].append(build(files, folder / "timed", *extra))
            print(f"{name:12} {runs[name][-1]['mb_per_second']:8.2f} MB/s", flush=True)
            if name == "wordpiece":
                text_bytes = runs[name][-1]["read"]["bytes"]
                peer.append(hugging_face(files, args.vocab, folder / "peer.npy", text_bytes))
                print(f"{'hugging face':12} {peer[-1]['mb_per_second']:8.2f} MB/s", flush=True)
    middle = {name: median(found) for name, found in runs.items()}
    one = middle["one"]
    text, dataset = one["read"]["bytes"], one["datasets"]["128"]
    print(f"{hardware.describe()}; {len(files)} files, {text / 1e6:.1f} MB of text")
    print(f"{'stage':18} {'seconds':>8} {'ns/byte':>8} {'MB/s':>8}")
    for name, seconds in sorted(one["stage_seconds"].items(), key=lambda item: -item[1]):
        print(f"{name:18} {seconds:8.2f} {seconds * 1e9 / text:8.1f} {text / 1e6 / max(seconds, 1e-9):8.0f}")
    print(f"{'whole':18} {one['seconds']:8.2f} {one['seconds'] * 1e9 / text:8.1f} {one['mb_per_second']:8.2f}")
    over_bytes = dataset["shard_bytes"] / dataset["text_bytes"]
    added = middle["near"]["seconds"] / one["seconds"] - 1
    peak = max(run["peak_memory"] for found in runs.values() for run in found)
    print(f"shards {over_bytes:.3f} of the text's bytes, fill {dataset['fill']:.2%}")
    print(f"near-duplicate removal adds {added:.1%}; peak {peak / 1e6:.0f} MB a process")
    result = {
        "unit": "MB/s a core",
        "text_bytes": text,
        "ours": one["mb_per_second"],
        "ratio": None,
        "comparisons": [],
        "near_duplicates_add": added,
        "stages_seconds": one["stage_seconds"],
        "peak_memory_bytes": peak,
        "shard_bytes_over_text_bytes": over_bytes,
        "fill": dataset["fill"],
        "random_next_share": dataset["random_next_share"],
        "seconds": {name: [run["seconds"] for run in found] for name, found in runs.items()},
    }
    if versus:
        mine, theirs = middle["wordpiece"]["mb_per_second"], median(peer)["mb_per_second"]
        result |= {
            "ratio": mine / theirs,
            "comparisons": [
                {
                    "what": "MB/s of text to instances of 128 tokens, one core, the same WordPiece vocabulary",
                    "ours": mine,
                    "peer": theirs,
                    "peer_is": "tokenizers' BertWordPieceTokenizer and the packing of transformers' run_mlm.py",
                    "vocabulary": Path(versus).name,
                    "ratio": mine / theirs,
                }
            ],
            "peer_seconds": [run["seconds"] for run in peer],
        }
        print(f"ratio {mine / theirs:.2f}   {mine:.2f} over {theirs:.2f} MB/s with the same WordPiece vocabulary")
    else:
        print("ratio not measured: it needs --vocab vocab.txt")
    if "all" in middle:
        together, apart = (middle[name]["mb_per_second"] for name in ("all", "apart"))
        scaling, possible = together / one["mb_per_second"], apart / one["mb_per_second"]
        print(f"{args.workers} workers: {together:.2f} MB/s, {scaling:.2f} x one")
        print(f"{args.workers} builds at the same time: {apart:.2f} MB/s, {possible:.2f} x one")
        result["scaling"] = {"workers": args.workers, "over one": scaling, "builds apart over one": possible}
        result["mb_per_second"] = {name: [run["mb_per_second"] for run in found] for name, found in runs.items()}
    return result


def memory(args: argparse.Namespace, inputs: list[str], folder: Path) -> dict[str, Any]:
    files = unpack(inputs, min(args.megabytes, max(args.memory)), folder / "text")
    peaks = {}
    extra = ["--dedup", "documents", "near", "paragraphs", "--workers", str(args.workers)]
    if args.tokenizer:
        extra += ["--tokenizer", args.tokenizer]
    for megabytes in args.memory:
        grown = folder / f"{megabytes}"
        grow(files, megabytes, grown)
        run = build([str(grown)], folder / "built", *extra)
        peaks[str(megabytes)] = {
            "read_bytes": run["read"]["bytes"],
            "documents": run["read"]["documents"],
            "dropped": run["dropped"]["reasons"],
            "seconds": run["seconds"],
            "peak_memory_bytes": run["peak_memory"],
        }
        print(
            f"{megabytes:6} MB: {run['peak_memory'] / 1e6:.0f} MB in the largest process, {run['seconds']:.0f} s",
            flush=True,
        )
        for path in grown.iterdir():
            path.unlink()
    return {"unit": "bytes", "workers": args.workers, "sizes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    hardware.add_json(parser)
    parser.add_argument("--input", nargs="+", metavar="PATH")
    parser.add_argument("--megabytes", type=float, default=210, help="of unpacked input")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", nargs="+", type=int, metavar="MB", help="measure memory at these sizes")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="default: a vocabulary of 30,000 trained on the input, untimed"
    )
    parser.add_argument(
        "--vocab", metavar="FILE", default=str(DATA / "bert-base-uncased-vocab.txt"), help="of both in `ratio`"
    )
    parser.add_argument("--workers", type=int, default=hardware.cores())
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    inputs = args.input or usual_input()
    with tempfile.TemporaryDirectory() as folder:
        result = (memory if args.memory else speed)(args, inputs, Path(folder))
    if args.json:
        hardware.write_json(args.json, result)


if __name__ == "__main__":
    main()
