"""What a run will need, before it gets a machine: batch arithmetic, memory, work and time.

    megabert plan --config large_phase1 --data DIR --world-size 64 [section.key=value …]
    megabert plan --config large_24h --world-size 64 --mfu 0.4 peak_tflops=989
    megabert plan --config large_phase1 --gpus h100 --nodes-of 8 --network 8x400 --over 8 64 512

Nothing is run. With --gpus seconds an update at each number of GPUs are predicted, with cost and failures where their prices
and times are given (docs/planner.md).
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING

from megabert.common.arguments import Parser, add_config_options, called_as
from megabert.common.errors import OK, code_of, command

if TYPE_CHECKING:
    from megabert.config import Config

# what only a forecast takes
PRICES = ("gpu_hour_price", "kwh_price", "watts")
FAILURES = ("node_mtbf_hours", "save_seconds", "restart_seconds")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises ValueError for an option that only a forecast takes, and for a value that is not a positive number."""
    parser = Parser(prog=called_as("megabert.commands.plan"), description=__doc__)
    add_config_options(parser)
    add = parser.add_argument
    add("--world-size", type=int, default=1, metavar="N", help="ranks to plan for")
    add("--tokens-per-sec", type=float, metavar="X", help="speed of all ranks together, for the time it takes")
    add("--mfu", type=float, metavar="X", help="or its share of peak_tflops, e.g. 0.4")
    add("--memory-gib", type=float, metavar="X", help="of a GPU, for the largest micro-batch")
    add = parser.add_argument_group("forecast").add_argument
    add("--gpus", metavar="NAME", help="predict seconds an update on this GPU, e.g. h100")
    numbers = "numbers of GPUs to predict for (default: one node); overrides go before it"
    add("--over", type=int, nargs="+", metavar="N", help=numbers)
    add("--nodes-of", type=int, default=8, metavar="N", help="GPUs a node")
    add("--network", default="", metavar="AxG", help="network a node: A adapters of G Gbit/s, e.g. 8x400")
    add("--gpu-hour-price", type=float, metavar="X", help="of one GPU for an hour, in any currency")
    add("--kwh-price", type=float, metavar="X", help="of energy, in the same currency")
    add("--watts", type=float, metavar="X", help="of a GPU with its part of the node (default: its board's)")
    add("--node-mtbf-hours", type=float, metavar="X", help="mean time between failures of a node")
    add("--save-seconds", type=float, metavar="X", help="that a checkpoint holds up training")
    add("--restart-seconds", type=float, metavar="X", help="from a failure to the first new update")
    args = parser.parse_intermixed_args(argv)
    for name in ("over", "network", *PRICES, *FAILURES):
        if not args.gpus and getattr(args, name) not in (None, ""):
            raise ValueError(f"{_option(name)} belongs to a forecast: name the GPU with --gpus, e.g. --gpus h100")
    for name in ("world_size", "tokens_per_sec", "mfu", "memory_gib", *PRICES, *FAILURES):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{_option(name)} {value:g}: give a number above 0")
    missing = [name for name in FAILURES if getattr(args, name) is None]
    if 0 < len(missing) < len(FAILURES):
        raise ValueError(f"{_option(missing[0])} is missing: failures need {', '.join(map(_option, FAILURES))}")
    return args


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from megabert import config as configuration
    from megabert.commands.plan import workload

    config = configuration.from_arguments(args)
    if args.gpus:
        print(forecast_text(args, config))
        return OK
    manifest, extra = workload.manifest_of(config), configuration.read_deepspeed(args.deepspeed_config)
    print(
        workload.report(
            config,
            manifest,
            args.world_size,
            tokens_per_sec=args.tokens_per_sec,
            mfu=args.mfu,
            deepspeed_extra=extra,
            memory_gib=args.memory_gib,
        )
    )
    return OK


def forecast_text(args: argparse.Namespace, config: Config) -> str:
    """The forecast's tables. Raises ValueError naming the option or key that it cannot take."""
    from megabert.commands.plan import forecast, step_time

    job = forecast.job_of(config)
    device = step_time.device(args.gpus)
    fabric = step_time.Fabric.of(args.nodes_of, args.network)
    prices = forecast.Prices(args.gpu_hour_price or 0.0, args.kwh_price or 0.0, args.watts or 0.0)
    points = forecast.forecast(job, args.over or [fabric.node], device, fabric)
    network = f", network {args.network}" if args.network else ""
    text = (
        f"projection, not measured: {args.gpus}, nodes of {fabric.node}{network}: {job.rows:,} rows of {job.seq_len} tokens "
        f"an update, ZeRO-{job.config.zero.stage}\n\n{forecast.table(job, points, device, prices)}"
    )
    if args.node_mtbf_hours:
        node = forecast.Reliability(args.node_mtbf_hours * forecast.HOUR, args.save_seconds, args.restart_seconds)
        text += f"\n\nfailures\n{forecast.failure_table(points, fabric, node)}"
    return text


if __name__ == "__main__":
    sys.exit(code_of(main))
