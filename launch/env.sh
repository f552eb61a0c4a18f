#!/usr/bin/env bash
# The values of your site: both launch/*.slurm read this file. A variable that is set already wins; launch/job.sh checks
# each of them before it reaches a command.
# sbatch takes partition, account and sizes on its command line: sbatch -p gpu -A project -N 4 launch/pretrain_large.slurm
# shellcheck disable=SC2034 # used by the scripts that read this one

PROJECT=${PROJECT:-${SLURM_SUBMIT_DIR:-$PWD}} # this repository, on a file system that every node sees
VENV=${VENV:-$PROJECT/.venv}                  # made once with `make venv` on a node with the cluster's compiler
CONTAINER=${CONTAINER:-}                      # image to run in instead of VENV: a .sif for apptainer, any for pyxis
CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-apptainer} # apptainer or pyxis
CORPUS=${CORPUS:-$PROJECT/corpus}             # text for prep.slurm: files, folders or globs, separated by spaces
VOCAB=${VOCAB:-30000}                         # entries of the tokenizer that prep.slurm trains
DATA=${DATA:-$PROJECT/data}                   # where prep.slurm writes: seq128 for phase 1, seq512 for phase 2
DATA_128=${DATA_128:-$DATA/seq128}            # shards of phase 1
DATA_512=${DATA_512:-$DATA/seq512}            # shards of phase 2
PREP=${PREP:---nsp --held-out 0.005}          # further options of prep.slurm: --nsp for large_phase1 and 2, --dedup …, --filters …, --tokenizer …
RUNS=${RUNS:-$PROJECT/runs}                   # run folders: checkpoints, metrics, TensorBoard; every node sees it
MAX_RESTARTS=${MAX_RESTARTS:-3}               # restarts in a row without progress before a job gives up
RESTARTS=${RESTARTS:-3}                       # restarts on the nodes that a job has, before it is requeued
NODES=${NODES:-${SLURM_JOB_NUM_NODES:-1}}     # nodes that train; those that sbatch -N takes beyond them are spare
EXCLUDE_SLOW=${EXCLUDE_SLOW:-0}               # 1: restarts leave out nodes that RUN/slow-ranks.json names, like failed ones
NETWORK=${NETWORK:-}                          # the cluster's own network for the ranks' sockets, e.g. 10.78.0.0/24; empty: NCCL's and gloo's choice
# module load cuda/13.0                       # whatever your site needs
# export NCCL_SOCKET_IFNAME=ib0               # the cluster's own network: ranks trust whoever reaches their ports
# export GLOO_SOCKET_IFNAME=ib0               # the same for the control messages
