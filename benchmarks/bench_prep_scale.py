"""Inputs of the size that users bring: one large packed file, very many small files, a corpus of many gigabytes.

    python benchmarks/bench_prep_scale.py --packed 8 --kills 5 --files 500000 --corpus 20 [--json FILE]

Each part is run where it is asked for; sizes are GB (10^9 bytes) of unpacked text. The text is the input over and over with
one letter in fifty changed (`bench_prep.py --memory` says why). The tokenizer is trained once, untimed, unless one is given.

`--packed G`: one file of G GB as it is, as one gzip member and as one bzip2 stream, each built with `--workers`: MB/s, the
largest process by stage, and whether the shards are the same bytes. With `--kills N` the bzip2 build is killed N times
(SIGKILL to all its processes, at even distances of the time that the first build took) and goes on each time.
`--files N`: N files of 2 KB in folders of a thousand: seconds and memory to list and group them, and of the whole build.
`--corpus G`: G GB in files of 200 MB, of which two fifths are one gzip file: MB/s and memory by stage, and its rate
over that of 1/100 of it, which is built three times before and three times after it. With `--near` near duplicates are
searched for, and as copies are such, hardly anything is left to shuffle and write.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import bz2

import numpy as np

from benchmarks.bench_prep import CHANGED, LETTERS, build, build_command, unpack, usual_input
from benchmarks.common import hardware

ROOT = hardware.ROOT
SMALL = 2_000  # bytes of a small file
FILE_BYTES = 200_000_000  # of a corpus
AROUND = 3  # builds of the small corpus before and after the large one: a machine's speed moves
LISTING = """
import json, sys, time
from data_prep.common.errors import Problems
from data_prep.executor.work_files import peak_memory
from data_prep.readers.tasks import Corpus, ReadOptions, group, list_pieces
before, began = peak_memory(), time.perf_counter()
tasks = group(list_pieces([Corpus("input", (sys.argv[1],))], ReadOptions(), Problems("stop")))
found = {"tasks": len(tasks), "seconds": time.perf_counter() - began, "memory_bytes": peak_memory() - before}
print(json.dumps(found))
"""


def write_text(paths: list[str], size: int, files: Sequence[Any], first_copy: int = 0) -> None:
    """The same `size` bytes of text to each of `files`: whole input files, from the second round on with letters changed."""
    rng = np.random.default_rng(first_copy)
    copy = first_copy
    while size > 0:
        for path in paths:
            data = np.fromfile(path, np.uint8)
            if copy:
                changed = np.isin(data, LETTERS) & (rng.random(len(data)) < CHANGED)
                data[changed] = rng.choice(LETTERS, int(changed.sum()))
            for file in files:
                file.write(data.tobytes())
            size -= len(data)
            if size <= 0:
                return
        copy += 1


def digest(folder: Path) -> str:
    """SHA-256 over the shards of a dataset and of its held-out part."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.tar")):
        found.update(path.read_bytes())
    return found.hexdigest()


def figures(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "read_bytes": run["read"]["bytes"],
        "documents": run["read"]["documents"],
        "dropped": run["dropped"]["reasons"],
        "mb_per_second": run["mb_per_second"],
        "seconds": run["seconds"] + run["tokenizer_seconds"],
        "peak_memory_bytes": run["peak_memory"],
        "stages": run["stages"],
    }


def say(name: str, run: dict[str, Any]) -> None:
    rate = "killed and gone on" if run["mb_per_second"] is None else f"{run['mb_per_second']:.2f} MB/s"
    print(f"{name:16} {rate}, {run['seconds'] + run['tokenizer_seconds']:.0f} s, {run['peak_memory'] / 1e6:.0f} MB")
    for stage, found in run["stages"].items():
        print(f"  {stage:18} {found['seconds']:8.1f} s {found['peak_memory'] / 1e6:8.0f} MB", flush=True)


def killed(path: Path, output: Path, extra: list[str], kills: int, seconds: float) -> None:
    """Begin the build of `path` and kill it, `kills` times; the last one is left to go on."""
    for _ in range(kills):
        process = subprocess.Popen(build_command([str(path)], output, *extra), cwd=ROOT, start_new_session=True)
        try:
            process.wait(timeout=seconds / (kills + 1))
            raise SystemExit("the build ended before it was killed; give more text")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def packed(args: argparse.Namespace, paths: list[str], folder: Path, extra: list[str]) -> dict[str, Any]:
    place = Path(args.texts) / f"packed-{args.packed}" if args.texts else folder
    names = {"plain": place / "text", "gz": place / "text.gz", "bz2": place / "text.bz2"}
    if not all(path.exists() for path in names.values()):
        place.mkdir(parents=True, exist_ok=True)
        drafts = {name: path.with_suffix(f"{path.suffix}.draft") for name, path in names.items()}
        with (
            open(drafts["plain"], "wb") as plain,
            gzip.open(drafts["gz"], "wb", 6) as gz,
            bz2.open(drafts["bz2"], "wb") as bz,
        ):
            write_text(paths, int(args.packed * 1e9), [plain, gz, bz])
        for name, path in names.items():
            drafts[name].rename(path)
    runs: dict[str, Any] = {}
    for name, path in names.items():
        run = build([str(path)], folder / "built", *extra)
        say(name, run)
        runs[name] = figures(run) | {"file_bytes": path.stat().st_size, "shards": digest(folder / "built")}
    if args.kills:
        output = folder / "killed"
        killed(names["bz2"], output, extra, args.kills, runs["bz2"]["seconds"])
        began = time.perf_counter()
        summary = folder / "killed.json"
        subprocess.run(
            build_command([str(names["bz2"])], output, "--json", str(summary), *extra),
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        run = json.loads(summary.read_text())
        runs["killed"] = figures(run) | {
            "kills": args.kills, "resumed": run["resumed"], "last_seconds": time.perf_counter() - began,
            "shards": digest(output),
        }  # fmt: skip
    same = len({run["shards"] for run in runs.values()}) == 1
    print(f"the same bytes: {same}", flush=True)
    return {"runs": runs, "same_bytes": same}


def files(args: argparse.Namespace, paths: list[str], folder: Path, extra: list[str]) -> dict[str, Any]:
    text = b"".join(Path(path).read_bytes() for path in paths)
    for i in range(args.files):
        place = folder / "small" / f"{i // 1000:05d}"
        place.mkdir(parents=True, exist_ok=True)
        at = i * SMALL % (len(text) - SMALL)
        content = b"File %d. " % i + text[at : at + SMALL].decode(errors="ignore").encode()
        (place / f"{i:07d}.txt").write_bytes(content)
    listing = [sys.executable, "-c", LISTING, str(folder / "small")]
    listed = json.loads(subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    print(f"listed in {listed['seconds']:.1f} s and {listed['memory_bytes'] / 1e6:.0f} MB: {listed['tasks']} tasks")
    run = build([str(folder / "small")], folder / "built", *extra)
    say(f"{args.files} files", run)
    return {"files": args.files, "listed": listed, "build": figures(run)}


def write_file(paths: list[str], size: int, path: Path, first_copy: int) -> None:
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else open(path, "wb") as file:
        write_text(paths, size, [file], first_copy)


def write_corpus(paths: list[str], size: int, place: Path, workers: int) -> None:
    """`size` bytes: two fifths in one gzip file, the rest in files of FILE_BYTES."""
    place.mkdir()
    sizes = {place / "large.gz": size * 2 // 5}
    for number, done in enumerate(range(0, size * 3 // 5, FILE_BYTES)):
        sizes[place / f"{number:04d}"] = min(size * 3 // 5 - done, FILE_BYTES)
    with ProcessPoolExecutor(workers) as pool:
        written = [
            pool.submit(write_file, paths, of, path, 1 + 1_000 * i) for i, (path, of) in enumerate(sizes.items())
        ]
        for one in written:
            one.result()


def corpus(args: argparse.Namespace, paths: list[str], folder: Path, extra: list[str]) -> dict[str, Any]:
    size, small = int(args.corpus * 1e9), int(args.corpus * 1e7)
    duplicates = ["--dedup", "documents", *(["near"] if args.near else [])]

    def run(of: int) -> dict[str, Any]:
        found = build([str(folder / str(of))], folder / "built", *extra, *duplicates)
        say(f"{of / 1e9:g} GB", found)
        return figures(found)

    for of in (small, size):
        write_corpus(paths, of, folder / str(of), args.workers)
        print(f"{of / 1e9:g} GB written", flush=True)
    before = [run(small) for _ in range(AROUND)]
    large = run(size)
    around = [*before, *(run(small) for _ in range(AROUND))]
    rate = statistics.median(each["mb_per_second"] for each in around)
    ratio = large["mb_per_second"] / rate
    print(f"{size / 1e9:g} GB at {ratio:.3f} of the rate of {small / 1e9:g} GB ({rate:.2f} MB/s, median)")
    return {"near duplicates removed": args.near, "large": large, "small": around, "large over small": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    hardware.add_json(parser)
    parser.add_argument("--input", nargs="+", metavar="PATH")
    parser.add_argument("--packed", type=float, metavar="GB", help="of text in one file, plain, gz and bz2")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="of the bz2 build, by SIGKILL")
    parser.add_argument("--files", type=int, metavar="N", help="of 2 KB")
    parser.add_argument("--corpus", type=float, metavar="GB", help="of text in many files, one of them a large gz")
    parser.add_argument("--near", action="store_true", help="the corpus loses its near duplicates: most of it")
    parser.add_argument("--tokenizer", metavar="FILE", help="default: 30,000 pieces trained on the input, untimed")
    parser.add_argument("--workers", type=int, default=hardware.cores())
    parser.add_argument(
        "--texts",
        metavar="DIR",
        help="the packed files are kept here, and used again by the next run of the same input",
    )
    parser.add_argument("--scratch", metavar="DIR", help="where the text and the datasets are written")
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    inputs = args.input or usual_input()
    result: dict[str, Any] = {"unit": "MB/s", "workers": args.workers}
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        folder = Path(name)
        paths = unpack(inputs, 210, folder / "text")
        tokenizer = args.tokenizer
        if tokenizer is None:
            build(paths, folder / "trained")
            tokenizer = str(folder / "trained" / "tokenizer.model")
        extra = ["--workers", str(args.workers), "--tokenizer", tokenizer]
        print(hardware.describe())
        for part in (packed, files, corpus):
            if getattr(args, part.__name__):
                place = folder / f"of-{part.__name__}"
                place.mkdir()
                result[part.__name__] = part(args, paths, place, extra)
                subprocess.run(["rm", "-r", str(place)], check=True)
    if args.json:
        hardware.write_json(args.json, result)


if __name__ == "__main__":
    main()
