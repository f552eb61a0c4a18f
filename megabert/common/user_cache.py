"""Measurements of a machine that later starts read: JSON files under `$XDG_CACHE_HOME/megabert` or `~/.cache/megabert`."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabert.common.files import canonical, compact, write_whole
from megabert.common.logs import log


def file_of(kind: str, place: Mapping[str, Any]) -> Path:
    """The file of one kind of measurements at `place`: whatever they depend on. A user without a home has it in the folder of
    temporary files."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        home = os.path.join(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return Path(home) / "megabert" / kind / f"{hashlib.sha256(compact(place)).hexdigest()[:16]}.json"


def read(path: Path) -> dict[str, Any]:
    """The measurements in a file; {} without it, and with a warning if it cannot be read."""
    try:
        saved = json.loads(path.read_bytes()) if path.exists() else {}
        return saved if isinstance(saved, dict) else {}
    except (OSError, ValueError) as error:
        log.warning(f"{path}: {error}; what it held is measured again")
        return {}


def write(path: Path, measurements: Mapping[str, Any]) -> None:
    """Write or replace a file of measurements. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, canonical(measurements))
