"""Everything that must travel to a bare GPU machine with torch alone, in one folder: wheels, native library, two datasets.

    python benchmarks/gpu_pack.py --corpus TEXT…            writes build/gpu_pack
    rsync -a --exclude .git --exclude .venv ./ GPU:megabert/
    ssh GPU 'cd megabert && python3 benchmarks/gpu_suite.py'

The machine has Python 3.12 or what --python says, torch and numpy, and no network. Wheels are those of DeepSpeed and of all
else the trainer and the operations' tests import, with what these need in turn; torch and numpy stay the machine's. The
library is compiled here by nvcc (stable ABI: one for all torch versions from 2.11 on); where it does not load, the suite
builds it there. Revision and digests of the sources travel too, for a copy that has no git.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.common import hardware
from benchmarks.gpu import pack

ROOT = hardware.ROOT
LIMIT_MIB = 64  # of all that travels: the pack and the tree it lies in
ROOTS = (
    "deepspeed",
    "pydantic",
    "sentencepiece",
    "safetensors",
    "tqdm",
    "webdataset",
    "zstandard",
    "pytest",
    "pytest-timeout",
)
THERE = {"torch", "numpy", "triton", "setuptools", "pip"}  # the machine's own
FROM_SOURCE = {"deepspeed", "hjson"}  # releases without a wheel, pure Python when nothing is compiled ahead
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 26, 27, 28, 31, 34)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


def run(command: list[str], **env: str) -> str:
    """A command's output. Raises ValueError with its last lines when it fails."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise ValueError(f"{hardware.shown(command)} failed (exit {done.returncode}):\n{last}")
    return done.stdout


def pins() -> dict[str, str]:
    """Tested versions by canonical name, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {line.split("==")[0]: line for line in lines if "==" in line and not line.startswith("#")}


def needs(wheel: Path, python: str) -> set[str]:
    """Canonical names of what a wheel's metadata asks for on Linux with that Python, extras aside."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    where = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
             "platform_system": "Linux", "platform_machine": "x86_64", "extra": ""}  # fmt: skip
    wanted = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name) for r in wanted if r.marker is None or r.marker.evaluate(where)}


def fetch(name: str, folder: Path, python: str) -> Path:
    """The wheel of a package at its tested version, or the newest, for that Python."""
    wanted, before = pins().get(name, name), set(folder.glob("*.whl"))
    pip = [sys.executable, "-m", "pip"]
    if name in FROM_SOURCE:
        more = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", str(folder)]
        run([*pip, "wheel", *more, wanted], DS_BUILD_OPS="0")
    else:
        more = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
        for platform in PLATFORMS:
            more += ["--platform", platform]
        run([*pip, "download", *more, "-d", str(folder), wanted])
    (wheel,) = set(folder.glob("*.whl")) - before
    tags = wheel.stem.split("-")[-3:]
    if name in FROM_SOURCE and tags != ["py3", "none", "any"]:
        raise ValueError(f"{wheel.name}: was compiled for this machine's Python, the other one may not load it")
    return wheel


def collect_wheels(folder: Path, python: str) -> list[str]:
    """Fetches the roots and, from each wheel's own metadata, all that they need but what the machine has."""
    folder.mkdir(parents=True)
    waiting, seen = list(ROOTS), set(ROOTS) | THERE
    while waiting:
        wheel = fetch(waiting.pop(0), folder, python)
        print(f"  {wheel.name}", flush=True)
        more = sorted(needs(wheel, python) - seen)
        waiting += more
        seen |= set(more)
    return sorted(path.name for path in folder.glob("*.whl"))


def put_library(target: Path, given: str) -> dict[str, object]:
    """The library for the GPU: built here from this tree by nvcc, or the one given. Says whether it holds CUDA code."""
    library = Path(given) if given else ROOT / "megabert" / "_native.abi3.so"
    if not given:
        run([sys.executable, "setup.py", "build_ext", "--inplace"], MEGABERT_CUDA="1")
    if not library.is_file():
        raise ValueError(f"--library {given}: there is no such file")
    target.parent.mkdir(parents=True)
    shutil.copy2(library, target)
    code = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]); has = torch._C._dispatch_has_kernel_for_dispatch_key"
    )
    found = run([sys.executable, "-c", f"{code}; print(has('megabert::bias_gelu', 'CUDA'))", str(target)])
    return {"sha256": hashlib.sha256(target.read_bytes()).hexdigest(), "cuda": found.strip() == "True"}


def build_data(folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """Datasets of both row lengths from the corpus, without the reports of the build."""
    lengths = [str(n) for n in args.seq_len]
    command = [sys.executable, "-m", "data_prep", "build", "--output", str(folder), "--quiet", "--held-out", "0"]
    command += ["--vocab-size", str(args.vocab_size), "--seq-len", *lengths, "--input", *args.corpus]
    run(command, **hardware.clone_environment())
    one = len(lengths) == 1
    return {n: (folder if one else folder / f"seq{n}").relative_to(args.output).as_posix() for n in lengths}


def tree_size() -> int:
    """Bytes of the tree that the pack travels in: all files that git does not ignore. Raises ValueError without git."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).split("\0")
    paths = [ROOT / name for name in listed if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", nargs="+", default=["pydoc"], metavar="TEXT", help="as data_prep's --input; about 10 MB"
    )
    parser.add_argument("--output", type=Path, default=pack.FOLDER, metavar="DIR", help="replaced where it is a pack")
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python")
    parser.add_argument("--library", default="", metavar="FILE", help="a native library built already from this tree")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[128, 512], help="row lengths")
    parser.add_argument("--vocab-size", type=int, default=30_000, help="pieces of the tokenizer trained on the corpus")
    parser.add_argument("--no-wheels", action="store_true", help="the other machine has the project's environment")
    args = parser.parse_args(argv)
    args.output = args.output.resolve()
    try:
        if args.output.exists() and not (args.output / pack.RECORD).is_file():
            raise ValueError(f"--output {args.output}: is there and is no pack; name another folder")
        shutil.rmtree(args.output, ignore_errors=True)
        args.output.mkdir(parents=True)
        pack.write_record(args.output, {})  # without data: unfinished, and may be replaced
        record: dict[str, object] = {"python": args.python}
        record["library"] = put_library(args.output / pack.LIBRARY, args.library)
        print(f"library: {record['library']}", flush=True)
        record["data"] = build_data(args.output / "data", args)
        record["wheels"] = [] if args.no_wheels else collect_wheels(args.output / "wheels", args.python)
        record["bytes"] = size = pack.size(args.output)
        tree = tree_size()
        if size + tree > LIMIT_MIB * 2**20:
            raise ValueError(
                f"{args.output}: is {size / 2**20:.1f} MiB beside the tree's {tree / 2**20:.1f}, {LIMIT_MIB} may travel; "
                "give less text in --corpus"
            )
        pack.write_record(args.output, record)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {size / 2**20:.1f} MiB, with the tree {(size + tree) / 2**20:.1f} of {LIMIT_MIB}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
