"""Suite of all GPU measurements in one command and one file: operations tested, operations and steps measured.

    python benchmarks/gpu_suite.py [--json FILE] [--minutes 25] [--only tests ops step …]
    python benchmarks/gpu_suite.py --device cpu --small      (shows that the suite runs; measures nothing)

Each stage is a command of its own with a time limit; the file is written after each, so a run that is cut short keeps what
it has. Stages: `tests` (the operations' tests on the device), `ops` (benchmarks/bench_ops.py),
`step` (BERT-LARGE's whole training step at 128 and 512, with torch's operations and with ours).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware

ROOT = hardware.ROOT
TORCH_OPS = ["layer=torch", "mlm_loss=torch"]
OUR_OPS = ["layer=native", "mlm_loss=native"]


@dataclass
class Stage:
    name: str
    command: list[str]  # after the interpreter; "{json}" stands for a file the command writes
    limit: float  # seconds


def step_stage(name: str, seq_len: int, args: argparse.Namespace, data: Path, backends: list[str]) -> Stage:
    """BERT-LARGE's step on full rows; on a small run one update of a small model."""
    size = ["--model", "mini", "--micro", "2", "--steps", "1"] if args.small else ["--model", "large"]
    if not args.small:
        size += ["--micro", str(args.tokens // seq_len), "--steps", "20"]
    command = ["benchmarks/bench_step.py", *size, "--seq-len", str(seq_len), "--accumulation", "1"]
    command += ["--dropout", "0.1", "--data", str(data), "--json", "{json}", "--ops", *backends]
    return Stage(name, command, 300)


def stages(args: argparse.Namespace, work: Path) -> list[Stage]:
    device = ["--device", args.device, *(["--small"] if args.small else [])]
    chosen_tests = ["tests/csrc/test_philox.py"] if args.small else ["-m", "gpu", "tests/model/ops"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen_tests]
    attention = "varlen" if args.device == "cuda" else "native"
    short, long = work / "seq128", work / "seq512"
    if args.small:
        long = short
    result = [
        Stage("tests", tests, 600),
        Stage("ops", ["benchmarks/bench_ops.py", *device, "--json", "{json}"], 600),
    ]
    for folder, seq_len in ((short, 128), (long, 512)):
        length = 128 if args.small else seq_len
        if not any(stage.name == f"data {folder.name}" for stage in result):
            build = ["-m", "data_prep", "build", "--input", args.corpus, "--output", str(folder), "--quiet"]
            build += ["--seq-len", str(length), "--vocab-size", "2000" if args.small else "30000"]
            result.append(Stage(f"data {folder.name}", build, 300))
        for what, backends in {"torch": TORCH_OPS, "ours": OUR_OPS}.items():
            chosen = [*backends, f"attention={attention}"]
            result.append(step_stage(f"step {seq_len} {what}", length, args, folder, chosen))
    fused = [*OUR_OPS, "attention=fused_softmax"]
    result.append(step_stage("step 128 fused_softmax", 128, args, short, fused))
    return result


def run(stage: Stage, work: Path, left: float) -> dict[str, Any]:
    """The stage's outcome: seconds, exit code, the end of what it printed, and the file it wrote."""
    target = work / f"{stage.name.replace(' ', '_')}.json"
    command = [sys.executable, *(part.replace("{json}", str(target)) for part in stage.command)]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=min(stage.limit, left),
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        code, output = 124, str(expired.stdout or "")
    result = {"exit": code, "seconds": round(time.monotonic() - start, 1), "output": output[-4000:]}
    if target.is_file():
        result["result"] = json.loads(target.read_text())
    return result


def device_facts(device: str) -> dict[str, Any]:
    import torch

    if device == "cpu":
        return {"device": "cpu", "torch": torch.__version__}
    if not torch.cuda.is_available():
        sys.exit("error: torch sees no CUDA device; --device cpu --small shows that the suite runs")
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name, "compute_capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count, "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip


def steps_table(done: dict[str, Any]) -> list[dict[str, Any]]:
    """Full rows a second of each measured step, and its share of the measured matrix ceiling and of the datasheet's."""
    table = []
    for name, stage in done.items():
        for result in stage.get("result", {}).get("results", []) if name.startswith("step") else []:
            ours = result["results"]["ours"]
            table.append(
                {
                    "what": name,
                    "rows_per_sec": ours["real_tokens_per_sec"]["p50"] / result["seq_len"],
                    "mfu_real": ours["mfu_real"],
                    "mfu_datasheet_real": ours["mfu_datasheet_real"],
                    "memory_peak_gib": ours["memory_peak_gib"],
                    "backends": result["backends"],
                }
            )
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE", help="stages whose name starts with one of these"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="no stage starts or goes on after them")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-step of BERT-LARGE")
    parser.add_argument("--corpus", default="pydoc", help="text of the steps' rows, as data_prep's --input")
    name = f"{hardware.RESULTS}/gpu_{hardware.label()}_{time.strftime('%Y-%m-%d')}.json"
    hardware.add_json(parser, "result of all stages, written after each", default=ROOT / name)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    facts, done = device_facts(args.device), {}
    print(facts, flush=True)
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="gpu_suite_") as folder:
        for stage in stages(args, Path(folder)):
            wanted = not args.only or stage.name.startswith((*args.only, "data"))
            if not wanted or time.monotonic() > end:
                continue
            print(f"{stage.name} …", end=" ", flush=True)
            done[stage.name] = run(stage, Path(folder), end - time.monotonic())
            print(f"exit {done[stage.name]['exit']}, {done[stage.name]['seconds']} s", flush=True)
            hardware.write_json(
                args.json, {"facts": facts, "small": args.small, "steps": steps_table(done), "stages": done}
            )
    for row in steps_table(done):
        sheet = row["mfu_datasheet_real"]
        print(
            f"{row['what']:<26} {row['rows_per_sec']:>9,.1f} full rows/s   {row['mfu_real']:.1%} of the measured "
            f"matrix ceiling, {f'{sheet:.1%}' if sheet else 'unknown'} of the datasheet's"
        )
    failed = [name for name, stage in done.items() if stage["exit"]]
    if failed:
        print(f"error: failed: {', '.join(failed)}; their output is in {args.json}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
