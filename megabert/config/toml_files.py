"""TOML files that a command names by their stem in a folder, or by their path."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def read(name: str, folder: Path, option: str, kind: str) -> tuple[Path, dict[str, Any]]:
    """The file of an option's value and what is in it; `kind` is what the files of `folder` are, in the singular.

    Raises ValueError naming the option or the file.
    """
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        known = f"{folder.name}: {', '.join(names(folder))}"
        raise ValueError(f"{option} {name}: no such {kind} or file; {known}")
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 (byte {error.start}); TOML is, so save it as that") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
