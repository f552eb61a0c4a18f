"""Ceiling of MFU: measured once for a device, its threads, torch and type; kept for later starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert.common import environment
from megabert.distributed.ranks import World
from megabert.engine import ceiling
from tests.helpers.simulated_ranks import ALONE


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


def find(dtype: torch.dtype = torch.float32, peak: float = 0.0, world: World = ALONE) -> Any:
    return ceiling.find_ceiling(world, dtype, peak)


def test_a_later_start_reads_the_kept_ceiling(measured: list[float], tmp_path: Path) -> None:
    first, (file,) = find(), kept_files(tmp_path)
    assert first == (1.25, f"measured; remove {file} to measure it again")
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"date": "2026-03-01"}))
    assert find() == (1.25, f"kept of 2026-03-01; remove {file} to measure it again")
    file.unlink()
    assert find().tflops == 2.5


def test_given_and_published_peaks_are_not_measured(measured: list[float], tmp_path: Path, monkeypatch) -> None:
    assert find(peak=3.5) == (3.5, "peak_tflops")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    cuda = World(0, 0, 1, torch.device("cuda"), "nccl", "single")
    assert find(torch.bfloat16, world=cuda) == (989.0, "datasheet")
    assert len(measured) == 3 and not (tmp_path / "the cache").exists()


@pytest.mark.parametrize("other", ["dtype", "threads", "torch", "device"])
def test_another_machine_is_measured(other: str, measured: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "threads": (torch, "get_num_threads", lambda: 63),
        "torch": (torch, "__version__", "3.0"),
        "device": (environment, "processor", lambda: "another"),
    }
    assert find().tflops == 1.25
    with monkeypatch.context() as changed:
        if other in changes:
            changed.setattr(*changes[other])
        assert find(torch.bfloat16 if other == "dtype" else torch.float32).tflops == 2.5
    assert find().tflops == 1.25


@pytest.mark.parametrize("content", ["{", "[]", '{"tflops": "x"}', '{"tflops": 0.0}', '{"tflops": NaN}'])
def test_a_damaged_file_is_measured_again(content: str, measured: list[float], tmp_path: Path) -> None:
    find()
    kept_files(tmp_path)[0].write_text(content)
    assert [find().tflops, find().tflops] == [2.5, 2.5]


def test_without_a_place_to_keep_it_each_start_measures(measured: list[float], tmp_path: Path) -> None:
    (tmp_path / "the cache").write_text("a file")
    for rate in (1.25, 2.5):
        found = find()
        assert found.tflops == rate and found.origin.startswith("measured, and not kept: ")


def test_a_busy_machine_is_named(measured, monkeypatch, caplog) -> None:
    """A second of the clock, in which two threads had 2 or 0.7 seconds of processor time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(ceiling, "ALONE", 0.8)
    for seconds, named in ((2.0, 0), (0.7, 1)):
        clock, used = iter((10.0, 11.0)), iter((5.0, 5.0 + seconds))
        monkeypatch.setattr(ceiling.time, "perf_counter", clock.__next__)
        monkeypatch.setattr(ceiling.time, "process_time", used.__next__)
        origin = find(torch.float32 if named else torch.bfloat16).origin
        assert origin.endswith("not kept") == named
        assert caplog.text.count("left the measurement of the matrix-product ceiling 35% of its") == named


def test_the_ceiling_is_a_rate_of_this_machine() -> None:
    assert 0.001 < ceiling.matmul_tflops(torch.device("cpu"), torch.float32, seconds=0.2) < 100
