"""Requests to stop by signals and time limits, in time for the save that has to follow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.common.hardware import free_port
from megabert.distributed import signals
from megabert.distributed.signals import Stop, find_deadline, parse_duration

pytestmark = pytest.mark.usefixtures("own_signals")


def test_durations_are_read_as_sbatch_reads_them():
    found = [parse_duration(text) for text in ("90", "45s", "1.5h", "1:30", "1:30:00", "1-12", "1-12:30:15")]
    assert found == [5400, 45, 5400, 90, 5400, 129600, 131415]
    for wrong in ("0", "soon", "1:2:3:4", "1-"):
        with pytest.raises(ValueError, match=f"--max-time {wrong}: write 90"):
            parse_duration(wrong)


def test_the_earlier_end_counts():
    assert find_deadline("", {}, 1000.0) is None
    assert find_deadline("10s", {}, 1000.0) == 1010.0
    assert find_deadline("10s", {"SLURM_JOB_END_TIME": "1005"}, 1000.0) == 1005.0
    assert find_deadline("", {"SLURM_JOB_END_TIME": "1005"}, 1000.0) == 1005.0
    assert find_deadline("10s", {signals.STARTED: "990.5"}, 1000.0) == 1000.5  # ranks restarted within the job
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME='soon'"):
        find_deadline("", {"SLURM_JOB_END_TIME": "soon"}, 0.0)


def test_a_stop_leaves_time_for_the_save(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    stop = Stop(deadline=2000.0)
    assert stop.seconds_left == 1000 - 60 - signals.MARGIN_SECONDS  # a first save of unknown length
    for seconds in (1.0, 30.0, 2.0):
        stop.record_update(seconds)
    stop.record_save(10.0)
    stop.record_save(20.0)
    stop.record_upload(7.0)
    now = 2000.0 - 2 * 30 - 20 - 7 - signals.MARGIN_SECONDS - 0.1
    assert not stop.requested
    now += 0.2
    assert stop.requested
    for _ in range(signals.RECENT):
        stop.record_update(1.0)  # the long update is forgotten
    assert not stop.requested
    later = time.monotonic() + 1000.0
    now = 500.0  # the clock is set back
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert stop.requested
    assert not Stop().requested and Stop().seconds_left == float("inf")


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_signal_and_its_echo_set_the_flag(number):
    stop = Stop()
    assert not stop.requested
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert stop.requested


ENDING = """
import os, signal, time
from megabert.distributed.signals import Stop, ignore_signals
class Last:  # goes with the module, when Python has put back the signals' default actions
    def __del__(self, kill=os.kill, me=os.getpid(), numbers={numbers}):
        for number in numbers:
            kill(me, number)
last = Last()
Stop()
if {ignored}:
    ignore_signals()
"""


@pytest.mark.parametrize(("ignored", "code"), [(True, 0), (False, -signals.SIGNALS[0])])
def test_a_late_signal_keeps_the_exit_code(ignored, code):
    script = ENDING.format(ignored=ignored, numbers=[int(number) for number in signals.SIGNALS])
    assert subprocess.run([sys.executable, "-c", script], timeout=30).returncode == code


RESTARTED = """
import os, signal, time
from megabert.distributed import signals
signals.Stop()
signals._early_request = time.monotonic() - 2 * signals.ECHO_SECONDS  # noted while `Stop` took over
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(9)
"""


def test_a_restarted_rank_ends_at_the_second_signal():
    assert subprocess.run([sys.executable, "-c", RESTARTED], timeout=30).returncode == 128 + signal.SIGTERM


STUCK = """
import socket, sys
from datetime import timedelta
from megabert.distributed.signals import exit_on_signals
exit_on_signals()
import torch.distributed as dist
print("waiting", flush=True)
dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=True, timeout=timedelta(minutes=5))
"""


def test_rank_waiting_for_others_leaves_when_signalled():
    """The main thread sits in torch's own code, where Python runs no handler."""
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(free_port())], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(5) == signals.REQUEUE
    finally:
        process.kill()
        process.wait()
