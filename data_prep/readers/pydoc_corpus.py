"""Built-in corpus: the English documentation in every Python installation, read without running code.

`pydoc_data/topics.py` has a document for each topic. Every other module of the standard library and of the installed packages is
one document, its docstrings in source order, found by parsing. The list of files depends only on the installed packages, and its
order only on their names.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import chain

SOURCE_LIMIT = 60_000_000  # bytes of source to read; more only costs minutes of parsing
FILE_LIMIT = 2_000_000  # bytes; larger modules are generated tables
SKIPPED_FOLDERS = {"__pycache__", "test", "tests", "testing", "idlelib", "lib2to3", "_vendor", "vendor", "vendored"}
PROMPT = re.compile(r"^\s*(>>>|\.\.\. |\.\.\.$)")
UNDERLINE = re.compile(r"^\s*[-=~^#*_+|`\".]{3,}\s*$")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files() -> list[tuple[str, int]]:
    """(path, bytes) of the modules to read: the topics and the standard library, then the installed packages."""
    standard, packages = (sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))
    chosen, total = [], 0
    for path in chain(_python_files(standard, os.path.join(standard, "site-packages")), _python_files(packages)):
        size = os.path.getsize(path)
        if 0 < size <= FILE_LIMIT:
            total += size
            if total > SOURCE_LIMIT:
                break
            chosen.append((path, size))
    return chosen


def _python_files(root: str, skip: str = "") -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            f for f in folders if f not in SKIPPED_FOLDERS and os.path.join(folder, f) != skip and "-info" not in f
        )
        paths = (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
        yield from (path for path in paths if not os.path.islink(path))


def documents(path: str) -> list[str]:
    """Documents of one module; none if it does not parse as Python (a template, another version)."""
    with open(path, "rb") as file:
        source = file.read()
    if b'"""' not in source and b"'''" not in source and not path.endswith("topics.py"):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    if path.endswith(os.path.join("pydoc_data", "topics.py")):
        literals = (
            node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        )
        topics: dict[str, str] = next(map(ast.literal_eval, literals), {})
        return [_prose(topics[name]) for name in sorted(topics)]
    docstrings: list[tuple[int, str]] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            docstrings.append((getattr(node, "lineno", 0), _prose(text)))
        stack += [*getattr(node, "body", ()), *getattr(node, "orelse", ())]
    return ["\n\n".join(text for _, text in sorted(docstrings))] if docstrings else []


def _prose(docstring: str) -> str:
    """A docstring without doctest examples and without lines of drawing characters."""
    kept, in_example = [], False
    for line in inspect.cleandoc(docstring).splitlines():
        if PROMPT.match(line):
            in_example = True
        elif not line.strip():
            in_example = False
            kept.append("")
        elif not in_example and not UNDERLINE.match(line):
            kept.append(line.strip())
    return "\n".join(kept)
