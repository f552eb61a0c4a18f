"""Options of the planner and the text they ask for."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from megabert.commands.plan import devices
from megabert.commands.plan.devices import Fabric
from megabert.commands.plan.forecast import HOUR, Job, Prices, Reliability, failure_table, forecast, table
from megabert.commands.plan.plot import svg
from megabert.common.atomic_io import write_whole

FAILURE_OPTIONS = ("node_mtbf_hours", "save_seconds", "restart_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the forecast is for; without --gpus there is none."""
    add = parser.add_argument_group("forecast").add_argument
    names = ", ".join(devices.DEVICES)
    add("--gpus", metavar="NAME", help=f"predict seconds an update on this GPU ({names})")
    add(
        "--over",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of GPUs to predict for (default: one node); overrides go before it",
    )
    add("--nodes-of", type=int, default=8, metavar="N", help="GPUs a node")
    add("--network", default="", metavar="AxG", help="network a node: A adapters of G Gbit/s, e.g. 8x400")
    add("--plot", type=Path, metavar="FILE", help="seconds an update and efficiency, as SVG")
    add("--gpu-hour-price", type=float, metavar="X", help="of one GPU for an hour, in any currency")
    add("--kwh-price", type=float, metavar="X", help="of energy, in the same currency")
    add("--watts", type=float, metavar="X", help="of a GPU with its part of the node (default: its board's)")
    add("--node-mtbf-hours", type=float, metavar="X", help="mean time between failures of a node")
    add("--save-seconds", type=float, metavar="X", help="that a checkpoint holds up training")
    add("--restart-seconds", type=float, metavar="X", help="from a failure to the first new update")


def asked(args: argparse.Namespace) -> bool:
    """Whether a forecast is. Raises ValueError for an option that only a forecast takes."""
    if args.gpus:
        return True
    only = ("over", "network", "plot", "gpu_hour_price", "kwh_price", "watts", *FAILURE_OPTIONS)
    for name in only:
        if getattr(args, name) not in (None, ""):
            raise ValueError(f"{_option(name)} belongs to a forecast: name the GPU with --gpus, e.g. --gpus h100")
    return False


def from_arguments(args: argparse.Namespace, job: Job) -> str:
    """The forecast as text; its plot is written. Raises ValueError naming the option or key that cannot be."""
    device = devices.device(args.gpus)
    fabric = Fabric.of(args.nodes_of, args.network)
    for name in ("gpu_hour_price", "kwh_price", "watts"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{_option(name)} {value:g}: give a number from 0 on")
    prices = Prices(args.gpu_hour_price or 0.0, args.kwh_price or 0.0, args.watts or 0.0)
    reliability = _reliability(args)
    points = forecast(job, args.over or [fabric.node], device, fabric)
    what = f"{args.gpus}, nodes of {fabric.node}" + (f", network {args.network}" if args.network else "")
    title = f"{what}: {job.rows:,} rows of {job.seq_len} tokens an update, ZeRO-{job.config.zero.stage}"
    text = f"projection, not measured: {title}\n\n{table(job, points, device, prices)}"
    if reliability is not None:
        text += f"\n\nfailures\n{failure_table(points, fabric, reliability)}"
    if args.plot:
        write_whole(args.plot, svg(points, f"{title} (projection)").encode())
        text += f"\n\n{args.plot}"
    return text


def _reliability(args: argparse.Namespace) -> Reliability | None:
    """Raises ValueError where some of its three times are missing or cannot be."""
    given = {name: getattr(args, name) for name in FAILURE_OPTIONS}
    missing = [_option(name) for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(f"{missing[0]} is missing: failures need {', '.join(map(_option, given))}")
    hours, save, restart = given.values()
    for name, value in (("node_mtbf_hours", hours), ("save_seconds", save), ("restart_seconds", restart)):
        if not 0 < value < math.inf:
            raise ValueError(f"{_option(name)} {value:g}: give a number above 0")
    return Reliability(hours * HOUR, save, restart)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
