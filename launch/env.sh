#!/usr/bin/env bash
# Settings of your site for launch/*.slurm. The environment takes precedence; launch/job.sh checks each value before use.
# Partition, account and node count are options of sbatch: sbatch -p gpu -A project -N 4 launch/pretrain_large.slurm
# shellcheck disable=SC2034 # used by the scripts that read this one

PROJECT=${PROJECT:-${SLURM_SUBMIT_DIR:-$PWD}} # this repository, on a file system that all nodes share
VENV=${VENV:-$PROJECT/.venv}                  # made by `make venv` on a node with the cluster's compiler
CONTAINER=${CONTAINER:-}                      # image to use instead of VENV: a .sif for apptainer, any for pyxis
CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-apptainer} # apptainer or pyxis
CORPUS=${CORPUS:-$PROJECT/corpus}             # text for prep.slurm: one path, or files, folders or globs separated by spaces
VOCAB=${VOCAB:-30000}                         # vocabulary size of the tokenizer that prep.slurm trains
DATA=${DATA:-$PROJECT/data}                   # output of prep.slurm: seq128 for phase 1, seq512 for phase 2
DATA_128=${DATA_128:-$DATA/seq128}            # shards of phase 1
DATA_512=${DATA_512:-$DATA/seq512}            # shards of phase 2
PREP=${PREP---nsp --held-out 0.005}           # further options of prep.slurm: --nsp for large_phase1 and 2, --dedup …, --filters …, --tokenizer …
RUNS=${RUNS:-$PROJECT/runs}                   # run folders (checkpoints, metrics, TensorBoard), on a shared file system
MAX_RESTARTS=${MAX_RESTARTS:-3}               # restarts in a row without progress before the job gives up
RESTARTS=${RESTARTS:-3}                       # restarts within an allocation before the job is requeued
NODES=${NODES:-${SLURM_JOB_NUM_NODES:-1}}     # nodes that train; further nodes of sbatch -N are spares
EXCLUDE_SLOW=${EXCLUDE_SLOW:-0}               # 1: restarts exclude nodes named in RUN/slow-ranks.json, like failed ones
NETWORK=${NETWORK:-}                          # private network for the ranks' sockets, e.g. 10.78.0.0/24; empty: NCCL and gloo choose
# module load cuda/13.0                       # modules that your site needs
# export NCCL_SOCKET_IFNAME=ib0               # a private network: ranks do not authenticate connections
# export GLOO_SOCKET_IFNAME=ib0               # the same for the control messages
