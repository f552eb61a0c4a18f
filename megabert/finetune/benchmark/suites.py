"""Suites of tasks: GLUE's nine, SQuAD's two, or those that a folder's TOML files describe.

    glue   DIR/SST-2/train.tsv dev.tsv test.tsv … as GLUE's own download has them (Wang et al. 2019), or DIR/sst2/…
    squad  train-v1.1.json, dev-v1.1.json, the same with v2.0, in DIR or in a folder of it whose name begins with squad
    own    DIR/NAME.toml, a task each: `task = "sst2"` or `kind`, `text`, `label` …; `train`, `dev`, `test`; [settings]

Tables may be .tsv, .csv or .jsonl; every file may be gzipped. Settings and grids are those of Devlin et al. 2019 (section 4,
appendix A.3, and the README of their code for lengths).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megabert.common import tables
from megabert.finetune import tasks
from megabert.finetune.encoding import LONG
from megabert.finetune.tasks import Task

GLUE = {
    **{"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP"},
    **{"mnli": "MNLI", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI"},
}  # name of the task -> of its folder and of its row
SQUAD = {"squad1.1": "SQuAD 1.1", "squad2.0": "SQuAD 2.0"}
MNLI_PARTS = {"m": "matched", "mm": "mismatched"}  # part of dev and test -> ending of their files
DIAGNOSTIC = ("diagnostic", "ax"), ("AX", "ax", "diagnostic")  # folders and files of MNLI's third test
ENDINGS = tuple(ending + packed for ending in tables.ENDINGS for packed in ("", ".gz"))
GLUE_SETTINGS = {"batch": 32, "epochs": 3, "max_length": 128}
SQUAD_SETTINGS = {
    "squad1.1": {"batch": 32, "epochs": 3, "lr": 5e-5, "max_length": 384, "stride": 128},
    "squad2.0": {"batch": 48, "epochs": 2, "lr": 5e-5, "max_length": 384, "stride": 128},
}
GRIDS: dict[str, dict[str, list[Any]]] = {  # by their names; SQuAD's published settings are one point
    "published": {"lr": [5e-5, 4e-5, 3e-5, 2e-5]},
    "small": {"lr": [5e-5, 2e-5]},
    "none": {},
}
OWN_SETTINGS = {
    **{"lr": float, "dropout": float, "warmup": float, "weight_decay": float},
    **{"batch": int, "epochs": int, "max_length": int, "stride": int, "evaluations": int, "patience": int},
    **{"long": str},
}
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Entry:
    """A task of a suite with its files; files and settings decide what is trained, `title` is for tables."""

    title: str
    task: Task
    train: Path
    dev: dict[str, Path]  # part -> labelled file, "" where there is one alone; {}: a part of `train` is reported
    test: dict[str, Path]  # name of the predictions' file that is handed in -> file without labels
    settings: dict[str, Any] = field(default_factory=dict)  # of `training.Settings`
    searched: bool = True  # over the named grid; SQuAD's published settings are one point

    @property
    def name(self) -> str:
        return self.task.name

    def row(self, part: str) -> str:
        """The name of a part's row in the table."""
        return f"{self.title}-{part}" if part else self.title


def find(suite: str, data: Path, only: Sequence[str] = ()) -> list[Entry]:
    """The tasks of `suite` that are in the folder, in the suite's order; of `only`, all of them.

    Raises ValueError naming what is missing or, in a TOML file, wrong.
    """
    if not data.is_dir():
        raise ValueError(f"{data}: no such folder; name the folder of the tasks as --data")
    entries = {entry.name: entry for entry in READERS[suite](data)}
    known = {"glue": tuple(GLUE), "squad": tuple(SQUAD), "own": tuple(entries)}[suite]
    for name in only:
        if name not in known:
            raise ValueError(f"--tasks {name}: is none of {', '.join(known) or 'no tasks'}{_near(name, known)}")
        if name not in entries:
            raise ValueError(f"{data}: has no {name}; {LOOKED_FOR[suite]}")
    if not entries:
        raise ValueError(f"{data}: has no task of --suite {suite}; {LOOKED_FOR[suite]}")
    return [entry for name, entry in entries.items() if not only or name in only]


LOOKED_FOR = {
    "glue": "each is a folder with train.tsv and dev.tsv, CoLA, SST-2, …, as GLUE's download has them",
    "squad": "its files are train-v1.1.json and dev-v1.1.json, or v2.0, here or in a folder named squad…",
    "own": "each is described by a file NAME.toml",
}


def _near(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


def _folders(data: Path, names: Sequence[str]) -> Iterator[Path]:
    for folder in sorted(data.iterdir()):
        if folder.is_dir() and _plain(folder.name) in names:
            yield folder


def _file(folder: Path, stem: str, endings: Sequence[str] = ENDINGS) -> Path | None:
    paths = (folder / f"{stem}{ending}" for ending in endings)
    return next((path for path in paths if path.is_file()), None)


# ---- GLUE


def _glue(data: Path) -> Iterator[Entry]:
    for name, title in GLUE.items():
        folders = list(_folders(data, [name]))
        if len(folders) > 1:
            raise ValueError(f"{data}: holds {title} twice, {folders[0].name} and {folders[1].name}; keep one")
        for folder in folders:
            train = _file(folder, "train")
            if train is None:
                raise ValueError(f"{folder}: has no train.tsv (nor .csv, .jsonl, or one of them as .gz)")
            parts = MNLI_PARTS if name == "mnli" else {}
            dev = _parts(folder, "dev", parts)
            test = {f"{title}-{part}" if part else title: f for part, f in _parts(folder, "test", parts).items()}
            if name == "mnli":
                test |= _diagnostic(data)
            yield Entry(title, tasks.preset(name), train, dev, test, dict(GLUE_SETTINGS))


def _parts(folder: Path, stem: str, parts: Mapping[str, str]) -> dict[str, Path]:
    """MNLI's matched and mismatched files by their parts, or the only file as ""."""
    found = {part: _file(folder, f"{stem}_{ending}") for part, ending in parts.items()}
    if not any(found.values()):
        found = {"": _file(folder, stem)}
    return {part: path for part, path in found.items() if path}


def _diagnostic(data: Path) -> dict[str, Path]:
    folders, stems = DIAGNOSTIC
    for folder in (*_folders(data, folders), data):
        for stem in stems:
            if path := _file(folder, stem):
                return {"AX": path}
    return {}


# ---- SQuAD


def _squad(data: Path) -> Iterator[Entry]:
    places = [data, *(f for f in sorted(data.iterdir()) if f.is_dir() and _plain(f.name).startswith("squad"))]
    for name, title in SQUAD.items():
        version = name.removeprefix("squad")
        for folder in places:
            train, dev, test = (
                _file(folder, f"{part}-v{version}", (".json", ".json.gz")) for part in ("train", "dev", "test")
            )
            if train:
                files = {"": dev} if dev else {}
                tests = {name: test} if test else {}
                settings = dict(SQUAD_SETTINGS[name])
                yield Entry(title, tasks.preset(name), train, files, tests, settings, searched=False)
                break


# ---- a folder of one's own


def _own(data: Path) -> Iterator[Entry]:
    for path in sorted(data.glob("*.toml")):
        yield describe(path)


def describe(path: Path) -> Entry:
    """The task of a TOML file; the files it names are relative to it. Raises ValueError naming file and key."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not TOML ({error})") from None
    if not NAME.fullmatch(path.stem):
        raise ValueError(f"{path}: its name is the task's; use letters, digits, - and _")
    own = {f.name: type(f.default) for f in fields(Task) if f.name not in ("name", "kind")}
    kinds = {name: list if kind is tuple else kind for name, kind in own.items()}
    kinds |= {"task": str, "kind": str, "train": str, "dev": str, "test": str, "settings": dict}
    _check(path, "", tree, kinds)
    settings = tree.pop("settings", {})
    _check(path, "settings.", settings, OWN_SETTINGS)
    if settings.get("long", LONG[0]) not in LONG:
        raise ValueError(f"{path}: settings.long = {settings['long']!r}: is none of {', '.join(LONG)}")
    files = {name: tree.pop(name, "") for name in ("train", "dev", "test")}
    if not files["train"]:
        raise ValueError(f"{path}: names no file as train")
    for key, name in files.items():
        if name and not (path.parent / name).exists():
            raise ValueError(f"{path}: {key} = {name!r}: there is no such file in {path.parent}")
    if bool("task" in tree) == bool("kind" in tree):
        raise ValueError(f"{path}: name a known task ({', '.join(tasks.PRESETS)}) or a kind")
    lengths = tasks.LENGTHS.get(tree.get("task", ""))
    usual = dict(zip(("max_length", "stride"), lengths, strict=True)) if lengths else {}
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
    if given.get("kind") == "tag":
        given = {"text": ("0",), "label": "-1"} | given
    try:
        if "task" in given:
            task = replace(tasks.preset(given.pop("task")), **given, name=path.stem)
        else:
            task = Task(path.stem, **given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    dev, test = (path.parent / files[name] if files[name] else None for name in ("dev", "test"))
    return Entry(
        path.stem,
        task,
        path.parent / files["train"],
        {"": dev} if dev else {},
        {path.stem: test} if test else {},
        GLUE_SETTINGS | usual | settings,
        searched="lr" not in settings,
    )


def _check(path: Path, prefix: str, tree: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raises ValueError for a key that is not known or holds another kind of value."""
    says = {
        bool: "true or false",
        str: "text",
        list: "a list of texts",
        dict: "a table",
        int: "a whole number",
        float: "a number",
    }
    for key, value in tree.items():
        if key not in kinds:
            raise ValueError(f"{path}: no key {prefix}{key}; known are {', '.join(kinds)}{_near(key, tuple(kinds))}")
        kind = kinds[key]
        right = isinstance(value, (int, float) if kind is float else kind)
        right = right and (kind is bool or not isinstance(value, bool))
        if kind is list:
            right = right and all(isinstance(entry, str) for entry in value)
        if not right:
            raise ValueError(f"{path}: {prefix}{key} = {value!r}: must be {says[kind]}")


READERS = {"glue": _glue, "squad": _squad, "own": _own}
