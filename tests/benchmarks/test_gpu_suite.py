"""The GPU suite without a GPU: items that fail or hang, what is projected and measured, the pack, and a small run."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from benchmarks import gpu_suite
from benchmarks.common import hardware
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


def test_projections_stand_beside_what_was_measured() -> None:
    def op(name: str, size: str, **milliseconds: float) -> dict:
        seconds = {side.replace("_", " "): {"p50": ms / 1e3} for side, ms in milliseconds.items()}
        return {"op": name, "size": size, "seconds": seconds}

    def step(seq_len: int, rate: float) -> dict:
        ours = {"real_tokens_per_sec": {"p50": rate}}
        return {"state": "done", "value": {"results": [{"seq_len": seq_len, "results": {"ours": ours}}]}}

    attention = [op("attention", f"[{n}, 16, {t}, 64], dropout {p}", varlen=ms, native=1.0)
                 for n, t, p, ms in ((128, 128, 0.1, 0.25), (32, 512, 0.1, 0.5), (32, 512, 0.0, 9.0))]  # fmt: skip
    layer = [op("bias_gelu", "", ours=0.05, torch=0.1), op("dropout_add_layer_norm", "", ours=0.02, torch=0.1)]
    results = {
        "ceilings": {"state": "done", "value": {"step_seconds": 0.045}},
        "kernels/attention": {"state": "done", "value": {"results": attention}},
        "kernels/layer": {"state": "done", "value": {"results": layer}},
        "kernels/optimizer": {"state": "failed", "reason": "SIGSEGV"},
        "steps/torch 128x128": step(128, 16_384 / 0.080),
        "steps/ours 128x256": step(128, 16_384 / 0.055),
        "steps/lamb 128x256": step(128, 10**9),
        "steps/ours 512x64": step(512, 512 * 400.0),
    }
    values = gpu_suite.measured(results)
    assert values == pytest.approx(
        {
            "products": 45.0, "attention_128": 6.0, "attention_512": 12.0, "elementwise_ours": 48 * 0.09,
            "elementwise_torch": 48 * 0.3, "step_torch": 80.0, "step_best": 55.0, "rows_128": 128 / 0.055, "rows_512": 400.0,
        }
    )  # fmt: skip
    lines = {line["what"]: line for line in gpu_suite.projections(values)}
    assert lines["full rows/s at 512, bf16"] == {
        "what": "full rows/s at 512, bf16",
        "projected": "at least 480",
        "measured": pytest.approx(400),
    }
    assert lines["norm, clip, LAMB, copies, ms"]["measured"] is None


@pytest.fixture
def small_pack(tmp_path: Path) -> Path:
    """Without wheels, for this environment."""
    (tmp_path / "topics.txt").write_text("\n\n".join(topics.values()))
    pack.make(tmp_path / "pack", [str(tmp_path / "topics.txt")], 2000, ops.LIBRARY, wheels=False)
    return tmp_path / "pack"


@pytest.mark.slow
@pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
def test_a_small_run_on_the_cpu(small_pack: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_suite.py", "--device", "cpu", "--small", "--pack", str(small_pack)]
    chosen = ["ceilings", "kernels/attention", "steps/ours 128x128, profile", "tests"]
    command += ["--json", str(tmp_path / "gpu.json"), "--only", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {key: result["state"] for key, result in report["results"].items()} == dict.fromkeys(chosen, "done")
    assert len(report["results"]["ceilings"]["value"]["products"]) == 18
    assert report["results"]["steps/ours 128x128, profile"]["value"]["results"][0]["kernels"][0]["ms"] > 0
    assert all(line["measured"] is None for line in report["projections"]), "a CPU says nothing of a GPU"
    command = [sys.executable, "benchmarks/gpu_suite.py", "--pack", str(tmp_path)]
    missing = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert missing.returncode == 2 and "is no finished pack; --make-pack makes one" in missing.stderr


def write_pack(folder: Path, **record: str) -> Path:
    (folder / pack.LIBRARY).parent.mkdir(parents=True)
    (folder / pack.LIBRARY).write_bytes(b"the pack's")
    found = {"python": pack.python_version(), "native_sources": pack.native_digest()} | record
    (folder / pack.RECORD).write_text(json.dumps(found))
    return folder


def test_a_library_of_other_sources_or_without_device_code_is_not_used(tmp_path: Path, monkeypatch) -> None:
    tree = tmp_path / "tree.so"
    monkeypatch.setattr(pack, "TREES_LIBRARY", tree)
    fails: set[str] = set()

    def run(command: list[str], timeout: float = 0, **env: str) -> str:
        what = "build" if "setup.py" in command else Path(command[-2]).name
        if what in fails:
            raise ValueError(f"{what} failed")
        return ""

    monkeypatch.setattr(pack, "run", run)
    assert pack.place_library(write_pack(tmp_path / "one"), "cuda") == "the pack's library"
    assert tree.read_bytes() == b"the pack's"
    other = write_pack(tmp_path / "two", native_sources="0" * 64)
    assert pack.place_library(other, "cuda").endswith("(the pack's: its native sources are not this tree's)")
    fails |= {Path(pack.LIBRARY).name, "build"}
    with pytest.raises(
        ValueError, match=r"no native library runs here: .*_native.abi3.so failed; built here: build failed"
    ):
        pack.place_library(tmp_path / "one", "cuda")


def test_the_digest_of_native_sources_is_that_of_a_build(monkeypatch) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    assert runpy.run_path(str(ROOT / "setup.py"))["native_digest"]() == pack.native_digest()


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
    assert not (tmp_path / "other").exists()


def test_a_folder_that_is_no_pack_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is there and is no pack"):
        pack.make(tmp_path, ["pydoc"], 2000)
    assert (tmp_path / "thesis.tex").exists()
