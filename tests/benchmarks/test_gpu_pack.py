"""What travels to a bare machine is complete, of one revision, and taken only where it fits."""

from __future__ import annotations

import hashlib
import json
import runpy
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_pack
from benchmarks.common import hardware
from benchmarks.gpu import library, pack
from megabert.common import environment

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def wheel(folder: Path, name: str, *needs: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {need}" for need in needs)]
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n\nText.\n")
        archive.writestr(f"{name}.py", f"name = {name!r}\n")
    return path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree without git in place of ours, with a finished pack in it."""
    root = tmp_path / "tree"
    for name in ("csrc/gelu/cuda.cu", "megabert/model.py", "setup.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for module in (pack, library, hardware, environment):
        monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(library, "LIBRARY", root / "megabert" / "_native.abi3.so")
    monkeypatch.setattr(hardware, "_carried", ("0123456789ab", ()))
    hardware.changes.cache_clear()
    folder = root / "build" / "pack"
    (folder / "native").mkdir(parents=True)
    (folder / pack.LIBRARY).write_bytes(b"the pack's")
    wheel(folder / "wheels", "alpha")
    pack.write_record(folder, {"python": HERE, "data": {"128": "data/seq128"}})
    yield root
    hardware.changes.cache_clear()


def opened(root: Path) -> pack.Pack:
    return pack.Pack(root / "build" / "pack")


def test_wheels_bring_what_they_need_and_not_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {
        "alpha": ("beta>=2", "torch>=2.0", "numpy", "gamma; python_version < '3.12'", "delta; extra == 'test'"),
        "beta": ("Epsilon_Zeta", "alpha", "tomli; sys_platform == 'win32'"),
        "epsilon-zeta": (),
    }
    asked = []

    def fetch(name: str, folder: Path, python: str) -> Path:
        asked.append((name, python))
        return wheel(folder, name.replace("-", "_"), *needs[name])

    monkeypatch.setattr(gpu_pack, "fetch", fetch)
    monkeypatch.setattr(gpu_pack, "ROOTS", ("alpha",))
    found = gpu_pack.collect_wheels(tmp_path / "wheels", "3.12")
    assert asked == [("alpha", "3.12"), ("beta", "3.12"), ("epsilon-zeta", "3.12")]
    assert found == [f"{n}-1.0-py3-none-any.whl" for n in ("alpha", "beta", "epsilon_zeta")]


def test_wheels_of_another_python_are_not_put_in_the_way(tree: Path, tmp_path: Path) -> None:
    assert opened(tree).unpack_wheels(tmp_path / "site") == "1 unpacked"
    assert (tmp_path / "site" / "alpha.py").read_text() == "name = 'alpha'\n"
    record = tree / "build" / "pack" / pack.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {"python": "3.9"}))
    assert opened(tree).unpack_wheels(tmp_path / "other") == f"not used: they are of Python 3.9, this is {HERE}"
    assert not (tmp_path / "other").exists()


def test_the_revision_is_the_packs_as_long_as_the_sources_are(tree: Path) -> None:
    assert opened(tree).origin() == ("0123456789ab", [])
    (tree / "megabert" / "model.py").write_text("changed\n")
    assert opened(tree).origin() == ("0123456789ab", ["sources differ from the pack's"])
    hardware.carry(*opened(tree).origin())
    hardware.changes.cache_clear()
    assert hardware.revision() == "0123456789ab+changes"
    assert hardware.about()["changes"] == ["sources differ from the pack's"]


def test_a_library_of_other_sources_is_not_loaded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(tree).library()
    assert found is not None and found.read_bytes() == b"the pack's"
    (tree / "csrc/gelu/cuda.cu").write_text("changed\n")
    assert opened(tree).library() is None


@pytest.mark.parametrize(
    ("probes", "builds", "expected", "tried"),
    [
        ({b"the pack's": ""}, "", "the pack's", ["the pack's"]),
        ({b"the pack's": "GLIBC_2.38 not found", b"built": ""}, "", "built here", ["the pack's", "built here"]),
        ({b"the pack's": "no kernel image is available"}, "no nvcc", None, ["the pack's", "built here"]),
    ],
)
def test_a_library_that_does_not_run_is_built_on_the_spot(
    tree: Path, monkeypatch: pytest.MonkeyPatch, probes: dict[bytes, str], builds: str, expected: str | None, tried: list[str]
) -> None:  # fmt: skip
    def build(device: str) -> str:
        library.LIBRARY.write_bytes(b"built")
        return builds

    monkeypatch.setattr(library, "probe", lambda path, device: probes[path.read_bytes()])
    monkeypatch.setattr(library, "build", build)
    where = str(tree / "build" / "pack")
    if expected is None:
        with pytest.raises(library.Absent, match=r"no kernel image.*no nvcc"):
            library.prepare("cuda", where)
        return
    found = library.prepare("cuda", where)
    assert found["library"] == expected and list(found["tried"]) == tried
    assert library.LIBRARY.read_bytes() == (b"the pack's" if expected == "the pack's" else b"built")


def test_a_library_of_unknown_sources_in_the_tree_does_not_come_before_the_packs(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.LIBRARY.write_bytes(b"left from another revision")
    monkeypatch.setattr(library, "probe", lambda path, device: "")
    assert library.prepare("cpu", str(tree / "build" / "pack"))["library"] == "the pack's"
    assert library.LIBRARY.read_bytes() == b"the pack's"


def test_the_trees_library_is_taken_for_its_own_sources_alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pack's is refused for its sources; and one of unknown sources is not left where it would be loaded."""
    where, source = str(tree / "build" / "pack"), tree / "csrc/gelu/cuda.cu"
    monkeypatch.setattr(library, "probe", lambda path, device: "")
    monkeypatch.setattr(library, "build", lambda device: "no nvcc")
    source.write_text("changed\n")
    library.LIBRARY.write_bytes(b"built before")
    record = tree / "build" / "native" / "library.json"
    record.parent.mkdir(parents=True)
    sha = hashlib.sha256(b"built before").hexdigest()
    record.write_text(json.dumps({"library": sha, "native_sources": pack.digest(pack.NATIVE_SOURCES)}))
    assert library.prepare("cuda", where)["library"] == "the tree's"
    source.write_text("changed again\n")
    with pytest.raises(library.Absent, match=r"unknown sources, put aside as aside_native.*no nvcc"):
        library.prepare("cuda", where)
    assert not library.LIBRARY.exists()
    library.LIBRARY.with_name("aside_native.abi3.so").rename(library.LIBRARY)
    monkeypatch.setattr(library, "build", lambda device: library.LIBRARY.write_bytes(b"built") and "")
    assert library.prepare("cuda", where)["library"] == "built here"
    assert library.LIBRARY.read_bytes() == b"built"


def test_a_build_records_the_digest_that_the_suite_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    assert runpy.run_path(str(hardware.ROOT / "setup.py"))["native_digest"]() == pack.digest(pack.NATIVE_SOURCES)


def test_an_unfinished_pack_is_none_and_a_folder_of_something_else_is_not_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pack"
    given = ["--output", str(folder), "--library", str(tmp_path / "missing.so"), "--no-wheels"]
    assert gpu_pack.main(given) == 2
    assert "missing.so: there is no such file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no finished pack"):
        pack.Pack(folder)
    assert gpu_pack.main(given) == 2 and "no such file" in capsys.readouterr().err, "it may be tried again"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    assert gpu_pack.main(["--output", str(other)]) == 2
    assert "is there and is no pack" in capsys.readouterr().err and (other / "thesis.tex").exists()


def test_what_is_too_large_to_travel_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(target: Path, given: str) -> dict[str, object]:
        target.parent.mkdir(parents=True)
        target.write_bytes(bytes(3 << 20))
        return {}

    monkeypatch.setattr(gpu_pack, "put_library", put)
    monkeypatch.setattr(gpu_pack, "build_data", lambda folder, args: {"128": "data"})
    monkeypatch.setattr(gpu_pack, "tree_size", lambda: 2 << 20)
    monkeypatch.setattr(gpu_pack, "LIMIT_MIB", 4)
    given = ["--output", str(tmp_path / "pack"), "--no-wheels"]
    assert gpu_pack.main(given) == 2
    assert "is 3.0 MiB beside the tree's 2.0, 4 may travel" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no finished pack"):
        pack.Pack(tmp_path / "pack")
    monkeypatch.setattr(gpu_pack, "LIMIT_MIB", 6)
    assert gpu_pack.main(given) == 0


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
def test_the_tree_that_travels_is_what_git_does_not_ignore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pack, "ROOT", tmp_path)
    gpu_pack.run(["git", "init", "-q"])
    (tmp_path / ".gitignore").write_text("build/\n")
    for name, size in (("build/native.o", 1000), ("tracked", 100), ("new", 10)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    gpu_pack.run(["git", "add", "tracked"])
    assert gpu_pack.tree_size() == 100 + 10 + len("build/\n")
