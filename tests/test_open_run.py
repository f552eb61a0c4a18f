"""A run's data: read by one rank of a node for all of them, and held-out rows that stay open between evaluations."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megabert import open_run as opening
from megabert import train
from megabert.common.errors import USER_ERROR, exit_code
from megabert.config import replace
from megabert.data.shards import Dataset, Manifest
from megabert.distributed.ranks import RankError
from megabert.distributed.watchdog import Watchdog
from megabert.model import BertForPreTraining
from megabert.open_run import open_dataset, open_run
from megabert.workload import Pretraining
from tests.helpers import tiny
from tests.helpers.golden_runs import DATA, held_out_of
from tests.helpers.loop import StopAt
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import make_dataset, vocabulary
from tests.helpers.simulated_ranks import ALONE

CPU = torch.device("cpu")


@dataclass
class Rank:
    """A rank among 16 on nodes of 8, as `World` has it; `sent` is what rank 0 broadcasts."""

    rank: int
    sent: Any = None
    size: int = 16

    @property
    def local_rank(self) -> int:
        return self.rank % 8

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def max_ints(self, own: Any) -> list[int]:
        return list(own)

    def gather(self, own: Any) -> list[Any]:
        return [own if rank == self.rank else ["", 0] for rank in range(self.size)]

    def broadcast(self, value: Any) -> Any:
        if self.is_main:
            self.sent = json.loads(json.dumps(value))
        return self.sent


@pytest.fixture
def reads(monkeypatch):
    """The manifests that are read, and the files that are looked at or opened."""
    found, load, check_size = [], Manifest.load, Dataset._check_size
    monkeypatch.setattr(
        Manifest, "load", staticmethod(lambda path, *rest: found.append(str(path)) or load(path, *rest))
    )
    monkeypatch.setattr(Dataset, "_check_size", lambda self, shard: found.append(shard.name) or check_size(self, shard))
    return found


def config(folder, **more):
    return tiny.config(data__path=str(folder), peak_tflops=1.0, **more)


@pytest.mark.parametrize("mixed", [False, True])
def test_one_rank_of_a_node_reads_the_manifests(tmp_path, reads, mixed):
    make_dataset(tmp_path / "a", 200)
    make_dataset(tmp_path / "b", 44)
    cfg = config(tmp_path / "a", data__mix={str(tmp_path / "b"): 0.3} if mixed else {})
    main, first, other = Rank(0), Rank(8), Rank(9)
    want = open_dataset(cfg.data, main)
    assert len([name for name in reads if not name.startswith("shard-")]) == 1 + mixed
    first.sent = other.sent = main.sent
    looked_at = [*reads]
    reads.clear()
    found = [open_dataset(cfg.data, first)]
    assert reads == looked_at, "another node has a look of its own"
    reads.clear()
    found.append(open_dataset(cfg.data, other))
    assert not reads, "the others of a node read and ask for nothing"
    ids = want.order(3, np.arange(700))[0]
    for its in found:
        assert (its.order(3, np.arange(700))[0] == ids).all() and (its.read(ids).ids == want.read(ids).ids).all()
        assert its.identity == want.identity
    make_dataset(tmp_path / "a", 200, seed=7)
    with pytest.raises(RankError, match=r"rank 8: .*a: differs from the dataset that rank 0 reads there"):
        open_dataset(cfg.data, first)
    (tmp_path / "a" / "shard-000001.tar").unlink()
    with pytest.raises(RankError, match=r"rank 8: .*shard-000001\.tar: is missing"):
        open_dataset(cfg.data, first)


def test_what_one_rank_cannot_read_is_refused(tmp_path) -> None:
    main, alone = Rank(0), Rank(8)
    make_dataset(tmp_path, 20)
    cfg = config(tmp_path)
    open_dataset(cfg.data, main)
    alone.sent = main.sent
    with pytest.raises(RankError, match=r"rank 8: .*tokenizer\.model") as found:
        open_run(tmp_path / "run", cfg, alone, None, None)
    assert exit_code(found.value) == USER_ERROR


def test_one_rank_looks_at_the_program_for_all(tmp_path, monkeypatch) -> None:
    asked: list[str] = []
    for name in ("versions", "revision", "source"):
        monkeypatch.setattr(opening.environment, name, lambda name=name: asked.append(name) or f"its {name}")
    make_dataset(tmp_path, 16)
    cfg = config(tmp_path)
    main, other = Rank(0), Rank(9)
    main.device = other.device = CPU

    def described(rank):
        engine = SimpleNamespace(module=tiny.model(cfg), world=rank, optimizer_kernels="torch")
        tokenizer = SimpleNamespace(sha256="t" * 64)
        return opening.describe(cfg, [Dataset(tmp_path)], tokenizer, engine)

    found = described(main)
    assert asked == ["versions", "revision", "source"] and found["source"] == "its source"
    other.sent = main.sent
    assert described(other) == found and len(asked) == 3


def open_where_rank_1_has_no_model(world, folder):
    """The refusal of a run whose model rank 1 cannot build."""

    def fail(*_):
        raise ValueError("no weights fit here")

    if world.rank == 1:
        opening.BertForPreTraining = fail
    cfg, watchdog = config(DATA, model__vocab_size=0, model__max_positions=512), Watchdog(world, folder, 0)
    with pytest.raises(RankError) as found:
        open_run(Path(folder) / "run", cfg, world, StopAt(), watchdog)
    return str(found.value), exit_code(found.value)


@pytest.mark.dist
def test_a_model_one_rank_cannot_build_stops_all(tmp_path) -> None:
    found = run_ranks(2, open_where_rank_1_has_no_model, str(tmp_path), timeout=60)
    assert found == [("rank 1: no weights fit here", USER_ERROR)] * 2


def test_a_model_above_memory_is_not_built(tmp_path, world) -> None:
    for change in ({"model__hidden": 10**7}, {"model__intermediate": 10**12}, {"model__first_position": 10**18}):
        cfg = config(DATA, model__vocab_size=0, model__max_positions=512, **change)
        with pytest.raises(ValueError, match=r"the model's weights are [\d,]+ GiB in fp32, this machine's memory is"):
            open_run(tmp_path / "run", cfg, world, StopAt(), Watchdog(world, tmp_path, 0))


def test_evaluations_reuse_what_the_first_left_open(tmp_path, reads):
    inner = make_dataset(tmp_path / "held_out", 100)
    make_dataset(tmp_path, 16, held_out=held_out_of(inner, 100))
    cfg = config(tmp_path, eval__rows=90)
    rows: list[int] = []

    def eval_sums(batches, sources):
        rows.extend(row for batch in batches for row in batch.row_ids.tolist() if row >= 0)
        return torch.ones(6, dtype=torch.float64)

    tokenizer = vocabulary()
    tokenizer.tokens = list(map(str, range(len(tokenizer.special))))
    sizes = {"vocab_size": len(tokenizer.tokens), "max_positions": 128}
    module = BertForPreTraining(cfg.model.model_copy(update=sizes), cfg.ops)
    parts = {"terms": 1, "dtype": torch.float32, "eval_sums": eval_sums, "module": module, "describe": str}
    engine = SimpleNamespace(world=ALONE, **parts)
    workload = Pretraining(cfg, engine, [Dataset(tmp_path)], tokenizer)
    reads.clear()
    first = workload.evaluate(0, lambda: None)
    assert str(inner) in reads and rows == list(range(90))
    reads.clear()
    assert workload.evaluate(100, lambda: None) == first and rows == 2 * list(range(90))
    assert workload.samples and not reads


def test_a_run_in_its_mirror_needs_no_start(tmp_path) -> None:
    """Its disk may be empty, and the folder from which it once began be gone."""
    make_dataset(tmp_path / "data", 20)
    args = train.parse(["--config", "tiny", "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run")])
    cfg = config(tmp_path / "data", init_from="gone")
    with pytest.raises(ValueError, match="init_from=gone: no checkpoint in it"):
        train.check(args, cfg, 1)
    assert train.check(args, replace(cfg, "checkpoint.mirror", "s3://runs/large"), 1) == (0, 0)
