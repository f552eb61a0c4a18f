"""The command `megabert NAME …`, also `python -m megabert NAME …`: every command of the project under one name.

Modules are listed by name and imported on use, so that `megabert --help` is fast.
"""

from __future__ import annotations

import os
import sys

try:
    import atexit
    import difflib
    import importlib
    import shlex
    import signal
    from dataclasses import dataclass

    from megabert import __version__
    from megabert.common import arguments, environment, errors
    from megabert.common.logs import log
except KeyboardInterrupt:
    try:
        print("error: interrupted", file=sys.stderr)
    finally:  # also if nobody reads stderr
        os._exit(130)


@dataclass(frozen=True)
class Command:
    """A module with `main(argv)`. `saves`: it trains, so a signal means "save and end" from the beginning on."""

    module: str
    about: str
    saves: bool = False


COMMANDS = {
    "quickstart": Command("megabert.commands.quickstart", "text to a trained and evaluated model in minutes"),
    "doctor": Command("megabert.commands.doctor", "what is installed, what each operation will use, what is missing"),
    "prep": Command("data_prep.__main__", "text to verified shards: prep build, verify, inspect, push"),
    "plan": Command("megabert.commands.plan", "what a run will need: memory, work, time"),
    "train": Command("megabert.train", "pre-train BERT, or continue a run", saves=True),
    "evaluate": Command("megabert.commands.evaluate", "held-out metrics of a run, as one JSON line"),
    "pairs": Command("megabert.commands.pairs", "scores of minimal pairs: BLiMP, Zorro"),
    "distill": Command("megabert.commands.distill", "train a student of fewer layers from a teacher"),
    "finetune": Command("megabert.finetune.__main__", "fine-tune a model on a task, and predict", saves=True),
    "glue": Command("megabert.finetune.glue", "every task of GLUE, to one table", saves=True),
    "features": Command("megabert.commands.features", "a model's vectors of texts"),
    "verify": Command("megabert.commands.verify", "whether a run is as it was written, from rows to weights"),
    "replay": Command("megabert.commands.replay", "repeat an interval of a run and compare"),
    "report": Command("megabert.commands.report", "one HTML file about a run"),
    "fill": Command("megabert.commands.fill", "words for the [MASK]s of a text"),
    "average": Command("megabert.commands.average", "the mean of a run's checkpoints, as a run"),
    "export": Command("megabert.commands.export", "a run as a Hugging Face folder, or to its hub"),
    "convert": Command("megabert.commands.convert", "a Hugging Face folder as a run to continue from"),
}


def usage(prog: str) -> str:
    lines = [f"  {name:12}{command.about}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: {prog} NAME …", "", *lines, "", f"{prog} NAME --help shows a command's options"])


def called() -> str:
    """The command of this process, without arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return "megabert" if os.path.basename(sys.argv[0]) == "megabert" else shlex.quote(sys.argv[0])


def start(name: str, argv: list[str] | None = None, prog: str = "") -> int:
    """Run a command and return its exit code, for every way to call it; `prog` is the name in its usage lines."""
    command = COMMANDS[name]
    if command.saves:
        from megabert.distributed.signals import exit_on_signals

        exit_on_signals()  # before the slow imports
    # Ctrl-C while the interpreter exits does not change the exit code
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    environment.limit_openmp_spinning()  # torch reads it when it is imported
    arguments.call_as(prog or called())

    def run() -> int:
        with errors.exit_on_ctrl_c():
            module = importlib.import_module(command.module)
        return int(module.main(argv))

    code = errors.run_main(run)
    if command.saves:
        from megabert.distributed.signals import ignore_signals

        ignore_signals()
    return code


def main(argv: list[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    return start(name, rest, f"{called()} {name}") if name in COMMANDS else errors.run_main(lambda: answer([name]))


@errors.command
def answer(argv: list[str] | None) -> int:
    """Handle a call without a command."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(usage(called()))
        return errors.OK
    if name == "--version":
        print(f"megabert {__version__}")
        return errors.OK
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
    log.error(f"unknown command {name!r}; {hint}" if name else f"no command; {hint}")
    return errors.USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
