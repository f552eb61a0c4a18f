"""The GPU suite runs from end to end without a GPU, here and in a bare Python with torch and numpy and the pack alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import pack, plan, runner, steps
from megabert import ops
from megabert.distributed import process_group
from tests.helpers.pythons import bare_python
from tests.helpers.rows import make_dataset

ROOT = Path(__file__).resolve().parents[2]
needs_library = pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
TORCHS = {"attention": "varlen", "mlm_loss": "torch", "layer": "torch"}
SUITE = ["benchmarks/gpu_suite.py", "--device", "cpu", "--small"]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A setup joins a process group of one and leaves it to the end of its process, which is this one."""
    yield
    process_group.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("gpu_data")
    shape = {"slots": 8, "block_rows": 8, "shard_rows": 64}
    return {n: str(make_dataset(folder / f"seq{n}", 16, seq_len=n, **shape)) for n in (128, 512)}


@pytest.fixture
def small_pack(data: dict[int, str], tmp_path: Path) -> Path:
    """A pack with neither wheels nor library: of an environment that has both."""
    folder = tmp_path / "pack"
    shutil.copytree(Path(data[128]).parent, folder)
    pack.write_record(folder, {"python": "3.12", "data": {"128": "seq128", "512": "seq512"}})
    return folder


@pytest.mark.slow
def test_every_part_runs_in_one_process(data: dict[int, str], tmp_path: Path) -> None:
    """All but the trainer's step, whose engine takes this process for itself, and what starts others."""
    journal = runner.Journal(tmp_path / "journal")
    options = plan.Options("cpu", True, "", data, str(journal.path), time.time() + 300)
    left_out = ("environment/", "tests/", "operations/layer compiled")
    wanted = [
        item for item in plan.items(options)
        if not item.key.startswith(left_out)
        and (item.part not in ("steps", "profile") or item.name.startswith(("plain", "graphed")))
    ]  # fmt: skip
    wanted.append(
        runner.Item(
            "profile", "plain", "benchmarks.gpu.kernels:profile", wanted[-1].arguments | {"setup": {"plain": True}}
        )
    )
    steps.LIVE.release()
    assert runner.work(wanted, journal, dict.fromkeys(plan.PARTS, time.time() + 300), lambda: True) == 0
    steps.LIVE.release()
    results = journal.results()
    assert not [(k, r) for k, r in results.items() if r["state"] in ("failed", "skipped")]
    for kind in ("bf16", "fp8"):
        products = results[f"ceilings/products {kind}"]["value"]
        names = {(p["linear"], p["product"]) for p in products["products"]}
        assert len(names) == len(products["products"]) == (18 if kind == "bf16" else 12)
        total = sum(p["seconds"] * (24 if p["linear"] not in ("mlm", "decoder") else 1) for p in products["products"])
        assert products["step_seconds"] == pytest.approx(total) and products["tflops"] > 0
    assert results["operations/optimizer lamb"]["value"]["ms"] > 0
    step = results["steps/plain 128x256"]["value"]
    assert step["loop"] == "plain torch loop" and step["updates"] >= 3 and step["seq_len"] == 128
    assert step["full_rows_per_sec"] == pytest.approx(step["rows"] * step["fill"] / step["step_seconds"]["p50"])
    assert results["steps/plain 512x64"]["value"]["seq_len"] == 512
    kernels = results["profile/plain"]["value"]
    assert 20 <= len(kernels["kernels"]) <= 40 and kernels["kernels"][0]["ms"] > 0
    assert sum(kernels["groups_ms"].values()) == pytest.approx(kernels["total_ms"])


def test_the_plain_loop_learns_and_its_weights_are_its_masters_rounded(data: dict[int, str], tmp_path: Path) -> None:
    setup, journal = steps.Setup(plain=True, dropout=0.0), str(tmp_path / "journal")
    steps.build(setup, "cpu", 128, 4, 2000, True, journal)
    loop, batches = steps.LIVE.engine, steps.updates(data[128], 4, 42, "cpu")
    before = [m.detach().clone() for m in loop.masters]
    first = [float(loop.train_update(batches[0], steps.LR)) for _ in range(60)]
    assert first[-1] < first[0] - 0.02, first
    assert all(torch.equal(w, m.bfloat16()) for w, m in zip(loop.weights, loop.masters, strict=True))
    moved = max(float((m.detach() - b).abs().max()) for m, b in zip(loop.masters, before, strict=True))
    assert 0 < moved < 61 * 2 * steps.LR, "an update of AdamW moves a weight by about the learning rate"
    steps.LIVE.release()


def test_a_setup_that_this_revision_does_not_know_is_absent() -> None:
    with pytest.raises(runner.Absent, match=r"not in this revision: .*precision"):
        steps.make_config(steps.Setup(precision="fp4"), {}, 8, 2000, True)


def test_backends_follow_what_the_operations_showed(tmp_path: Path) -> None:
    """The fastest right candidate of the row length; none that failed, and it says so."""
    journal = runner.Journal(tmp_path / "journal")

    def ended(role: str, name: str, seq_len: int, ms: float | None, dropout: float = 0.1) -> None:
        key = f"operations/{role} {name} {seq_len} dropout {dropout:g}"
        value = {"role": role, "name": name, "seq_len": seq_len, "dropout": dropout, "ms": ms}
        journal.end(key, "done" if ms else "failed", 1, **({"value": value} if ms else {"reason": "wrong by 3"}))

    ended("attention", "varlen", 128, 0.5)
    ended("attention", "native", 128, 0.2)
    ended("attention", "varlen", 512, 0.5)
    ended("attention", "native", 512, 0.9)
    ended("layer", "torch", 128, 0.7)
    ended("layer", "native", 128, None)

    def choose(backends: str, seq_len: int) -> tuple[dict[str, str], dict[str, str]]:
        return steps.chosen(steps.Setup(backends=backends), "cuda", seq_len, str(journal.path))

    found, notes = choose("best", 128)
    assert found["attention"] == "native" and found["layer"] == "torch"
    assert notes["layer"] == "operations/layer native 128 dropout 0.1 failed: wrong by 3"
    assert choose("best", 512)[0]["attention"] == "varlen"
    assert choose("ours", 512)[0]["layer"] == "torch", "what is wrong is not trained with"
    assert choose("torch", 128) == (TORCHS, {})


def test_without_the_library_torchs_backends_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ops, ops.backend):
        monkeypatch.setattr(module, "MISSING", "native library not built")
    natives = dict.fromkeys(("attention", "mlm_loss", "layer"), "native library not built")
    for backends in ("torch", "ours", "best"):
        found, notes = steps.chosen(steps.Setup(backends=backends), "cuda", 128, str(tmp_path / "journal"))
        assert found == TORCHS
        assert notes == ({} if backends == "torch" else natives)


def test_a_setup_without_memory_is_absent_and_deepspeed_is_not_to_blame(
    data: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the error has lost its type on its way through a native operation."""
    refused = 0

    class Full:
        def __init__(self, *_: object) -> None: ...

        def train_update(self, *_: object) -> None:
            nonlocal refused
            refused += 1
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(steps, "Engine", Full)
    monkeypatch.setattr(steps, "allocations_refused", lambda: refused)
    monkeypatch.setattr(steps.LIVE, "trouble", "")
    with pytest.raises(runner.Absent, match=r"out of memory: CUDA out of memory\. Tried"):
        steps.measure({}, data[128], 2, "cpu", True, str(tmp_path / "journal"))
    assert not steps.LIVE.trouble and steps.LIVE.engine is None
    assert steps.out_of_memory(torch.OutOfMemoryError("CUDA out of memory"), refused)
    assert not steps.out_of_memory(RuntimeError("NCCL error"), refused)


def test_compiled_layers_share_their_graphs() -> None:
    """One, and one for the last, which computes fewer positions; as many for twelve layers as for three."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    cfg = steps.make_config(
        steps.Setup(dropout=0.1), {"attention": "sdpa", "mlm_loss": "torch", "layer": "torch"}, 2, 2000, True
    )
    model = steps.BertForPreTraining(cfg.model.model_copy(update={"layers": 12}), cfg.ops, "cpu", torch.float32)
    ids, bound = torch.ones(2, 16, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32)
    inputs = ids, ids * 0, ids * 0, bound, bound + 16, torch.full((2, 1), 16, dtype=torch.int32)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        steps.compile_layers(model, count)
        assert torch._dynamo.config.fail_on_recompile_limit_hit
        model.encode(*inputs).sum().backward()
        assert len(graphs) == 1
        model.encode(*inputs, keep=torch.tensor([0, 17])).sum().backward()
        assert len(graphs) == 2
    assert all(layer.qkv.weight.grad is not None for layer in model.layers)


def test_deepspeed_is_not_tried_again_after_it_ended_the_process(tmp_path: Path) -> None:
    journal = runner.Journal(tmp_path / "journal")
    assert steps.broken_before(str(journal.path)) == ""
    journal.end("steps/best 128x256", "failed", 180, reason="no end after 180 s", broke=True)
    assert (
        steps.broken_before(str(journal.path)) == "it ended the process before (steps/best 128x256: no end after 180 s)"
    )
    spoilt = runner.Journal(tmp_path / "spoilt")
    spoilt.end("steps/best 128x256", "failed", 3, reason="CUDA error: misaligned address", broke=True)
    assert steps.broken_before(str(spoilt.path)) == "", "a kernel did it"
    journal.end("steps/lamb 128x256", "done", 9, value={"loop": steps.TRAINER})
    assert steps.broken_before(str(journal.path)) == "", "it was the setup, not DeepSpeed"


@pytest.mark.parametrize("where", ["built", "updated"])
def test_a_deepspeed_that_fails_leaves_the_plain_loop_which_says_so(
    data: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            if where == "built":
                raise RuntimeError("NCCL error: no socket interface found")

        def train_update(self, *_: object) -> None:
            raise RuntimeError("NCCL error: no socket interface found")

    monkeypatch.setattr(steps, "Engine", Failing)
    monkeypatch.setattr(steps.LIVE, "trouble", "")
    given = (data[128], 2, "cpu", True, str(tmp_path / "journal"))
    found = steps.measure({}, *given)
    assert found["loop"].startswith("plain torch loop; DeepSpeed is not used: ") and "no socket" in found["loop"]
    with pytest.raises(runner.Absent, match=r"the plain loop has it not.*no socket|not in this revision"):
        steps.measure({"graphed": True}, *given)
    monkeypatch.setattr(steps.LIVE, "trouble", "")
    monkeypatch.setattr(steps.Plain, "train_update", Failing.train_update)
    with pytest.raises(RuntimeError, match="no socket"):
        steps.measure({"dropout": 0.0}, *given)
    assert where == "built" or steps.LIVE.trouble == "", "where the plain loop fails too it is not DeepSpeed"
    steps.LIVE.release()


def test_without_a_gpu_or_a_pack_it_says_so(small_pack: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "benchmarks/gpu_suite.py", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run([*command, "--pack", str(small_pack)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "error: RuntimeError: torch sees no CUDA device" in done.stderr, done.stderr
    done = subprocess.run([*command, "--pack", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is no finished pack; python benchmarks/gpu_pack.py makes one" in done.stderr
    assert not (tmp_path / "gpu.json").exists()


def whole(python: str, root: Path, target: Path, *arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The report of a small run in which nothing fails."""
    command = [python, *SUITE, "--minutes", "25", "--json", str(target), *arguments]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=1600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(target.read_text())
    assert "not measured" in done.stdout and {row["verdict"] for row in report["verdict"]} == {"not measured"}
    states = {key: r["state"] for key, r in report["results"].items()}
    assert set(states.values()) <= {"done", "absent"}, states
    assert states["environment/library"] == states["steps/best 128x256"] == "done"
    return report


@needs_library
@pytest.mark.slow
@pytest.mark.dist
def test_a_small_run_on_the_cpu(small_pack: Path, tmp_path: Path) -> None:
    report = whole(sys.executable, ROOT, tmp_path / "gpu.json", "--pack", str(small_pack))
    results = report["results"]
    assert results["steps/best 128x256"]["value"]["loop"] == steps.TRAINER
    assert all(results[key]["state"] == "done" for key in ("ceilings/copy", "profile/best 512x32", "tests/operations"))
    assert " passed" in results["tests/operations"]["value"]["output"]
    assert report["about"]["command"].startswith("python benchmarks/gpu_suite.py")


@needs_library
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_pack_is_all_that_a_bare_python_needs(corpus: Path, tmp_path: Path) -> None:
    """A copy of the tracked files without git, the pack, and a Python with torch and numpy: the trainer's step runs there;
    without DeepSpeed's wheel, the plain loop; without any wheel it names what is missing."""
    python = bare_python("3.12")
    root = tmp_path / "copy"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git here to tell which files travel")
    for name in filter(None, listed.stdout.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    folder = root / "build" / "gpu_pack"
    make = [sys.executable, "benchmarks/gpu_pack.py", "--corpus", str(corpus), "--vocab-size", "2000"]
    made = subprocess.run(
        [*make, "--library", str(ops.LIBRARY), "--output", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=900
    )  # fmt: skip
    if "pip download" in made.stderr or "pip wheel" in made.stderr:
        pytest.skip(f"no package index: {made.stderr.splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    assert pack.size(folder) < 64 << 20
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    report = whole(python, root, tmp_path / "gpu.json", env=bare)
    assert (
        report["wheels"].endswith(" unpacked")
        and report["results"]["environment/library"]["value"]["library"] == "the pack's"
    )
    assert report["results"]["steps/best 128x256"]["value"]["loop"] == steps.TRAINER
    (wheel,) = (folder / "wheels").glob("deepspeed-*.whl")
    wheel.unlink()
    report = whole(python, root, tmp_path / "plain.json", "--only", "steps", env=bare)
    loop = report["results"]["steps/best 128x256"]["value"]["loop"]
    assert loop.startswith("plain torch loop; DeepSpeed is not used: ModuleNotFoundError")
    shutil.rmtree(folder / "wheels")
    command = [python, *SUITE, "--json", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=root, env=bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "pydantic: not here, and not in the pack" in done.stderr
