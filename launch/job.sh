#!/usr/bin/env bash
# Restarts of a SLURM job: sourced by launch/*.slurm. Reads the site's values and checks them, and starts the command again
# when it ended for a reason that is not its own: on the nodes that the job has, then by a requeue. Never COMPLETED before it
# is finished.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "${root:?}/launch/lib.sh"
# shellcheck source=launch/env.sh
source "$root/launch/env.sh"

for name in MAX_RESTARTS RESTARTS NODES; do check "$name" "$NUMBER" "a number"; done
SLURM_JOB_NUM_NODES=${SLURM_JOB_NUM_NODES:-$NODES} # not set where a script is run without sbatch
check SLURM_JOB_NUM_NODES "$NUMBER" "a number of nodes" "the job's environment"
((NODES >= 1 && NODES <= SLURM_JOB_NUM_NODES)) || fail "NODES=$NODES is outside 1 to $SLURM_JOB_NUM_NODES, which the job has"
for name in RESTART_WAIT LONGEST_WAIT; do check "$name" "$NUMBER" "a number of seconds" "the environment"; done
check VOCAB "$NUMBER" "a number"
check EXCLUDE_SLOW "0|1" "0 or 1"
check SLURM_JOB_ID "$NUMBER" "a job's number" "the job's environment"
check SLURM_NTASKS "$NUMBER" "a number of tasks" "the job's environment"
check CONTAINER_RUNTIME 'apptainer|pyxis' "apptainer or pyxis"
check NETWORK '|[0-9a-fA-F:.]+/[0-9]{1,3}' "a network such as 10.78.0.0/24"
check_rendezvous
for name in PROJECT RUNS DATA DATA_128 DATA_512; do
  check "$name" '/[^[:cntrl:]]*' "an absolute path"
  [ -z "$CONTAINER" ] || check "$name" '[^,:]*' "a path without , and : as a container's mounts need it"
done
[ -f "$PROJECT/megabert/train.py" ] || fail "PROJECT=$PROJECT is not this repository; set it in launch/env.sh"
mkdir -p "$RUNS" || fail "RUNS=$RUNS cannot be made; set it in launch/env.sh"
cd "$PROJECT"
export PYTHONPATH="$PROJECT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# read_places WORDS: the absolute paths among them, each as far as the folder in front of its first wildcard
read_places() {
  local words word
  read -r -a words <<<"$1"
  for word in "${words[@]}"; do
    if [[ $word != /* ]]; then continue; fi
    word=${word%%[*?[]*}
    if [ ! -e "$word" ]; then word=${word%/*}; fi
    if [[ -e $word && $word/ != "$PROJECT"/* ]]; then echo "${word%/}"; fi
  done
}
mapfile -t read_from < <(read_places "${CORPUS:-} ${PREP:-}")
mounted=("$PROJECT" "$RUNS" "$DATA" "$DATA_128" "$DATA_512" "${read_from[@]}")

# shellcheck disable=SC2034 # read by the scripts
inside=() # what stands before a command so that it runs in the environment
# shellcheck disable=SC2034
options=() # srun's options for the same
if [ -z "$CONTAINER" ]; then
  [ -x "$VENV/bin/python" ] ||
    fail "$VENV/bin/python is missing: run make venv in $PROJECT, or set VENV in launch/env.sh"
  export PATH="$VENV/bin:$PATH"
elif [ "$CONTAINER_RUNTIME" = apptainer ]; then
  [ -e "$CONTAINER" ] || fail "CONTAINER=$CONTAINER does not exist; set it in launch/env.sh"
  command -v apptainer >/dev/null || fail "apptainer is not on PATH; load its module in launch/env.sh"
  mkdir -p "$DATA"
  # shellcheck disable=SC2034
  inside=(apptainer exec --nv --bind "$(IFS=, && echo "${mounted[*]}")" --pwd "$PROJECT" "$CONTAINER")
else
  mounts=
  for path in "${mounted[@]}"; do mounts+="${mounts:+,}$path:$path"; done
  # shellcheck disable=SC2034
  options=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$PROJECT")
fi

job=$RUNS/.job-$SLURM_JOB_ID # this job's state across restarts: how many made no progress
mkdir -p "$job"
HOLD=${HOLD:-600} # seconds that a preempted job waits for SLURM to requeue it where scontrol cannot
check HOLD "$NUMBER" "a number of seconds" "the environment"

# The batch shell alone gets USR2 before the time limit (--signal=B:…). SLURM sends TERM to the ranks itself, in a
# preemption without this shell.
# shellcheck disable=SC2317 # called by a trap
forward_signal() {
  echo "$(date -Is) SIG$1 in the batch shell"
  case $1 in USR1 | USR2) kill -USR2 "$2" 2>/dev/null || true ;; esac
}

# Progress is what the function `progress` of the script prints: something else once there is some. `restarts` holds how
# many attempts in a row made none, and what it printed last.
remember() { printf '%s\n%s\n' "$1" "$(progress)" >"$job/restarts"; }

# job_field NAME: what SLURM says of this job; nothing without scontrol
job_field() { scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | sed -nE "s/.* $1=([^ ]*).*/\1/p" || true; }

# ends_itself: whether SLURM ends this job
job_nodes() { scontrol show hostnames "$(job_field NodeList)" 2>/dev/null; }

ends_itself() { [[ $(job_field JobState) =~ ^(CANCELLED|COMPLETING)$ ]]; }

meeting=${MASTER_ADDR:-} # where the ranks are to meet, if that is given: rank 0's node then stays
nodes=()                 # of an attempt, in SLURM's order; none without scontrol
failed=()                # that the ranks of the last attempt named
slow=()                  # whose ranks were slow when it ended, with EXCLUDE_SLOW=1
named=()                 # that any attempt in this allocation named: failed ones, the newest first, then slow ones

has() { [[ " ${*:2} " == *" $1 "* ]]; } # has WORD words…

# choose_nodes: NODES of those that the job has; where it has more, the ones that are `named` are left out
choose_nodes() {
  local all node spare first=${meeting:+1} out=()
  mapfile -t all < <(job_nodes)
  spare=$((${#all[@]} - NODES))
  for node in "${named[@]}"; do
    if [ "${#out[@]}" -lt "$spare" ] && has "$node" "${all[@]:$first}"; then out+=("$node"); fi
  done
  nodes=()
  for node in "${all[@]}"; do
    if [ "${#nodes[@]}" -lt "$NODES" ] && ! has "$node" "${out[@]}"; then nodes+=("$node"); fi
  done
}

# slow_nodes: those that a run's record of slow ranks names, written in the last attempt; a script that trains replaces it
slow_nodes() { :; }

# name_nodes: those that the ranks of the last attempt named; where they are most of its nodes, they prove nothing
name_nodes() {
  local node
  mapfile -t failed < <(find "$job/ranks" -type f -exec sed -n 's/^failed=//p' {} + | sort -u)
  if [ "${#failed[@]}" -gt $(((NODES + 1) / 2)) ]; then failed=(); fi
  for node in "${failed[@]}"; do if ! has "$node" "${named[@]}"; then named=("$node" "${named[@]}"); fi; done
  slow=()
  if [ "$EXCLUDE_SLOW" = 1 ]; then mapfile -t slow < <(slow_nodes); fi
  if [ "${#slow[@]}" -gt $(((NODES + 1) / 2)) ]; then slow=(); fi
  for node in "${slow[@]}"; do if ! has "$node" "${named[@]}"; then named+=("$node"); fi; done
}

# drop_failed: give the failed nodes back to SLURM, which then does not end the job for them; false where too few are left
drop_failed() {
  local all node keep=()
  mapfile -t all < <(job_nodes)
  for node in "${all[@]}"; do
    if [ "$node" = "${SLURMD_NODENAME:-}" ] || ! has "$node" "${failed[@]}"; then keep+=("$node"); fi
  done
  [ "${#keep[@]}" -ge "$NODES" ] && [ "${#keep[@]}" -lt "${#all[@]}" ] || return 1
  (cd "$job" && scontrol update JobId="$SLURM_JOB_ID" NodeList="$(IFS=, && echo "${keep[*]}")") >/dev/null
}

# on_nodes: whether the ranks' step is still on some node
on_nodes() { squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null | grep -qE '\.[0-9]+ *$'; }

# wait_for_lost_node: return when the ranks' step has ended on all nodes, or the others are given back; false when SLURM ends
# this job, or at a signal. srun leaves a step that is on a node that does not answer. Requeued then, the job is counted wrongly
# once SLURM finds that node down: its next start is refused the GPUs (22.05: "Invalid generic resource"). SLURM finds it down
# after SlurmdTimeout, and requeues.
wait_for_lost_node() {
  local patience waited
  patience=$(scontrol show config 2>/dev/null | sed -nE 's/^SlurmdTimeout *= *([0-9]+).*/\1/p') || true # no scontrol here
  for ((waited = 0; waited < ${patience:-300} + 60; waited++)); do
    if [ -n "$stopping" ] || ends_itself; then return 1; fi
    on_nodes || return 0
    if [ "$waited" = 5 ]; then
      if drop_failed; then echo "$(date -Is) given back, because they do not answer: ${failed[*]}" && return; fi
      echo "$(date -Is) a node does not answer: waiting until SLURM finds it down"
    fi
    rest 1
  done
  return 1
}

# requeue: this job again, without the nodes that are named as far as enough others are there
requeue() {
  local out count partition node
  out=$(job_field ExcNodeList | sed 's/(null)//')
  for node in "${named[@]}"; do out+=${out:+,}$node; done
  partition=$(job_field Partition)
  count=$(sinfo --noheader --Node --partition="$partition" --states=idle,mixed,allocated,completing --format=%N 2>/dev/null |
    sort -u | grep -cvxF "$(scontrol show hostnames "$out" 2>/dev/null)") || true
  trap '' TERM # of the requeue itself: the lines below come first
  scontrol requeue "$SLURM_JOB_ID" || return 1
  if [ "${#named[@]}" = 0 ]; then return; fi
  if [ "${count:-0}" -lt "$SLURM_JOB_NUM_NODES" ]; then
    echo "$(date -Is) not left out: ${named[*]}; $partition has too few others"
  elif scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$out"; then # only of a job that waits
    echo "$(date -Is) left out from now on: ${named[*]}"
  fi
}

# count_attempt WHAT: sets `count`, the attempts in a row without progress; gives up after too many
count_attempt() {
  local before=''
  count=0
  { read -r count && IFS= read -r before; } <"$job/restarts" || true
  if [[ $count =~ ^($NUMBER)$ && $(progress) == "$before" ]]; then count=$((count + 1)); else count=0; fi
  remember "$count"
  if [ "$count" -gt "$MAX_RESTARTS" ]; then
    echo "error: $1 ended with $ended, and $MAX_RESTARTS restarts in a row made no progress" >&2
    exit 4
  fi
}

# run_or_restart WHAT command…: returns when the command is finished; otherwise ends this job, requeued or not.
run_or_restart() {
  local what=$1 count within answered
  shift
  [ -f "$job/restarts" ] || remember 0
  choose_nodes
  for ((within = 1; ; within++)); do
    attempt "$job/ranks" forward_signal "$@"
    case $ended in
      0) return ;;
      2 | 3) echo "$(date -Is) $what ended with $ended: starting it again would not help" && exit "$ended" ;;
    esac
    name_nodes
    # Before a time limit this shell gets USR2. Otherwise a job that is completing while this shell still runs is one
    # that SLURM ends itself: it was cancelled, or lost a node, and then SLURM requeues it.
    answered=yes
    wait_for_lost_node || answered=
    if [ "$stopping" != USR2 ] && ends_itself; then
      echo "$(date -Is) $what ended with $ended: SLURM ends this job itself, because it was cancelled or lost a node" && exit "$ended"
    fi
    count_attempt "$what"
    if [ -z "$stopping" ]; then before_restart "$count"; fi
    if [ "$ended" != 4 ] || [ -n "$stopping" ] || [ -z "$answered" ] || [ "$within" -gt "$RESTARTS" ]; then break; fi
    choose_nodes
    echo "$(date -Is) $what ended with 4, failed nodes: ${failed[*]:-none named}${slow[*]:+, slow nodes: ${slow[*]}};" \
      "restart $within of $RESTARTS in this job on ${nodes[*]:-its nodes}; attempts in a row without progress: $count"
  done
  echo "$(date -Is) $what ended with $ended: requeued; attempts in a row without progress: $count"
  if ! requeue; then
    echo "scontrol cannot requeue this job: it ends with 85, which RequeueExit=85 in slurm.conf requeues; otherwise submit it again"
    # Before a time limit this shell gets USR2, in a preemption nothing. A preempted job that ends by itself is not
    # requeued, one that SLURM has to end is.
    if [ -z "$stopping" ]; then sleep "$HOLD" & wait $!; fi
  fi
  exit 85
}
