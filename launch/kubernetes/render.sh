#!/usr/bin/env bash
# Kubernetes objects of a job that trains BERT-LARGE, with the values of values.sh and overrides for both phases:
#   launch/kubernetes/render.sh jobset [override…] | kubectl apply -f -      a JobSet
#   launch/kubernetes/render.sh trainjob [override…] | kubectl apply -f -    the same as a TrainJob of Kubeflow Trainer
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/lib.sh
source "$here/../lib.sh"
# shellcheck source=launch/kubernetes/values.sh
source "$here/values.sh"

names=()
# value NAME PATTERN MEANING: check a value that the templates name
value() {
  check "$1" "$2" "$3" launch/kubernetes/values.sh
  names+=("$1")
}
LABEL='[a-z]([a-z0-9-]{0,38}[a-z0-9])?'
SIZE='[1-9][0-9]{0,5}[MGT]i'
value NAME "$LABEL" "a name of at most 40 small letters, digits and -"
value IMAGE '[A-Za-z0-9][A-Za-z0-9._/:@-]*' "an image"
for name in NODES GPUS CPUS GRACE; do value "$name" '[1-9][0-9]{0,4}' "a number from 1"; done
for name in MEMORY SHM DISK; do value "$name" "$SIZE" "a size such as 64Gi"; done
for name in DATA MIRROR; do value "$name" "$URL" "a URL"; done
for name in RUNS_CLAIM SECRET; do check "$name" '|[a-z0-9][a-z0-9.-]*' "a name" launch/kubernetes/values.sh; done
value SERVICE_ACCOUNT '[a-z0-9][a-z0-9.-]*' "a name"
for name in MAX_RESTARTS RESTARTS; do value "$name" "$NUMBER" "a number"; done
value PHASE1 '[A-Za-z0-9_./-]+' "a preset or a TOML file"
value PHASE2 '[A-Za-z0-9_./-]*' "a preset or a TOML file"
[ "$NODES" = 1 ] || [ -n "$RUNS_CLAIM" ] ||
  fail "RUNS_CLAIM is empty: $NODES nodes write one checkpoint; name a ReadWriteMany claim in launch/kubernetes/values.sh"
kind=${1-}
[[ $kind =~ ^(jobset|trainjob)$ ]] || fail "launch/kubernetes/render.sh: write jobset or trainjob"

# shellcheck disable=SC2034 # these four are read by their names
{
  OVERRIDES=
  for word in "${@:2}"; do
    [[ $word =~ ^[^[:cntrl:]\"\\$]+$ ]] || fail "launch/kubernetes/render.sh: $(printf %q "$word") is not section.key=value"
    OVERRIDES+=", \"$word\""
  done
  ENV_FROM="[${SECRET:+{secretRef: {name: $SECRET\}\}}]"
  RUNS_VOLUME="emptyDir: {sizeLimit: $DISK}"
  if [ -n "$RUNS_CLAIM" ]; then RUNS_VOLUME="persistentVolumeClaim: {claimName: $RUNS_CLAIM}"; fi
  JOBSET_SPEC=$(sed '1,/^spec:/d; s/^/    /' "$here/jobset.yaml") # two levels deeper in a runtime
}
text=$(cat "$here/$kind.yaml" "$here/network.yaml")
for name in JOBSET_SPEC OVERRIDES ENV_FROM RUNS_VOLUME "${names[@]}"; do
  text=${text//"\${$name}"/"${!name}"}
done
echo "$text"
