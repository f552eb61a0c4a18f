"""Who may import whom, read from the source by `ast`: the staircase of architecture, one row a folder."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("megabert", "data_prep")

# The staircase from the bottom up: a folder, or a file of the tour, imports only what stands before it. Steps in one pair of
# brackets do not import each other.
MEGABERT = (
    ("common", "ops"), ("distributed", "config"), ("data", "optim", "model"), ("engine",), ("checkpoint",),
    ("inplace", "hf"), ("agreement", "metrics", "sinks", "progress"), ("spikes",), ("evaluation",), ("trainer",),
    ("workload",), ("objectives", "trackers"), ("open_run",), ("finetune",), ("commands",), ("train",),
)  # fmt: skip
DATA_PREP = (
    ("common",), ("text", "filters"), ("readers",), ("options",), ("executor",), ("tokens",), ("stages",), ("report",),
)  # fmt: skip


def staircase(package: str, rows: tuple[tuple[str, ...], ...]) -> dict[str, set[str]]:
    """What each step may import of its package: itself, and all that stands on a lower row."""
    below: set[str] = set()
    allowed = {}
    for row in rows:
        names = {f"{package}.{name}" for name in row}
        allowed |= {name: below | {name} for name in names}
        below = below | names
    return allowed


LEAVES = ("megabert.hf", "megabert.objectives", "megabert.trackers", "megabert.finetune", "megabert.commands")
# what puts core and leaves together
COMPOSED = ("megabert.train", "megabert.__main__")
STAIRS = staircase("megabert", MEGABERT) | staircase("data_prep", DATA_PREP)
DATA_PREP_MAY_USE = {"megabert.data", "megabert.common"}
WITHOUT_TORCH = (
    *("megabert.__main__", "megabert.common.arguments", "megabert.common.errors", "megabert.common.logs"),
    *("megabert.common.files", "megabert.config", "megabert.data.masking", "megabert.data.shards"),
    *("megabert.data.tokenizer", "megabert.inplace.keeper", "megabert.inplace.kept_rank", "megabert.commands.report"),
    *("megabert.distributed.signals", "megabert.commands.doctor", "megabert.spikes", "megabert.optim.schedule"),
    *("megabert.finetune.encoding", "megabert.finetune.files", "megabert.finetune.scores"),
    *("megabert.finetune.tasks", "data_prep"),
)
# package -> the only files or folders that may import it, where it is used and not at the top
OWNERS = {
    "amp_C": ("megabert.optim",),
    "apex": ("megabert.optim", "megabert.ops"),
    "deepspeed": ("megabert.engine",),
    "fsspec": ("megabert.common.storage",),
    "mpi4py": ("data_prep.executor", "megabert.distributed"),
    "ray": ("data_prep.executor.ray_cluster",),
    # what is exported loads in transformers; its ONNX is made from it
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript", "transformers"), ("megabert.hf.onnx",)),
    **dict.fromkeys(("scipy", "seqeval", "sklearn"), ("megabert.finetune.scores",)),
    **dict.fromkeys(("mlflow", "tensorboard", "torch.utils.tensorboard", "trackio", "wandb"), ("megabert.trackers",)),
}


class Import(NamedTuple):
    """A dotted name (`from a import b` gives `a.b`), and whether it is imported when its module is."""

    name: str
    eager: bool


@cache
def sources() -> dict[str, list[Import]]:
    """Module -> its imports; a package's `__init__.py` gives the package."""
    found = {}
    for path in (p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        tree = ast.parse(path.read_text())
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = list(imports_of(tree, parts[:-1]))
    return found


def imports_of(node: ast.AST, package: tuple[str, ...], eager: bool = True) -> Iterator[Import]:
    """Imports in a tree, without those under `if TYPE_CHECKING:`, which name types and import nothing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, eager) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = list(package[: len(package) - child.level + 1]) if child.level else []
            base += [child.module] if child.module else []
            yield from (Import(".".join([*base, alias.name]), eager) for alias in child.names)
        elif not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(child, package, eager and not function)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def exists(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def step_of(name: str) -> str | None:
    """`megabert.data.shards.Dataset` -> `megabert.data`; None for other packages and for the project's root package."""
    step = ".".join(name.split(".")[:2])
    return step if step.split(".")[0] in PACKAGES and "." in step and exists(step) else None


def test_no_import_runs_up_the_staircase() -> None:
    wrong = []
    for module, imports in sources().items():
        step, of_prep = step_of(module), inside(module, "data_prep")
        for name, _ in imports:
            target = step_of(name)
            if step in STAIRS and target is not None and not module.endswith(".__main__"):
                allowed = STAIRS[step] | (DATA_PREP_MAY_USE if of_prep else set()) | {"megabert.__main__"}
                wrong += [f"{module} imports {name}"] if target not in allowed else []
            if of_prep and inside(name, "megabert") and target not in DATA_PREP_MAY_USE:
                wrong.append(f"{module} imports {name}")
            if inside(name, "data_prep") and not of_prep:
                wrong.append(f"{module} imports {name}: data_prep imports megabert, not the reverse")
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_no_leaf() -> None:
    """The core is what trains; leaves use, judge or describe a run. The command that starts training, and the package's face, put both
    together."""
    inner = (name for name in sources() if inside(name, "megabert"))
    of_core = [name for name in inner if step_of(name) not in (*LEAVES, *COMPOSED, None)]
    assert len(of_core) > 60
    found = [
        f"{module} imports {name}" for module in of_core for name, _ in sources()[module] if step_of(name) in LEAVES
    ]
    assert not found, "\n".join(found)


def test_packages_are_imported_by_owners_where_used() -> None:
    wrong = []
    for module, imports in sources().items():
        for name, eager in imports:
            if eager and inside(name, "torch") and any(inside(module, light) for light in WITHOUT_TORCH):
                wrong.append(f"{module} imports torch at its top")
            for package, owners in OWNERS.items():
                if inside(name, package) and not any(inside(module, owner) for owner in owners):
                    wrong.append(f"{module} imports {name}, which belongs to {owners}")
                elif inside(name, package) and eager:
                    wrong.append(f"{module} imports {name} at its top")
            own = (*sys.stdlib_module_names, "megabert.ops", "torch", "apex")
            if inside(module, "megabert.ops") and not any(inside(name, package) for package in own):
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle() -> None:
    """Of the imports that run when a module is imported."""
    modules, done = sources(), set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for name, eager in modules[module]:
            parts = name.split(".")
            prefixes = (".".join(parts[:k]) for k in range(len(parts), 1, -1))
            target = next((prefix for prefix in prefixes if prefix in modules), None)
            if eager and target is not None and target != module:
                visit(target, (*path, module))
        done.add(module)

    for module in modules:
        visit(module, ())


def test_every_rule_is_about_what_exists() -> None:
    """A rule about a file that was renamed would pass for ever; a folder without a row would be free of rules."""
    owners = [owner for names in OWNERS.values() for owner in names]
    for name in {*STAIRS, *WITHOUT_TORCH, *owners}:
        assert exists(name), name
    for package in PACKAGES:
        folders = {f"{package}.{p.parent.name}" for p in (ROOT / package).glob("*/__init__.py")}
        assert folders <= set(STAIRS), folders - set(STAIRS)
