"""Options of the fine-tuning commands: each setting of a run is a field with its help and its range. Imports no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from megabert.common import errors
from megabert.common.arguments import LAYERS, Parser, parse_layers
from megabert.common.environment import disable_malloc_trimming, launched, require_packages

if TYPE_CHECKING:
    from megabert.distributed.session import Session


def option(
    default: Any, about: str, least: int | None = None, below: float = math.inf, choices: Sequence[Any] = ()
) -> Any:
    """A field of `Settings` with its help and allowed values."""
    return field(default=default, metadata={"about": about, "least": least, "below": below, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """Settings of a run; each field is an option of the commands. The defaults are those of Devlin et al. 2019 (appendix A.3)."""

    seed: int = 1
    lr: float = 5e-5
    batch: int = option(32, "texts (or windows of long ones) of an update", 1)
    micro_batch: int = option(0, "texts of a forward pass on a rank; 0: the rank's whole share", 0)
    epochs: int = option(3, "passes over the training file", 1)
    dropout: float = option(0.1, "dropout of the encoder and of the added layer", 0, 1)
    warmup: float = option(0.1, "warm-up as a share of the updates", 0, 1)
    weight_decay: float = option(0.01, "weight decay of AdamW", 0)
    # A window has three special tokens and tokens of each part.
    max_length: int = option(None, "tokens of a text or window; default: the task's", 8)
    stride: int = option(None, "tokens between the starts of windows; default: the task's", 1)
    from_scratch: bool = option(False, "the model's shape with random weights")
    freeze: bool = option(False, "train the added layer alone, on fixed features (Devlin et al. 2019, section 5.3)")
    layers: str = option("last", f"with --freeze, layers that the added one reads: {LAYERS}")
    threshold: str = option(
        "half",
        "with two labels, the probability above which the second is predicted: a half, or that of the best F1 on --dev",
        choices=("half", "f1"),
    )
    precision: str = option(
        "auto", "type of forward and backward; auto: bf16 if the device is fast in it", choices=("auto", "bf16", "fp32")
    )
    zero: int = option(1, "DeepSpeed ZeRO stage", choices=(0, 1, 2))


# Fields that are options of the commands by their names.
OPTIONS = tuple(each for each in fields(Settings) if each.metadata)
# Width of the smaller model of Devlin et al. 2019, and their rates (section 4.1). For narrower models the three highest of Turc et
# al. 2019, and 1e-3, the best of these for a model of width 192 (4,000 phrases of SST-2, one seed). A single run uses the first.
BASE_WIDTH = 768
BASE_RATES, SMALL_RATES = (5e-5, 4e-5, 3e-5, 2e-5), (3e-4, 1e-3, 1e-4, 5e-5)
# Of an added layer alone; the first is the best of five on WNUT-17 with a model of width 192 (one seed).
FROZEN_RATES = (1e-2, 3e-3, 3e-2, 1e-3)
# A larger number of runs is meant as a seed.
MOST_SEEDS = 1_000


def add_options(parser: Parser, seeds: int, rates: int) -> None:
    """Add the options of every field of `Settings`, and others that both commands share; `seeds` and the first `rates` of the usual
    learning rates are defaults."""
    add = parser.add_argument
    add("--tokenizer", default="", metavar="FILE", help="the model's tokenizer, if its folder has none")
    add("--limit", type=int, default=0, metavar="N", help="first N examples of each file, for a trial; 0: all")
    add("--log-interval", type=int, default=20, metavar="UPDATES", help="updates between progress lines")
    add("--local_rank", type=int, metavar="N", help="set by launchers")
    add("--seeds", type=int, nargs="+", default=[seeds], help="number of seeds, or the seeds")
    usual = [" ".join(f"{rate:g}" for rate in of[:rates]) for of in (BASE_RATES, SMALL_RATES, FROZEN_RATES)]
    add("--lr", type=float, nargs="+", default=[],
        help=f"peak learning rate; several: runs with each (default: {usual[0]}; of models narrower than {BASE_WIDTH}: {usual[1]}; with --freeze: {usual[2]})")  # fmt: skip
    parser.set_defaults(usual=rates)
    for each in OPTIONS:
        name, about, choices = f"--{each.name.replace('_', '-')}", each.metadata["about"], each.metadata["choices"]
        if isinstance(each.default, bool):
            add(name, action="store_true", help=about)
        else:
            kind = int if each.default is None else type(each.default)
            add(name, type=kind, choices=choices or None, default=each.default, help=about)


def require_metrics() -> None:
    """Raises ValueError if a package that computes metrics is missing."""
    require_packages("fine-tuning", "finetune", "sklearn", "scipy", "seqeval")


def list_runs(args: argparse.Namespace, max_length: int, stride: int, hidden: int = BASE_WIDTH) -> dict[str, Settings]:
    """The settings of each run of a command line, by name: `seed1`, or `lr2e-05-seed1` with several rates.

    `max_length` and `stride` are defaults; without rates those usual for the width `hidden` are used. Raises ValueError naming an
    option that is out of range.
    """
    named = {each.name: getattr(args, each.name) for each in OPTIONS}
    named |= {name: usual for name, usual in (("max_length", max_length), ("stride", stride)) if named[name] is None}
    limits = {each.name: (each.metadata["least"], each.metadata["below"]) for each in OPTIONS}
    limits |= {"log_interval": (1, math.inf), "limit": (0, math.inf)}
    given = vars(args) | named
    for name, (least, below) in limits.items():
        value = given[name]
        if least is not None and not least <= value < below:
            rule = f"at least {least}" + (f" and below {below:g}" if below < math.inf else "")
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be {rule}")
    many = len(args.seeds) == 1 and args.seeds[0] > MOST_SEEDS
    seeds = list(range(1, args.seeds[0] + 1)) if len(args.seeds) == 1 and not many else args.seeds
    if many or not seeds or not 0 <= min(seeds) <= max(seeds) < 2**63 or len(set(seeds)) < len(seeds):
        rule = f"give how many, at most {MOST_SEEDS:,}, or several different ones below 2^63"
        raise ValueError(f"--seeds {' '.join(map(str, args.seeds))}: {rule}")
    parse_layers(args.layers)
    if args.layers != "last" and not args.freeze:
        raise ValueError(f"--layers {args.layers}: is for --freeze; fine-tuning reads the last layer")
    if not all(0 < lr < 1 for lr in args.lr) or len(set(args.lr)) < len(args.lr):
        raise ValueError(f"--lr {' '.join(f'{lr:g}' for lr in args.lr)}: must be above 0 and below 1, and different")
    usual = FROZEN_RATES if args.freeze else BASE_RATES if hidden >= BASE_WIDTH else SMALL_RATES
    rates = args.lr or usual[: args.usual]
    runs = [Settings(seed=seed, lr=lr, **named) for lr in rates for seed in seeds]
    return {f"lr{each.lr}-seed{each.seed}" if len(rates) > 1 else f"seed{each.seed}": each for each in runs}


def run(
    args: argparse.Namespace,
    check: Callable[[argparse.Namespace], None],
    work: Callable[[argparse.Namespace, Session], int],
) -> int:
    """Run a fine-tuning command, `check(args)` and then `work(args, ranks)` in a session of ranks; returns the exit code."""
    # A single process checks before the slow imports; several ranks check in the session, where one of them prints the error.
    if not launched() and (code := errors.command(check)(args)):
        return code
    from megabert.checkpoint import run_lock
    from megabert.distributed import session

    disable_malloc_trimming()

    def checked(ranks: Session) -> int:
        check(args)
        return work(args, ranks)

    return session.run(checked, run_lock.release)
