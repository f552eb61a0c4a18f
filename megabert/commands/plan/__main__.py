"""What a run will need, before it gets a machine: batch arithmetic, memory, work, time, and one update on random ids.

    megabert plan --config large_phase1 --data DIR --world-size 64 [section.key=value …]
    megabert plan --config large_24h --world-size 64 --mfu 0.4 peak_tflops=989
    megabert plan --config large_phase1 --gpus h100 --nodes-of 8 --network 8x400 --over 8 64 512 [--plot FILE.svg]

The figures are for --world-size ranks, whatever runs here. Under a launcher the update is done by its ranks together.
With --gpus nothing is run: seconds an update at each number of GPUs are predicted, with cost and failures where their
prices and times are given (docs/planner.md).
"""

from __future__ import annotations

import sys

from megabert import config as configuration
from megabert.commands.plan import arguments as planner
from megabert.commands.plan import dry_run, forecast
from megabert.commands.plan.forecast import Job
from megabert.commands.plan.step_time import MicroBatch
from megabert.common.arguments import Parser, called_as
from megabert.common.errors import OK, code_of
from megabert.config import Config
from megabert.distributed import session
from megabert.distributed.session import Session


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.commands.plan"), description=__doc__)
    configuration.add_arguments(parser)
    dry_run.add_arguments(parser)
    planner.add_arguments(parser)
    args = parser.parse_intermixed_args(argv)

    def command(ranks: Session) -> int:
        if planner.asked(args):
            if ranks.world.is_main:
                print(planner.from_arguments(args, job_of(configuration.from_arguments(args))))
            return OK
        dry_run.from_arguments(args, configuration.from_arguments(args), ranks.world)
        return OK

    return session.run(command)


def job_of(config: Config) -> Job:
    """What an update of the run works on, by the manifests of its data where it names any."""
    manifest = dry_run.manifest_of(config)
    config = dry_run.with_vocabulary(config, manifest)
    work = dry_run.work(config, manifest)
    counts = MicroBatch(work.tokens, work.pairs, work.predictions, work.sequences)
    return forecast.job(config, work.rows, work.seq_len, counts, work.flops(config))


if __name__ == "__main__":
    sys.exit(code_of(main))
