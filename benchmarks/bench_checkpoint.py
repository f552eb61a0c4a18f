"""Seconds for which a save keeps training waiting: this tree, another revision, torch.distributed.checkpoint.

    python benchmarks/bench_checkpoint.py --base REVISION|DIR [--ranks 8] [--stage 1] [--rounds 3] [--json FILE]

Every side saves the same model from as many processes (gloo), in turn, which one first changes every round. `blocked` is
what the slowest rank spends in calls that belong to a save (taking the snapshot, committing, removing what is too old),
`committed` the time until the checkpoint could be gone on from; medians over all saves but each round's first.
A revision with other native operations is named by a folder where they are built.
Then bits of a finished checkpoint are flipped, one at a time: `noticed` counts those that loading it tells of.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.bench_revisions import tree_of
from benchmarks.common import hardware
from benchmarks.survival.life import free_port

RANKS = hardware.ROOT / "benchmarks/checkpoint/save_ranks.py"
OURS, BASE, DCP = "ours", "base", "torch.distributed.checkpoint"
FLIPS = 8


def run_side(tree: Path, side: str, asked: dict[str, Any], ranks: int) -> list[dict[str, float]]:
    """Figures of each save. Raises ValueError with the end of the output of a rank that failed."""
    argument = json.dumps(asked | {"side": "dcp" if side == DCP else "store"})
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        env = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, str(RANKS), argument]
        processes.append(
            subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate() for process in processes]
    for process, (out, error) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise ValueError(f"{side}: a rank ended with {process.returncode}:\n{(out + error)[-2000:]}")
    return json.loads(outputs[0][0].splitlines()[-1])


def noticed(folder: Path, load: Callable[[], object]) -> int:
    """How many of FLIPS flipped bits, spread over the folder's largest file, make `load` fail."""
    file = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    size, found = file.stat().st_size, 0
    for number in range(FLIPS):
        place = (2 * number + 1) * size // (2 * FLIPS)
        flip(file, place)
        try:
            load()
        except Exception:  # whatever a library tells it by
            found += 1
        flip(file, place)
    return found


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 16]))


def load_ours(folder: Path, newest: str) -> None:
    """Raises ValueError where not `newest` but one before it would be gone on from."""
    import torch

    from megabert.checkpoint import Checkpoints
    from megabert.distributed.process_group import World

    found = Checkpoints(folder, World(0, 0, 1, torch.device("cpu"), "gloo", "single")).latest()
    if found is None or found.name != newest:
        raise ValueError("an older one was taken")


def load_dcp(folder: Path) -> object:
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    tensors = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(found.size) for name, found in tensors.items()}  # type: ignore[union-attr]
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REVISION|DIR", help="compared with this tree (default: none)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="ZeRO stage")
    parser.add_argument("--optimizer", choices=("adamw", "lamb", "muon"), default="adamw")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--saves", type=int, default=5, help="of each side in each round")
    parser.add_argument("--rounds", type=int, default=3)
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    heads = args.hidden // 64
    model = {"layers": args.layers, "hidden": args.hidden, "heads": heads, "vocab_size": 30_528}
    asked = {"stage": args.stage, "optimizer": args.optimizer, "saves": args.saves, "model": model}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in (OURS, DCP, BASE) if side != BASE or args.base}
    try:
        with tempfile.TemporaryDirectory(prefix="bench_checkpoint_") as scratch:
            with tree_of(args.base or str(hardware.ROOT)) as base:
                for number in range(args.rounds):
                    for side in list(found)[:: 1 if number % 2 else -1]:
                        folder = Path(scratch) / side
                        shutil.rmtree(folder, ignore_errors=True)
                        folder.mkdir()
                        tree = base if side == BASE else hardware.ROOT
                        saves = run_side(tree, side, asked | {"folder": str(folder)}, args.ranks)
                        found[side] += saves[1:]
                        print(f"round {number + 1}, {side}: {[round(s['blocked'], 4) for s in saves]}", flush=True)
            results = {
                side: {key: round(statistics.median(save[key] for save in saves), 4) for key in saves[0]}
                for side, saves in found.items()
            }
            name = f"step-{args.saves:08d}"
            theirs, ours = Path(scratch) / DCP / name, Path(scratch) / OURS / "checkpoints" / name
            results[DCP]["noticed"] = noticed(theirs, lambda: load_dcp(theirs))
            results[OURS]["noticed"] = noticed(ours, lambda: load_ours(Path(scratch) / OURS, name))
            results[DCP]["index_bytes"] = (theirs / ".metadata").stat().st_size
            results[OURS]["index_bytes"] = (ours / "manifest.json").stat().st_size
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for side, figures in results.items():
        over = figures["blocked"] / results[OURS]["blocked"]
        print(f"{side}: {json.dumps(figures)}, blocked {over:.2f} times as long as ours")
    if args.json:
        setting = asked | {"ranks": args.ranks, "rounds": args.rounds, "base": args.base, "flips": FLIPS}
        hardware.write_json(args.json, {"benchmark": "checkpoint", "setting": setting, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
