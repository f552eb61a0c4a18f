"""The GPU suite without a GPU: items that fail or hang, the pack, and a small run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import bench_ops, bench_step, gpu_suite
from benchmarks.common import hardware, measure
from benchmarks.gpu import pack
from megabert import ops
from megabert.common.processes import is_alive
from tests.conftest import ROOT
from tests.helpers import programs
from tests.helpers.waiting import wait_until
from tests.integration.conftest import command
from tests.ops.oracle import needs_library

ENV = hardware.clone_environment(OMP_NUM_THREADS="1")


def run(code: str, seconds: float = 30) -> dict[str, Any]:
    """The result of a process that runs `code`."""
    ((_, result),) = gpu_suite.run_items(["machine"], lambda target: ["-c", code, str(target)], ENV, seconds)
    return result


def test_an_item_that_crashes_or_hangs_is_one_failed_result() -> None:
    done = run("import json, sys; json.dump({'about': 1, 'ms': 2.5}, open(sys.argv[-1], 'w'))")
    assert done["state"] == "done" and done["value"] == {"ms": 2.5}
    crashed = run("import os; print('misaligned address', flush=True); os.abort()")
    assert (crashed["state"], crashed["reason"]) == ("failed", "SIGABRT") and "misaligned" in crashed["output"]
    hung = run("import time; time.sleep(600)", seconds=1)
    assert (hung["state"], hung["reason"]) == ("failed", "no end after 1 s") and hung["seconds"] < 20


def test_what_an_item_leaves_behind_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detached process that still writes into the item's folder, and an nvidia-smi that does not end when asked."""
    smi = "#!/bin/sh\ntrap '' TERM\necho \"198$2, 3201, 650.5, 60, [N/A]\"\nsleep 60\n"
    programs.write(tmp_path / "nvidia-smi", smi)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write = "import pathlib, sys, time\nend = time.monotonic() + 5\nwhile time.monotonic() < end: "
    write += "time.sleep(1e-3), pathlib.Path(sys.argv[1], str(time.monotonic_ns())).touch()"
    code = "import os, subprocess, sys, time\nfolder = os.path.dirname(sys.argv[-1])\n"
    code += f"subprocess.Popen([sys.executable, '-c', {write!r}, folder], start_new_session=True); time.sleep(1)"
    done = run(code)
    assert done["state"] == "done" and done["seconds"] < 10
    assert done["telemetry"]["clocks.sm"] == [1983] * 3, "of the device that the items run on"
    assert "memory.used" not in done["telemetry"]


LINES = """
import json, sys, time
for key in sys.argv[2:]:
    if 'broken' in key: sys.exit('out of memory')
    line = json.dumps({'key': key, 'value': {'of': key}}) + '\\n'
    for half in (line[:20], line[20:]):
        print(half, end='', file=open(sys.argv[1], 'a'), flush=True)
        time.sleep(0.7)
"""


def test_steps_share_a_process_until_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process writes a line for each key, whose second half is waited for, and ends at one that is named so."""
    keys = ["steps/one 128x2", "steps/broken 128x2", "steps/three 128x2", "steps/four 128x2"]
    suite = gpu_suite.Suite("cpu", True, Path("pack"))
    made = Mock(side_effect=lambda keys, options, target: ["-c", LINES, str(target), *keys])
    monkeypatch.setattr(gpu_suite.Suite, "command", made)
    found = dict(gpu_suite.results(suite, dict.fromkeys(keys, ""), ENV, time.monotonic() + 60))
    assert [list(call.args[0]) for call in made.call_args_list] == [keys, keys[2:]]
    assert [found[key]["state"] for key in keys] == ["done", "failed", "done", "done"]
    assert found[keys[3]]["value"] == {"of": keys[3]} and "out of memory" in found[keys[1]]["output"]
    late = dict(gpu_suite.results(suite, dict.fromkeys(keys, ""), ENV, time.monotonic()))
    assert {result["state"] for result in late.values()} == {"skipped"}


def test_items_end_with_the_suite(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(60)"
    code = f"list(gpu_suite.run_items(['machine'], lambda _: ['-c', {child!r}], dict(os.environ), 60))"
    code = f"import os; from benchmarks import gpu_suite\n{code}"
    suite = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=ENV | {"TMPDIR": str(tmp_path)})
    file = tmp_path / "pid"
    wait_until(lambda: file.is_file() and file.read_text().endswith("."))
    pid = int(file.read_text()[:-1])
    suite.kill()
    suite.wait()
    wait_until(lambda: not is_alive(pid))


@needs_library
def test_a_failed_capture_restarts_without_its_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def kernel_times(sides: dict[str, Any], *_: Any) -> dict[str, list[float]]:
        timed.extend(sides)
        if "ours" in sides:
            raise measure.CaptureFailed("ours", RuntimeError("operation not permitted when stream is capturing"))
        return {side: [1.0] for side in sides}

    execv = Mock(side_effect=SystemExit)  # it does not return
    target = tmp_path / "ops.json"
    monkeypatch.setattr(bench_ops, "kernel_times", kernel_times)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", "--small", "--only", "softmax_mask", "--json", str(target)])
    with pytest.raises(SystemExit):
        bench_ops.main()
    assert timed == ["torch", "ours"], "the peer runs before what may leave the device in another state"
    monkeypatch.setattr(sys, "argv", execv.call_args.args[1][1:])
    assert bench_ops.main() == 0
    report = json.loads(target.read_text())
    assert [(list(result["seconds"]), result["comparisons"]) for result in report["results"]] == [(["torch"], [])]
    assert report["left_out"][0][1:] == ["ours", "RuntimeError: operation not permitted when stream is capturing"]


def test_a_part_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for words in (["--only", "kernel"], ["first", "--only", "kernels"]):
        monkeypatch.setattr("sys.argv", ["gpu_suite.py", *words])
        with pytest.raises(SystemExit, match="2"):
            gpu_suite.parse()
        assert f"--only {words[-1]}: not in the calls first" in capsys.readouterr().err


def test_too_few_minutes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Those in which no part starts, and those that the set-up takes."""
    words = ["gpu_suite.py", "first", "--device", "cpu", "--json", str(tmp_path / "gpu.json"), "--pack"]
    words += [str(write_pack(tmp_path / "pack", about={"revision": "1"})), "--minutes"]
    monkeypatch.setattr("sys.argv", [*words, "1"])
    with pytest.raises(SystemExit, match="2"):
        gpu_suite.parse()
    assert "error: --minutes 1: the smallest part needs 1.2, of which 60 s" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*words, "1.17"])
    monkeypatch.setattr(pack, "place_library", lambda *_: monkeypatch.setattr(gpu_suite, "LEAST", 11) or "placed")
    with pytest.raises(ValueError, match="over before the first part"):
        gpu_suite.main()


def test_right_comes_before_fast() -> None:
    """Whether kernels are right, then a profile and the baseline, whether it trains; each key of one call."""
    first, second = (list(items) for items in gpu_suite.CALLS.values())
    assert first[:3] == ["machine", "tests", "steps/ours 128x128, profile"]
    assert {"training/small", "steps/torch 128x128"} <= set(first)
    assert not set(first) & set(second)
    assert {key.partition("/")[0] for key in first + second} == set(gpu_suite.LIMITS)
    suite = gpu_suite.Suite("cuda", False, Path("pack"))
    steps = {key: options for call in gpu_suite.CALLS.values() for key, options in call.items() if key[:6] == "steps/"}
    for key, options in steps.items():
        args = bench_step.parser().parse_args(suite.step_options(key, options).split())
        assert f"{args.seq_len}x{args.micro}" in key


@pytest.mark.slow
@needs_library
def test_a_small_run_on_the_cpu(tmp_path: Path) -> None:
    """By a pack without wheels, for this environment."""
    options = ("--device", "cpu", "--quick", *make_pack(tmp_path, wheels=False), "--json", tmp_path / "gpu.json")
    done = command("benchmarks/gpu_suite.py", *options, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    keys = [key for items in gpu_suite.CALLS.values() for key in items]
    assert {key: result["state"] for key, result in results.items()} == dict.fromkeys(keys, "done")
    lines = {line[:32].strip(): line[48:] for line in done.stdout.splitlines()[2:]}
    assert set(lines) == set(keys) and all(re.search(r"\d", line) for line in lines.values())
    products = results["kernels/products"]["value"]["results"]
    assert len(products) == 6 and all(rate > 0 for linear in products for rate in linear["tflops"].values())
    assert results["steps/ours 128x128, profile"]["value"]["kernels"][0]["ms"] > 0
    small = results["training/small"]["value"]
    assert (small["steps"], small["resumed_at"]) == (8, 4) and small["perf/tokens_per_sec"] > 0


def make_pack(folder: Path, **options: Any) -> list[str]:
    """A pack of Python's help texts, and the argument that names it."""
    (folder / "topics.txt").write_text("\n\n".join(topics.values()))
    pack.make(folder / "pack", [str(folder / "topics.txt")], 2000, ops.LIBRARY, **options)
    return ["--pack", str(folder / "pack")]


def write_pack(folder: Path, **record: Any) -> Path:
    (folder / pack.LIBRARY).parent.mkdir(parents=True)
    (folder / pack.LIBRARY).write_bytes(b"the pack's")
    found = {"python": pack.python_version(), "native_sources": pack.native_digest(), "needs": []} | record
    (folder / pack.RECORD).write_text(json.dumps(found))
    return folder


def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pack, "TREES_LIBRARY", tmp_path / "tree.so")
    for record, message in (
        ({}, "not load this library"),
        ({"native_sources": "0"}, "built from other native sources"),
    ):
        with pytest.raises(ValueError, match=message):
            pack.place_library(write_pack(tmp_path / message, **record), "cpu")
    assert not (tmp_path / "tree.so").exists()


def test_why_no_library_runs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pack's and of the one built there; a device that does not answer is no reason to build one."""
    folder, outcomes = (
        write_pack(tmp_path / "pack"),
        [ValueError("probe\nundefined symbol"), "9.0", ValueError("no nvcc")],
    )
    monkeypatch.setattr(pack, "output_of", Mock(side_effect=outcomes))
    with pytest.raises(ValueError, match=r"the pack's: undefined symbol; building one here: no nvcc"):
        pack.place_library(folder, "cuda")
    slow = Mock(side_effect=TimeoutError("no end after 180 s"))
    monkeypatch.setattr(pack, "output_of", slow)
    with pytest.raises(TimeoutError):
        pack.place_library(folder, "cuda")
    assert slow.call_count == 1


def test_a_profile_without_times_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a device whose counters are closed."""
    kernel = {"ms": 0.0, "calls": 1, "name": "Activity Buffer Request", "tflops": None}
    bench_step.show_kernels({"own_products_tflops": 700.0, "kernels": [kernel]})
    assert "Activity Buffer Request" in capsys.readouterr().out


@needs_library
def test_the_library_loads_on_glibc_2_28(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack.newer_symbols(ops.LIBRARY) == []
    monkeypatch.setattr(pack, "NEWEST", pack.NEWEST | {"GLIBC": (2, 26)})
    with pytest.raises(ValueError, match=r"does not load on glibc .*\bexpf@GLIBC_2\.27"):
        pack.make(tmp_path / "pack", ["pydoc"], 2000, ops.LIBRARY)


def test_wheels_are_those_that_the_machine_lacks() -> None:
    there = {"torch": "2.11.0", "numpy": "", "sentencepiece": "0.2.2", "safetensors": "0.8.0"}
    roots = [Requirement(line) for line in ("torch>=2.11", "numpy>=1.26", "sentencepiece>=0.2.3", "pydantic>=2.7")]
    needs = pack.requirements(there, roots)
    lacking = {need.name.replace("_", "-") for need in needs if not pack.meets(there, need)}
    assert {"sentencepiece", "pydantic", "pydantic-core", "annotated-types"} <= lacking
    assert not lacking & {"torch", "numpy", "safetensors"}
    assert {need.name for need in pack.dependencies()} >= {"torch", "deepspeed", "webdataset", "pytest"}


def test_whatever_the_suite_imports_is_there_in_the_pack_or_an_extra() -> None:
    """An import, also inside a function, that is not a dependency, or a dependency of one that was forgotten, is found before a GPU is
    at hand."""
    folders = ("megabert", "benchmarks/gpu", "benchmarks/common", "tests/ops", "tests/helpers")
    sources = [path.read_text() for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    modules = {name for text in sources for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.M)}
    owners = importlib.metadata.packages_distributions()
    names = {canonicalize_name(name) for module in modules for name in owners.get(module, ())}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    optional = {canonicalize_name(Requirement(line).name) for lines in extras.values() for line in lines}
    there = pack.of_the_machine()
    needs = {canonicalize_name(need.name) for need in pack.requirements(there, pack.dependencies())}
    assert {"torch", "deepspeed", "pydantic"} <= names
    assert not names - needs - there.keys() - optional - {"megabert"}, "neither a dependency nor an extra"


def test_what_pack_and_machine_lack_together_is_named(tmp_path: Path) -> None:
    folder = write_pack(tmp_path / "pack", needs=["alpha>=1.0", "numpy>=1.26"])
    (folder / "wheels").mkdir()

    def put(version: str) -> None:
        for old in (folder / "wheels").iterdir():
            old.unlink()
        with zipfile.ZipFile(folder / f"wheels/alpha-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr("alpha.py", "name = 'alpha'\n")
            archive.writestr(f"alpha-{version}.dist-info/METADATA", f"Name: alpha\nVersion: {version}\n")

    put("1.0")
    assert pack.unpack_wheels(folder, tmp_path / "site") == "1 wheels unpacked, 2 requirements met"
    assert (tmp_path / "site/alpha.py").read_text() == "name = 'alpha'\n"
    put("0.9")
    assert pack.unpack_wheels(folder, tmp_path / "old").endswith("2 requirements but 0.9 for alpha>=1.0 met")
    (folder / "wheels/alpha-0.9-py3-none-any.whl").unlink()
    with pytest.raises(ValueError, match=r"lack alpha>=1\.0$"):
        pack.unpack_wheels(folder, tmp_path / "none")
    (folder / pack.RECORD).write_text('{"python": "3.9", "needs": []}')
    with pytest.raises(ValueError, match=r"is for Python 3\.9, this"):
        pack.unpack_wheels(folder, tmp_path / "other")


def test_a_folder_that_is_no_pack_is_neither_used_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="exists and is not a pack"):
        pack.make(tmp_path, ["pydoc"], 2000)
    assert (tmp_path / "thesis.tex").exists()
    missing = command("benchmarks/gpu_suite.py", "--pack", tmp_path)
    assert missing.returncode == 2 and "is not a finished pack; --make-pack makes one" in missing.stderr


def python_of_the_machine() -> str:
    """A Python of the GPU machine's version; "" if there is none here."""
    names = [f"python{pack.PYTHON}", *map(str, Path.home().glob(f".pyenv/versions/{pack.PYTHON}.*/bin/python"))]
    works = (name for name in names if shutil.which(name) and not subprocess.run([name, "-c", ""]).returncode)
    return next(works, "")


@pytest.mark.soak
@needs_library
@pytest.mark.skipif(not python_of_the_machine(), reason=f"there is no Python {pack.PYTHON}")
def test_the_suite_is_rehearsed_with_the_machines_python_and_torch(tmp_path: Path) -> None:
    """The operations' tests and training runs with the oldest torch that is allowed, 2.11; every wheel is needed, and named without."""
    words = ("benchmarks/gpu/rehearse.py", "--python", python_of_the_machine(), *make_pack(tmp_path))
    for more in (["--each-wheel"], []):
        done = command(*words, *more, timeout=3000)
        assert done.returncode == 0, done.stdout + done.stderr
    tests = next(line for line in done.stdout.splitlines() if line.startswith("tests "))
    assert int(re.findall(r"(\d+) passed", tests)[0]) > 300 and "failed" not in tests
