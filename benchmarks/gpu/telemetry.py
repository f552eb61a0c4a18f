"""Clocks, power and temperature of a GPU during a measurement, as nvidia-smi reports them; nothing is ever set."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from typing import Any

FIELDS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
    "memory_mib": "memory.used",
}
# what holds the clocks back, a bit mask (nvml.h, nvmlClocksEventReasons); drivers before 535 know the second name only
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
IDLE = 1  # its bit for a GPU that has nothing to do


class Telemetry:
    """Samples of device 0, `interval` seconds apart, from start to stop; where there is no nvidia-smi, none."""

    def __init__(self, interval: float = 0.5) -> None:
        self._samples: list[tuple[float, dict[str, float], str]] = []
        self._process: subprocess.Popen[str] | None = None
        program = shutil.which("nvidia-smi")
        if program is None:
            return
        ask = [program, "-i", "0", "--format=csv,noheader,nounits"]
        known = (n for n in REASONS if subprocess.run([*ask, f"--query-gpu={n}"], capture_output=True).returncode == 0)
        query = ",".join([*FIELDS.values(), next(known, REASONS[-1])])
        command = [*ask, f"--query-gpu={query}", "-lms", str(round(1000 * interval))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            *numbers, mask = (part.strip() for part in line.split(","))
            if len(numbers) != len(FIELDS):
                continue  # a message, not a sample
            values = {n: float(v) for n, v in zip(FIELDS, numbers, strict=True) if _is_number(v)}
            self._samples.append((time.time(), values, mask))

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def between(self, start: float, end: float) -> dict[str, Any]:
        """Least, median and most of each field between two moments (seconds of the epoch), and what held the clocks back."""
        inside = [(values, mask) for at, values, mask in list(self._samples) if start <= at <= end]
        found: dict[str, Any] = {"samples": len(inside)}
        for name in FIELDS:
            numbers = [values[name] for values, _ in inside if name in values]
            if numbers:
                found[name] = [min(numbers), statistics.median(numbers), max(numbers)]
        reasons = {int(mask, 16) & ~IDLE for _, mask in inside if mask.startswith("0x")}
        found["throttle_masks"] = sorted(f"{mask:#x}" for mask in reasons if mask)
        return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False  # "[N/A]": this device does not say
    return True
