"""Options of the commands that take a run's configuration, and the configuration they ask for."""

from __future__ import annotations

import argparse

from megabert.config.schema import Config, load, presets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Preset or file, data, overrides, and what DeepSpeed's launcher passes."""
    add = parser.add_argument
    add("--config", default="", metavar="NAME", help=f"preset ({', '.join(presets())}) or TOML file")
    add("--data", default="", metavar="DIR", help="dataset folder written by data_prep, or its URL")
    add("--deepspeed", action="store_true", help="accepted for DeepSpeed's launcher; always on")
    add("--deepspeed_config", default="", metavar="FILE", help="JSON with further DeepSpeed keys")
    add("--local_rank", type=int, metavar="N", help="set by launchers")
    add("overrides", nargs="*", metavar="section.key=value", help="configuration overrides")


def from_arguments(args: argparse.Namespace) -> Config:
    """Raises ValueError naming the option, key or value that is wrong."""
    data = [f"data.path={args.data}"] if args.data else []
    return load(args.config, data + args.overrides)
