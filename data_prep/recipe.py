"""Recipes of builds: a TOML file with the options of a command line, and options of single corpora.

    seq_len = [128, 512]
    vocab_size = 30000

    [corpus.wiki]
    input = "dumps/*.xml.bz2"

    [corpus.papers]
    input = ["papers.jsonl.zst"]
    text_field = "title+abstract"
    filters = ["gopher"]
    weight = 2

The names are those of the options, with `_` or `-`. Options on the command line replace those of the recipe.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from typing import Any

from data_prep.common.errors import BadInput
from data_prep.common.records import Corpus, ReadOptions

# options that a recipe has in its corpora, or not at all
NOT_IN = ("input", "weight", "recipe", "help")
# options that a corpus may have of its own, beside filters
OWN = tuple(field.name for field in fields(ReadOptions))
# options without influence on the dataset
RUNNING = ("output", "workers", "overwrite", "json", "quiet", "print_recipe", "part", "merge")


def load(path: str, options: Mapping[str, Any]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """(arguments of a command line, tables of the corpora by name) of a recipe file.

    `options` maps names of options to argparse's actions. Raises BadInput naming the file and the key.
    """
    try:
        with open(path, "rb") as file:
            recipe = tomllib.load(file)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such recipe") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid TOML ({error})") from None
    tables = recipe.pop("corpus", None)
    if not isinstance(tables, dict) or not tables or not all(isinstance(t, dict) for t in tables.values()):
        raise BadInput(f"{path}: names no corpus; give each a table [corpus.NAME] with its input")
    names = [name for name in options if name not in NOT_IN]
    arguments: list[str] = []
    for key, value in recipe.items():
        name = _known(path, key, names)
        flag = options[name].option_strings[0]
        if options[name].nargs == 0:
            if not isinstance(value, bool):
                raise BadInput(f"{path}: {key} is {value!r}; give true or false")
            arguments += [flag] if value else []
        elif value == []:
            continue
        elif isinstance(value, bool | dict):
            raise BadInput(f"{path}: {key} is {value!r}, which {flag} does not accept")
        else:
            arguments += [flag, *(str(item) for item in (value if isinstance(value, list) else [value]))]
    return arguments, tables


def _known(path: str, key: str, names: Iterable[str]) -> str:
    name = key.replace("-", "_")
    if name not in names:
        near = get_close_matches(name, list(names), 1, 0)
        raise BadInput(f"{path}: no option {key!r}; the nearest is {near[0]!r}")
    return name


def corpora(path: str, tables: Mapping[str, Mapping[str, Any]], read: ReadOptions) -> list[Corpus]:
    """The corpora of a recipe's tables; `read` are the options of a corpus without own ones."""
    corpora = []
    for name, table in tables.items():
        where = f"{path}: corpus.{name}"
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise BadInput(f"{where}: a corpus' name is a letter, then letters, digits, - and _")
        given = {
            _known(where, key, ("input", "weight", "filters", "language", *OWN)): value for key, value in table.items()
        }
        paths = _texts(where, "input", given.pop("input", None))
        weight = given.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 100:
            raise BadInput(f"{where}: weight is {weight!r}; give a number above 0 and at most 100")
        filters = tuple(_texts(where, "filters", given.pop("filters"))) if "filters" in given else None
        languages = tuple(_texts(where, "language", given.pop("language"))) if "language" in given else None
        changes: dict[str, Any] = {}
        for key, value in given.items():
            if isinstance(getattr(ReadOptions, key), bool):
                if not isinstance(value, bool):
                    raise BadInput(f"{where}: {key} is {value!r}; give true or false")
                changes[key] = value
            else:
                changes[key] = "+".join(_texts(where, key, value))
            allowed = ReadOptions.choices(key)
            if allowed and changes[key] not in allowed:
                raise BadInput(f"{where}: {key} is {changes[key]!r}; give {', '.join(allowed)}")
        corpora.append(
            Corpus(name, tuple(paths), float(weight), replace(read, **changes) if changes else None, filters, languages)
        )
    return corpora


def _texts(where: str, key: str, value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(item, str) and item for item in listed):
        raise BadInput(f"{where}: {key} is {value!r}; give a text or a list of texts")
    return listed


def render(options: Mapping[str, Any], corpora: Iterable[Corpus], read: ReadOptions) -> str:
    """The recipe of a build as TOML: every option that decides what is built, and every corpus.

    `options` maps names of options to their values. Raises BadInput for a file name that is not UTF-8, which TOML is.
    """
    lines = [
        f"{name} = {_value(name, value)}"
        for name, value in options.items()
        if name not in NOT_IN and name not in RUNNING and name != "command" and value not in (None, [])
    ]
    for corpus in corpora:
        table: dict[str, Any] = {"input": list(corpus.paths), "weight": corpus.weight}
        if corpus.read is not None:
            common = asdict(read)
            table |= {name: value for name, value in asdict(corpus.read).items() if value != common[name]}
        if corpus.filters is not None:
            table["filters"] = list(corpus.filters)
        if corpus.languages is not None:
            table["language"] = list(corpus.languages)
        lines += ["", f"[corpus.{corpus.name}]", *(f"{key} = {_value(key, v)}" for key, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(name: str, value: Any) -> str:
    """A TOML value; a JSON text is one but for DEL, which JSON does not escape."""
    for item in value if isinstance(value, list) else [value]:
        try:
            str(item).encode()
        except UnicodeEncodeError:
            flag = "--" + name.replace("_", "-")
            raise BadInput(
                f"{flag} {item!a}: is not UTF-8, so that no recipe can name it; rename it, or name a folder above it"
            ) from None
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
