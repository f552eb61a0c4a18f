"""The other Pythons of this machine, as parameters of a test: those without the packages are skipped by name."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
PACKAGES = ("numpy", "pydantic", "sentencepiece", "torch")  # what the loader imports
FIND = "import importlib.util as u, sys; print(sys.version_info[:2], *(n for n in sys.argv[1:] if not u.find_spec(n)))"


@functools.cache
def other_pythons() -> list[Any]:
    """Interpreters named python3.11 to python3.14 on PATH or installed by pyenv, but for the version that runs this."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = []
    for version in SUPPORTED:
        name = f"python{version}"
        if version == "{}.{}".format(*sys.version_info):
            continue
        folders = [*os.environ.get("PATH", "").split(os.pathsep), *sorted(pyenv.glob(f"versions/{version}.*/bin"))]
        paths = dict.fromkeys(shutil.which(name, path=str(folder)) for folder in folders)
        reasons = {path: _lacks(path, version) for path in paths if path}
        good = [path for path, reason in reasons.items() if not reason]
        if good:
            found.append(pytest.param(good[0], id=version))
        else:
            reason = next(filter(None, reasons.values()), "not on this machine")
            found.append(pytest.param(name, id=version, marks=pytest.mark.skip(reason=f"{name}: {reason}")))
    return found


def _lacks(python: str, version: str) -> str:
    """Why an interpreter cannot run the loader, or ""."""
    done = subprocess.run([python, "-c", FIND, *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        return f"{python} does not start"  # a shim of pyenv for a version that is not selected
    missing = done.stdout.split(")")[1].split()
    return f"{python} lacks {', '.join(missing)}" if missing else ""
