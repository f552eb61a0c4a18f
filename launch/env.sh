#!/usr/bin/env bash
# The values of your site. Every launch/*.slurm reads this file and nothing else; a variable that is set already wins.
# sbatch takes partition, account and sizes on its command line: sbatch -p gpu -A project -N 4 launch/pretrain_large.slurm

PROJECT=${PROJECT:-${SLURM_SUBMIT_DIR:-$PWD}} # this repository, on a file system that every node sees
VENV=${VENV:-$PROJECT/.venv}                  # made once with `make venv` on a node with the cluster's compiler and nvcc
CORPUS=${CORPUS:-$PROJECT/corpus}             # text for prep.slurm: files, folders or globs, separated by spaces
VOCAB=${VOCAB:-30000}                         # entries of the tokenizer that prep.slurm trains
DATA=${DATA:-$PROJECT/data}                   # where prep.slurm writes: seq128 for phase 1, seq512 for phase 2
DATA_128=${DATA_128:-$DATA/seq128}            # shards of phase 1
DATA_512=${DATA_512:-$DATA/seq512}            # shards of phase 2
PREP=${PREP:---held-out 0.005}                # further options of prep.slurm: --dedup …, --filters …, --tokenizer …
RUNS=${RUNS:-$PROJECT/runs}                   # run folders: checkpoints, metrics, TensorBoard
# module load cuda/13.0                       # whatever your site needs, before the environment is activated
# export NCCL_SOCKET_IFNAME=ib0               # the network that the ranks find each other on

if [ ! -x "$VENV/bin/python" ]; then
  echo "error: $VENV/bin/python is missing: run make venv in $PROJECT, or set VENV in launch/env.sh" >&2
  exit 2
fi
export PATH="$VENV/bin:$PATH" PYTHONPATH="$PROJECT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$PROJECT" || exit 2
