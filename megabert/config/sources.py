"""Sources of a configuration: preset or TOML file, `section.key=value` overrides and a command's options, merged in this order.

Unknown keys fail with the nearest match.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megabert.common.arguments import PRESETS, nearest, presets, toml_names
from megabert.config.phases import check_phases, list_phases, merge
from megabert.config.schema import Config, ScheduleConfig, flat, is_section, validated


def load(source: str = "", overrides: list[str] | None = None) -> Config:
    """Config from a preset name or TOML path, then `section.key=value` strings.

    Raises ValueError naming the file or key and what to do.
    """
    tree = _read_config(source)
    for override in overrides or []:
        set_override(tree, override)
    return from_dict(tree)


def refuse_unknown_overrides(overrides: Iterable[str]) -> None:
    """Raises ValueError for the first override that is malformed or has an unknown key, for any config."""
    tree: dict[str, Any] = {}
    for override in overrides:
        if not override.startswith("phases."):
            set_override(tree, override)
    refuse_unknown(tree)


def value_sources(source: str, overrides: Sequence[str]) -> dict[str, str]:
    """The source of each `section.key` that is not a default; arguments as of `load`, which have to be valid."""
    path, own = _read_own(source)
    base = own.pop("extends", "")
    if path.parent == PRESETS:
        own = _read_config(source)
    where, own_keys = f"preset {source}" if path.parent == PRESETS else f"file {path}", flat(own)
    tables = {"data.mix": where} if own.get("data", {}).get("mix") else {}
    sources = (value_sources(base, ()) if base else {}) | dict.fromkeys(own_keys, where) | tables
    for key in flatten_overrides(overrides):
        whole = re.sub(r"^(phases|data\.mix)\..*", r"\1", key)
        before = sources.get(whole, "").removesuffix("command line").removesuffix(" and ")
        sources[whole] = f"{before} and command line" if whole != key and before else "command line"
    return sources


def flatten_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Values by `section.key` of overrides, of which one may be a whole section."""
    kinds, values = dict(_fields()), dict[str, Any]()
    for override in overrides:
        key, _, text = override.partition("=")
        kind = kinds.get(re.sub(r"^phases\.\d+\.", "", key))
        value = parse_value(text, kind)
        is_table = isinstance(value, dict) and is_section(kind)
        values |= {f"{key}.{name}": each for name, each in flat(value).items()} if is_table else {key: value}
    return values


def refuse_unused(source: str, overrides: Sequence[str], config: Config) -> None:
    """Raises ValueError for a setting of the schedule that has no effect beside those of the file, or command line, that gives it.
    `config` is theirs; the other arguments are as of `load`."""
    if config.distill.teacher:  # a student is given all of its teacher's settings
        return
    given = {f"schedule.{name}": value for name, value in _read_own(source)[1].get("schedule", {}).items()}
    if len(given) == len(ScheduleConfig.model_fields):
        given = {}  # of --print-config, which writes all
    chosen = {name: value for name, value in _read_config(source).get("schedule", {}).items() if name in ("name", "by")}
    # not validated: a file may leave its budget to the command line
    in_file, phases = (
        ScheduleConfig().model_copy(update=chosen),
        [phase.config.schedule for phase in list_phases(config)],
    )
    for schedule, values in ((in_file, given), (config.schedule, flatten_overrides(overrides))):
        for message in schedule.unused(values, phases):
            raise ValueError(message)


def from_arguments(args: argparse.Namespace) -> Config:
    """The config from the options of `common.arguments.add_config_options`. Raises ValueError naming the wrong option, key or
    value, or one without effect."""
    overrides = collect_overrides(args)
    config = load(args.config, overrides)
    refuse_unused(args.config, overrides, config)
    return config


def collect_overrides(args: argparse.Namespace) -> list[str]:
    """The `section.key=value` of the options."""
    return ([f"data.path={args.data}"] if args.data else []) + args.overrides


def from_dict(tree: dict[str, Any]) -> Config:
    """Validated config from nested dicts."""
    refuse_unknown(tree)
    config = validated(tree)
    for number, phase in enumerate(config.phases, 1):
        refuse_unknown(phase.changes, f"phases.{number}.")
    check_phases(config)
    return config


def _read_config(source: str) -> dict[str, Any]:
    """The keys of a preset or TOML file over those of the preset that it `extends`."""
    path, own = _read_own(source)
    if "extends" not in own:
        return own
    base = own.pop("extends")
    if base not in presets():
        raise ValueError(f"{path}: extends={base!r} is not a preset; presets: {', '.join(presets())}")
    tree = _read_config(base)
    merge(tree, own)
    return tree


def _read_own(source: str) -> tuple[Path, dict[str, Any]]:
    """The path of a preset or TOML file, "" for none, and what it has itself."""
    return read_toml(source, PRESETS, "--config", "preset") if source else (Path(), {})


def read_toml(name: str, folder: Path, option: str, kind: str) -> tuple[Path, dict[str, Any]]:
    """The path and content of the TOML file given by an option; `kind` is a noun for the files of `folder`.

    Raises ValueError naming the option or the file.
    """
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        names = toml_names(folder)
        hint = nearest(Path(name).stem, names)
        raise ValueError(f"{option} {name}: no such {kind} or file; {folder.name}: {', '.join(names)}{hint}")
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 (byte {error.start}); TOML is, so save it as that") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def set_override(tree: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into `tree`, parsed as the key's type; a section's table over what the tree has of it. Raises
    ValueError."""
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ValueError(f"override {override!r}: write section.key=value")
    phase = re.fullmatch(r"phases\.(\d+)\.(.+)", key)
    if phase:
        number, phases = int(phase[1]), tree.get("phases", [])
        if not isinstance(phases, list) or not all(isinstance(one, dict) for one in phases):
            raise ValueError(f"phases={phases!r:.40}: must be a list of tables")
        if not 0 < number <= len(phases):
            raise ValueError(f"override {override!r}: there are {len(phases)} phases, from phases.1 on")
        tree, key = phases[number - 1], phase[2]
    *parents, leaf = key.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ValueError(f"override {override!r}: {part} is not a section")
    # an unknown key is reported with its nearest match when the tree is checked
    kind = dict(_fields()).get(key)
    value = parse_value(text, kind)
    if is_section(kind) and isinstance(value, dict) and isinstance(node.get(leaf), dict):
        merge(node[leaf], value)
    else:
        node[leaf] = value


def parse_value(text: str, kind: Any = None) -> Any:
    """The value after `=`: TOML or a bare word; the unchanged text if `kind` is str."""
    if kind is str:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def refuse_unknown(tree: dict[str, Any], where: str = "") -> None:
    """Raises ValueError for the first unknown key of `tree`, which is at `where`, with the nearest name of its section, or of
    another section for a key in the wrong one."""
    names = [name for name, _ in _fields()]

    def check_section(section: dict[str, Any], prefix: str) -> None:
        siblings = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        for key, value in section.items():
            if key not in siblings:
                raise ValueError(f"unknown config key {where}{prefix}{key}{nearest(key, siblings, by_leaf(names))}")
            if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in siblings):
                check_section(value, f"{prefix}{key}.")

    check_section(tree, "")


def by_leaf(names: Iterable[str]) -> dict[str, str]:
    """Full names by their last part."""
    return {name.rpartition(".")[2]: name for name in names}


def _fields(model: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full name and type of every section and field."""
    for name, field in model.model_fields.items():
        yield prefix + name, field.annotation
        if is_section(field.annotation):
            yield from _fields(field.annotation, f"{prefix}{name}.")


def changed(tree: dict[str, Any]) -> dict[str, Any]:
    """`section.key` -> value of the settings that differ from the defaults."""
    usual = flat(Config().model_dump())
    return {name: value for name, value in flat(tree).items() if value != usual.get(name)}
