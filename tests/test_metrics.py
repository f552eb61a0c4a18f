"""FLOPs by the published arithmetic, a metrics file that survives kills, TensorBoard files read back by TensorBoard."""

import json

import pytest
import torch

from megabert.common.logs import duration
from megabert.config import ModelConfig, load
from megabert.metrics import JsonLines, TensorBoard, datasheet_tflops, matmul_tflops, training_flops

LARGE = ModelConfig(layers=24, hidden=1024, heads=16, vocab_size=30_528)


@pytest.mark.parametrize(("length", "predictions", "gflop"), [(128, 20, 240.6), (512, 77, 1020.0)])
def test_flops_of_large_match_the_worked_figures(length, predictions, gflop):
    got = training_flops(LARGE, length, length**2, predictions, 1) / 1e9
    assert got == pytest.approx(gflop, rel=5e-4)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", None),
        ("AMD EPYC", None),
    ],
)
def test_the_datasheets_peak_is_of_the_very_device(name, peak):
    assert datasheet_tflops(name) == peak


def test_flops_grow_with_real_work_only():
    two = training_flops(LARGE, 128, 2 * 64**2, 20, 2)
    one = training_flops(LARGE, 128, 128**2, 20, 1)
    assert one - two == 12 * 24 * 1024 * (128**2 - 2 * 64**2) - 6 * 1024**2


def test_metrics_past_the_resumed_step_are_cut_and_broken_lines_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "x": 1}\n{"step": 20, "x": 2}\n{"step": 30, "x": 3}\n{"step": 3')
    sink = JsonLines(path, resume_step=20)
    sink.write({"step": 21, "x": float("nan")})
    sink.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 21]
    assert lines[-1]["x"] == "nan"


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, load("tiny"), 0)
    for step in (1, 2, 3):
        sink.write({"step": step, "train/loss": 10.0 - step, "note": 1})
    sink.write({"step": 4, "perf/rank_compute_seconds": [0.5, 0.75], "perf/stragglers": [1]})
    sink.write({"step": 5, "perf/rank_compute_seconds": [0.5] * 65})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 9.0), (2, 8.0), (3, 7.0)]
    each = [f"perf/rank_compute_seconds/{rank:02}" for rank in range(2)]
    assert events.Tags()["scalars"] == ["train/loss", *each]
    assert [events.Scalars(name)[0].value for name in each] == [0.5, 0.75]
    assert events.Histograms("perf/rank_compute_seconds")[0].histogram_value.num == 65
    assert "config/text_summary" in events.Tags()["tensors"]


def test_durations_read_as_people_say_them():
    assert [duration(s) for s in (59, 61, 3661, 93784)] == ["0m59s", "1m01s", "1h01m", "1d02h03m"]


def test_the_ceiling_is_a_rate_of_this_machine():
    rate = matmul_tflops(torch.device("cpu"), torch.float32, seconds=0.2)
    assert 0.001 < rate < 100
