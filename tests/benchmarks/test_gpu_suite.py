"""The GPU suite without a GPU: items that fail or hang, the pack, and a small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from benchmarks import bench_ops, gpu_suite
from benchmarks.common import hardware, measure
from benchmarks.gpu import pack
from megabert import ops
from tests.conftest import ROOT

ENV = hardware.clone_environment(OMP_NUM_THREADS="1")
WRITE = "import json, sys; json.dump({'about': 1, 'ms': 2.5}, open(sys.argv[-1], 'w'))"


def test_an_item_that_crashes_or_hangs_is_one_failed_result() -> None:
    def run(code: str, seconds: float = 30) -> dict:
        return gpu_suite.run_item(gpu_suite.SuiteItem("steps/one", ("-c", code)), ENV, seconds)

    done = run(WRITE)
    assert done["state"] == "done" and done["value"] == {"ms": 2.5}
    crashed = run("import os; print('misaligned address', flush=True); os.abort()")
    assert (crashed["state"], crashed["reason"]) == ("failed", "SIGABRT") and "misaligned" in crashed["output"]
    hung = run("import time; time.sleep(600)", seconds=1)
    assert (hung["state"], hung["reason"]) == ("failed", "no end after 1 s") and hung["seconds"] < 20


class Restarted(Exception):
    """Takes the place of the process that os.execv replaces."""


@pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
def test_a_failed_capture_restarts_without_its_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def kernel_times(sides: dict[str, Any], *_: Any) -> dict[str, list[float]]:
        timed.extend(sides)
        if "ours" in sides:
            raise measure.CaptureFailed("ours", RuntimeError("operation not permitted when stream is capturing"))
        return {side: [1.0] for side in sides}

    def execv(program: str, command: list[str]) -> None:
        raise Restarted(command[1:])

    target = tmp_path / "ops.json"
    monkeypatch.setattr(bench_ops, "kernel_times", kernel_times)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", "--small", "--only", "softmax_mask", "--json", str(target)])
    with pytest.raises(Restarted) as restart:
        bench_ops.main()
    assert timed == ["torch", "ours"], "the peer runs before what may leave the device in another state"
    monkeypatch.setattr(sys, "argv", restart.value.args[0])
    assert bench_ops.main() == 0
    report = json.loads(target.read_text())
    assert [(list(result["seconds"]), result["comparisons"]) for result in report["results"]] == [(["torch"], [])]
    assert report["left_out"][0][1:] == ["ours", "RuntimeError: operation not permitted when stream is capturing"]


def test_torchs_step_comes_before_everything_else() -> None:
    keys = [item.key for item in gpu_suite.items("cuda", small=False, folder=Path("pack"))]
    assert keys[:3] == ["steps/torch 128x128", "steps/torch 512x64", "kernels/products"]
    assert len(keys) == len(set(keys)) == len(gpu_suite.STEPS) + len(gpu_suite.KERNELS) + 1


@pytest.mark.slow
@pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
def test_a_small_run_on_the_cpu(tmp_path: Path) -> None:
    """By a pack without wheels, for this environment."""
    (tmp_path / "topics.txt").write_text("\n\n".join(topics.values()))
    pack.make(tmp_path / "pack", [str(tmp_path / "topics.txt")], 2000, ops.LIBRARY, wheels=False)
    command = [
        sys.executable,
        "benchmarks/gpu_suite.py",
        "--device",
        "cpu",
        "--small",
        "--pack",
        str(tmp_path / "pack"),
    ]
    chosen = ["kernels/products", "kernels/attention", "steps/ours 128x128, profile", "tests"]
    command += ["--json", str(tmp_path / "gpu.json"), "--only", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert {key: result["state"] for key, result in results.items()} == dict.fromkeys(chosen, "done")
    products = results["kernels/products"]["value"]["results"]
    assert len(products) == 6 and all(rate > 0 for linear in products for rate in linear["tflops"].values())
    assert results["steps/ours 128x128, profile"]["value"]["results"][0]["kernels"][0]["ms"] > 0


def write_pack(folder: Path, **record: str) -> Path:
    (folder / pack.LIBRARY).parent.mkdir(parents=True)
    (folder / pack.LIBRARY).write_bytes(b"the pack's")
    found = {"python": pack.python_version(), "native_sources": pack.native_digest()} | record
    (folder / pack.RECORD).write_text(json.dumps(found))
    return folder


def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pack, "TREES_LIBRARY", tmp_path / "tree.so")
    with pytest.raises(ValueError, match="Could not load this library"):
        pack.place_library(write_pack(tmp_path / "damaged"), "cpu")
    with pytest.raises(ValueError, match="built from other native sources"):
        pack.place_library(write_pack(tmp_path / "other", native_sources="0" * 64), "cpu")
    assert not (tmp_path / "tree.so").exists()


@pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
def test_the_library_loads_on_glibc_2_28(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack.newer_symbols(ops.LIBRARY) == []
    monkeypatch.setattr(pack, "NEWEST", pack.NEWEST | {"GLIBC": (2, 26)})
    with pytest.raises(ValueError, match=r"does not load on glibc .*\bexpf@GLIBC_2\.27"):
        pack.make(tmp_path / "pack", ["pydoc"], 2000, ops.LIBRARY)


def test_wheels_are_those_that_the_machine_lacks(tmp_path: Path) -> None:
    names = {line.partition("==")[0] for line in pack.requirements(["deepspeed", "safetensors"])}
    assert {"deepspeed", "safetensors", "hjson", "pydantic-core"} <= names
    assert not {"torch", "numpy"} & names and not any(name.startswith("nvidia") for name in names)
    folder = write_pack(tmp_path / "pack")
    (folder / "wheels").mkdir()
    with zipfile.ZipFile(folder / "wheels/alpha-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("alpha.py", "name = 'alpha'\n")
    assert pack.unpack_wheels(folder, tmp_path / "site") == "1 wheels unpacked"
    assert (tmp_path / "site/alpha.py").read_text() == "name = 'alpha'\n"
    (folder / pack.RECORD).write_text(json.dumps({"python": "3.9"}))
    assert pack.unpack_wheels(folder, tmp_path / "other").startswith("wheels not used: they are of Python 3.9")


def test_a_folder_that_is_no_pack_is_neither_used_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is there and is no pack"):
        pack.make(tmp_path, ["pydoc"], 2000)
    assert (tmp_path / "thesis.tex").exists()
    command = [sys.executable, "benchmarks/gpu_suite.py", "--pack", str(tmp_path)]
    missing = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert missing.returncode == 2 and "is no finished pack; --make-pack makes one" in missing.stderr
