"""launch/Dockerfile and launch/megabert.def: what they copy, build and call exists, and both make the same image."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = "/opt/megabert"  # the repository in an image
STAGES = {"build": "build", "finish": ""}  # step of image.sh -> name of the stage that takes it


def docker_stages() -> dict[str, list[list[str]]]:
    """The instructions of each stage of the Dockerfile as words, by its name ("" for the last one)."""
    text = (ROOT / "launch/Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    stages: dict[str, list[list[str]]] = {}
    name = None
    for line in filter(None, map(str.strip, text.splitlines())):
        words = shlex.split(line)
        if words[0] == "FROM":
            name = words[3] if len(words) > 2 else ""
        stages.setdefault("before" if name is None else name, []).append(words)
    return stages


def definition_stages() -> dict[str, dict[str, list[str]]]:
    """The sections of each stage of the definition file, their lines without indentation; "" has the header."""
    stages: list[dict[str, list[str]]] = []
    for line in (ROOT / "launch/megabert.def").read_text().splitlines():
        if line.startswith("Bootstrap:"):
            stages.append({"": []})
            section = ""
        if line.startswith("%"):
            section = line[1:]
            stages[-1][section] = []
        elif stages and line.strip():
            stages[-1][section].append(line.strip())
    (build, final) = stages
    return {"build": build, "": final}


def docker_copies() -> dict[str, str]:
    """Source -> place in the image, of what the first stage takes from the repository."""
    found = {}
    for words in docker_stages()["build"]:
        if words[0] == "COPY":
            *sources, target = words[1:]
            for source in sources:
                found[source] = f"{HOME}/{source if target == './' else target}"
    return found


def test_what_is_copied_exists_and_is_the_same_in_both() -> None:
    copies = docker_copies()
    assert [name for name in copies if not (ROOT / name).exists()] == []
    assert all(place == f"{HOME}/{name}" for name, place in copies.items())
    files = dict(line.split() for line in definition_stages()["build"]["files"])
    assert files == copies
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    needed = {name for name in packages["include"] if "." not in name}
    needed |= {"csrc", "setup.py", "pyproject.toml", "constraints.txt", "Makefile", "launch"}
    assert needed <= set(copies), "what the environment is made of"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= set(copies), "what setuptools reads"


def test_the_finished_image_takes_the_environment_and_the_repository_alone() -> None:
    copies = [words[1:] for words in docker_stages()[""] if words[0] == "COPY"]
    assert copies == [["--from=build", place, place] for place in (HOME, "/opt/venv")]
    assert definition_stages()[""]["files from build"] == [f"{place} {place}" for place in (HOME, "/opt/venv")]


@pytest.mark.parametrize(("step", "stage"), STAGES.items())
def test_both_take_the_steps_of_the_script(step: str, stage: str) -> None:
    (run,) = [words for words in docker_stages()[stage] if words[0] == "RUN"]
    (post,) = definition_stages()[stage]["post"]
    for words in (run, shlex.split(post)):
        at = words.index("bash")
        assert (ROOT / words[at + 1].removeprefix(f"{HOME}/")).samefile(ROOT / "launch/image.sh")
        assert words[at + 2 :] == [step, "/opt/venv"]
    script = (ROOT / "launch/image.sh").read_text()
    assert f"\n  {step}-/*)\n" in script
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z]+) VENV=", script):
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert "make venv VENV=" in script


def test_arguments_have_the_same_defaults_in_both() -> None:
    docker = dict(words[1].split("=", 1) for stage in docker_stages().values() for words in stage if words[0] == "ARG")
    sections = definition_stages()
    theirs = dict(line.split("=", 1) for stage in sections.values() for line in stage["arguments"])
    names = {"build_base": "BUILD_BASE", "base": "BASE", "torch_index": "TORCH_INDEX", "architectures": "TORCH_CUDA_ARCH_LIST"}  # fmt: skip
    assert {names[name]: value for name, value in theirs.items()} == docker
    used = set(re.findall(r"{{ (\w+) }}", (ROOT / "launch/megabert.def").read_text()))
    assert used == set(theirs)
    assert [stage[""][1] for stage in sections.values()] == ["From: {{ build_base }}", "From: {{ base }}"]
    for name, argument in (("build", "BUILD_BASE"), ("", "BASE")):
        assert docker_stages()[name][0][:2] == ["FROM", f"${{{argument}}}"]


def test_commands_run_by_the_images_own_python() -> None:
    """The SLURM scripts say `python` in a container, and nothing of where it is."""
    (env,) = [words[1:] for words in docker_stages()[""] if words[0] == "ENV"]
    assert env[0].startswith("PATH=/opt/venv/bin:")
    assert definition_stages()[""]["environment"] == ["export PATH=/opt/venv/bin:$PATH"]


@pytest.mark.parametrize("args", [[], ["build"], ["build", "venv"], ["finish"], ["test", "/opt/venv"]])
def test_a_wrong_step_is_one_line(args: list[str]) -> None:
    done = subprocess.run(["bash", str(ROOT / "launch/image.sh"), *args], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: image.sh ") and done.stderr.count("\n") == 1, done.stderr
