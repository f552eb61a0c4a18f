"""Command lines: help that shows every default, and the name by which a command was called."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

PRESETS = Path(__file__).resolve().parents[1] / "presets"
# help of --model
MODEL = "run folder, one checkpoint in it, a Hugging Face folder, a URL of a mirror or folder, or OWNER/NAME on the hub"
TOKENIZER = "the run's tokenizer, if its dataset was moved"  # help of --tokenizer
LAYERS = "last, N (0 is the embeddings), N,N,… concatenated, or N+N+… summed"  # help of --layers
_called_as = ""


def call_as(name: str) -> None:
    """Set the name in usage lines of this process, e.g. "megabert train"."""
    global _called_as
    _called_as = name


def called_as(module: str) -> str:
    """The name set by `call_as`, else `python -m module`."""
    return _called_as or f"python -m {module}"


class Help(argparse.RawDescriptionHelpFormatter):
    """The description unwrapped, and each option's default after its help."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default in (None, "", argparse.SUPPRESS) or isinstance(default, bool):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{text} (default: {shown})".replace("%", "%%") if shown else text


class _Store(argparse._StoreAction):
    """Refuses a list option that is given twice: the second list would replace the first in silence."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string and self.nargs in ("+", "*") and getattr(namespace, self.dest) is not self.default:
            parser.error(f"{option_string} is given twice; name all its values after one")
        super().__call__(parser, namespace, values, option_string)


class Parser(argparse.ArgumentParser):
    """An argument parser with `Help` and one-line errors, which name the option nearest to a misspelt one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Help, "prog": _called_as or None} | options)
        self.register("action", None, _Store)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options before missing ones: a misspelt required option is both."""
        given = sys.argv[1:] if args is None else list(args)
        for name in () if self._subparsers else (text.partition("=")[0] for text in given):
            if name == "--":
                break
            if name.startswith("--") and not any(known.startswith(name) for known in self._option_string_actions):
                self.error(f"unknown option {name}{nearest(name, [*self._option_string_actions])}")
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (`{self.prog} --help` shows all options)\n")


def nearest(wrong: str, *groups: Iterable[str]) -> str:
    """The text "; did you mean NAME?" for the closest match to `wrong` in the first group that has one, else "". A
    mapping maps matched names to the names to suggest."""
    for group in groups:
        for match in difflib.get_close_matches(wrong, group, n=1):
            return f"; did you mean {group[match] if isinstance(group, Mapping) else match}?"
    return ""


def toml_names(folder: Path) -> list[str]:
    """Names of the TOML files in a folder, without their ending."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def presets() -> list[str]:
    return toml_names(PRESETS)


def refuse_missing(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError for the first of these options whose file or folder does not exist; "" is skipped."""
    for name in names:
        path = getattr(args, name)
        if path and not Path(path).exists():
            raise ValueError(f"--{name.replace('_', '-')} {path}: no such file or folder")


def refuse_replacing(option: str, path: str) -> None:
    """Raises ValueError if the file to write exists; "" is skipped."""
    if path and Path(path).is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file")
    if path and os.path.lexists(path):
        raise ValueError(f"{option} {path}: already exists; name another file")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Options for `config.from_arguments`: preset or file, data, overrides, and those that DeepSpeed's launcher passes."""
    add = parser.add_argument
    add("--config", default="", metavar="NAME", help=f"preset ({', '.join(presets())}) or TOML file; else BERT-BASE")
    add("--data", default="", metavar="DIR", help="dataset written by data_prep: folder or URL")
    add("--deepspeed", action="store_true", help="accepted for DeepSpeed's launcher; always on")
    add("--deepspeed_config", default="", metavar="FILE", help="JSON with additional DeepSpeed keys")
    add("--local_rank", type=int, metavar="N", help="set by launchers")
    add("overrides", nargs="*", metavar="section.key=value", help="configuration overrides")


def parse_layers(text: str, count: int = sys.maxsize) -> list[int]:
    """Layer numbers of --layers for a model with `count` layers. Raises ValueError for a text that is not as LAYERS
    describes, and for a layer beyond `count`."""
    if not re.fullmatch(r"(last|\d+)((,(last|\d+))*|(\+(last|\d+))*)", text):
        raise ValueError(f"--layers {text}: expected {LAYERS}")
    layers = [int(number) for number in re.split("[,+]", text.replace("last", str(count)))]
    if max(layers) > count:
        raise ValueError(f"--layers {text}: the model has 0 (embeddings) to {count}")
    return layers


def parse_steps(text: str) -> tuple[int, int]:
    """`10:20` -> (10, 20), the first and the last update. Raises ValueError."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--profile {text}: write the first and the last update, as 10:20")
    return int(match[1]), int(match[2])
