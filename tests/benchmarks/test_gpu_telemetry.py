"""Clocks and power come from nvidia-smi, read only; a machine without it has none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.gpu.telemetry import Telemetry

STAND_IN = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in
  *event_reasons*) {newer} ;;
esac
case "$*" in
  *-lms*) while :; do
    echo "1980, 3201, 690.50, 61, 52000, 0x0000000000000004"
    echo "1500, 3201, [N/A], 65, 52000, 0x0000000000000001"
    sleep 0.05
  done ;;
esac
"""


@pytest.mark.parametrize("newer", ["true", "exit 2"])
def test_samples_of_a_time_are_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: str) -> None:
    program, calls = tmp_path / "nvidia-smi", tmp_path / "calls"
    program.write_text(STAND_IN.format(calls=calls, newer=newer))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    start = time.time()
    telemetry = Telemetry(interval=0.05)
    deadline = time.time() + 10
    while telemetry.between(start, time.time())["samples"] < 4 and time.time() < deadline:
        time.sleep(0.05)
    found = telemetry.between(start, time.time())
    telemetry.stop()
    assert found["samples"] >= 4
    assert found["sm_mhz"][0] == 1500 and found["sm_mhz"][2] == 1980
    assert found["watts"] == [690.5, 690.5, 690.5], "what is not known is not a number"
    assert found["celsius"][2] == 65
    assert found["throttle_masks"] == ["0x4"], "an idle GPU is not throttled"
    assert telemetry.between(start - 20, start - 10) == {"samples": 0, "throttle_masks": []}
    asked = calls.read_text()
    field = "clocks_event_reasons.active" if newer == "true" else "clocks_throttle_reasons.active"
    assert field in asked.splitlines()[-1]
    for changing in ("-pm", "-pl", "-ac", "-lgc", "-r ", "-mig", "-c "):
        assert changing not in asked


def test_without_the_program_there_are_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    telemetry = Telemetry()
    telemetry.stop()
    assert telemetry.between(0, time.time()) == {"samples": 0, "throttle_masks": []}
