"""What `auto` means: what a device multiplies, what all ranks are fast in, and what a run started in. Settings of
torch and cuBLAS for updates that repeat bit for bit."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest
import torch

from megabert.commands.evaluate import evaluate_run
from megabert.common import environment
from megabert.engine import precision
from tests.helpers import tiny
from tests.helpers.golden_runs import DATA, opened
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def multiplies(monkeypatch) -> Any:
    """Sets whether this CPU has products of bf16."""
    return lambda able: monkeypatch.setattr(environment, "has_native_bf16", lambda: able)


def test_flags_of_processors_that_multiply_bf16(monkeypatch, tmp_path) -> None:
    file, real = tmp_path / "cpuinfo", environment.match_in
    monkeypatch.setattr(environment, "match_in", lambda _, pattern: real(str(file), pattern))
    for flags in ("fpu avx2 avx512_bf16 sha_ni", "fpu amx_bf16", "fp asimd bf16 i8mm"):
        file.write_text(f"processor\t: 0\n{'Features' if 'asimd' in flags else 'flags'}\t: {flags}\nbugs\t: none\n")
        assert environment.has_native_bf16()
    file.write_text("flags\t\t: fpu avx2 avx512f avx512_vnni\nFeatures\t: fp asimd\n")
    assert not environment.has_native_bf16()


def test_a_device_has_its_usual_precision(monkeypatch, multiplies) -> None:
    for able, name, dtype in ((True, "bf16", torch.bfloat16), (False, "fp32", torch.float32)):
        multiplies(able)
        assert precision.usual(CPU) == name
        found = [precision.dtype_on(CPU, name) for name in ("auto", "bf16", "fp32")]
        assert found == [dtype] * 2 + [torch.float32]
    for capability, name in (((7, 5), "fp32"), ((8, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert precision.usual(torch.device("cuda")) == name
        assert precision.dtype_on(torch.device("cuda"), "bf16") == precision.DTYPES[name]


def choices(world: Any) -> list[str]:
    environment.has_native_bf16 = lambda: world.rank == 0  # type: ignore[assignment]
    asked = (("auto", ""), ("auto", "bf16"), ("bf16", ""), ("fp32", "bf16"))
    return [precision.choose(name, world, first) for name, first in asked]


def test_ranks_take_what_all_of_them_are_fast_in(multiplies, world, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("megabert"), "propagate", True)
    for able in (True, False):
        multiplies(able)
        assert precision.choose("bf16", world) == "bf16"
        assert precision.choose("auto", world, "auto") == ("bf16" if able else "fp32")  # as of a conversion
        assert ("precision=bf16" in caplog.text) is not able
    assert run_ranks(2, choices) == [["fp32", "bf16", "bf16", "fp32"]] * 2


def test_a_run_keeps_the_precision_it_began_in(multiplies, world, tmp_path) -> None:
    """Started where bf16 is emulated, resumed where it is not; another precision by name is refused."""
    run, settings = tmp_path / "run", ("precision=auto", "model.nsp=false", "schedule.total_steps=4")

    def train(**options: Any) -> None:
        trainer = opened(world, run, *settings, **options)
        assert trainer.train() and trainer.engine.dtype == torch.float32
        trainer.close()

    multiplies(False)
    train(stop_after=2)
    assert json.loads((run / "config.json").read_text())["config"]["precision"] == "fp32"
    multiplies(True)
    with pytest.raises(ValueError, match="precision is 'bf16' but the checkpoint was made with 'fp32'"):
        opened(world, run, *settings, "precision=bf16")
    train()
    assert evaluate_run(str(run), str(DATA))["step"] == 4


def flags(world: Any) -> list[Any]:
    """Torch's settings before and after an engine asks for updates that repeat, and losses of the same updates twice."""

    def now() -> list[Any]:
        filled = torch.utils.deterministic.fill_uninitialized_memory
        return [torch.are_deterministic_algorithms_enabled(), filled, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]

    tiny.engine(tiny.config(), world)
    before, cfg = now(), tiny.config(optimizer__name="lamb", zero__stage=1, precision="bf16", deterministic=True)
    losses = [tiny.train(tiny.engine(cfg, world), range(2)) for _ in range(2)]
    return [before, now(), losses[0] == losses[1]]


@pytest.mark.dist
def test_the_key_asks_torch_and_cublas_for_it() -> None:
    ((before, after, same),) = run_ranks(1, flags)
    assert before == [False, True, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]
    assert after == [True, False, os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")] and same
