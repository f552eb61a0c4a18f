"""Who may import whom, read from the source by `ast`: the staircase of architecture, one row a folder."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("megabert", "data_prep")

# The staircase from the bottom up: a folder, or a file of the tour, imports only what stands below it. Steps of one row do not
# import each other.
MEGABERT = (
    ("common", "ops"),
    ("distributed", "config"),
    ("data", "optim", "model"),
    ("engine",),
    ("checkpoint",),
    ("hf",),
    ("metrics", "spikes"),
    ("evaluation",),
    ("distillation",),
    ("trainer",),
    ("pretraining",),
    ("finetune",),
    ("commands",),
    ("train",),
)
DATA_PREP = (
    ("common",),
    ("text", "filters", "readers"),
    ("options",),
    ("executor",),
    ("tokens",),
    ("stages", "report"),
)


def staircase(package: str, rows: tuple[tuple[str, ...], ...]) -> dict[str, set[str]]:
    """What each step may import of its package: all that stands on a lower row."""
    below: set[str] = set()
    allowed = {}
    for row in rows:
        names = {f"{package}.{name}" for name in row}
        allowed |= dict.fromkeys(names, below)
        below = below | names
    return allowed


STAIRS = staircase("megabert", MEGABERT) | staircase("data_prep", DATA_PREP)
DATA_PREP_MAY_USE = {"megabert.data", "megabert.common"}
WITHOUT_TORCH = (
    *("megabert.__main__", "megabert.common.arguments", "megabert.common.errors", "megabert.common.logs"),
    *("megabert.common.files", "megabert.config", "megabert.data.masking", "megabert.data.shards"),
    *("megabert.data.tokenizer", "megabert.distributed.preemption", "megabert.commands.doctor", "data_prep"),
    *("megabert.finetune.encoding", "megabert.finetune.datasets", "megabert.finetune.metrics"),
    *("megabert.finetune.tasks", "megabert.spikes", "megabert.optim.schedule"),
    "megabert.commands.report",
)
# package -> the only files or folders that may import it, where it is used and not at the top
OWNERS = {
    "amp_C": ("megabert.optim",),
    "apex": ("megabert.optim", "megabert.ops"),
    "deepspeed": ("megabert.engine",),
    "mlflow": ("megabert.metrics",),
    "onnx": ("megabert.finetune.onnx",),
    "onnxruntime": ("megabert.finetune.onnx",),
    "onnxscript": ("megabert.finetune.onnx",),
    "mpi4py": ("data_prep.executor", "megabert.distributed"),
    "scipy": ("megabert.finetune.metrics", "megabert.finetune.label_metrics", "megabert.finetune.benchmark.summary"),
    "seqeval": ("megabert.finetune.metrics",),
    "sklearn": ("megabert.finetune.metrics", "megabert.finetune.label_metrics"),
    "tensorboard": ("megabert.metrics",),
    "torch.utils.tensorboard": ("megabert.metrics",),
    "wandb": ("megabert.metrics",),
    "transformers": ("megabert.finetune.onnx",),  # what is exported loads there; its ONNX is made from it
}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    """`megabert/ops/norm.py` -> `megabert.ops.norm`; a package's `__init__.py` gives the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def type_checking_only(tree: ast.Module) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING:`: they name types and import nothing when the program runs."""
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            guarded.update(inner for statement in node.body for inner in ast.walk(statement))
    return guarded


def imports_of(source: str, package: str) -> list[tuple[str, bool]]:
    """(dotted name, whether it is imported when the module is) of each import; `from a import b` gives `a.b`."""
    tree = ast.parse(source)
    guarded = type_checking_only(tree)
    found = []
    depth = {}
    for node in ast.walk(tree):
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or depth.get(node, False)
        for child in ast.iter_child_nodes(node):
            depth[child] = inside
        if node in guarded:
            continue
        eager = not depth.get(node, False)
        if isinstance(node, ast.Import):
            found += [(alias.name, eager) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found += [(f"{base}.{alias.name}", eager) for alias in node.names]
    return found


def starts(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def stair_of(name: str) -> str | None:
    """`megabert.data.shards.Dataset` -> `megabert.data`; None for other packages and for the project's root package."""
    parts = name.split(".")
    if parts[0] not in PACKAGES or len(parts) < 2:
        return None
    return ".".join(parts[:2]) if exists(".".join(parts[:2])) else None


def exists(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_import_runs_up_the_staircase(path: Path) -> None:
    here = name_of(path)
    for name, eager in imports_of(path.read_text(), package_of(path)):
        stair, target = stair_of(here), stair_of(name)
        if stair in STAIRS and target is not None and not here.endswith(".__main__"):
            allowed = STAIRS[stair] | {stair} | (DATA_PREP_MAY_USE if starts(here, "data_prep") else set())
            assert target in {*allowed, "megabert.__main__"}, (
                f"{here} imports {name}; its stair allows {sorted(allowed)}"
            )
        if starts(name, "megabert") and starts(here, "data_prep"):
            assert target in DATA_PREP_MAY_USE, f"{here} imports {name}"
        if starts(name, "data_prep"):
            assert starts(here, "data_prep"), f"{here} imports {name}: data_prep imports megabert, not the reverse"
        if any(starts(here, module) for module in WITHOUT_TORCH) and eager:
            assert not starts(name, "torch"), f"{here} imports torch"
        for package, owners in OWNERS.items():
            if starts(name, package):
                assert any(starts(here, owner) for owner in owners), f"{here} imports {name}, which belongs to {owners}"
                assert not eager, f"{here} imports {name} at its top; import it where it is used"


def test_there_is_no_circle() -> None:
    """Of the imports that run when a module is imported; a folder's face counts as the folder's modules do."""
    graph = {name_of(p): eager_modules(p) for p in sources()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def eager_modules(path: Path) -> set[str]:
    """Names of the project's modules that `path` imports when it is imported."""
    modules = {name_of(p) for p in sources()}
    found = set()
    for name, eager in imports_of(path.read_text(), package_of(path)):
        parts = name.split(".")
        candidates = [".".join(parts[:k]) for k in range(len(parts), 1, -1)]
        module = next((c for c in candidates if c in modules), None)
        if eager and module and module != name_of(path):
            found.add(module)
    return found


def test_ops_import_torch_alone() -> None:
    for path in sorted((ROOT / "megabert" / "ops").rglob("*.py")):
        for name, _ in imports_of(path.read_text(), package_of(path)):
            top = name.split(".")[0]
            allowed = top in sys.stdlib_module_names or top in ("torch", "apex")  # apex where it is chosen
            assert allowed or starts(name, "megabert.ops"), f"{path.name} imports {name}"


def test_every_named_module_exists() -> None:
    """A rule about a file that was renamed would pass for ever."""
    owners = [owner for names in OWNERS.values() for owner in names]
    for name in {*STAIRS, *(n for names in STAIRS.values() for n in names), *WITHOUT_TORCH, *owners}:
        assert exists(name), name


def test_every_folder_has_its_stair() -> None:
    for package in PACKAGES:
        folders = {p.parent.name for p in (ROOT / package).glob("*/__init__.py")}
        assert {f"{package}.{folder}" for folder in folders} <= set(STAIRS)


def test_the_reader_of_imports_sees_every_form() -> None:
    source = (
        "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\nfrom ..h import i\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hidden\n"
        "def function():\n    import late\n    def inner():\n        from later import x\n"
        "class C:\n    import early\n"
    )
    assert dict(imports_of(source, "p.q")) == {
        "a.b": True,
        "c.d": True,
        "p.q.e": True,
        "p.q.f.g": True,
        "p.h.i": True,
        "typing.TYPE_CHECKING": True,
        "late": False,
        "later.x": False,
        "early": True,
    }
