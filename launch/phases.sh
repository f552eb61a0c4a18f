#!/usr/bin/env bash
# BERT-LARGE's phases under torchrun, from and to a bucket; every node runs this, under Kubernetes and SkyPilot:
#   launch/keep.sh launch/phases.sh --run RUNS [override…]
#   DATA=URL            shards: URL/seq128 for phase 1, URL/seq512 for phase 2
#   MIRROR=URL          copies of the runs: URL/phase1 and URL/phase2, from which an empty RUNS goes on
#   CACHE=folder        the node's copies of shards
#   PHASE1=, PHASE2=    other presets or TOML files; an empty PHASE2 leaves phase 2 out
#   PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT    torchrun's options
# Nodes meet at PET_MASTER_PORT for phase 1 and at the port after it for phase 2, so that a node which restarted and passes over
# phase 1 does not meet the others in phase 2.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
PHASE1=${PHASE1:-large_phase1} PHASE2=${PHASE2-large_phase2}
for name in DATA MIRROR; do check "$name" "$URL" "a URL" "the environment"; done
check CACHE '/.+' "an absolute path" "the environment"
check PET_MASTER_PORT "$NUMBER" "a port" "the environment"
if [ "${1-}" != --run ] || [ -z "${2-}" ]; then fail "launch/phases.sh: which --run FOLDER?"; fi
runs=$2
shift 2
if [ -n "$PHASE2" ]; then check_stop "$@"; fi

# before there are ranks, keep.sh signals this script
trap 'kill -USR2 "${!:-}" 2>/dev/null || exit 85' USR2
phase() { # NUMBER PRESET LENGTH [override…]
  PET_MASTER_PORT=$((PET_MASTER_PORT + $1 - 1)) torchrun -- megabert/train.py --config "$2" --data "${DATA%/}/seq$3" \
    --run "$runs/phase$1" "checkpoint.mirror=${MIRROR%/}/phase$1" "data.cache_dir=$CACHE" "${@:4}" &
  wait $!
}

phase 1 "$PHASE1" 128 "$@"
if [ -z "$PHASE2" ]; then exit; fi
if [ -e "${MEGABERT_EXIT_DIR-}/stop" ]; then exit 85; fi # requested while the ranks of phase 1 ended
phase 2 "$PHASE2" 512 "init_from=$runs/phase1" "$@"
