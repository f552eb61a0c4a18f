"""Conditions of a CUDA graph on the CPU, where a replay runs the step again: fixed addresses, fixed shapes, no reads, the
same losses as without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megabert import config as configuration
from megabert import ops
from megabert.engine.recorded_step import RecordedStep, check_graphs
from tests.helpers import tiny
from tests.helpers.host_reads import HostReads
from tests.helpers.ranks import run_ranks

STEPS, VETOED = 20, 5


def test_a_replay_reads_the_buffers_alone_and_they_never_move():
    seen: list[tuple[str, int]] = []

    def step(kind: str, inputs: Any) -> torch.Tensor:
        seen.append((kind, inputs["x"].data_ptr()))
        return 2 * inputs["x"]

    recorded = RecordedStep(step, ("first", "later"), torch.device("cpu"))
    for number in range(4):
        given = torch.full((3,), float(number))
        assert recorded("later" if number else "first", {"x": given}).tolist() == [2.0 * number] * 3
        assert given.data_ptr() != recorded.buffers["x"].data_ptr()
    assert [kind for kind, _ in seen] == ["first", "later", "later", "later"]
    assert len({address for _, address in seen}) == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": torch.zeros(4)}, r"x is \(\(4,\), torch.float32\) and was recorded as \(\(3,\), torch.float32\)"),
        ({"x": torch.zeros(3).double()}, r"x is \(\(3,\), torch.float64\)"),
        ({}, "x is None and was recorded"),
        ({"x": torch.zeros(3), "y": torch.zeros(1)}, "y is .* and was recorded as None"),
        ({"x": torch.zeros(3), "sequences": 7}, "sequences is no tensor"),
    ],
)
def test_inputs_of_another_kind_are_refused(inputs, message):
    recorded = RecordedStep(lambda kind, given: given["x"], ("first",), torch.device("cpu"))
    recorded("first", {"x": torch.zeros(3)})
    with pytest.raises(ValueError, match=f"cuda_graphs: the input {message}"):
        recorded("first", inputs)


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        (["zero.stage=2"], 1, "cuda_graphs=true needs zero.stage=1, and this run has 2"),
        (["precision=fp32"], 1, "needs precision=bf16, and this run has fp32"),
        (["zero.offload=cpu"], 1, "needs zero.offload=none, and this run has cpu"),
        (["batch.micro_size=128"], 2, "this run has one an update"),
    ],
)
def test_where_gradients_move_graphs_are_refused_by_name(overrides, world, message):
    with pytest.raises(ValueError, match=message):
        check_graphs(configuration.load("", ["precision=bf16", *overrides]), world)


class Shared:
    """Batches that are overwritten as soon as the next one is asked for, once they were counted."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.counted = batches, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        used, self.counted = self.counted, True
        for batch in self.batches:
            yield batch
            for tensor in batch.inputs().values() if used else ():
                tensor.fill_(0)


def with_and_without(world: Any) -> dict[str, Any]:
    """Both ways, by the native operations where they are built: on 1 rank with 4 micro-steps an update, all recorded; on 2
    ranks with 2, of which the last one is not."""
    found: dict[str, Any] = {}
    parts = ("ops__attention", "ops__mlm_loss", "ops__layer")
    chosen = {} if ops.MISSING else dict.fromkeys(parts, "native")
    for name, graphs in (("eager", False), ("recorded", True)):
        cfg = tiny.config(
            precision="bf16",
            zero__stage=1,
            cuda_graphs=graphs,
            model__dropout=0.1,
            model__attention_dropout=0.1,
            **chosen,
        )
        engine, reads, places, found[name] = tiny.engine(cfg, world), HostReads(), set(), []
        replays = {}
        for step in range(STEPS if world.size == 1 else 8):
            update = tiny.update(step, cfg, world)
            if graphs:
                update = tiny.Update(step, Shared(update.batches))  # type: ignore[arg-type]
            result = engine.train_update(update, 0.003, (lambda loss: True) if step == VETOED else None)
            found[name].append((result.losses.tolist(), float(result.grad_norm), result.skipped))
            if graphs:
                held = [
                    *engine._recorded.recorded.buffers.values(),
                    *engine.optimizer.state.keys(),
                    *engine._gradients(),
                ]
                places.add(tuple(tensor.data_ptr() for tensor in held))
                if step == 1:
                    replays = dict(engine._recorded.recorded._replays)
        if graphs:
            with reads:
                engine._recorded.recorded("first", engine._recorded.recorded.buffers)
            found[f"{name}, reads"], found[f"{name}, places"] = dict(reads.found), len(places)
            assert engine._recorded.recorded._replays == replays  # nothing was recorded again
    return found


# The dropout of torch's backends, of tensors on the CPU alone (`row_dropout.follows_rows`).
ON_THE_HOST = set() if not ops.MISSING else {"tolist in row_dropout.py:dropout"}


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_20_recorded_updates_are_the_eager_ones(ranks):
    for found in run_ranks(ranks, with_and_without):
        assert found["eager"] == found["recorded"]
        skipped = [step for step, (_, _, skipped) in enumerate(found["recorded"]) if skipped]
        assert skipped == [VETOED] and len(found["recorded"]) == (STEPS if ranks == 1 else 8)
        assert found["recorded, places"] == 1
        assert found["recorded, reads"].keys() <= ON_THE_HOST
