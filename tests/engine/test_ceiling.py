"""Ceiling of MFU: measured once for a device, its threads, torch and type; kept for later starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megabert.common import environment
from megabert.distributed.ranks import World
from megabert.engine import ceiling

CPU = World(0, 0, 1, torch.device("cpu"), "gloo", "single")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Rates that the measurements of a machine give one after another; those that are left."""
    monkeypatch.setattr(ceiling, "ALONE", 0.0)  # the tests run beside others
    rates = [1.25, 2.5, 5.0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "the cache"))
    monkeypatch.setattr(ceiling, "matmul_tflops", lambda *_: rates.pop(0))
    return rates


def kept_files(folder: Path) -> list[Path]:
    return sorted((folder / "the cache/megabert/ceilings").iterdir())


def test_a_later_start_reads_the_kept_ceiling(measured: list[float], tmp_path: Path) -> None:
    first = ceiling.find_ceiling(CPU, torch.float32, 0.0)
    (file,) = kept_files(tmp_path)
    assert first == (1.25, f"measured; remove {file} to measure it again")
    saved = json.loads(file.read_bytes())
    file.write_text(json.dumps(saved | {"date": "2026-03-01"}))
    again = ceiling.find_ceiling(CPU, torch.float32, 0.0)
    assert again == (1.25, f"kept of 2026-03-01; remove {file} to measure it again")
    file.unlink()
    assert ceiling.find_ceiling(CPU, torch.float32, 0.0).tflops == 2.5


def test_a_given_peak_is_neither_measured_nor_kept(measured: list[float], tmp_path: Path) -> None:
    assert ceiling.find_ceiling(CPU, torch.float32, 3.5) == (3.5, "peak_tflops")
    assert len(measured) == 3 and not (tmp_path / "the cache").exists()


@pytest.mark.parametrize("other", ["dtype", "threads", "torch", "device"])
def test_another_machine_is_measured(other: str, measured: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ceiling.find_ceiling(CPU, torch.float32, 0.0).tflops == 1.25
    with monkeypatch.context() as changed:
        if other == "threads":
            changed.setattr(torch, "get_num_threads", lambda: 63)
        elif other == "torch":
            changed.setattr(torch, "__version__", "3.0")
        elif other == "device":
            changed.setattr(environment, "processor", lambda: "another")
        dtype = torch.bfloat16 if other == "dtype" else torch.float32
        assert ceiling.find_ceiling(CPU, dtype, 0.0).tflops == 2.5
    assert ceiling.find_ceiling(CPU, torch.float32, 0.0).tflops == 1.25


@pytest.mark.parametrize("content", ["{", "[]", '{"tflops": "x"}', '{"tflops": 0.0}', '{"tflops": NaN}'])
def test_a_damaged_file_is_measured_again(content: str, measured: list[float], tmp_path: Path) -> None:
    ceiling.find_ceiling(CPU, torch.float32, 0.0)
    (file,) = kept_files(tmp_path)
    file.write_text(content)
    assert ceiling.find_ceiling(CPU, torch.float32, 0.0).tflops == 2.5
    assert ceiling.find_ceiling(CPU, torch.float32, 0.0).tflops == 2.5


def test_without_a_place_to_keep_it_each_start_measures(measured: list[float], tmp_path: Path) -> None:
    (tmp_path / "the cache").write_text("a file")
    for rate in (1.25, 2.5):
        found = ceiling.find_ceiling(CPU, torch.float32, 0.0)
        assert found.tflops == rate and found.origin.startswith("measured, and not kept: ")


def test_a_busy_machine_is_named(measured, monkeypatch, caplog) -> None:
    """A second of the clock, in which two threads had 2 or 0.7 seconds of processor time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(ceiling, "ALONE", 0.8)
    for seconds, named in ((2.0, 0), (0.7, 1)):
        clock, used = iter((10.0, 11.0)), iter((5.0, 5.0 + seconds))
        monkeypatch.setattr(ceiling.time, "perf_counter", lambda clock=clock: next(clock))
        monkeypatch.setattr(ceiling.time, "process_time", lambda used=used: next(used))
        origin = ceiling.find_ceiling(CPU, torch.float32 if named else torch.bfloat16, 0.0).origin
        assert origin.endswith("not kept") == named
        assert (
            caplog.text.count("other processes left the measurement of the matrix-product ceiling 35% of its") == named
        )


def test_the_ceiling_is_a_rate_of_this_machine() -> None:
    assert 0.001 < ceiling.matmul_tflops(torch.device("cpu"), torch.float32, seconds=0.2) < 100


def test_a_known_gpu_has_its_datasheets_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    cuda = World(0, 0, 1, torch.device("cuda"), "nccl", "single")
    assert ceiling.find_ceiling(cuda, torch.bfloat16, 0.0) == (989.0, "datasheet")
