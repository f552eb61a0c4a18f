#!/usr/bin/env bash
# The steps that make an image, the same for launch/Dockerfile and launch/megabert.def: as root on Debian or Ubuntu, in a
# copy of the repository that stays in the image.
#   image.sh build VENV    a compiler, then the environment by `make venv`: packages of constraints.txt, native operations
#   image.sh finish VENV   what a finished image needs beside VENV, and whether everything in it can be imported
# TORCH_INDEX is a package index beside PyPI for torch: PyPI's own torch is the CUDA build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "error: $*" >&2
  exit 2
}

packages() {
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
  rm -rf /var/lib/apt/lists/*
}

step=${1:-} venv=${2:-}
case $step-$venv in
  build-/*)
    packages ca-certificates g++ make python3 python3-venv
    rm -rf build megabert/_native.abi3.so # of the machine that the repository was copied from
    if [ -n "${TORCH_INDEX:-}" ]; then export PIP_EXTRA_INDEX_URL=$TORCH_INDEX; fi
    PIP_NO_CACHE_DIR=1 make venv VENV="$venv"
    rm -rf build
    ;;
  finish-/*)
    packages ca-certificates g++ iproute2 libgomp1 python3 python3-dev # torch.compile makes C++ and builds it
    "$venv/bin/megabert" doctor
    ;;
  *) fail "image.sh ${step:-STEP} ${venv:-VENV}: give build or finish, and the environment's absolute path" ;;
esac
