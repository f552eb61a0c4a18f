"""A checkpoint and an exported model that an earlier revision wrote are read, and go on as they did there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megabert import config
from megabert import hf as pretrained
from megabert.checkpoint import Checkpoints, load_weights
from megabert.commands import export
from megabert.distributed.process_group import World
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

OLD = Path(__file__).resolve().parents[1] / "data" / "old_formats"
WEIGHTS = "eb9686f218cb3057bce1f53c355f0e6659fcef2ef5bade81504864a29c83f91c"
TOKENIZER = "dd22ff538e790ce8d5f9ddb62e2956796556ca5997f34bcfdf74bb072569477e"
# (MLM loss, NSP loss) of the two updates of `going_on` as that revision computed them on 1 and 2 ranks at each stage
NEXT = [(4.2371659755706785, 0.6950517892837524), (4.238026809692383, 0.693146014213562)]


def going_on(world: World) -> list[list[tuple[float, float]]]:
    """Losses of two more updates at each ZeRO stage; two ranks at stage 2 wrote the checkpoint."""
    found = []
    for stage in range(4):
        checkpoints = Checkpoints(OLD / "run", world)
        path = checkpoints.latest()
        assert path is not None and path.name == "step-00000003"
        tree: dict[str, Any] = checkpoints.read_state(path)["config"]
        tree["zero"]["stage"] = stage
        tree["batch"] |= {"global_size": tiny.ROWS, "micro_size": 2}
        tree["model"] |= {"dropout": 0.0, "attention_dropout": 0.0}
        engine = tiny.engine(config.from_dict(tree), world)
        state = checkpoints.load(engine, path)
        assert (state["step"], state["world_size"], state["tokenizer"]) == (3, 2, TOKENIZER)
        found.append(tiny.train(engine, range(2), lr=0.001))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_checkpoint_goes_on_at_every_stage(ranks: int) -> None:
    for losses in run_ranks(ranks, going_on)[0]:
        for ours, theirs in zip(losses, NEXT, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(("name", "step"), [("run", 3), ("hf", 0)])
def test_a_run_and_an_exported_model_are_the_same_model(name: str, step: int) -> None:
    found = pretrained.load(OLD / name)
    assert (found.step, pretrained.fingerprint(found.weights)) == (step, WEIGHTS)
    assert found.tokenizer.sha256 == TOKENIZER and not found.initialised
    assert torch.isfinite(found.model(torch.device("cpu")).nsp.weight).all()


def test_its_weights_alone_are_read_from_the_run_or_the_checkpoint() -> None:
    for source in (OLD / "run", OLD / "run" / "checkpoints" / "step-00000003"):
        weights, state = load_weights(source)
        assert pretrained.fingerprint(weights) == WEIGHTS and state["step"] == 3


def test_it_is_exported_as_it_was(tmp_path: Path) -> None:
    """But for what other libraries write (tokenizer.json) and the card, which tells of data that is not here."""
    export.export(OLD / "run", tmp_path / "hf")
    assert pretrained.fingerprint(pretrained.load(tmp_path / "hf").weights) == WEIGHTS
    for name in ("config.json", "special_tokens_map.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "hf" / name).read_bytes() == (OLD / "hf" / name).read_bytes(), name
