"""Training in FP8 under DeepSpeed: the same at every ZeRO stage and on any ranks, resumed bit for bit, unharmed by a bad update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert import ops
from megabert.checkpoint import Checkpoints
from megabert.engine import Engine
from tests.checkpoint.test_store import settings, state
from tests.engine.test_deepspeed_engine import poisoned_update
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.ops.test_fp8 import Reads

pytestmark = pytest.mark.dist

STEPS, MORE = 10, 3


def config(precision: str = "fp8", **more: Any) -> Any:
    """4 layers of 32, of which 2 in FP8, on native operations; without dropout, whose masks differ between ranks."""
    native = {} if ops.MISSING else {"ops__attention": "native", "ops__layer": "native"}
    return tiny.config(precision=precision, model__layers=4, **native, **more)


def history(engine: Engine) -> torch.Tensor:
    return torch.tensor(engine.snapshot().counters["amax_history"])


def host_reads(engine: Engine) -> int:
    """What the host reads in an update."""
    update = tiny.update(70, engine.config, engine.world)
    with Reads() as counted:
        engine.train_update(update, 0.003)
    return counted.count


def one_rank(world: Any, folder: str, stages: Sequence[int]) -> dict[str, Any]:
    plain = tiny.engine(config("bf16"), world)
    found: dict[str, Any] = {"bf16": tiny.train(plain, range(STEPS)), "reads of bf16": host_reads(plain)}
    for stage in stages:
        engine = tiny.engine(config(zero__stage=stage), world)
        found[f"losses {stage}"] = tiny.train(engine, range(STEPS))
        found[f"history {stage}"] = history(engine)
    checkpoints = Checkpoints(folder, world, settings())  # two ranks go on from here
    checkpoints.save(engine, state(STEPS, engine.config))
    found["more"] = tiny.train(engine, range(STEPS, STEPS + MORE))
    found["history after more"] = history(engine)
    found["describe"], found["reads of fp8"] = engine.describe(), host_reads(engine)
    return found | bad_updates(engine)


def bad_updates(engine: Engine) -> dict[str, Any]:
    """An infinite gradient, an infinite loss and an unwanted update, then an evaluation, then three good updates."""
    before = engine.consolidated_weights()
    skipped = [poisoned_update(engine, kind).skipped for kind in ("gradient", "loss")]
    update = tiny.update(50, engine.config, engine.world)
    skipped.append(engine.train_update(update, 0.003, lambda loss: True).vetoed)
    after, seen = engine.consolidated_weights(), history(engine)
    engine.eval_sums(update.batches)
    return {
        "skipped": skipped,
        "unchanged": all(before[name].equal(after[name]) for name in before),
        "history of bad": seen,
        "history of evaluation": history(engine),
        "losses after bad": tiny.train(engine, range(3)),
    }


def two_ranks(world: Any, folder: str, resumed: str, stages: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in stages:
        engine = tiny.engine(config(zero__stage=stage), world)
        found[f"losses {stage}"] = tiny.train(engine, range(STEPS))
        found[f"history {stage}"] = history(engine)
        checkpoints = Checkpoints(Path(resumed) / str(stage), world, settings())
        checkpoints.save(engine, state(STEPS, engine.config))
        found[f"straight {stage}"] = tiny.train(engine, range(STEPS, STEPS + MORE))
        other = tiny.engine(config(zero__stage=stage), world, seed=5)
        checkpoints.load(other, newest(checkpoints))
        found[f"resumed {stage}"] = tiny.train(other, range(STEPS, STEPS + MORE))
        ours, theirs = engine.consolidated_weights(), other.consolidated_weights()
        histories = history(engine), history(other)  # collectives: on every rank, whatever the weights are
        found[f"same {stage}"] = all(ours[name].equal(theirs[name]) for name in ours)
        found[f"same history {stage}"] = histories[0].equal(histories[1])
    elastic = tiny.engine(config(batch__micro_size=4), world)  # one rank saved it, with micro-batches of 2
    checkpoints = Checkpoints(folder, world)
    checkpoints.load(elastic, newest(checkpoints))
    found["elastic history"] = history(elastic)
    found["more"] = tiny.train(elastic, range(STEPS, STEPS + MORE))
    found["history after more"] = history(elastic)
    return found


def newest(checkpoints: Checkpoints) -> Path:
    path = checkpoints.latest()
    assert path is not None
    return path


@pytest.fixture(
    scope="module", params=[pytest.param(stages, marks=pytest.mark.slow) for stages in ((1,), (0, 2, 3))], ids=str
)
def runs(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any], Sequence[int]]:
    folder, resumed = (str(tmp_path_factory.mktemp(name)) for name in ("one", "two"))
    (one,) = run_ranks(1, one_rank, folder, request.param, timeout=300)
    return one, run_ranks(2, two_ranks, folder, resumed, request.param, timeout=300), request.param


def close(ours: list[Any], theirs: list[Any], rel: float) -> None:
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a == pytest.approx(b, rel=rel), f"update {number}"


def test_stages_and_ranks_give_the_same_updates(runs: Any) -> None:
    one, two, stages = runs
    for stage in stages:
        close(one[f"losses {stage}"], one[f"losses {stages[0]}"], rel=5e-3)
        close(two[0][f"losses {stage}"], one[f"losses {stages[0]}"], rel=5e-3)
        saved = one[f"history {stage}"]
        assert saved.shape == (16, 2 * 4 * 3)
        assert (saved[:STEPS] > 0).all() and (saved[STEPS:] == 0).all()
        first = STEPS - 1  # the oldest row; the history is that of the whole update, on however many ranks
        torch.testing.assert_close(two[0][f"history {stage}"][first], saved[first], rtol=0.05, atol=0)


def test_ranks_agree_on_the_scales_and_a_resumed_run_is_the_run(runs: Any) -> None:
    _, two, stages = runs
    for stage in stages:
        assert two[0][f"history {stage}"].equal(two[1][f"history {stage}"])
        for rank in two:
            assert rank[f"resumed {stage}"] == rank[f"straight {stage}"]
            assert rank[f"same {stage}"] and rank[f"same history {stage}"]


def test_other_ranks_and_micro_batches_go_on_with_the_same_history(runs: Any) -> None:
    one, two, stages = runs
    assert two[0]["elastic history"].equal(one[f"history {stages[-1]}"])
    close(two[0]["more"], one["more"], rel=5e-3)
    ours, theirs = two[0]["history after more"], one["history after more"]
    torch.testing.assert_close(ours[MORE - 1], theirs[MORE - 1], rtol=0.05, atol=0)


def test_fp8_follows_bf16_and_is_not_bf16(runs: Any) -> None:
    one, _, stages = runs
    ours = one[f"losses {stages[0]}"]
    assert ours[0] == pytest.approx(one["bf16"][0], rel=1e-6)  # the first update observes
    assert ours[2:] != one["bf16"][2:]
    close(ours, one["bf16"], rel=0.02)
    assert "fp8 (emulated on cpu: for its numerics, not for speed)" in one["describe"]


def test_a_bad_update_changes_nothing_and_does_not_spoil_the_history(runs: Any) -> None:
    one, _, _ = runs
    assert one["skipped"] == [True] * 3 and one["unchanged"]
    assert one["history of bad"].isfinite().all()
    assert one["history of evaluation"].equal(one["history of bad"])
    assert all(math.isfinite(loss) for losses in one["losses after bad"] for loss in losses)


def test_fp8_reads_nothing_back_that_bf16_does_not(runs: Any) -> None:
    one, _, _ = runs
    assert one["reads of fp8"] <= one["reads of bf16"], (one["reads of fp8"], one["reads of bf16"])
