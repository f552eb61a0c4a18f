"""Backends that a run on CUDA leaves to `auto`: measured in child processes, cached, recorded. Here on the CPU."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import config as configuration
from megabert import ops
from megabert.config import Config, ModelConfig, OpsConfig
from megabert.data.shards import DamagedRow, Rows
from megabert.distributed.ranks import World
from megabert.engine import choice
from megabert.model import BertForPreTraining
from megabert.ops import backend
from tests.ops.oracle import needs_library

CUDA = World(0, 0, 1, torch.device("cuda"), "gloo", "single")
SMALL = {"layers": 1, "hidden": 32, "heads": 2, "vocab_size": 50, "max_positions": 16}
SPEC: dict[str, Any] = {
    "model": ModelConfig(**SMALL).model_dump(), "device": "cpu", "precision": "fp32", "deterministic": False, "rows": 3,
    "seq_len": 16, "lengths": [[7, 6, 0], [16, 0, 0], [3, 4, 5]], "predictions": 4, "causal": False,
}  # fmt: skip
DAMAGED = 1


def read(row_ids: np.ndarray) -> Rows:
    if DAMAGED in row_ids:
        raise DamagedRow("shard-00000.tar: block 0, row 1, byte 512")
    lengths = np.array(SPEC["lengths"], np.uint16)[row_ids % 3]
    return Rows(np.zeros((len(row_ids), 16)), np.stack([lengths, lengths], -1), np.zeros(lengths.shape))


DATASET: Any = SimpleNamespace(
    manifest=SimpleNamespace(seq_len=16, max_sequences=3), order=lambda seed, at: (at + seed, 0 * at), read=read
)
TIMES: dict[str, Any] = {
    "attention=varlen": 3.0, "attention=cudnn": 2.0, "attention=native": 1.0, "layer=native": 1.0, "layer=compiled": 0.5,
    "mlm_loss=torch": 2.0, "mlm_loss=native": 1.0,
}  # fmt: skip


def config(*overrides: str) -> Config:
    return configuration.load("tiny", ["model.vocab_size=50", "precision=bf16", "deterministic=false", *overrides])


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A machine on which everything can run, and what its child processes give by the backend they measure."""
    results: dict[str, Any] = {"given": dict(TIMES), "started": []}

    def run_child(spec: Any) -> float | str:
        results["started"].append(spec["ops"])
        parts = [results["given"].get(f"{role}={name}", 5.0) for role, name in spec["ops"].items()]
        if broken := [part for part in parts if isinstance(part, Exception)]:
            raise broken[0]
        return next((part for part in parts if isinstance(part, str)), None) or sum(parts)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "run_child", run_child)
    monkeypatch.setattr(choice, "describe_place", lambda *_: {"device": "stand"})
    monkeypatch.setattr(ops, "missing_kernels", lambda _: "")
    monkeypatch.setattr(ops, "obstacles", lambda role, *_: dict.fromkeys(ops.BACKENDS[role], ""))
    return results


def chosen(run: Path, *overrides: str) -> dict[str, str]:
    run.mkdir(exist_ok=True)
    found = choice.choose_backends(config(*overrides), DATASET, CUDA, run).ops.model_dump()
    found.pop("optimizer")
    return found


def test_the_fastest_usable_backend_runs(stand: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    stand["given"]["layer=compiled"] = "wrong: the error of loss is 1.00e+00, allowed are 1.00e-03"
    with caplog.at_level("INFO", logger="megabert"):
        assert chosen(tmp_path / "run") == {"attention": "native", "layer": "native", "mlm_loss": "native"}
    assert "ops.attention=auto is native: native 8 ms, cudnn 9 ms, varlen 10 ms" in caplog.text
    assert "ops.layer=auto is native: native 4 ms; not compiled: wrong: the error of loss" in caplog.text
    assert stand["started"][3]["attention"] == "native", "the layer is measured beside the attention that was chosen"


def test_a_run_without_our_kernels_says_so(
    stand: dict[str, Any], tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(ops, "missing_kernels", lambda device: f"no {device} code")
    with caplog.at_level("WARNING", logger="megabert"):
        chosen(tmp_path)
    assert caplog.messages == ["no cuda code; training runs on torch's own kernels"]


def test_named_backends_are_not_measured(stand: dict[str, Any], tmp_path: Path) -> None:
    found = chosen(tmp_path / "run", "ops.attention=varlen", "ops.mlm_loss=torch")
    assert found == {"attention": "varlen", "layer": "compiled", "mlm_loss": "torch"}
    assert [spec["attention"] for spec in stand["started"]] == ["varlen", "varlen"]
    cpu = World(0, 0, 1, torch.device("cpu"), "gloo", "single")
    assert choice.choose_backends(config(), DATASET, cpu, tmp_path).ops == config().ops


OTHER_SHAPE = ("batch.micro_size=1", "batch.global_size=4")


def test_results_are_cached_by_shapes(stand: dict[str, Any], tmp_path: Path) -> None:
    first = chosen(tmp_path / "one")
    count = len(stand["started"])
    assert chosen(tmp_path / "two") == first and len(stand["started"]) == count
    chosen(tmp_path / "three", *OTHER_SHAPE)
    assert len(stand["started"]) == 2 * count
    choice.cache_file({"device": "stand"}).write_text("{")
    assert chosen(tmp_path / "four") == first and len(stand["started"]) == 3 * count


WRONG, FAILED = "wrong: the error of loss is 1.00e+00, allowed are 1.00e-03", "OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(("result", "later"), [(WRONG, "cudnn"), (FAILED, "native")])
def test_a_failure_is_not_cached(stand: dict[str, Any], tmp_path: Path, caplog: Any, result: str, later: str) -> None:
    stand["given"]["attention=native"] = result
    with caplog.at_level("INFO", logger="megabert"):
        assert chosen(tmp_path / "one")["attention"] == "cudnn"
    assert f"not native: {result}{'; the next run tries it again' * (result == FAILED)}" in caplog.text
    stand["given"]["attention=native"] = 0.1
    assert chosen(tmp_path / "two")["attention"] == later


def test_failures_of_an_older_cache_are_tried_again(stand: dict[str, Any], tmp_path: Path) -> None:
    first, file = chosen(tmp_path / "one"), choice.cache_file({"device": "stand"})
    cache = json.loads(file.read_bytes())
    file.write_text(json.dumps(cache | {"results": dict.fromkeys(cache["results"], FAILED)}))
    assert chosen(tmp_path / "two") == first


def test_a_crashed_candidate_is_never_started_again(stand: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level("INFO", logger="megabert"):
        for run, result, shape in (
            ("one", choice.BrokenCandidate("crashed with signal 11"), ()),
            ("two", 0.1, OTHER_SHAPE),
        ):
            stand["given"]["attention=native"] = result
            assert chosen(tmp_path / run, *shape)["attention"] == "cudnn"
    assert "not native: crashed with signal 11; remove " in caplog.text


def test_a_resumed_run_keeps_its_backends(stand: dict[str, Any], tmp_path: Path) -> None:
    first, record = chosen(tmp_path), tmp_path / choice.RECORD
    stand["given"] = TIMES | {"attention=varlen": 0.1}
    choice.cache_file({"device": "stand"}).unlink()
    assert chosen(tmp_path) == first
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"place": {"device": "another"}}))
    assert chosen(tmp_path)["attention"] == "varlen"


def test_without_a_usable_candidate_plain_torch_runs(stand: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    stand["given"] = dict.fromkeys(TIMES, "it fails")
    assert chosen(tmp_path / "run") == choice.PLAIN
    monkeypatch.undo()
    assert "zero.stage=3" in choice.obstacles("layer", config("zero.stage=3"), "cpu")["compiled"]


def test_candidates_get_the_sequences_of_the_run() -> None:
    spec = choice.shapes_of(config("seed=5", "batch.micro_size=4"), DATASET, CUDA.device)
    given = SPEC["lengths"]
    assert spec["lengths"] == [given[0], given[2], given[0], given[0]], "damaged rows are left out, rows enough"
    batch = choice.batch_of(SPEC)
    assert batch["lengths"].tolist() == given and batch["key_end"][2].tolist() == [3] * 3 + [7] * 4 + [12] * 5 + [0] * 4
    assert batch["mlm_positions"].tolist() == [[0, 3, 6, 9], [16, 20, 24, 28], [32, 35, 38, 41]]
    causal = choice.batch_of(SPEC | {"causal": True, "rows": 1})
    assert causal["key_end"].tolist() == [[*range(1, 14), 0, 0, 0]]


def flash(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, _: Tensor, *numbers: Any, scale: float, **sides: int) -> Any:
    """What the kernel behind torch.nn.attention.varlen computes, by torch: `numbers` are two widths, the dropout, `is_causal`."""
    out, causal = torch.zeros_like(q), numbers[3]
    left, right = sides.get("window_size_left", -1), 0 if causal else sides.get("window_size_right", -1)
    for begin, end in itertools.pairwise(begins.tolist()):
        parts = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        away = torch.arange(end - begin) - torch.arange(end - begin)[:, None]  # of a key from its query
        seen = ((away >= -left) | (left < 0)) & ((away <= right) | (right < 0))
        out[begin:end] = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale).transpose(0, 1)
    return (out,)


@pytest.mark.parametrize("window", [0, 6])
def test_masked_and_causal_batches_of_one_run_are_flash_attention(window, stand, monkeypatch, tmp_path) -> None:
    """A run with a causal phase chooses varlen where it is fastest; the kernel gets the objective of each batch."""
    monkeypatch.setattr(backend, "_obstacle", lambda *_: "")  # as on a machine that has everything
    monkeypatch.setattr(ops, "obstacles", backend.obstacles)
    mixed, asked = config("objective.causal_share=0.4", "model.nsp=false"), []
    stand["given"] |= {"attention=varlen": 0.1, "attention=cudnn": 0.05}
    assert chosen(tmp_path / "run", "objective.causal_share=0.4", "model.nsp=false")["attention"] == "varlen"
    assert choice.obstacles("attention", mixed, "cuda") == dict.fromkeys(ops.BACKENDS["attention"], "") | {
        "cudnn": "it attends to whole sequences, a causal model must not"
    }
    kernel = lambda *given, **more: (asked.append(given[8]), flash(*given, **more))[1]  # noqa: E731
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    model = ModelConfig(**SMALL | {"kind": "modern", "norm": "pre", "nsp": False, "window": window, "layers": 2})
    for causal in (False, True):
        batch = choice.batch_of(SPEC | {"causal": causal})
        losses = []
        for name in ("varlen", "sdpa"):
            torch.manual_seed(0)
            asked_for = OpsConfig(attention=name, layer="torch", mlm_loss="torch")
            losses.append(BertForPreTraining(model, asked_for, "cuda", causal=True).eval()(**batch).mlm_loss_sum.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and asked == [causal] * 2
        asked.clear()


@needs_library
def test_a_correct_candidate_is_timed_and_a_wrong_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for norm in ("post", "pre"):
        spec = SPEC | {"model": SPEC["model"] | {"norm": norm}, "ops": dict.fromkeys(choice.PLAIN, "native")}
        assert isinstance(choice.run_candidate(spec), float)
    original = torch.ops.megabert.bias_gelu
    monkeypatch.setattr(torch.ops.megabert, "bias_gelu", lambda x, bias: original(x, bias) * 1.01)
    found = choice.run_candidate(SPEC | {"ops": choice.PLAIN | {"layer": "native"}})
    assert isinstance(found, str) and found.startswith("wrong: the error of ")


def test_a_child_process_reports_time_failure_and_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(code: str) -> float | str:
        return choice.run_child(SPEC, (sys.executable, "-c", code))

    assert child("print('compiling'); print(0.5)") == 0.5
    assert child("print('\"wrong\"')") == "wrong"
    assert child("raise RuntimeError('no kernel')") == "RuntimeError: no kernel"
    # by the kernel where memory is short, which may be otherwise at the next start
    assert child("import os; os.kill(os.getpid(), 9)") == "was killed by signal 9"
    with pytest.raises(choice.BrokenCandidate, match="crashed with signal 6"):
        child("import os; os.abort()")
    monkeypatch.setattr(choice, "TIME_LIMIT", 0.5)
    with pytest.raises(choice.BrokenCandidate, match=r"did not end within 0\.5 s"):
        child("import time; time.sleep(60)")


@pytest.mark.slow
@needs_library
def test_a_compiled_layer_is_measured_in_its_process() -> None:
    backends = choice.PLAIN | {"attention": "native", "layer": "compiled"}
    assert isinstance(choice.run_child(SPEC | {"ops": backends}), float)
