"""Reference of the configuration: description, type, range and default of every key, and the sources of a run's values.

`python -m megabert.config.reference` prints the page; docs/conf.py writes it when the site is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from megabert.common.arguments import nearest
from megabert.config.schema import Config, flat, is_section
from megabert.config.sources import by_leaf

BOUNDS = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}  # bounds of a number in pydantic's metadata
HEAD = """# Configuration

Every key of a run's configuration. A value comes from the preset or TOML file of `--config`, which may extend a preset
(`extends = "NAME"`), then from `section.key=value` on the command line, else from the default.
`megabert train --config NAME --explain SECTION` (or a key) prints this page's lines about it and the source of its value,
`--print-config` all values as TOML with their sources, which `--config` reads.

This page is the output of `python -m megabert.config.reference`.
"""


@dataclass(frozen=True)
class Key:
    """A key: full name, default, values, and description."""

    name: str
    default: Any
    values: str
    description: str


def sections(model: Any = Config, prefix: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """Name ("" of the first, for keys outside of sections), description and keys of each section, in the schema's order."""
    fields = model.model_fields.items()
    inner = {name: field.annotation for name, field in fields if is_section(field.annotation)}
    default = model()
    keys = [
        Key(prefix + name, getattr(default, name), describe_values(field), field.description or "")
        for name, field in fields
        if name not in inner
    ]
    yield prefix.rstrip("."), " ".join((model.__doc__ or "").split()), keys
    for name, section in inner.items():
        yield from sections(section, f"{prefix}{name}.")


def describe_values(field: Any) -> str:
    """The values of a field: its choices, or its type and range."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    names = {dict: "table", list: "list of texts" if get_args(kind) == (str,) else "list of tables"}
    name = names.get(get_origin(kind)) or kind.__name__
    bounds = [(getattr(rule, bound, None), word) for rule in field.metadata for bound, word in BOUNDS.items()]
    return " ".join([name, *(f"{word} {limit:g}" for limit, word in bounds if limit is not None)])


def markdown() -> str:
    """The page of all keys."""
    parts = [HEAD]
    for section, about, keys in sections():
        parts.append(
            f"\n## {section or 'Outside of sections'}\n\n{about}\n\n| key | default | values | |\n|---|---|---|---|\n"
        )
        parts += [
            f"| `{key.name}` | `{toml_value(key.default)}` | {key.values} | {key.description.replace('|', '&#124;')} |\n"
            for key in keys
        ]
    return "".join(parts)


def explain(name: str, config: Config, sources: Mapping[str, str]) -> str:
    """The description of a section or key, and the source of its value. Raises ValueError for an unknown name."""
    everything, values = list(sections()), flat_values(config)
    chosen = [(s, about, keys) for s, about, keys in everything if name and (s == name or s.startswith(f"{name}."))]
    chosen = chosen or [("", "", [key]) for _, _, keys in everything for key in keys if key.name == name]
    if not chosen:
        names = [n for section, _, keys in everything for n in (section, *(key.name for key in keys)) if n]
        raise ValueError(f"--explain {name}: no such section or key{nearest(name, names, by_leaf(names))}")
    lines = []
    for section, about, keys in chosen:
        lines += [f"[{section}]  {about}"] if section else []
        for key in keys:
            source = sources.get(key.name, "default")
            usual = "" if source == "default" else f"; default {toml_value(key.default)}"
            lines += [f"{key.name} = {toml_value(values[key.name])}    from: {source}"]
            lines += [f"    {key.description}", f"    {key.values}{usual}"]
    return "\n".join(lines)


def as_toml(config: Config, sources: Mapping[str, str]) -> str:
    """All values as TOML that yields the same configuration, each with its source as a comment."""
    lines, values = [], flat_values(config)
    for section, _, keys in sections():
        lines += ["", f"[{section}]"] if section else []
        for key in keys:
            text = f"{key.name.rpartition('.')[2]} = {toml_value(values[key.name])}"
            lines.append(f"{text:40}  # {sources.get(key.name, 'default')}")
    return "\n".join(lines)


def flat_values(config: Config) -> dict[str, Any]:
    """`section.key` -> value, tables whole."""
    return flat(config.model_dump()) | {"data.mix": config.data.mix}


def toml_value(value: Any) -> str:
    """A value in TOML syntax."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(name)} = {toml_value(share)}" for name, share in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


if __name__ == "__main__":
    print(markdown(), end="")
