"""Plan of the suite: which items there are, in the order of what they are worth, and how much of the time each part may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.runner import Item

# part -> the share of the time at which it ends; what a part leaves, the next ones have
PARTS = {"environment": 0.35, "ceilings": 0.45, "operations": 0.6, "steps": 0.86, "profile": 0.9, "tests": 1.0}
CANDIDATES = {
    "attention": ("sdpa", "varlen", "cudnn", "native", "fused_softmax"),
    "layer": ("torch", "native", "compiled", "apex"),
    "mlm_loss": ("torch", "native"),
}
OURS = {"attention": "native", "mlm_loss": "native", "layer": "native"}
WITHOUT_DROPOUT = ("mlm_loss",)
LENGTHS = {128: 128, 512: 32}  # row length -> rows of the paper's 16,384 tokens
TOKENS = 16384


@dataclass(frozen=True)
class Options:
    """What the items are told. data: folder of the dataset of each row length."""

    device: str
    small: bool
    pack: str
    data: dict[int, str]
    journal: str
    end: float  # seconds of the epoch

    def both(self) -> dict[str, Any]:
        return {"device": self.device, "small": self.small}


def items(o: Options) -> list[Item]:
    """All items, in their order."""
    found = [
        Item("environment", "facts", "benchmarks.gpu.library:facts", {"device": o.device}, limit=120, needed=True),
        Item("environment", "library", "benchmarks.gpu.library:prepare", {"device": o.device, "pack": o.pack}, cost=10, limit=400),
        *ceilings(o), *operations(o), *steps(o), tests(o),
    ]  # fmt: skip
    return found


def ceilings(o: Options) -> list[Item]:
    tokens = 64 if o.small else TOKENS
    where = "benchmarks.gpu.ceilings"
    found = [
        Item(
            "ceilings",
            f"products {kind}",
            f"{where}:products",
            {**o.both(), "tokens": tokens, "precision": kind},
            cost=5,
        )
        for kind in ("bf16", "fp8")
    ]
    return [*found, Item("ceilings", "copy", f"{where}:copy", o.both(), cost=2)]


def operations(o: Options) -> list[Item]:
    """Each candidate apart: one that breaks the process takes no other one's figures along."""
    found = []
    where = "benchmarks.gpu.operations"
    for dropout in (0.1, 0.0):
        for seq_len in o.data:
            rows = 2 if o.small else LENGTHS[seq_len]
            for role, names in CANDIDATES.items():
                if (role in WITHOUT_DROPOUT and dropout) or (role != "attention" and seq_len != min(o.data)):
                    continue  # only attention depends on how long the rows are
                for name in names:
                    given = {
                        **o.both(),
                        "role": role,
                        "name": name,
                        "data": o.data[seq_len],
                        "rows": rows,
                        "dropout": dropout,
                    }
                    cost = 25 if name == "compiled" and not o.small else 3
                    title = f"{role} {name} {seq_len} dropout {dropout:g}"
                    found.append(Item("operations", title, f"{where}:candidate", given, cost=cost, limit=120))
    for name in ("adamw", "lamb", "muon"):
        given = {**o.both(), "optimizer": name}
        found.append(Item("operations", f"optimizer {name}", f"{where}:update", given, limit=60))
    found.append(Item("operations", "accumulate", f"{where}:accumulate", o.both(), limit=60))
    return found


def steps(o: Options) -> list[Item]:
    """The most telling setups first: the fastest candidates, graphed, FP8, then what they are compared with."""
    main = [(128, 256), (512, 64)]
    plan: list[tuple[dict[str, Any], list[tuple[int, int]], float]] = [
        # below zero: a profile. By row length, since another length may have other backends, which are built anew
        ({}, [(128, 256), (128, 128), (-128, 128), (512, 64), (512, 32), (-512, 32), (128, 512)], 8),
        ({"graphed": True}, [*main, (128, 64)], 12),
        ({"precision": "fp8"}, main, 10),
        ({"precision": "fp8", "graphed": True}, main, 12),
        ({"backends": "torch"}, [(128, 128), *main], 8),
        ({"backends": "torch", "compiled": True}, main, 50),
        ({"optimizer": "lamb"}, main, 8),
        ({"dropout": 0.0}, main, 8),
        ({"backends": "ours"}, main, 8),
        ({"plain": True}, main, 8),
        ({}, [(128, 64), (512, 128)], 8),
    ]
    found, common = [], {**o.both(), "journal": o.journal}
    for changes, shapes, cost in plan:
        for seq_len, rows in shapes:
            part, function = ("profile", "kernels:profile") if seq_len < 0 else ("steps", "steps:measure")
            if abs(seq_len) not in o.data:
                continue
            title = " ".join(k if v is True else f"{k} 0" if v == 0.0 else str(v) for k, v in changes.items()) or "best"
            given = {**common, "setup": changes, "data": o.data[abs(seq_len)], "rows": 2 if o.small else rows}
            item = Item(part, f"{title} {abs(seq_len)}x{rows}", f"benchmarks.gpu.{function}", given,
                        cost=1 if o.small else cost, limit=180, group=title)  # fmt: skip
            found.append(item)
    return found


def tests(o: Options) -> Item:
    given = {"device": o.device, "end": o.end}
    return Item("tests", "operations", "benchmarks.gpu.library:tests", given, cost=20, limit=600)
