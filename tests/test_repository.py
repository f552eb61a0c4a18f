"""What a stranger finds in a fresh clone: pinned versions, scripts that parse, a build that works, nothing that misleads."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tests.helpers import programs

SHELL = ("launch/*.sh", "launch/kubernetes/*.sh", "launch/*.slurm", "examples/*.sh", ".ci/run")
SCRIPTS = [path for pattern in SHELL for path in sorted(ROOT.glob(pattern))]
MINIMAL = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
static torch::stable::Tensor twice(const torch::stable::Tensor x) {
  auto y = torch::stable::empty_like(x);
  const float* a = static_cast<const float*>(x.data_ptr());
  float* b = static_cast<float*>(y.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = 2 * a[i];
  return y;
}
STABLE_TORCH_LIBRARY(toy, m) { m.def("twice(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(toy, CPU, m) { m.impl("twice", TORCH_BOX(&twice)); }
"""


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository; of the folder where there is no git, e.g. in an unpacked archive."""
    if (ROOT / ".git").exists():
        listed = subprocess.check_output(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, text=True)
        return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    made = re.compile(r"^(\.(?!ci/|gitignore)|build/|dist/|runs/|data/)|__pycache__|\.egg-info|\.so$")
    found = (path for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path.is_file())
    return [path for path in found if not made.search(path.relative_to(ROOT).as_posix())]


def copy_of_the_build(folder: Path, **files: str) -> Path:
    """The build files and the package without compiled code, with other native sources, in `folder`."""
    folder.mkdir(exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for package in ("megabert", "data_prep"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "csrc").mkdir()
    for name, text in files.items():
        (folder / "csrc" / name.replace("__", ".")).write_text(text)
    return folder


def build(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("MEGABERT_CUDA", "TORCH_CUDA_ARCH_LIST")} | env
    words = [sys.executable, *command]
    return subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, timeout=600)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_requirement_is_pinned_to_a_tested_version() -> None:
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    lines = [line for part in lists for line in part if not line.startswith("megabert[")]
    requirements = [Requirement(line) for line in lines]
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    names = {requirement.name for requirement in requirements}
    assert {"torch", "deepspeed", "webdataset", "sentencepiece", "mpi4py", "tensorboard"} <= names
    assert names == set(pins)
    assert [str(r) for r in requirements if not r.specifier.contains(pins[r.name])] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse_and_stop_at_errors(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    if script.name not in ("env.sh", "values.sh"):  # sourced: they must not change their reader's options
        assert "set -euo pipefail" in text
        assert script.suffix == ".slurm" or os.access(script, os.X_OK)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-x", str(script)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_no_unsafe_read_and_no_shell() -> None:
    unsafe = re.compile(r"weights_only=False|allow_pickle=True|pickle\.load|yaml\.load\(|shell=True|os\.system\(")
    for path in tracked("megabert/*.py", "megabert/**/*.py", "data_prep/*.py", "benchmarks/*.py", "setup.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not unsafe.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_there_is_no_deepspeed_file_and_no_large_file() -> None:
    for path in tracked("*", "**/*"):
        name = path.relative_to(ROOT)
        assert path.stat().st_size < 2_000_000, f"{name} is {path.stat().st_size} bytes"
        if path.suffix == ".json":
            assert "zero_optimization" not in path.read_text(), f"{name}: DeepSpeed's settings come from config.py"
        assert path.suffix not in (".so", ".o", ".pyc", ".pt", ".bin"), f"{name} is built, not written"


def test_links_in_documents_lead_somewhere() -> None:
    for path in tracked("*.md", "**/*.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target and not target.startswith("mailto:"):
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_image_copies_what_the_build_needs() -> None:
    stage = (ROOT / "launch/Dockerfile").read_text().split("FROM ")[1]
    copied = {name for line in re.findall(r"^COPY (.*)", stage, re.M) for name in line.split()[:-1]}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    needed = {"megabert", "data_prep", "csrc", "launch", "setup.py", "pyproject.toml", "constraints.txt", "Makefile"}
    assert needed | {project()["readme"], *project()["license-files"]} <= copied


def test_an_old_python_a_missing_compiler_or_a_folder_of_files_is_one_clear_line(tmp_path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "find", "sort", "xargs", "sha256sum", "cut", "cat", "dirname", "grep", "rm", "env"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    programs.write(tools / "python3", "#!/bin/sh\nexit 1\n")

    for more, error in (
        ({}, "error: no Python 3.11 or newer on PATH"),
        ({"PYTHON": "/nowhere/python"}, "error: PYTHON=/nowhere/python is not"),
        ({"PYTHON": sys.executable}, "error: no C++ compiler (g++)"),
        ({"PYTHON": sys.executable, "CXX": "env", "VENV": str(tools)}, f"error: VENV={tools} has files"),
    ):
        env = {"PATH": str(tools), "VENV": str(tmp_path / "venv")} | more
        done = subprocess.run([tools / "bash", ROOT / "launch/venv.sh"], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done.stdout + done.stderr
        assert done.stderr.startswith(error) and not (tmp_path / "venv").exists()


STAND_IN = """#!/usr/bin/env bash
case "$*" in
  "-m venv "*)
    mkdir -p "$4/bin"
    touch "$4/pyvenv.cfg"
    cp "$0" "$4/bin/python"
    printf '#!/bin/sh\\necho "pip 26 from %s (python 3)"\\n' "$(realpath "$4/bin")" >"$4/bin/pip"
    chmod +x "$4/bin/pip"
    ;;
  "-m pip "*) [ "$PIP_USER${PIP_TARGET-unset}" = 0unset ] && echo "$*" >>"$CALLS" ;;
  *sys.base_prefix*) echo NAME ;;
  *pip.__path__*) dirname "$0" ;;
  *) exec REAL "$@" ;;
esac
"""


def test_an_environment_is_made_when_something_changed_and_only_the_project_without_isolation(tmp_path) -> None:
    """With a stand-in for python that writes down what pip is asked for, in a folder with a space and without git."""
    folder = copy_of_the_build(tmp_path / "a folder", registration__cpp="")
    (folder / "launch").mkdir()
    for name in ("launch/venv.sh", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    library = folder / "megabert/_native.abi3.so"
    library.touch()
    for name in ("first", "second"):
        programs.write(tmp_path / name, STAND_IN.replace("NAME", name).replace("REAL", sys.executable))

    def make_venv(python: str = "", where: Path = folder, **more: str) -> list[str]:
        calls = tmp_path / "calls"
        calls.write_text("")
        env = (
            os.environ
            | {"CALLS": str(calls), "VENV": "", "CXX": "true", "PIP_USER": "1", "PIP_TARGET": "/nowhere"}
            | more
        )
        env["PYTHON"] = str(tmp_path / python) if python else ""
        command = ["bash", str(where / "launch/venv.sh")]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made = ["made"] if "making .venv" in done.stdout else []
        return made + calls.read_text().splitlines()

    made, *calls = make_venv("first")
    assert made == "made"
    bare = [call for call in calls if "isolation" in call]
    assert len(bare) == 1 and bare[0].endswith("-c constraints.txt --no-build-isolation --no-deps -e .")
    assert "isolation" not in "".join(k + v for k, v in os.environ.items() if k.startswith("PIP_")).lower()
    wanted = (folder / ".venv/requirements.txt").read_text().splitlines()
    assert {"seqeval", "deepspeed", "pytest", "matplotlib"} <= {Requirement(line).name for line in wanted}
    assert any(call.endswith("-c constraints.txt -r .venv/requirements.txt") for call in calls)

    assert make_venv() == make_venv("first") == []
    assert make_venv("second") == ["made", *calls], "another Python makes another environment"
    assert make_venv() == []
    library.unlink()
    tool = programs.write(folder / ".venv/bin/tool", f"#!{folder}/.venv/bin/python\nprint('the tool runs')\n")
    assert make_venv() == calls, "make clean removed the native library"
    assert subprocess.run([tool], capture_output=True, text=True, check=True).stdout == "the tool runs\n"
    library.touch()
    with open(folder / "constraints.txt", "a") as file:
        file.write("# changed\n")
    assert make_venv() == calls and make_venv() == []
    no_nvcc = {"MEGABERT_CUDA": "1", "CUDA_HOME": "/nowhere", "PATH": "/usr/bin:/bin"}
    (compiler,) = set(make_venv("second", **no_nvcc)) - set(calls)
    assert compiler.endswith(f" cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]=={torch.version.cuda or '13.0'}.*")
    assert make_venv("second", **no_nvcc), "the library still has no CUDA kernels"
    library.write_bytes(b".nv_fatbin")
    assert make_venv("second", **no_nvcc) == []
    moved = folder.rename(tmp_path / "moved")
    assert make_venv(python="first", where=moved) == ["made", *calls], "scripts name the folder that was"


def test_the_package_is_imported_at_once() -> None:
    """In processor time, which other tests at the same moment do not lengthen; the best of five."""
    code = "import sys, megabert; print(*{name.split('.')[0] for name in sys.modules})"
    seconds = []
    for _ in range(5):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert not {"torch", "numpy", "pydantic", "deepspeed", "data_prep"} & set(done.stdout.split())
    assert min(seconds) < 0.3, seconds


def test_cuda_demanded_without_nvcc_is_one_clear_line(tmp_path) -> None:
    folder = copy_of_the_build(tmp_path, registration__cpp=MINIMAL)
    missing = {"PATH": "/nowhere", "CUDA_HOME": "/nowhere"}
    for asked, error in (("1", "error: MEGABERT_CUDA=1 and no nvcc"), ("yes", "error: MEGABERT_CUDA=yes")):
        done = build(folder, "setup.py", "build_ext", "--inplace", MEGABERT_CUDA=asked, **missing)
        assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith(error), done.stderr


@pytest.mark.parametrize("jobs", [pytest.param("0", marks=pytest.mark.slow), "two"])
def test_a_wrong_number_of_compilers_is_one_clear_line(tmp_path, jobs: str) -> None:
    folder = copy_of_the_build(tmp_path, registration__cpp=MINIMAL)
    done = build(folder, "setup.py", "build_ext", "--inplace", MEGABERT_CUDA="0", MAX_JOBS=jobs)
    assert done.returncode == 1 and f"error: MAX_JOBS={jobs}: set it to a number" in done.stderr
    assert "Traceback" not in done.stderr


def test_nvcc_of_nvidias_wheels_comes_last(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    for place in ("site/nvidia/cu13/bin", "toolkit/bin", "path"):
        said = "compute_80 compute_86 compute_89 compute_90"
        nvcc = programs.write(tmp_path / place / "nvcc", f"#!/bin/sh\necho {said}")
        assert setup["find_nvcc"]() == str(nvcc)
    assert setup["architectures"](str(nvcc)) == "8.0;8.9;9.0+PTX", "of CUDA 12.4, which knows no sm_100"


def test_nvcc_compiles_and_links_by_the_compiler_that_cxx_names(tmp_path) -> None:
    """With a stand-in for nvcc that does not link."""
    folder = copy_of_the_build(tmp_path / "copy", registration__cpp="", kernel__cu="")
    made = '*" -c "*) for last; do :; done; touch "$last";;'
    script = f'#!/bin/sh\ncase "$*" in --list*) echo compute_90;; {made} *) exit 1;; esac\n'
    programs.write(tmp_path / "bin/nvcc", script)
    cxx = shutil.which("c++") or shutil.which("g++") or ""
    programs.write(tmp_path / "bin/ccache", '#!/bin/sh\nexec "$@"\n')
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CXX": f"ccache {cxx}", "MEGABERT_CUDA": "1"}
    done = build(folder, "setup.py", "build_ext", "--inplace", **env)
    assert "error: linking _native.abi3.so failed (exit 1)" in done.stderr
    commands = re.findall(r"^  \S+/bin/nvcc -ccbin (\S+) (?:-O3|-shared) ", done.stdout, re.M)
    assert commands == [cxx, cxx], done.stdout


@pytest.mark.slow
def test_the_wheel_holds_presets_and_one_native_library_that_loads(tmp_path) -> None:
    folder = copy_of_the_build(tmp_path, registration__cpp=MINIMAL)
    left = folder / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/megabert/gone.py"
    left.parent.mkdir(parents=True)
    left.touch()  # by an earlier build
    done = build(folder, "setup.py", "-q", "bdist_wheel", MEGABERT_CUDA="0")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = (folder / "dist").glob("*.whl")
    assert re.fullmatch(r"megabert-[0-9.]+-cp311-abi3-manylinux_2_28_(x86_64|aarch64)\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(n for n in names if n.endswith(".toml")) == [
        f"megabert/presets/{path.name}" for path in sorted((ROOT / "megabert/presets").glob("*.toml"))
    ]
    sources = tracked(*(f"{package}/{files}" for package in ("megabert", "data_prep") for files in ("*.py", "**/*.py")))
    modules = sorted({path.relative_to(ROOT).as_posix() for path in sources})
    assert sorted(n for n in names if n.endswith(".py")) == modules
    assert [n for n in names if n.endswith(".so")] == ["megabert/_native.abi3.so"]
    assert sorted(n for n in names if n.endswith(".html")) == [
        f"megabert/commands/{page}_template.html" for page in ("comparison", "report")
    ]
    zipfile.ZipFile(wheel).extract("megabert/_native.abi3.so", tmp_path / "out")
    twice = "import sys, torch; torch.ops.load_library(sys.argv[1]); print(torch.ops.toy.twice(torch.ones(1)).item())"
    done = build(folder, "-c", twice, str(tmp_path / "out/megabert/_native.abi3.so"))
    assert done.stdout.strip() == "2.0", done.stderr

    again = build(folder, "setup.py", "build_ext", "--inplace", MEGABERT_CUDA="0")
    assert again.returncode == 0 and "compiling" not in again.stdout, "an unchanged source was compiled again"
    header = folder / "csrc/registration.cpp"
    header.write_text(header.read_text().replace("2 *", "wrong"))
    broken = build(folder, "setup.py", "build_ext", "--inplace", MEGABERT_CUDA="0")
    assert broken.returncode == 1 and "error: compiling csrc/registration.cpp failed" in broken.stderr
    assert (folder / "megabert/_native.abi3.so").is_file(), "the library that worked is kept"


@pytest.mark.slow
def test_the_source_package_holds_what_the_build_needs(tmp_path) -> None:
    """It is unpacked, and its own setup.py finds every native source; the commands of the Makefile that it has find theirs."""
    places = ("egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path))
    made = build(ROOT, "setup.py", "-q", *places, MEGABERT_CUDA="0")
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]
    (archive,) = tmp_path.glob("megabert-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "out", filter="data")
    (root,) = (tmp_path / "out").iterdir()
    needed = tracked(
        "csrc/**/*", "csrc/*", "launch/*", "launch/**/*", "megabert/**/*.py", "data_prep/**/*.py", "megabert/presets/*"
    )
    assert [path for path in needed if not (root / path.relative_to(ROOT)).is_file()] == []
    assert {"setup.py", "pyproject.toml", "Makefile", "constraints.txt", "LICENSE", "README.md"} <= {*os.listdir(root)}
    assert not list(root.rglob("*.so"))
    for page in sorted(root.rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(root)} links to {target}"
