"""Who may import whom: read from the source by `ast`, so that nothing has to be installed or run.

The rules are the architecture's. A module that no rule names may import what it likes, but nobody imports `train`,
`doctor` runs without torch, and a heavy package is imported in the one or two files that own it.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("megabert", "data_prep")

# module (or package, or a module in one) of megabert -> the megabert modules it may import
ALLOWED = {
    "config": {"overrides"},
    "overrides": set(),
    "schedule": {"config"},  # the type of its argument
    "masking": set(),
    "shards": set(),
    "tokenizer": set(),
    "ops": {"ops"},
    "model": {"config", "ops"},
    "optim": {"config", "ops"},
    "partition": {"distributed", "optim"},  # where ZeRO put each parameter, for LAMB
    "batches": {"masking", "shards"},
    "order": {"masking"},
    "data": {"batches", "config", "masking", "memory", "order", "shards", "tokenizer"},
    "memory": set(),
    "distributed": set(),
    "spikes": set(),
    "stopping": set(),
    "signs": set(),
    "watchdog": {"distributed", "signs"},
    "ledger": {"batches", "distributed", "masking"},
    "rng": set(),
    "runlock": {"distributed"},
    "folder": set(),
    "packing": set(),
    "features": {"packing", "pretrained"},
    "foreign": {"config", "huggingface", "model", "tokenizer"},
    "hf_tokenizer": {"tokenizer"},
    "huggingface": {"config"},
    "pretrained": {"checkpoint", "config", "foreign", "model", "shards", "tokenizer"},
    "checkpoint": {"config", "distributed", "folder", "optim", "partition"},  # the engine calls nothing in it
    "finetune.tasks": set(),
    "finetune.files": {"finetune.tasks"},
    "finetune.encoding": {"finetune.files", "finetune.tasks", "tokenizer"},
    "finetune.scores": {"folder", "finetune.encoding", "finetune.files", "finetune.tasks"},
    "finetune.batches": {"finetune.encoding", "packing"},
    "finetune.heads": {"config", "model"},
    "distill": {"config", "engine", "model", "pretrained"},
}
WITHOUT_TORCH = {
    *("config", "doctor", "folder", "hf_tokenizer", "schedule", "shards", "spikes", "stopping", "tokenizer"),
    *("finetune.encoding", "finetune.files", "finetune.scores", "finetune.tasks"),
}
# package -> the only files that may import it
OWNERS = {
    "transformers": set(),  # what is exported loads there, but nothing here needs it
    "deepspeed": {"megabert/engine.py"},
    "mpi4py": {"data_prep/parallel.py", "megabert/distributed.py"},
    "scipy": {"megabert/finetune/scores.py"},
    "seqeval": {"megabert/finetune/scores.py"},
    "sklearn": {"megabert/finetune/scores.py"},
    "tensorboard": {"megabert/metrics.py"},
    "torch.utils.tensorboard": {"megabert/metrics.py"},
}
LAZY = (
    "deepspeed",
    "mpi4py",
    "scipy",
    "seqeval",
    "sklearn",
    "tensorboard",
    "torch.utils.tensorboard",
)  # imported where used, not at the top


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
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or depth.get(
            node, False
        )
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


def megabert_module(name: str) -> str | None:
    """`megabert.ops.norm.layer_norm` -> `ops`; None for the package itself and for other packages."""
    parts = name.split(".")
    if parts[0] != "megabert" or len(parts) == 1:
        return None
    exists = (ROOT / "megabert" / f"{parts[1]}.py").is_file() or (ROOT / "megabert" / parts[1]).is_dir()
    return parts[1] if exists else None  # `from megabert import __version__` names no module


def inside_a_package(name: str) -> str | None:
    """`megabert.finetune.tasks.Task` -> `finetune.tasks`, where rules name that module; otherwise as `megabert_module`."""
    inner = ".".join(name.split(".")[1:3])
    return inner if starts(name, "megabert") and inner in ALLOWED else megabert_module(name)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    here = name_of(path)
    where = path.relative_to(ROOT).as_posix()
    imported = imports_of(path.read_text(), package_of(path))
    module = inside_a_package(here)
    for name, eager in imported:
        target = megabert_module(name) if module in (None, megabert_module(here)) else inside_a_package(name)
        assert target != "train", f"{where} imports train.py; nothing may"
        if here.startswith("data_prep"):
            assert target in (None, "masking", "shards", "tokenizer"), f"{where} imports megabert.{target}"
        if here.startswith("megabert"):
            assert not starts(name, "data_prep"), (
                f"{where} imports {name}: data_prep imports megabert, not the reverse"
            )
        if module in ALLOWED and target is not None:
            allowed = ALLOWED[module] | {module}
            assert target in allowed, f"{where} imports megabert.{target}; its layer allows {sorted(allowed)}"
        if module in WITHOUT_TORCH and eager:
            assert not starts(name, "torch"), f"{where} imports torch"
        for package, owners in OWNERS.items():
            if starts(name, package):
                assert where in owners, f"{where} imports {package}, which belongs to {sorted(owners)}"
        for package in LAZY:
            assert not (eager and starts(name, package)), (
                f"{where} imports {package} at its top; import it where used"
            )


def test_ops_import_torch_alone() -> None:
    for path in sorted((ROOT / "megabert" / "ops").rglob("*.py")):
        for name, _ in imports_of(path.read_text(), package_of(path)):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top == "torch" or starts(name, "megabert.ops"), (
                f"{path.name} imports {name}"
            )


def test_every_named_module_exists() -> None:
    """A rule about a file that was renamed would pass for ever."""
    for module in [*ALLOWED, *WITHOUT_TORCH]:
        path = ROOT / "megabert" / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), module
    for owners in OWNERS.values():
        assert all((ROOT / owner).is_file() for owner in owners), owners


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
