"""Candidates are checked, then timed: a wrong, a failing or a slow one loses and is named, on the CPU with stand-ins."""

from __future__ import annotations

import re
import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megabert import ops
from megabert.ops import attention, candidates, problems
from megabert.ops.candidates import Candidate, DeviceLost, NoneRight, measure
from megabert.ops.problems import Problem, Shapes
from tests.helpers.clock import Clock
from tests.ops.oracle import needs_library

CPU = torch.device("cpu")
SHAPES = Shapes(
    rows=3, seq_len=16, slots=3, sequences=1.5, predictions=4, hidden=32, heads=2, ffn=64, vocab=100, padded_vocab=128,
    dtype=torch.float32,
)  # fmt: skip
PLAIN = replace(SHAPES, dropout=0.0, attention_dropout=0.0)


def changed(name: str, change: Any, seeded: bool = False) -> Candidate:
    """Torch's own functions, with `change` made to their outputs."""

    def make(problem: Problem) -> Any:
        right = problem.call("torch")
        return lambda *inputs: change(right(*inputs))

    return Candidate(name, make, seeded=seeded)


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is 2% too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.02


def raising(outputs: Any) -> Any:
    raise RuntimeError("no kernel image is available\nsecond line")


RIGHT = changed("right", lambda outputs: outputs)
BAD = {
    "wrong": (lambda out: [out[0] * 1.02, *out[1:]], r"result 0: error .*, torch's .*, allowed 2\.0 x that"),
    "gradient": (lambda out: [*out[:-1], WrongGradient.apply(out[-1])], r"result \d+: error"),
    "nan": (lambda out: [out[0] / 0, *out[1:]], "result 0 is not finite"),
    "raising": (raising, "RuntimeError: no kernel image is available$"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("shapes", [SHAPES, PLAIN], ids=["dropout", "plain"])
def test_a_bad_candidate_loses_to_the_next_and_says_why(name: str, shapes: Shapes) -> None:
    change, said = BAD[name]
    choice, rows = measure("layer", shapes, CPU, 0.01, among=[changed(name, change), RIGHT])
    assert choice.name == "right" and [row.name for row in rows] == [name, "right"]
    assert rows[0].ms is None and rows[1].ms is not None and not rows[1].reason
    assert re.search(said, rows[0].reason), rows[0].reason


def test_the_slow_one_loses_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(candidates, "time", clock)

    def asleep(outputs: Any) -> Any:
        clock.sleep(0.03)
        return outputs

    choice, (slow, right) = measure("layer", SHAPES, CPU, 0.2, among=[changed("slow", asleep), RIGHT])
    assert choice.name == "right" and slow.ms is not None and right.ms is not None
    assert slow.ms > 30 > right.ms and slow.low is not None and slow.low <= slow.ms <= (slow.high or 0)
    assert choice.reason == f"measured: {right.ms:.3g} ms, slow {slow.ms:.3g}"


def test_one_that_cannot_run_is_a_line_and_is_never_made() -> None:
    absent = Candidate("absent", lambda problem: pytest.fail("made all the same"), "needs a device")
    choice, rows = measure("layer", PLAIN, CPU, 0.01, among=[absent, RIGHT])
    assert choice.name == "right" and rows[0] == candidates.Row("layer", "absent", reason="needs a device")


def test_when_none_is_right_all_reasons_are_said_and_nothing_runs() -> None:
    bad = [changed(name, change) for name, (change, _) in BAD.items()]
    with pytest.raises(NoneRight, match=r"ops\.layer=auto: .*wrong: result 0.*nan: result 0.*raising: RuntimeError"):
        measure("layer", PLAIN, CPU, 0.01, among=bad)
    with pytest.raises(ValueError, match="no candidate"):
        measure("layer", PLAIN, CPU, 0.01, among=[])


def test_after_a_candidate_that_broke_the_device_nothing_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_well", lambda device: False)
    with pytest.raises(DeviceLost, match=r"ops\.layer=raising broke the device \(no kernel image is available\)"):
        measure("layer", PLAIN, CPU, 0.01, among=[changed("raising", raising), RIGHT])


def test_reasons_from_elsewhere_keep_a_candidate_out() -> None:
    choice, rows = measure("layer", PLAIN, CPU, 0.01, {"right": "seen to fail"}, [RIGHT, RIGHT._replace(name="next")])
    assert choice.name == "next" and rows[0].reason == "seen to fail"


def test_one_that_cannot_be_timed_runs_only_where_nothing_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a graph cannot be captured."""
    calls = {"untimed": 0}

    def fails_when_timed(outputs: Any) -> Any:
        calls["untimed"] += 1
        if calls["untimed"] > 1:  # without dropout the check is the first call
            raise RuntimeError("operation not permitted when stream is capturing")
        return outputs

    choice, rows = measure("layer", PLAIN, CPU, 0.01, among=[changed("untimed", fails_when_timed), RIGHT])
    assert choice.name == "right"
    assert rows[0].reason == "right, but cannot be timed: operation not permitted when stream is capturing"
    calls["untimed"] = 0
    choice, rows = measure("layer", PLAIN, CPU, 0.01, among=[changed("untimed", fails_when_timed)])
    assert choice == ("untimed", "right, and nothing could be timed")


@needs_library
def test_a_dropout_mask_of_ones_own_is_checked_and_must_be_the_references() -> None:
    """A candidate that is right without dropout, and with it draws another mask than the one it promises."""

    def make(problem: Problem) -> Any:
        return problem.call("torch")

    choice, rows = measure("layer", SHAPES, CPU, 0.01, among=[Candidate("other", make, seeded=True), RIGHT])
    assert choice.name == "right" and "result 0: error" in rows[0].reason


def test_measuring_leaves_torchs_generator_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure("layer", SHAPES, CPU, 0.01, among=[RIGHT])
    assert torch.equal(torch.get_rng_state(), before)


@needs_library
@pytest.mark.parametrize("role", ops.BACKENDS)
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_every_backend_is_a_candidate_and_those_that_run_here_are_right(role: str, norm: str) -> None:
    """torch.compile's aside, which takes a minute: below."""
    shapes = replace(SHAPES, norm=norm, causal=norm == "pre", gated=norm == "pre")
    among = candidates.candidates(role, shapes, CPU)
    assert [candidate.name for candidate in among] == list(ops.BACKENDS[role])
    rows = measure(role, shapes, CPU, 0.01, among=[c for c in among if c.name != "compiled"]).rows
    here = [name for name, reason in ops.obstacles(role, "cpu", torch.float32).items() if not reason]
    assert [row.name for row in rows if row.ms] == [name for name in here if name != "compiled"]
    assert all(row.reason and row.ms is None for row in rows if row.name not in here)


@needs_library
def test_the_table_of_a_suite_has_every_candidate() -> None:
    seen: list[dict[str, Any]] = []
    table = candidates.time_all(SHAPES, "cpu", 0.02, ("attention", "mlm_loss"), seen.append)
    assert table == seen and {row["role"] for row in table} == {"attention", "mlm_loss"}
    assert {row["name"] for row in table if row["ms"]} == {"sdpa", "native", "fused_softmax", "torch"}
    assert next(row for row in table if row["name"] == "varlen")["reason"].endswith("needs a CUDA device")


def test_rows_hold_as_many_sequences_as_the_data_has_on_average() -> None:
    start, end, lengths = problems.layout(SHAPES, 4, CPU)
    assert (lengths > 0).sum() == 6 and lengths.shape == (4, 3)  # 1.5 a row
    assert lengths.sum(1).tolist() == [16] * 4
    assert torch.equal((end - start)[1, :8], torch.full((8,), 8, dtype=torch.int32))
    causal = problems.layout(replace(SHAPES, causal=True), 1, CPU)[1]
    assert causal[0].tolist() == list(range(1, 17))


def test_cudnns_mask_has_no_row_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's softmax over nothing would be NaN. Its call is made here by torch's plain one."""
    monkeypatch.setattr(attention, "sdpa_kernel", lambda backend: nullcontext())
    start = torch.tensor([[0, 0, 0, 0]], dtype=torch.int32)
    end = torch.tensor([[3, 3, 3, 0]], dtype=torch.int32)
    lengths, seed = torch.tensor([[3]], dtype=torch.int32), torch.tensor([1])
    mask, pad = ops.attention_inputs("cudnn", start, end, lengths)
    assert mask.any(-1).all() and pad.flatten().tolist() == [False, False, False, True]
    results = []
    for backend in ("cudnn", "sdpa"):
        qkv = torch.randn(1, 4, 3 * 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        inputs = ops.attention_inputs(backend, start, end, lengths)
        out = ops.attend(qkv, 2, inputs, 0.0, seed, 0, backend)
        out.square().sum().backward()
        results += [out.detach(), qkv.grad]
    assert results[0][0, 3].abs().max() == 0 and results[1][0, 3].abs().max() == 0
    torch.testing.assert_close(results[:2], results[2:], rtol=1e-5, atol=1e-6)


def test_apexs_norm_is_called_with_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signature of apex's fused_layer_norm_affine; on the CPU the backend itself is refused."""
    module = types.ModuleType("apex.normalization.fused_layer_norm")
    module.fused_layer_norm_affine = lambda x, w, b, shape, eps=1e-6: F.layer_norm(x, shape, w, b, eps)  # type: ignore[attr-defined]
    for name in ("apex", "apex.normalization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(1)
    x, residual, bias, weight, shift = torch.randn(5, 8), torch.randn(5, 8), *torch.randn(3, 8)
    found = [
        ops.dropout_add_layer_norm(x, bias, residual, weight, shift, 0.0, 1e-12, torch.tensor([1]), 0, backend)
        for backend in ("apex", "torch")
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert ops.obstacles("layer", "cuda", torch.bfloat16)["apex"] == ""
    assert ops.obstacles("layer", "cpu", torch.bfloat16)["apex"] == "NVIDIA's apex needs a CUDA device"


def test_without_apex_the_backend_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"ops.layer=apex cannot run on cuda in bfloat16: NVIDIA's apex does not import"
    ):
        ops.choose("layer", "apex", "cuda")


def test_the_compiled_layer_can_be_named_where_a_compiler_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert ops.choose("layer", "compiled", "cpu") == ("compiled", "asked for")
    compiler.unlink()
    with pytest.raises(ValueError, match=r"ops\.layer=compiled cannot run on cpu in bfloat16: .* C\+\+ compiler"):
        ops.choose("layer", "compiled", "cpu")


@pytest.mark.slow
def test_the_compiled_layer_is_a_right_candidate_and_replays_its_dropout() -> None:
    among = [c for c in candidates.candidates("layer", SHAPES, CPU) if c.name == "compiled"]
    choice, rows = measure("layer", SHAPES, CPU, 0.01, among=among)
    assert choice.name == "compiled" and rows[0].ms
    x, bias, vector = torch.ones(64, 32), torch.zeros(32), torch.ones(32)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(
            ops.dropout_add_layer_norm(
                x, bias, torch.zeros_like(x), vector, bias, 0.5, 1e-12, torch.tensor([1]), 0, "compiled"
            )[1]
        )
    assert torch.equal(*found) and set(found[0].unique().tolist()) == {0.0, 2.0}


@pytest.mark.slow
def test_a_compiled_function_takes_more_kinds_of_shapes_than_torchs_limit() -> None:
    for dimensions in range(1, 11):
        x = torch.randn((2,) * dimensions)
        found, expected = (ops.bias_gelu(x, torch.ones(2), backend) for backend in ("compiled", "torch"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
