"""What the tests of the CUDA operations call, read without a GPU: arguments as the schemas ask, and no operation left out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.conftest import ROOT
from tests.ops.oracle import needs_library

FILES = [path for path in Path(__file__).parent.glob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
FILES.remove(Path(__file__))


def calls(path: Path) -> Iterator[ast.Call]:
    """Direct calls of `torch.ops.megabert.NAME` with arguments that can be counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.ops.megabert."):
            starred = any(isinstance(a, ast.Starred) for a in node.args) or None in [k.arg for k in node.keywords]
            if not starred:
                yield node


@needs_library
def test_arguments_are_those_of_the_schema() -> None:
    checked = 0
    for path in FILES:
        for call in calls(path):
            schema: Any = getattr(torch.ops.megabert, ast.unparse(call.func).rpartition(".")[2]).default._schema
            names = [argument.name for argument in schema.arguments]
            given = names[: len(call.args)] + [keyword.arg for keyword in call.keywords]
            assert len(call.args) <= len(names) and sorted(given) == sorted(names), (
                f"{path.name}:{call.lineno}: {schema}"
            )
            checked += 1
    assert checked >= 3


def test_every_cuda_operation_has_a_test_on_a_gpu() -> None:
    """By its name; a gradient's also by that of its operation, whose tests run it."""
    text = "\n".join(path.read_text() for path in FILES)
    sources = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cu"))
    operations = set(re.findall(r'm\.impl\("(\w+)"', sources))
    assert len(operations) >= 14
    unnamed = [
        name for name in sorted(operations)
        if not any(re.search(rf"\b{n}\b", text) for n in {name, name.removesuffix("_backward")})
    ]  # fmt: skip
    assert not unnamed
