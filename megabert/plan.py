"""What a run will need, before it gets a machine: batch arithmetic, memory, work, time, and one update on random ids.

    megabert plan --config large_phase1 --data DIR --world-size 64 [section.key=value …]
    megabert plan --config large_24h --world-size 64 --mfu 0.4 peak_tflops=989

The figures are for --world-size ranks, whatever runs here. Under a launcher the update is done by its ranks together.
"""

from __future__ import annotations

import sys

from megabert import config as configuration
from megabert.common.arguments import Parser, called_as
from megabert.common.errors import OK, code_of
from megabert.training import dry_run, session
from megabert.training.session import Session


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.plan"), description=__doc__)
    configuration.add_arguments(parser)
    dry_run.add_arguments(parser)
    args = parser.parse_intermixed_args(argv)

    def command(ranks: Session) -> int:
        dry_run.from_arguments(args, configuration.from_arguments(args), ranks.world)
        return OK

    return session.run(command)


if __name__ == "__main__":
    sys.exit(code_of(main))
