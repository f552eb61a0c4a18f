"""Every measurement that one lent GPU has to answer, in one command of ten minutes on a bare machine with torch alone.

    python benchmarks/gpu_pack.py --corpus TEXT…              (at home: wheels, native library, two datasets)
    python3 benchmarks/gpu_suite.py [--minutes 9.5] [--json FILE] [--only PART …]
    python benchmarks/gpu_suite.py --device cpu --small       (shows that everything runs; measures nothing)

Parts, in this order: environment (facts, the native library: carried, or built there), ceilings (every matrix product of
BERT-LARGE in bf16 and FP8, a large copy), operations (each candidate, checked, timed in CUDA graphs), steps (BERT-LARGE at
128 and 512: eager, graphed, FP8, compiled, LAMB, without dropout), profile (the 40 costliest kernels of a step), tests.
One process does all; what breaks it or does not end is recorded and the rest goes on in a new one. The file is written
after every item, with clocks, power and temperature beside it, and ends with a verdict on what was computed on paper.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.gpu import library, paper, plan, runner
from benchmarks.gpu.pack import FOLDER, Pack
from benchmarks.gpu.runner import Journal
from benchmarks.gpu.telemetry import Telemetry

ROOT = hardware.ROOT


def measured(results: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """The values that `paper.LINES` asks for, from the items' results; None where one is missing."""
    done = {key: r["value"] for key, r in results.items() if r["state"] == "done"}
    steps = [value for key, value in done.items() if key.startswith("steps/") and value["dropout"] > 0]
    layers = 24

    def milliseconds(key: str, times: float = 1.0) -> float | None:
        value = done.get(key)
        return None if value is None else times * value["ms"]

    def best(seq_len: int, **wanted: Any) -> float | None:
        """The most full rows a second of the setups that are so, AdamW."""
        rates = [
            s["full_rows_per_sec"] for s in steps
            if s["seq_len"] == seq_len and s["optimizer"] == "adamw" and all(s[k] == v for k, v in wanted.items())
        ]  # fmt: skip
        return max(rates, default=None)

    def over(role: str) -> float | None:
        """Milliseconds of the best other candidate at 128, with dropout where it has any, over ours."""
        dropout = 0.0 if role in plan.WITHOUT_DROPOUT else 0.1
        rows = [
            v
            for k, v in done.items()
            if k.startswith(f"operations/{role} ") and v["seq_len"] == 128 and v["dropout"] == dropout
        ]
        own = plan.OURS[role]
        ours = [v["ms"] for v in rows if v["name"] == own]
        others = [v["ms"] for v in rows if v["name"] not in (own, "fused_softmax")]
        return min(others) / ours[0] if ours and others else None

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    products, torch_step, bf16 = (
        done.get("ceilings/products bf16"),
        best(128, backends="torch", rows=128),
        best(128, precision="bf16"),
    )
    fp8 = {n: ratio(best(n, precision="fp8"), best(n, precision="bf16")) for n in (128, 512)}
    per_step = plan.TOKENS / 128 * 1e3  # rows/s -> milliseconds of 16,384 tokens
    return {
        "products_ms": paper.PRODUCTS_TFLOP / products["tflops"] * 1e3 if products else None,
        "attention_128_flash_ms": milliseconds("operations/attention varlen 128 dropout 0.1", layers),
        "attention_512_flash_ms": milliseconds("operations/attention varlen 512 dropout 0.1", layers),
        "elementwise_torch_ms": milliseconds("operations/layer torch 128 dropout 0.1", layers),
        "elementwise_ours_ms": milliseconds("operations/layer native 128 dropout 0.1", layers),
        "accumulate_ms": milliseconds("operations/accumulate"),
        "adamw_ms": milliseconds("operations/optimizer adamw"),
        "lamb_ms": milliseconds("operations/optimizer lamb"),
        "step_torch_ms": per_step / torch_step if torch_step else None,
        "step_best_ms": per_step / bf16 if bf16 else None,
        "rows_128": bf16, "rows_512": best(512, precision="bf16"),
        "fp8_ratio_128": fp8[128], "fp8_ratio_512": fp8[512],
        "attention_ratio_128": over("attention"), "layer_ratio_128": over("layer"),
    }  # fmt: skip


def report(args: argparse.Namespace, journal: Journal, telemetry: Telemetry, wheels: str) -> dict[str, Any]:
    """All that is known so far, as it goes into the file."""
    begun = {e["begin"]: e["at"] for e in journal.entries() if "begin" in e}
    results = journal.results()
    for key, result in results.items():
        if key in begun and args.device == "cuda":
            result["telemetry"] = telemetry.between(begun[key], begun[key] + result["seconds"])
    real = args.device == "cuda" and not args.small  # small sizes and a CPU say nothing of a GPU
    return {
        "benchmark": "gpu", "small": args.small, "device": args.device, "minutes": args.minutes, "wheels": wheels,
        "verdict": paper.verdicts(measured(results) if real else {}), "results": results,
    }  # fmt: skip


def failures(results: dict[str, dict[str, Any]]) -> list[str]:
    """Keys of the items that failed, and of tests that did."""
    return [k for k, r in results.items() if r["state"] == "failed" or r.get("value", {}).get("exit")]


def line(key: str, result: dict[str, Any]) -> str:
    """One item for the screen."""
    value, state = result.get("value", {}), result["state"]
    if state != "done":
        return f"{key:<46} {state}: {result.get('reason', '').partition(chr(10))[0]:.150}"
    said = [f"{result['seconds']:.1f} s"]
    if "tflops" in value:
        said.append(f"{value['tflops']:,.1f} TFLOP/s")
    if "bytes_per_sec" in value:
        said.append(f"{value['bytes_per_sec'] / 1e9:,.1f} GB/s")
    if "ms" in value:
        said.append(f"{value['ms']:.3f} ms")
    if "full_rows_per_sec" in value:
        said += [
            f"{value['full_rows_per_sec']:,.1f} full rows/s",
            f"{value['step_seconds']['p50'] * 1e3:.1f} ms",
            value["loop"],
        ]
    if "library" in value:
        said.append(value["library"])
    if "exit" in value:
        said.append((value["output"].strip().splitlines() or [""])[-1])
    return f"{key:<46} {', '.join(said)}"


def datasets(pack: Pack) -> dict[int, str]:
    return {int(length): str(pack.data(int(length))) for length in pack.record["data"]}


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Pack]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument("--minutes", type=float, default=9.5, help="nothing starts or goes on after them")
    parser.add_argument("--only", nargs="+", choices=list(plan.PARTS), default=list(plan.PARTS), metavar="PART",
                        help=f"of {', '.join(plan.PARTS)}; environment is always done")  # fmt: skip
    parser.add_argument("--pack", type=Path, default=FOLDER, metavar="DIR", help="what gpu_pack.py made")
    name = f"{hardware.RESULTS}/gpu_{hardware.label()}_{time.strftime('%Y-%m-%d')}.json"
    hardware.add_json(parser, "result, written after each item", default=ROOT / name)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)  # works off the plan in this folder
    args = parser.parse_args(argv)
    try:
        pack = Pack(args.pack.resolve())
    except ValueError as error:
        parser.error(str(error))
    hardware.carry(*pack.origin())
    if not args.child:
        hardware.refuse_dirty(parser, args)
    return args, pack


def plan_of(args: argparse.Namespace, pack: Pack, folder: Path) -> tuple[list[runner.Item], dict[str, float]]:
    """The items and when each part ends, fixed once for parent and child."""
    file = folder / "plan.json"
    if not file.is_file():
        file.write_text(json.dumps({"start": time.time()}))
    start = json.loads(file.read_text())["start"]
    seconds = 60 * args.minutes
    options = plan.Options(
        args.device, args.small, str(pack.folder), datasets(pack), str(folder / "journal"), start + seconds
    )
    chosen = [item for item in plan.items(options) if item.part in ("environment", *args.only)]
    return chosen, {part: start + share * seconds for part, share in plan.PARTS.items()}


def child(args: argparse.Namespace, pack: Pack) -> int:
    folder = Path(args.child)
    items, ends = plan_of(args, pack, folder)
    return runner.work(items, Journal(folder / "journal"), ends, functools.partial(library.healthy, args.device))


def main(argv: list[str] | None = None) -> int:
    args, pack = parse(argv)
    if args.child:
        return child(args, pack)
    with tempfile.TemporaryDirectory(prefix="gpu_suite_") as name:
        folder = Path(name)
        _, ends = plan_of(args, pack, folder)
        wheels = pack.unpack_wheels(folder / "site")
        print(f"the pack's wheels: {wheels}", flush=True)
        env = hardware.clone_environment()
        env["PYTHONPATH"] = os.pathsep.join([str(folder / "site"), env["PYTHONPATH"]])
        journal, telemetry, shown = Journal(folder / "journal"), Telemetry(), set[str]()

        def changed() -> None:
            results = journal.results()
            for key in [key for key in results if key not in shown]:
                shown.add(key)
                print(line(key, results[key]), flush=True)
            if results.get("environment/facts", {}).get("state") == "done":
                hardware.write_json(args.json, report(args, journal, telemetry, wheels))

        command = [sys.executable, str(Path(__file__).resolve()), *(argv if argv is not None else sys.argv[1:])]
        code = runner.supervise(
            [*command, "--child", name], journal, folder / "log", env, end=max(ends.values()), changed=changed
        )
        telemetry.stop()
        results = journal.results()
        if code == runner.STOP:
            print(f"error: {results['environment/facts']['reason']}", file=sys.stderr)
            return 1
        if code not in (0, runner.RESTART) and not results:
            print(f"error: the measuring process ends at once:\n{runner.tail(folder / 'log')}", file=sys.stderr)
            return 1
        print(f"\n{paper.show(report(args, journal, telemetry, wheels)['verdict'])}\n{args.json}")
    failed = failures(results)
    if failed:
        print(f"error: failed: {', '.join(failed)}; the reasons are in {args.json}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
