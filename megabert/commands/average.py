"""The mean of a run's checkpoints, as a run folder without moments.

megabert average --run RUN --output DIR                      of all kept checkpoints
megabert average --run RUN --last 3 --output DIR
megabert average --run RUN --steps 800 900 1000 --output DIR
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megabert.common.arguments import Parser
from megabert.common.errors import command
from megabert.common.files import refuse_existing
from megabert.common.logs import log
from megabert.common.run_files import CONFIG, checkpoint_name, checkpoints_folder, saved_steps

if TYPE_CHECKING:
    from megabert.hf import Pretrained


def average(run: str | Path, output: str | Path, last: int = 0, steps: Sequence[int] = ()) -> list[int]:
    """Write the run folder `output` with the mean, computed in fp64, of the newest `last` checkpoints (0: all) or of those of `steps`;
    returns the steps. Raises ValueError naming a checkpoint that is missing or of another model, without writing anything."""
    folder = checkpoints_folder(run)
    known = saved_steps(Path(run))
    chosen = sorted(set(steps)) or known[-last:]
    if missing := sorted(set(chosen) - set(known)):
        raise ValueError(f"--steps {missing[0]}: {folder} has no such checkpoint; it has {', '.join(map(str, known))}")
    if len(chosen) < last:
        lower = "lower --last, or " * (len(chosen) > 1)
        raise ValueError(
            f"--last {last}: {run} has {len(chosen)} checkpoints; {lower}train with checkpoint.keep={last}"
        )
    if len(chosen) < 2:
        raise ValueError(f"{folder}: {len(chosen)} checkpoints to average, of 2; train with checkpoint.keep=2")
    refuse_existing(Path(output), CONFIG)
    from megabert import hf

    paths = [folder / checkpoint_name(step) for step in chosen]
    newest = hf.load(paths[-1])
    sums = {name: weight.double() for name, weight in newest.weights.items()}
    for path in paths[:-1]:
        other = hf.load(path)
        _check_alike(other, newest, path)
        for name, weight in other.weights.items():
            sums[name] += weight
    weights = {name: (total / len(paths)).float() for name, total in sums.items()}
    dataset = f"none, the mean of steps {chosen} of {Path(run).resolve().name}: begin a new run with init_from"
    hf.write_run(newest.with_weights(weights), output, dataset=dataset)
    return chosen


def _check_alike(other: Pretrained, newest: Pretrained, path: Path) -> None:
    """Raises ValueError naming the first field in which the models of two checkpoints differ."""
    from megabert.checkpoint import FREE

    one, two = ({"tokenizer": model.tokenizer.sha256} | model.config.model.model_dump() for model in (other, newest))
    for name, wanted in two.items():
        if name not in FREE and one[name] != wanted:
            differs = f"its {name} is {one[name]}, the newest one's {wanted}"
            raise ValueError(f"{path}: {differs}; average checkpoints of one model")


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--run", required=True, metavar="RUN", help="run folder")
    add("--output", required=True, metavar="DIR", help="run folder to write; must be new or empty")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, default=0, metavar="N", help="the newest checkpoints; 0: all")
    these = "the checkpoints of these steps"
    which.add_argument("--steps", type=int, nargs="+", default=[], metavar="STEP", help=these)
    args = parser.parse_args(argv)
    if args.last < 0 or args.last == 1:
        raise ValueError(f"--last {args.last}: give at least 2 checkpoints")
    if len(set(args.steps)) == 1:
        raise ValueError(f"--steps {args.steps[0]}: give at least 2 checkpoints")
    chosen = average(args.run, args.output, args.last, args.steps)
    steps = ", ".join(f"{step:,}" for step in chosen)
    log.info(f"{args.output}: the mean of steps {steps}. To use it, --model {shlex.quote(args.output)}")
