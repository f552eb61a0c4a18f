#!/usr/bin/env bash
# Install the project and its dependencies into $VENV (default .venv), unless it is up to date: a stamp has the hash of setup.py,
# pyproject.toml, constraints.txt and csrc/.
# CUDA kernels are built if NVIDIA's driver is loaded, or as MEGABERT_CUDA=0|1 says. Without nvcc, the compiler is installed from
# NVIDIA's wheels, in the CUDA release of torch.
# PYTHON names the interpreter; the default is the first python3 on PATH that is 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
export PIP_USER=0 # pip's own settings may name another place than $VENV
unset PIP_TARGET PIP_PREFIX

fail() {
  echo "error: $*" >&2
  exit 1
}

hash_of() { # hash of contents and names of files; a missing folder counts as empty
  { find "$@" -type f -print0 2>/dev/null || true; } | LC_ALL=C sort -z | xargs -0 -r sha256sum | sha256sum | cut -c1-64
}

hash_packages=$(hash_of setup.py pyproject.toml constraints.txt)
hash_native=$(hash_of csrc)-${MEGABERT_CUDA:-}-${TORCH_CUDA_ARCH_LIST:-}
wanted=${MEGABERT_CUDA:-$([ ! -e /proc/driver/nvidia/version ] || echo 1)}
stamp=$VENV/.megabert
folder=$(pwd -P)

new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

identity() { # version and prefix of an interpreter, equal for an environment made from it
  "$1" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null
}

in_place() { # whether its scripts name this folder, so that it was neither moved nor copied
  local from
  from=$("$VENV/bin/pip" --version 2>/dev/null | sed 's/^pip [^ ]* from \(.*\) (python .*/\1/')
  [ "$from" -ef "$("$VENV/bin/python" -c 'import pip; print(*pip.__path__)' 2>/dev/null)" ]
}

same_python= # an environment of another Python than PYTHON is replaced
if [ -z "${PYTHON:-}" ] || [ "$(identity "$PYTHON")" = "$(identity "$VENV/bin/python")" ]; then same_python=yes; fi
if [ "$same_python" ] && [ -f megabert/_native.abi3.so ] && [ -f "$stamp" ] &&
  { [ "$wanted" != 1 ] || grep -q nv_fatbin megabert/_native.abi3.so; } &&
  [ "$(cat "$stamp")" = "$hash_packages $hash_native $folder" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
  exit 0
fi

candidates=(python3 python3.14 python3.13 python3.12 python3.11)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
python=
for candidate in "${candidates[@]}"; do
  if new_enough "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python 3.11 or newer; name another one"
  fail "no Python 3.11 or newer on PATH; install one (apt-get install python3 python3-venv) or run make PYTHON=/path/to/python3"
fi
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "$python cannot make virtual environments; install its venv module (apt-get install python3-venv)"
compiler=${CXX:-$(command -v c++ || command -v g++ || echo g++)}
command -v "${compiler%% *}" >/dev/null || fail "no C++ compiler (${compiler%% *}); install one (apt-get install g++) or set CXX"

if [ -z "$same_python" ] || ! in_place || ! new_enough "$VENV/bin/python"; then
  [ -e "$VENV/pyvenv.cfg" ] || [ -z "$(find "$VENV" -not -type d -print -quit 2>/dev/null)" ] ||
    fail "VENV=$VENV has files and is no environment of venv, which would be deleted; name another folder"
  echo "making $VENV with $("$python" --version)"
  "$python" -m venv --clear "$VENV"
fi
pip() {
  "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet -c constraints.txt "$@" ||
    fail "pip could not install $*; its message is above"
}
rm -f "$stamp"
echo "installing into $VENV (the first time this downloads torch, which takes minutes)"
pip --upgrade pip 'setuptools>=77' wheel ninja
pip "$(grep '^torch==' constraints.txt)" numpy # first, since csrc is built with it
if [ "$wanted" = 1 ] && ! command -v nvcc >/dev/null && [ ! -x "${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}}/bin/nvcc" ]; then
  cuda=$("$VENV/bin/python" -c 'import torch; print(torch.version.hip or torch.version.cuda or "13.0")' | cut -d. -f-2)
  if [ "${cuda%.*}" -ge 13 ]; then
    echo "installing the compiler of CUDA $cuda from NVIDIA's wheels"
    pip "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==$cuda.*"
  else # older wheels have no nvcc; ROCm's releases are also below 13
    echo "no CUDA kernels: no wheels have a compiler for torch's release $cuda; put nvcc on PATH or set MEGABERT_CUDA=0"
  fi
fi
# Dependencies are installed with build isolation; only the project is built with the torch above. Source distributions need
# neither a compiler nor Python's headers: DeepSpeed compiles operations on first use (this project uses none), and
# mwparserfromhell, which has no wheel for 3.14 yet, works without its C extension.
"$VENV/bin/python" - >"$VENV/requirements.txt" <<'PYTHON'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
print("\n".join(sorted(line for line in wanted if not line.startswith("megabert["))))
PYTHON
DS_BUILD_OPS=0 WITH_EXTENSION=optional pip -r "$VENV/requirements.txt"
PYTHONWARNINGS="ignore:Editable installation" pip --no-build-isolation --no-deps -e .
# A script's first line cannot name an interpreter in a folder with a space, so scripts start with a shell that runs it.
{ grep -sl '^#!/.* .*/python' "$VENV"/bin/* || true; } | while IFS= read -r script; do
  sed -i "1s|^#!\\(.*\\)|#!/bin/sh\\n'''exec' \"\\1\" \"\$0\" \"\$@\"\\n' '''|" "$script"
done
echo "$hash_packages $hash_native $folder" >"$stamp"
echo "ready: $VENV/bin/python"
