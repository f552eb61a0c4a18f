"""The whole GPU suite on the CPU in a copy of the GPU machine: its Python, its torch, its packages, no network.

    python benchmarks/gpu/rehearse.py [--python python3.12] [--torch 2.13.0] [--each-wheel]

Makes the environment `build/gpu_machine` by `machine.txt`, copies the committed tree and the pack into an empty folder, and runs
`gpu_suite.py --device cpu --quick` there in a network namespace of its own. `--each-wheel`: instead, leaves out one wheel after
another; the suite has to name each.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a clone need not be installed
from benchmarks.common import hardware
from benchmarks.gpu import pack

ROOT = hardware.ROOT
# a shell with only the loopback interface, as root or as any user
OFFLINE = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def environment(python: str, torch: str) -> Path:
    """The Python of `build/gpu_machine`, made if missing or other than in `machine.txt`; with another torch if one is named."""
    listed = pack.MACHINE.read_text()
    if torch:
        listed = re.sub("^torch==.*$", f"torch=={torch}", listed, flags=re.M)
        listed = re.sub("^triton==.*$", "triton", listed, flags=re.M)
    folder = ROOT / "build" / "-".join(filter(None, ("gpu_machine", torch)))
    record = folder / "finished.txt"
    if not record.is_file() or record.read_text() != listed:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        (folder / "packages.txt").write_text(listed)
        pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "-r", str(folder / "packages.txt")], check=True)
        (folder / "packages.txt").rename(record)
    return folder / "bin/python"


def copy_tree(folder: Path, packed: Path) -> Path:
    """The committed files and the pack `packed`, as a transfer to the machine takes them."""
    names = [name for name in hardware.output_of(["git", "ls-files", "-z"]).split("\0") if (ROOT / name).is_file()]
    subprocess.run(["cp", "--parents", "--preserve=timestamps", *names, str(folder)], cwd=ROOT, check=True)
    shutil.copytree(packed, folder / pack.FOLDER.relative_to(ROOT))
    return folder


def suite(python: Path, tree: Path, *options: str, to: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the suite; `to`: where its output goes, by default to that of this process."""
    command = [str(python), "benchmarks/gpu_suite.py", "--device", "cpu", "--quick", "--minutes", "60"]
    command += ["--json", "gpu.json", *options]
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tree), "PYTHONUNBUFFERED": "1"}
    return subprocess.run([*OFFLINE, *command], cwd=tree, env=clean, text=True, stdout=to, stderr=subprocess.STDOUT)


def without_each(python: Path, tree: Path) -> int:
    """Number of wheels whose absence the suite does not name."""
    missed = 0
    for wheel in sorted((tree / pack.FOLDER.relative_to(ROOT) / "wheels").glob("*.whl")):
        aside = tree / wheel.name
        wheel.rename(aside)
        done = suite(python, tree, "--only", "none", to=subprocess.PIPE)
        output = done.stdout.strip().splitlines()
        aside.rename(wheel)
        name = wheel.name.split("-")[0].replace("_", "-")
        # with 2 it is missing, with 0 another version of the machine's is said, or its own fits
        named = [line for line in output if name in line.replace("_", "-")] if done.returncode in (0, 2) else []
        own = [str(python), "-c", f"import importlib.metadata as found; found.version({name!r})"]
        if not named and not done.returncode and not subprocess.run(own, stderr=subprocess.DEVNULL).returncode:
            named = ["the machine's own fits"]
        missed += not named
        said = named[-1] if named else f"NOT NAMED: {output[-1]}"
        print(f"without {name}: exit {done.returncode}, {said}", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=f"python{pack.PYTHON}")
    parser.add_argument("--torch", default="", metavar="VERSION", help="another one than the machine's")
    parser.add_argument("--each-wheel", action="store_true")
    parser.add_argument("--pack", type=Path, default=pack.FOLDER, metavar="DIR")
    args = parser.parse_args()
    if not pack.read(args.pack):
        parser.error(f"{args.pack}: no finished pack; gpu_suite.py --make-pack makes one")
    python = environment(args.python, args.torch)
    with tempfile.TemporaryDirectory(prefix="gpu_machine_") as folder:
        tree = copy_tree(Path(folder), args.pack)
        if args.each_wheel:
            return int(without_each(python, tree) > 0)
        return suite(python, tree).returncode


if __name__ == "__main__":
    sys.exit(main())
