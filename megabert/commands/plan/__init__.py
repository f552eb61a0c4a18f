"""The needs of a run, before it is started: batch arithmetic, memory, work and time.

    megabert plan --config large_phase1 --data DIR --world-size 64 [section.key=value …]
    megabert plan --config large_phase1 --gpus h100 --over 8 64 512

Nothing is run, but for half a second of matrix products with --this-cpu. With --gpus the seconds of an update and the days are
predicted for each number of GPUs (docs/planner.md).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megabert.common.arguments import Parser, add_config_options
from megabert.common.errors import command

if TYPE_CHECKING:
    from megabert.config import Config, Phase

# options that a plan takes only with --gpus, and only without it
FORECAST = ("--over", "--nodes-of", "--network", "--link", "--compare", "--price")
WITHOUT_GPUS = ("--world-size", "--memory-gib", "--this-cpu", "--deepspeed_config")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises ValueError for an option of the other kind of plan, and for a value that is not a positive number."""
    parser = Parser(description=__doc__)
    add_config_options(parser)
    add = parser.add_argument
    add("--world-size", type=int, metavar="N", help="ranks to plan for (default: 1)")
    add("--memory-gib", type=float, metavar="X", help="memory of a GPU, for the largest micro-batch")
    own = "also estimate the time on this machine's CPU, by measuring its matrix products"
    add("--this-cpu", action="store_true", default=None, help=own)
    add = parser.add_argument_group("forecast").add_argument
    add("--gpus", metavar="NAME", help="predict the seconds of an update on this GPU, e.g. h100")
    numbers = "numbers of GPUs to predict for (default: one node); overrides go before it"
    add("--over", type=int, nargs="+", metavar="N", help=numbers)
    add("--nodes-of", type=int, metavar="N", help="GPUs a node (default: 8)")
    network = (
        "network a node: A adapters of G Gbit/s (default: an adapter a GPU, of v100 50, Ampere and Ada 200, later 400)"
    )
    add("--network", metavar="AxG", help=network)
    link = "GB/s in one direction of the links between GPUs, if the host's are slower than the GPU's (PCIe 3.0 x16: 16)"
    add("--link", type=float, metavar="X", help=link)
    compare = "show the nearest published runs of BERT-LARGE beside the forecast"
    add("--compare", action="store_true", default=None, help=compare)
    add("--price", type=float, metavar="X", help="price of a GPU-hour, for the cost of MLPerf's target (large_phase2)")
    args = parser.parse_intermixed_args(argv)
    given = {name: value for name, value in vars(args).items() if value not in (None, "")}
    kind = "a forecast: name the GPU with --gpus, e.g. --gpus h100"
    if args.gpus:
        kind = "a plan without --gpus: leave out one of both"
    for option in WITHOUT_GPUS if args.gpus else FORECAST:
        if option[2:].replace("-", "_") in given:
            raise ValueError(f"{option} belongs to {kind}")
    for name in ("world_size", "memory_gib", "link", "price"):
        if not 0 < given.get(name, 1) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {given[name]:g}: give a number above 0")
    return args


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    from megabert import config as configuration
    from megabert.data.shards import Manifest

    config, extra = configuration.from_arguments(args), configuration.read_deepspeed(args.deepspeed_config)
    phases = configuration.list_phases(config)
    for path in {phase.config.data.path for phase in phases} - {""}:
        Manifest.load(path)
    if args.gpus:
        print_forecast(args, config, phases)
    else:
        from megabert.commands.plan import workload

        print(workload.report(config, args.world_size or 1, args.memory_gib, extra, bool(args.this_cpu)))


def print_forecast(args: argparse.Namespace, config: Config, phases: Sequence[Phase]) -> None:
    """Print the forecast of each phase. Raises ValueError naming an option that does not fit."""
    from megabert.commands.plan import step_time

    if args.gpus not in step_time.DEVICES:
        raise ValueError(f"--gpus {args.gpus}: not in the device table; choose one of {', '.join(step_time.DEVICES)}")
    device = step_time.DEVICES[args.gpus].linked(args.link or 0)
    node = 8 if args.nodes_of is None else args.nodes_of
    sizes, network, assumed = args.over or [node], args.network, ""
    if network is None and max(sizes) > node:
        network = f"{node}x{step_time.ADAPTERS[device.generation]:g}"
        assumed = " (assumed, as NVIDIA sells this GPU in nodes; --network names another)"
    fabric = step_time.Fabric.of(node, network or "")
    for size in sizes:
        if size < 1:
            raise ValueError(f"--over {size}: give numbers of GPUs from 1 on")
        if size > node and size % node:
            raise ValueError(f"--over {size} is not a whole number of nodes of {node}; see --nodes-of")
    from megabert.commands.plan import forecast, published, quality, workload

    place = f"{args.gpus}, nodes of {node}{f', network {network}' * bool(network)}{assumed}"
    jobs: list[forecast.ForecastJob] = []
    for phase in phases:
        jobs.append(forecast.build_job(phase.config, phase.end - phase.begin, sum(job.steps for job in jobs)))
    if args.price and not any(map(quality.applies, jobs)):
        raise ValueError(
            "--price is for MLPerf's target, which this run does not have: leave it out, or plan large_phase2"
        )
    days = dict.fromkeys(sizes, 0.0)
    for number, (phase, job) in enumerate(zip(phases, jobs, strict=True), 1):
        points = forecast.forecast(job, sizes, device, fabric)
        work = f"{job.update.rows:,} rows of {job.update.seq_len} tokens an update, ZeRO-{config.zero.stage}"
        print(f"projection, not measured: {place}: {work}{f', phase {number} of {len(phases)}' * (len(phases) > 1)}")
        if rows := workload.assumed_rows(phase.config, number * bool(config.phases)):
            print(rows)
        print(f"\n{forecast.table(job, points, device)}")
        if quality.applies(job):
            print(f"\n{quality.table(job, points, device, args.price)}")
        if args.compare:
            print(f"\n{published.comparison(job, points, args.gpus)}")
        days = {point.size: days[point.size] + point.seconds / 86_400 for point in points}
    if len(phases) > 1:
        print("\nall phases: " + ", ".join(f"{total:.3g} days on {size:,} GPUs" for size, total in days.items()))
