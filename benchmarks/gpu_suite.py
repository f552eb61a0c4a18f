"""One GPU's measurements in two calls of four and seven minutes: is it right, does it train, how fast, against what.

    python benchmarks/gpu_suite.py --make-pack TEXT…       (with nvcc and network: wheels, native library, two datasets)
    python3 benchmarks/gpu_suite.py first --json FILE      the machine, the operations' tests, BERT-LARGE's step, a training run
    python3 benchmarks/gpu_suite.py second --json FILE     larger micro-batches, peers, kernels, a published recipe
    python benchmarks/gpu_suite.py --device cpu --quick    (a test of all items; its figures mean nothing)

The machine needs torch, numpy and packaging, and a copy of this tree with the pack in build/gpu_pack. Items are child processes: one
that crashes, makes the device unusable or does not end is recorded without affecting the others. Each prints a line, and the file
is written after each, with clocks, power and temperature.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
from benchmarks.common import hardware
from benchmarks.gpu import pack
from megabert.common.environment import end_with_parent

ROOT = hardware.ROOT
# minutes of each call, of which the last seconds are kept in hand; remaining seconds below which no item is started
MINUTES, KEPT_IN_HAND, LEAST = {"first": 5.0, "second": 8.0}, 60, 10
ITEMS = "benchmarks/gpu/items.py"
OUTPUT = 20_000  # characters of an item's output that are kept
# seconds between looks at the results of a process of several items, and for the end of a killed process
LOOK, END_SECONDS = 0.5, 10
NOTHING = "none"  # value of --only for no item, as benchmarks/gpu/rehearse.py wants
NATIVE = "attention=native layer=native mlm_loss=native"
OURS = f"--ops {NATIVE}"
TORCH = "--ops attention=varlen layer=torch mlm_loss=torch"
FLASH = "--ops attention=varlen layer=native mlm_loss=native"
COMPILED = "--ops attention=varlen layer=compiled mlm_loss=native"
# call -> items in order. A step: row length x rows of a micro-step: options of bench_step.py
CALLS: dict[str, dict[str, str]] = {
    "first": {
        **dict.fromkeys(["machine", "tests"], ""),
        "steps/ours 128x128, profile": f"{OURS} --profile",
        "steps/torch 128x128": TORCH,
        "training/small": "",
        "steps/ours 512x32, profile": f"{OURS} --profile",
    },
    "second": {
        **dict.fromkeys(["steps/ours 128x256", "steps/ours 512x64"], OURS),
        **dict.fromkeys(["steps/flash, our layer 128x256", "steps/flash, our layer 512x64"], FLASH),
        "steps/torch 512x64": TORCH,
        **dict.fromkeys(["kernels/attention", "kernels/layer", "kernels/mlm_loss", "training/large_24h"], ""),
        "steps/ours 128x512": OURS,
        "steps/muon 128x256": f"{OURS} --optimizer muon",
        "steps/lamb 128x256": f"{OURS} --optimizer lamb",
        "steps/without dropout 128x256": f"{OURS} --dropout 0",
        **dict.fromkeys(["steps/compiled 128x256", "steps/compiled 512x64"], COMPILED),
        **dict.fromkeys(["kernels/products", "kernels/optimizer", "kernels/softmax_mask", "ranks"], ""),
    },
}
# longest time of an item in seconds, by the first part of its key; more on the CPU, where only its end matters
LIMITS = {"machine": 60, "ranks": 60, "tests": 110, "training": 150, "steps": 90, "kernels": 100}
PATIENCE = {"cuda": 1, "cpu": 4}
Results = Iterator[tuple[str, dict[str, Any]]]
NAMED = " ".join(f"ops.{choice}" for choice in NATIVE.split())
SMALL_MODEL = "model.layers=4 model.hidden=256 model.heads=4 data.workers=2 batch.micro_size=32 batch.global_size=64"
SHORT_DAY = "batch.global_size=512 data.workers=4 log.seconds=0"
TINY_MODEL = "model.layers=2 model.hidden=32 model.heads=2"
QUICK = f"{TINY_MODEL} batch.micro_size=2 batch.global_size=4 precision=fp32 data.workers=1"


@dataclass(frozen=True)
class Suite:
    """What all items share: the device, sizes, and the folder with the datasets."""

    device: str
    quick: bool
    pack: Path

    def step_options(self, key: str, options: str) -> str:
        """Options of bench_step.py for a step named like `steps/ours 128x256, profile`."""
        shape = re.search(r"(\d+)x(\d+)", key)
        assert shape, f"{key}: names no row length and rows"
        seq_len, rows = shape.groups()
        sizes = "--model tiny --micro 2 --steps 1" if self.quick else f"--model large --micro {rows} --steps 4"
        dropout = "" if "--dropout" in options else " --dropout 0.1"
        if self.device == "cpu":
            options = options.replace("=varlen", "=sdpa")
        return f"{sizes} --accumulation 1 --seq-len {seq_len} --data {self.pack}/data/seq{seq_len} {options}{dropout}"

    def command(self, keys: Sequence[str], options: Sequence[str], target: Path) -> list[str]:
        """The command of an item, or of several steps in one process."""
        part, _, name = keys[0].partition("/")
        if part == "steps":
            pairs = [text for pair in zip(keys, options, strict=True) for text in (pair[0], self.step_options(*pair))]
            return [ITEMS, "steps", str(target), *pairs]
        if part == "tests":
            chosen = ["-n", "2"] if self.device == "cpu" else ["-n", "6", "-m", "gpu"]
            return ["-m", "pytest", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", *chosen, "tests/ops"]
        result = ["--json", str(target)]
        if part == "kernels":
            small = ["--small"] if self.quick else []
            return ["benchmarks/bench_ops.py", "--device", self.device, "--only", name, *small, *result]
        if part == "training":
            config, more, steps = ("large_24h", SHORT_DAY, "16") if name == "large_24h" else ("tiny", SMALL_MODEL, "60")
            sizes = f"{more} {QUICK}" if self.quick else more
            data = ["--data", f"{self.pack}/data/seq128", "--steps", "8" if self.quick else steps]
            return [ITEMS, "training", *f"{sizes} {NAMED}".split(), "--config", config, *data, *result]
        return [ITEMS, part, *result]


def figure(key: str, value: dict[str, Any]) -> str:
    """The figures of an item in one line."""
    part = key.partition("/")[0]
    if part == "tests":
        return str(value["output"].strip().splitlines()[-1])
    if part == "steps":
        (ours,) = value["results"].values()
        rows, tokens = (ours[f"{name}_per_sec"]["p50"] for name in ("sequences", "real_tokens"))
        pace = f"{ours['step_seconds']['p50'] * 1e3:,.1f} ms, {rows:,.0f} sequences/s, {tokens:,.0f} real tokens/s"
        of = ours["mfu_datasheet_real"] or ours["mfu_real"]
        return f"{pace}, MFU {of:.1%}, {ours['memory_peak_gib']:.1f} GiB"
    if part == "kernels":
        best = [f"{c['what']} {c['ratio']:.2f}" for result in value["results"] for c in result["comparisons"]]
        rates = [f"{r['size']} {max(r['tflops'].values()):.4g} TFLOP/s" for r in value["results"] if r["tflops"]]
        return "; ".join(best or rates)
    return ", ".join(f"{name} {found}" for name, found in value.items())


def end_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group. One that waits for a hung device ends later, or never, and is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(END_SECONDS)


class Telemetry:
    """Clocks, power and temperature of the GPU of the items while one runs, read by nvidia-smi."""

    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")

    def __init__(self, folder: Path) -> None:
        self.file = folder / "telemetry"
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        command = ["nvidia-smi", "-i", device, f"--query-gpu={','.join(self.FIELDS)}", "--format=csv,noheader,nounits"]
        self.process: subprocess.Popen[bytes] | None = None
        if shutil.which("nvidia-smi"):
            with self.file.open("w") as file:
                self.process = subprocess.Popen(
                    [*command, "-lms", "500"], stdout=file, stderr=subprocess.DEVNULL, start_new_session=True,
                    preexec_fn=end_with_parent,
                )  # fmt: skip

    def stop(self) -> dict[str, list[float]]:
        """Minimum, median and maximum of each field; {} without nvidia-smi."""
        if self.process is None:
            return {}
        end_group(self.process)
        samples: dict[str, list[float]] = {field: [] for field in self.FIELDS}
        for line in self.file.read_text().splitlines():
            for field, text in zip(self.FIELDS, line.split(","), strict=False):
                if text.strip().replace(".", "", 1).isdigit():  # "[N/A]" if the device has no sensor
                    samples[field].append(float(text))
        return {field: [min(v), statistics.median(v), max(v)] for field, v in samples.items() if v}


def run_items(
    keys: list[str], command: Callable[[Path], list[str]], env: dict[str, str], limit: float, end: float = math.inf
) -> Results:
    """Results of a process of one item or of several steps, as they come: `state` done or failed, and figures or the reason.

    `limit`: seconds for each; `end`: of the monotonic clock. After a failure the rest of `keys` has no result.
    """
    # processes that an item has left may still write into it
    with tempfile.TemporaryDirectory(prefix="gpu_suite_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        target, log = folder / "result.json", folder / "log"
        # a separate cache of compiled code: incomplete files of an ended item would break this one
        env = env | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        with log.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, *command(target)], cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True,
                preexec_fn=end_with_parent,
            )  # fmt: skip
        try:
            for number, key in enumerate(keys):
                start, telemetry = time.monotonic(), Telemetry(folder)
                reason, value = wait(child, target, number if key.startswith("steps/") else -1, min(limit, end - start))
                result: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1), "telemetry": telemetry.stop()}
                if reason:
                    if target.is_file() and not key.startswith("steps/"):
                        result["partial"] = json.loads(target.read_text())  # it is written atomically
                    output = log.read_text(errors="replace")[-OUTPUT:]
                    yield key, {"state": "failed", "reason": reason, "output": output, **result}
                    return
                value = value or {"output": log.read_text(errors="replace")[-OUTPUT:]}
                yield key, {"state": "done", "value": value, **result}
        finally:
            end_group(child)


def wait(child: subprocess.Popen[bytes], target: Path, line: int, seconds: float) -> tuple[str, dict[str, Any]]:
    """Wait for the end of the process, or for a line of its results (from 0; -1: none). Returns why it failed, or "", and its result."""
    end = time.monotonic() + seconds
    while True:
        code = child.poll()
        # without the last one, which is empty or being written
        lines = target.read_text().split("\n")[:-1] if line >= 0 and target.is_file() else []
        if len(lines) > line >= 0:
            value: dict[str, Any] = json.loads(lines[line])["value"]
            return "", value
        if code is not None:
            if code or line >= 0:
                return f"exit code {code}" if code >= 0 else signal.Signals(-code).name, {}
            value = json.loads(target.read_text()) if target.is_file() else {}
            value.pop("about", None)
            return "", value
        if time.monotonic() > end:
            return f"no end after {seconds:.0f} s", {}
        time.sleep(LOOK)


def results(suite: Suite, chosen: dict[str, str], env: dict[str, str], end: float) -> Results:
    """Results of the chosen items in order. Steps that follow one another share a process; after one fails, the rest get another."""
    for part, group in groupby(chosen, lambda key: key.partition("/")[0]):
        waiting = list(group)
        while waiting:
            keys = waiting[:] if part == "steps" else waiting[:1]
            if end - time.monotonic() < LEAST:
                yield waiting.pop(0), {"state": "skipped"}
                continue
            command = partial(suite.command, keys, [chosen[key] for key in keys])
            threads = {"OMP_NUM_THREADS": "2"} if part == "tests" else {}  # of several processes
            for key, result in run_items(keys, command, env | threads, LIMITS[part] * PATIENCE[suite.device], end):
                waiting.remove(key)
                yield key, result


def parse() -> argparse.Namespace:
    name = f"{hardware.RESULTS}/gpu_{hardware.label()}_{time.strftime('%Y-%m-%d')}.json"
    parser = hardware.Parser(__doc__, help="result, written after each item", default=ROOT / name)
    add = parser.add_argument
    add("calls", nargs="*", choices=[*CALLS, []], metavar="CALL", help="first, second; default: both")
    add("--make-pack", nargs="+", metavar="TEXT", help="write the pack with datasets of these inputs (10 MB), and exit")
    add("--vocab-size", type=int, default=30_000, help="vocabulary of the pack's datasets")
    add("--library", type=Path, metavar="FILE", help="library for the pack, already built from this tree")
    add("--no-wheels", action="store_true", help="pack without wheels, for a machine with the project's environment")
    add("--pack", type=Path, default=pack.FOLDER, metavar="DIR")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--quick", action="store_true", help="tiny sizes: a test without meaningful figures")
    minutes = f"of this command, of which {KEPT_IN_HAND} s are kept in reserve; 0: 5 and 8 a call"
    add("--minutes", type=float, default=0, help=minutes)
    parts = f"machine, ranks, tests, training, steps, kernels, or keys of items; {NOTHING}: only check the pack"
    add("--only", nargs="+", metavar="PART", help=parts)
    args = parser.parse_args()
    args.pack, args.calls = args.pack.resolve(), args.calls or list(CALLS)
    known = {part for call in args.calls for key in CALLS[call] for part in (key, key.partition("/")[0])} | {NOTHING}
    if unknown := [part for part in args.only or () if part not in known]:
        parser.error(f"--only {unknown[0]}: not in the calls {' and '.join(args.calls)}; name {parts}")
    args.minutes = args.minutes or sum(MINUTES[call] for call in args.calls)
    if not args.make_pack:
        if 60 * args.minutes < KEPT_IN_HAND + LEAST:
            least = f"{(KEPT_IN_HAND + LEAST) / 60:.1f}, of which {KEPT_IN_HAND} s are kept in reserve"
            parser.error(f"--minutes {args.minutes:g}: the smallest part needs {least}")
        record = pack.read(args.pack)
        if not record:
            parser.error(f"--pack {args.pack}: is not a finished pack; --make-pack makes one")
        hardware.carry(record["about"]["revision"], record["about"].get("changes", ()))
        parser.refuse_dirty(args)
    return args


def main() -> int:
    args = parse()
    end, found = time.monotonic() + 60 * args.minutes - KEPT_IN_HAND, dict[str, dict[str, Any]]()
    if args.make_pack:
        record = pack.make(args.pack, args.make_pack, args.vocab_size, args.library, not args.no_wheels)
        size = pack.transfer_size(args.pack) / 2**20
        print(f"{args.pack}: {len(record['wheels'])} wheels; with the tree {size:.1f} MiB")
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu_site_") as site:
        setup = {"wheels": pack.unpack_wheels(args.pack, Path(site))}
        env = hardware.clone_environment(CUDA_DEVICE_ORDER="PCI_BUS_ID")  # nvidia-smi's
        env["PYTHONPATH"] = os.pathsep.join([site, env["PYTHONPATH"]])
        if args.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        setup["library"] = pack.place_library(args.pack, args.device)
        for line in setup.values():
            print(line, flush=True)
        listed = {key: options for call in args.calls for key, options in CALLS[call].items()}
        only = set(args.only or listed)
        chosen = {key: options for key, options in listed.items() if {key, key.partition("/")[0]} & only}
        for key, result in results(Suite(args.device, args.quick, args.pack), chosen, env, end):
            found[key] = result
            report = {"benchmark": "gpu", "device": args.device, "quick": args.quick, **setup, "results": found}
            hardware.write_json(args.json, report)
            try:
                line = figure(key, result["value"]) if "value" in result else result.get("reason", "")
            except (LookupError, TypeError, ValueError) as error:  # the others are still to be measured
                line = f"its figures are not as expected: {error!r}"
            print(f"{key:<32} {result['state']:<7} {result.get('seconds', 0):>5} s  {line}", flush=True)
    states = {key: result["state"] for key, result in found.items()}
    if set(states.values()) == {"skipped"}:
        raise ValueError(f"--minutes {args.minutes:g}: were over before the first part, so nothing was measured")
    if failed := [key for key, state in states.items() if state == "failed"]:
        print(f"error: failed: {', '.join(failed)}; the reasons are in {args.json}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    hardware.run(main)
