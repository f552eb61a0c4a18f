#!/usr/bin/env bash
# Settings of your site for launch/kubernetes/render.sh, which checks each value. The environment takes precedence.
# shellcheck disable=SC2034 # used by render.sh

NAME=${NAME:-megabert-large}          # of the job
IMAGE=${IMAGE:-}                      # made from launch/Dockerfile, in a registry that the nodes reach
NODES=${NODES:-1}                     # pods, one a node
GPUS=${GPUS:-8}                       # GPUs of a node
CPUS=${CPUS:-32}                      # cores and memory that a pod requests
MEMORY=${MEMORY:-256Gi}
SHM=${SHM:-64Gi}                      # /dev/shm: batches of loader processes, copies of --in-place; part of the pod's memory
DISK=${DISK:-500Gi}                   # of the node: copies of shards (data.cache_gib), and the runs without RUNS_CLAIM
DATA=${DATA:-}                        # URL of the shards: DATA/seq128 for phase 1, DATA/seq512 for phase 2
MIRROR=${MIRROR:-}                    # URL of the runs, MIRROR/phase1 and MIRROR/phase2: new pods go on from there
RUNS_CLAIM=${RUNS_CLAIM:-}            # ReadWriteMany claim for the run folders, which several nodes must share; one node needs none
SECRET=${SECRET:-}                    # Secret with the bucket's credentials as variables (AWS_ACCESS_KEY_ID, …)
SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-default} # or an account with a role for the bucket
PHASE1=${PHASE1:-large_phase1}        # presets, or TOML files in the image
PHASE2=${PHASE2-large_phase2}         # empty: phase 1 only
GRACE=${GRACE:-600}                   # seconds from TERM to KILL, for the last checkpoint and its upload
MAX_RESTARTS=${MAX_RESTARTS:-3}       # restarts in a row without a new checkpoint before a pod gives up
RESTARTS=${RESTARTS:-10}              # restarts of the job with new pods, without those of lost nodes
