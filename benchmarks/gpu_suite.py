"""One GPU's measurements in ten minutes: matrix products, kernels, BERT-LARGE's training step, the operations' tests.

    python benchmarks/gpu_suite.py --make-pack TEXT…          (with nvcc and network: wheels, native library, two datasets)
    python3 benchmarks/gpu_suite.py [--minutes 9.5] [--json FILE] [--only PART …]
    python benchmarks/gpu_suite.py --device cpu --small       (a test of all items; its figures mean nothing)

The machine needs torch and numpy, and a copy of this tree with the pack in build/gpu_pack. Each item is a benchmark in a child
process: one that crashes, makes the device unusable or does not end is recorded without affecting the others. The file is written
after every item, with clocks, power and temperature.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.gpu import pack

ROOT = hardware.ROOT
# time limit of an item in seconds, and remaining seconds below which none is started
LIMIT, LEAST = 180, 15
OURS = "attention=native layer=native mlm_loss=native"
TORCH = "attention=varlen layer=torch mlm_loss=torch"
# name -> (row length, rows of a micro-step, options of bench_step.py)
STEPS: dict[str, tuple[int, int, str]] = {
    "ours 128x256": (128, 256, f"--ops {OURS}"),
    "ours 512x64": (512, 64, f"--ops {OURS}"),
    "torch 128x128": (128, 128, f"--ops {TORCH}"),
    "torch 512x64": (512, 64, f"--ops {TORCH}"),
    "flash, our layer 128x256": (128, 256, "--ops attention=varlen layer=native mlm_loss=native"),
    "flash, our layer 512x64": (512, 64, "--ops attention=varlen layer=native mlm_loss=native"),
    "compiled 128x256": (128, 256, "--ops attention=varlen layer=compiled mlm_loss=native"),
    "compiled 512x64": (512, 64, "--ops attention=varlen layer=compiled mlm_loss=native"),
    "ours 128x128, profile": (128, 128, f"--ops {OURS} --profile"),
    "ours 512x32, profile": (512, 32, f"--ops {OURS} --profile"),
    "lamb 128x256": (128, 256, f"--ops {OURS} --optimizer lamb"),
    "without dropout 128x256": (128, 256, f"--ops {OURS} --dropout 0"),
    "ours 128x512": (128, 512, f"--ops {OURS}"),
    "ours 512x128": (512, 128, f"--ops {OURS}"),
}
KERNELS = ("products", "attention", "layer", "mlm_loss", "softmax_mask", "optimizer")


@dataclass(frozen=True)
class SuiteItem:
    """A command that writes figures to `--json FILE`, or pytest, whose last lines are recorded."""

    key: str
    command: tuple[str, ...]

    @property
    def part(self) -> str:
        return self.key.partition("/")[0]


def items(device: str, small: bool, folder: Path) -> list[SuiteItem]:
    """All items: torch's step first, before our code or a graph can change the state of the device, then kernels."""
    size, steps = ["--small"] if small else [], []
    kernels = [
        SuiteItem(f"kernels/{name}", ("benchmarks/bench_ops.py", "--device", device, "--only", name, *size))
        for name in KERNELS
    ]
    for name, (seq_len, rows, options) in STEPS.items():
        shape = ["--model", "tiny" if small else "large", "--micro", str(2 if small else rows), "--accumulation", "1"]
        shape += ["--seq-len", str(seq_len), "--data", str(folder / f"data/seq{seq_len}")]
        shape += ["--steps", "1" if small else "4"]
        chosen = options if "--dropout" in options else f"{options} --dropout 0.1"
        if device == "cpu":
            chosen = chosen.replace("=varlen", "=sdpa")
        steps.append(SuiteItem(f"steps/{name}", ("benchmarks/bench_step.py", *shape, *chosen.split())))
    chosen_tests = ["tests/csrc/test_philox.py"] if device == "cpu" else ["-m", "gpu", "tests/ops"]
    baseline = [item for item in steps if item.key.startswith("steps/torch ")]
    rest = [item for item in steps if item not in baseline]
    return [
        *baseline,
        *kernels,
        *rest,
        SuiteItem("tests", ("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen_tests)),
    ]


class Telemetry:
    """Clocks, power and temperature of the first GPU while an item runs, read by nvidia-smi."""

    FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")

    def __init__(self, folder: Path) -> None:
        self.file = folder / "telemetry"
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(self.FIELDS)}", "--format=csv,noheader,nounits"]
        self.process: subprocess.Popen[bytes] | None = None
        if shutil.which("nvidia-smi"):
            with self.file.open("w") as file:
                self.process = subprocess.Popen([*command, "-lms", "500"], stdout=file, stderr=subprocess.DEVNULL)

    def stop(self) -> dict[str, list[float]]:
        """Minimum, median and maximum of each field; {} without nvidia-smi."""
        if self.process is None:
            return {}
        self.process.terminate()
        self.process.wait()
        samples: dict[str, list[float]] = {field: [] for field in self.FIELDS}
        for line in self.file.read_text().splitlines():
            for field, text in zip(self.FIELDS, line.split(","), strict=False):
                if text.strip().replace(".", "", 1).isdigit():  # "[N/A]" if the device has no sensor
                    samples[field].append(float(text))
        return {field: [min(v), statistics.median(v), max(v)] for field, v in samples.items() if v}


def run_item(item: SuiteItem, env: dict[str, str], seconds: float) -> dict[str, Any]:
    """The result of an item: `state` done or failed, and its figures or the reason."""
    with tempfile.TemporaryDirectory(prefix="gpu_suite_") as name:
        folder, start = Path(name), time.monotonic()
        target, log, pytest = folder / "result.json", folder / "log", item.part == "tests"
        command = [sys.executable, *item.command, *([] if pytest else ["--json", str(target)])]
        # a separate cache of compiled code: incomplete files of an ended item would break this one
        env = env | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        telemetry = Telemetry(folder)
        with log.open("wb") as file:
            child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            code = child.wait(seconds)
            reason = "" if code == 0 else f"exit code {code}" if code > 0 else signal.Signals(-code).name
        except subprocess.TimeoutExpired:
            reason = f"no end after {seconds:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output = log.read_text(errors="replace")[-3000:]
        result: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1), "telemetry": telemetry.stop()}
        if reason:
            return {"state": "failed", "reason": reason, "output": output, **result}
        value = {"output": output} if pytest else json.loads(target.read_text())
        value.pop("about", None)
        return {"state": "done", "value": value, **result}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--make-pack", nargs="+", metavar="TEXT", help="write the pack with datasets of these inputs (10 MB), and exit")
    add("--vocab-size", type=int, default=30_000, help="vocabulary of the pack's datasets")
    add("--library", type=Path, metavar="FILE", help="library for the pack, already built from this tree")
    add("--no-wheels", action="store_true", help="pack without wheels, for a machine with the project's environment")
    add("--pack", type=Path, default=pack.FOLDER, metavar="DIR")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--small", action="store_true", help="tiny sizes: a test without meaningful figures")
    add("--minutes", type=float, default=9.5, help="time limit of all items together")
    add("--only", nargs="+", default=["kernels", "steps", "tests"], metavar="PART",
        help="kernels, steps, tests, or keys of items")  # fmt: skip
    name = f"{hardware.RESULTS}/gpu_{hardware.label()}_{time.strftime('%Y-%m-%d')}.json"
    hardware.add_json(parser, "result, written after each item", default=ROOT / name)
    args = parser.parse_args(argv)
    args.pack = args.pack.resolve()
    if not args.make_pack:
        record = pack.read(args.pack)
        if not record:
            parser.error(f"--pack {args.pack}: is no finished pack; --make-pack makes one")
        hardware.carry(record["about"]["revision"], record["about"].get("changes", ()))
        hardware.refuse_dirty(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    end, results = time.monotonic() + 60 * args.minutes, dict[str, dict[str, Any]]()
    try:
        if args.make_pack:
            record = pack.make(args.pack, args.make_pack, args.vocab_size, args.library, not args.no_wheels)
            print(f"{args.pack}: {len(record['wheels'])} wheels")
            return 0
        with tempfile.TemporaryDirectory(prefix="gpu_site_") as site:
            setup = {"wheels": pack.unpack_wheels(args.pack, Path(site))}
            pack.place_library(args.pack, args.device)
            print(setup["wheels"], flush=True)
            env = hardware.clone_environment()
            env["PYTHONPATH"] = os.pathsep.join([site, env["PYTHONPATH"]])
            if args.device == "cpu":
                env["CUDA_VISIBLE_DEVICES"] = ""
            for item in items(args.device, args.small, args.pack):
                if not {item.part, item.key} & set(args.only):
                    continue
                left = end - time.monotonic()
                enough = left > LEAST
                results[item.key] = run_item(item, env, min(LIMIT, left)) if enough else {"state": "skipped"}
                print(f"{item.key:<40} {results[item.key]['state']} {results[item.key].get('reason', '')}", flush=True)
                report = {"benchmark": "gpu", "device": args.device, "small": args.small, **setup, "results": results}
                hardware.write_json(args.json, report)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = [key for key, result in results.items() if result["state"] == "failed"]
    if failed:
        print(f"error: failed: {', '.join(failed)}; the reasons are in {args.json}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
