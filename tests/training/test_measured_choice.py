"""A run's measured backends: made once, cached by what decides them, kept with the run, the same on every rank."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert import config as configuration
from megabert import ops
from megabert.commands import doctor
from megabert.common.errors import Failed
from megabert.config import Config
from megabert.data.shards import Manifest
from megabert.distributed.preemption import Stop
from megabert.distributed.process_group import World
from megabert.distributed.watchdog import Watchdog
from megabert.ops import candidates
from megabert.ops.problems import Problem
from megabert.pretraining import open_run
from megabert.training import measured_choice
from megabert.training.measured_choice import RECORD, settle
from tests.helpers.clock import Clock
from tests.helpers.ranks import run_ranks
from tests.ops.oracle import needs_library

DATA = Path(__file__).parents[1] / "data" / "golden" / "dataset"
ALONE = World(0, 0, 1, torch.device("cpu"), "gloo", "single")
OURS = dict.fromkeys(("attention", "mlm_loss", "layer"), "native")  # of the CPU
NATIVE = [f"ops.{role}={name}" for role, name in OURS.items()]
TORCH = ["ops.attention=sdpa", "ops.mlm_loss=torch", "ops.layer=torch"]
SMALL = ["model.layers=1", "model.hidden=32", "model.heads=2", "precision=fp32", "batch.micro_size=2"]


def config(*overrides: str) -> Config:
    return configuration.load("tiny", [*SMALL, "model.vocab_size=100", "batch.global_size=4", *overrides])


class Stand:
    """The CPU as a device to measure on, with candidates that are `torch`'s and `native`'s as these change them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.measured: list[str] = []  # roles, in the order in which they were
        self.slow: set[str] = {"torch", "sdpa"}
        self.wrong: set[str] = set()
        self.clock = Clock()
        monkeypatch.setattr(candidates, "time", self.clock)
        monkeypatch.setattr(measured_choice, "MEASURED_ON", ("cpu",))
        monkeypatch.setattr(measured_choice, "measure", self.measure)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def measure(
        self, role: str, shapes: Any, device: torch.device, seconds: float, reasons: dict[str, str]
    ) -> candidates.Measured:
        self.measured.append(role)
        among = candidates.candidates(role, shapes, device)
        among = [self.changed(c) for c in among if c.name not in ("compiled", "fused_softmax")]
        return candidates.measure(role, shapes, device, 0.01, reasons, among)

    def changed(self, candidate: candidates.Candidate) -> candidates.Candidate:
        def make(problem: Problem) -> Any:
            function = candidate.make(problem)

            def call(*inputs: torch.Tensor) -> Any:
                if candidate.name in self.slow:
                    self.clock.sleep(0.01)
                outputs = function(*inputs)
                return [out * 1.1 for out in outputs] if candidate.name in self.wrong else outputs

            return call

        return candidate._replace(make=make)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stand:
    return Stand(monkeypatch, tmp_path / "cache")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def names(settled: Config) -> dict[str, str]:
    found = settled.ops.model_dump()
    assert found.pop("optimizer") == "auto"  # the engine's
    return found


MANIFEST = Manifest.load(DATA)


@needs_library
def test_the_fastest_right_one_runs_and_the_log_says_why_others_lost(stand, run, caplog) -> None:
    with caplog.at_level("INFO", logger="megabert"):
        settled = settle(config(), MANIFEST, ALONE, run)
    assert names(settled) == {"attention": "native", "mlm_loss": "native", "layer": "native"}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and lines[0].startswith("ops.attention=auto is native, measured now: ")
    assert "no varlen: variable-length flash attention needs a CUDA device" in lines[0]
    assert re.search(r"native 0\.1 ms, torch [123]\d(\.\d)? ms", lines[2])  # asleep for 10 ms, once or more a pass


@needs_library
def test_a_wrong_candidate_never_runs_and_is_named(stand, run, caplog) -> None:
    stand.wrong = {"native"}
    with caplog.at_level("INFO", logger="megabert"):
        assert names(settle(config(), MANIFEST, ALONE, run))["layer"] == "torch"
    assert "no native: result 0: error 1.00e-01" in caplog.text
    stand.wrong = {"native", "torch"}
    with pytest.raises(ValueError, match=r"ops\.layer=auto: no candidate gives right results here \(torch: result 0"):
        settle(config("model.hidden=64", "ops.mlm_loss=torch"), MANIFEST, ALONE, run)


@needs_library
def test_an_explicit_choice_wins_and_nothing_is_timed_for_it(stand, run) -> None:
    named = ("ops.attention=sdpa", "ops.mlm_loss=torch")
    settled = settle(config(*named), MANIFEST, ALONE, run)
    assert names(settled) == {"attention": "sdpa", "mlm_loss": "torch", "layer": "native"}
    assert stand.measured == ["layer"]
    settle(config(*named, *TORCH[2:], "ops.optimizer=torch"), MANIFEST, ALONE, run)
    assert stand.measured == ["layer"]


@needs_library
def test_a_deterministic_run_measures_what_it_will_run(stand, run, monkeypatch) -> None:
    """What cannot repeat raises in that mode, so that it is a line of the table and does not run."""
    seen: list[bool] = []

    def measure(*args: Any) -> candidates.Measured:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return stand.measure(*args)

    monkeypatch.setattr(measured_choice, "measure", measure)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        settle(config("deterministic=true", *TORCH[:2]), MANIFEST, ALONE, run)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    assert seen == [True]
    assert json.loads((run / RECORD).read_text())[0]["key"]["deterministic"] is True


def test_on_the_cpu_nothing_is_measured(run) -> None:
    cfg = config()
    assert settle(cfg, MANIFEST, ALONE, run) is cfg and not list(run.iterdir())


@needs_library
def test_the_cache_answers_in_a_tenth_of_a_second_and_only_for_the_same(stand, run, tmp_path, monkeypatch) -> None:
    first = settle(config(), MANIFEST, ALONE, run)
    stand.slow = {"native"}  # measured again, the choice would be another
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        assert settle(config(), MANIFEST, ALONE, tmp_path / "other", writes=False) == first
        seconds.append(time.perf_counter() - started)
    assert len(stand.measured) == 3 and min(seconds) < 0.1, seconds

    def again(*overrides: str) -> int:
        before = len(stand.measured)
        settle(
            config("ops.attention=sdpa", "ops.mlm_loss=torch", *overrides),
            MANIFEST,
            ALONE,
            tmp_path / "other",
            writes=False,
        )
        return len(stand.measured) - before

    assert again("batch.micro_size=4") == 1
    assert again("model.dropout=0.0") == 1
    assert again("precision=bf16") == 1
    assert again("seed=7", "optimizer.lr=1e-3") == 0
    library = tmp_path / "library"
    library.write_bytes(b"another build")
    for owner, name, value in (
        (measured_choice, "driver", lambda: "600.1"),
        (torch, "__version__", "2.99"),
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (measured_choice.ops, "LIBRARY", library),
    ):
        with monkeypatch.context() as other:
            other.setattr(owner, name, value)
            assert again() == 1, name
    assert again() == 0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert measured_choice.place(torch.device("cuda"))["device"] == "NVIDIA H200"
    monkeypatch.setattr(measured_choice.ops, "obstacles", _without_native(ops.obstacles))
    assert again() == 1


def _without_native(real: Any) -> Any:
    return lambda *args: real(*args) | {"native": "gone"}


@needs_library
def test_a_damaged_cache_is_said_and_measured_anew(stand, run, tmp_path, caplog) -> None:
    first = settle(config(), MANIFEST, ALONE, run)
    (run / RECORD).unlink()
    files = sorted((tmp_path / "cache" / "megabert" / "backends").iterdir())
    assert len(files) == 3
    for path, text in zip(files, ("{", '{"role": 1}', "[]"), strict=True):
        path.write_text(text)
    with caplog.at_level("WARNING", logger="megabert"):
        assert settle(config(), MANIFEST, ALONE, run) == first
    assert len(stand.measured) == 6 and all(str(path) in caplog.text for path in files)


@needs_library
def test_what_broke_the_device_is_left_out_by_the_next_start(stand, run, monkeypatch, caplog) -> None:
    """An illegal access ends every further call of a process; the launcher's restart has to come further."""
    tried = []

    def breaks(role, shapes, device, seconds, reasons):
        tried.append(reasons["native"])
        if not reasons["native"]:
            raise candidates.DeviceLost(role, "native", "CUDA error: an illegal memory access was encountered")
        return stand.measure(role, shapes, device, seconds, reasons)

    monkeypatch.setattr(measured_choice, "measure", breaks)
    with pytest.raises(Failed, match=r"ops\.layer=native broke the device \(CUDA error.*the next start leaves it out"):
        settle(config(*TORCH[:2]), MANIFEST, ALONE, run)
    settled = settle(config("ops.attention=sdpa", "ops.mlm_loss=torch"), MANIFEST, ALONE, run)
    assert settled.ops.layer == "torch" and tried[0] == "" and tried[1].startswith("ops.layer=native broke the device")
    assert "no native: ops.layer=native broke the device" in caplog.text and "to try it again" in caplog.text
    assert [entry.role for entry in measured_choice.cached(ALONE.device)] == ["layer"]


@needs_library
def test_a_cache_that_cannot_be_written_costs_no_run(stand, run, tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level("WARNING", logger="megabert"):
        settle(config(), MANIFEST, ALONE, run)
    assert "the next start measures again" in caplog.text


@needs_library
def test_a_resumed_run_keeps_its_choice_and_says_when_it_cannot(stand, run, tmp_path, caplog) -> None:
    first = settle(config(), MANIFEST, ALONE, run)
    shutil.rmtree(tmp_path / "cache")
    stand.slow = {"native"}
    with caplog.at_level("INFO", logger="megabert"):
        assert settle(config(), MANIFEST, ALONE, run) == first and len(stand.measured) == 3
        assert "as recorded with this run" in caplog.text
        changed = settle(config("batch.micro_size=4"), MANIFEST, ALONE, run)
    assert names(changed)["layer"] == "torch"
    said = "ops.layer=auto was native for another shapes: it is chosen anew, and this run does not go on bit for bit"
    assert said in caplog.text


@needs_library
def test_the_doctor_prints_the_tables_of_this_machine_and_of_no_other(stand, run, monkeypatch, capsys) -> None:
    (note,) = doctor.measured("cpu")
    assert note.section == "measured"
    assert note.state == "note" and "training measures at its start" in note.value
    settle(config(), MANIFEST, ALONE, run)
    capsys.readouterr()
    monkeypatch.setattr(doctor, "examine", lambda: doctor.measured("cpu"))
    assert doctor.main(["--json"]) == 0
    lines = {line["name"]: line["value"] for line in json.loads(capsys.readouterr().out)}
    assert list(lines) == [f"{role} 2 x 64 float32" for role in ("attention", "layer", "mlm_loss")]
    assert re.fullmatch(r"native: native \S+ ms, torch \S+ ms; no apex: .*", lines["layer 2 x 64 float32"])
    assert doctor.main([]) == 0 and "no varlen: variable-length" in capsys.readouterr().out
    real = measured_choice.place(ALONE.device)
    monkeypatch.setattr(measured_choice, "place", lambda device: real | {"driver": "another"})
    assert doctor.measured("cpu") == [note]


def test_the_drivers_version_is_read_without_its_tools(tmp_path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 13.3\n"
    )
    assert measured_choice.driver(file) == "580.65.06"
    assert measured_choice.driver(tmp_path / "none") == ""


# -- ranks and whole runs ------------------------------------------------------------------------------------------


def two_ranks(world: World, folder: Path) -> dict[str, Any]:
    """Each rank would choose otherwise: on rank 1 native is the slow one, and it has no cache."""
    monkeypatch = pytest.MonkeyPatch()
    stand = Stand(monkeypatch, folder / f"cache{world.rank}")
    if world.rank:
        stand.slow = {"native"}
    found: dict[str, Any] = {"names": names(settle(config(), MANIFEST, world, folder))}

    def broken(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(measured_choice, "measure", broken)
    real = ops.obstacles
    found["failed"] = problem(config("batch.micro_size=1"), world, folder)
    monkeypatch.setattr(measured_choice, "measure", stand.measure)
    if world.rank:
        monkeypatch.setattr(measured_choice.ops, "obstacles", _without_native(ops.obstacles))
    found["unable"] = problem(config(), world, folder)
    monkeypatch.setattr(measured_choice.ops, "obstacles", real)
    found["measured"] = len(stand.measured)

    runs = {"fresh": (), "cached": (), "named": NATIVE, "others": TORCH, "resumed": ()}
    for name, overrides in runs.items():
        before = len(stand.measured)
        if name == "resumed":
            trained(world, folder / name, stop_after=1)
            shutil.rmtree(folder / f"cache{world.rank}", ignore_errors=True)
        found[name] = trained(world, folder / name, *overrides)
        found[f"{name} measured"] = len(stand.measured) - before
        stand.slow ^= {"native", "torch", "sdpa"}  # measured again, every choice would be another
    monkeypatch.undo()
    return found


def problem(cfg: Config, world: World, folder: Path) -> str:
    try:
        settle(cfg, MANIFEST, world, folder)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained(world: World, folder: Path, *overrides: str, stop_after: int | None = None) -> list[str]:
    """The bits of every weight after two updates on rank 0, with dropout."""
    more = ["schedule.total_steps=2", "schedule.warmup_steps=1", "data.workers=0", "log.tensorboard=false"]
    more += ["eval.interval=0", "eval.rows=4", "peak_tflops=1.0", f"data.path={DATA}", "batch.global_size=4"]
    cfg = configuration.load("tiny", [*SMALL, *more, *overrides])
    trainer = open_run(folder, cfg, world, Stop(), Watchdog(world, folder, 0.0), stop_after=stop_after)
    try:
        assert trainer.train()
        weights = trainer.engine.consolidated_weights()
        return [hashlib.sha256(weights[name].numpy().tobytes()).hexdigest() for name in sorted(weights)]
    finally:
        trainer.close()


@needs_library
@pytest.mark.dist
def test_two_ranks_agree_and_a_run_is_the_same_with_a_fresh_choice_a_cached_a_recorded_and_a_named_one(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, two_ranks, tmp_path)
    assert first["names"] == second["names"] == dict.fromkeys(list(OURS)[:3], "native")
    assert (first["measured"], second["measured"]) == (3, 0)
    said = "Failed: measuring ops.attention failed: CUDA error: an illegal memory access was encountered"
    assert first["failed"] == second["failed"] == said
    assert first["unable"] == second["unable"]
    assert first["unable"].startswith(
        "Refused: rank 1: ops.attention=auto is native on rank 0 and cannot run here: gone"
    )

    assert {name: first[f"{name} measured"] for name in ("fresh", "cached", "resumed")} == {
        "fresh": 3, "cached": 0, "resumed": 0,
    }  # fmt: skip
    assert first["cached"] == first["fresh"] == first["named"] == first["resumed"]
    assert first["others"] != first["fresh"]  # a choice does show in the weights

    run = json.loads((tmp_path / "resumed" / "config.json").read_text())
    assert run["backends"] == OURS | {"optimizer": "torch"} and run["config"]["ops"]["layer"] == "auto"
    table = json.loads((tmp_path / "resumed" / RECORD).read_text())
    assert [entry["role"] for entry in table] == [*ops.BACKENDS]
    assert {row["name"] for row in table[0]["rows"]} >= {"sdpa", "varlen", "native"}
