#!/usr/bin/env bash
# Restarts of a SLURM job; sourced by launch/*.slurm. Checks the site's settings, runs a command, and restarts it after faults
# and time limits: first on the job's nodes, then by a requeue. The job is not COMPLETED before the command has finished.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "${root:?}/launch/lib.sh"
catch_signals forward_signal # before the modules of env.sh, which take their time
set +u # `module load` of many sites reads unset variables
# shellcheck source=launch/env.sh
source "$root/launch/env.sh"
set -u

[ -n "${SLURM_JOB_ID-}" ] || fail "runs as a job of SLURM: sbatch $0"
for name in MAX_RESTARTS RESTARTS NODES VOCAB; do check "$name" "$NUMBER" "a number"; done
SLURM_JOB_NUM_NODES=${SLURM_JOB_NUM_NODES:-$NODES} # not set where a script is run without sbatch
check SLURM_JOB_NUM_NODES "$NUMBER" "a number of nodes" "the job's environment"
((NODES >= 1 && NODES <= SLURM_JOB_NUM_NODES)) || fail "NODES=$NODES is outside 1 to $SLURM_JOB_NUM_NODES, the job's nodes"
HOLD=${HOLD:-600} # seconds that a preempted job waits to be requeued by SLURM if scontrol cannot requeue it
for name in RESTART_WAIT LONGEST_WAIT HOLD; do check "$name" "$NUMBER" "a number of seconds" "the environment"; done
check EXCLUDE_SLOW "0|1" "0 or 1"
check SLURM_JOB_ID "[1-9][0-9]{0,9}" "a job's number" "the job's environment"
check SLURM_NTASKS "$NUMBER" "a number of tasks" "the job's environment"
check CONTAINER_RUNTIME 'apptainer|pyxis' "apptainer or pyxis"
check NETWORK '|[0-9a-fA-F:.]+/[0-9]{1,3}' "a network such as 10.78.0.0/24"
check_rendezvous
for name in CORPUS PREP; do check "$name" '[^[:cntrl:]]*' "words on one line"; done
for name in PROJECT RUNS DATA DATA_128 DATA_512; do
  check "$name" '/[^[:cntrl:]]*' "an absolute path"
  [ -z "$CONTAINER" ] || check "$name" '[^,:]*' "a path without , and : for a container's mounts"
done
[ -f "$PROJECT/megabert/train.py" ] || fail "PROJECT=$PROJECT is not this repository; set it in launch/env.sh"
mkdir -p "$RUNS" || fail "RUNS=$RUNS cannot be created; set it in launch/env.sh"
cd "$PROJECT"
export PYTHONPATH="$PROJECT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

read -r -a corpus <<<"$CORPUS"
if [ -e "$CORPUS" ]; then corpus=("$CORPUS"); fi # one path, with blanks

# read_places WORD…: the absolute paths among the words, cut to the folder before the first wildcard
read_places() {
  local word
  for word in "$@"; do
    if [[ $word != /* ]]; then continue; fi
    word=${word%%[*?[]*}
    if [ ! -e "$word" ]; then word=${word%/*}; fi
    if [[ -e $word && $word/ != "$PROJECT"/* ]]; then echo "${word%/}"; fi
  done
}
read -r -a further <<<"$PREP" # of prep.slurm
mapfile -t read_from < <(read_places "${corpus[@]}" "${further[@]}")
[ -z "$CONTAINER" ] || [[ ${read_from[*]} != *[,:]* ]] || fail "CORPUS or PREP has a path with , or :, which a container's mounts cannot have"
mounted=("$PROJECT" "$RUNS" "$DATA")
# before the first build they are not there
for path in "$DATA_128" "$DATA_512"; do if [ -e "$path" ]; then mounted+=("$path"); fi; done
mounted+=("${read_from[@]}")

# shellcheck disable=SC2034 # read by the scripts
inside=() # prefix of a command that runs it in the container
# shellcheck disable=SC2034
options=() # srun options for the container
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
  mkdir -p "$DATA"
  mounts=
  for path in "${mounted[@]}"; do mounts+="${mounts:+,}$path:$path"; done
  # shellcheck disable=SC2034
  options=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$PROJECT")
fi

# SLURM_JOB_ID of an array's last task is also the number of the whole array
this_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
check this_job '[1-9][0-9]{0,9}(_[0-9]{1,10})?' "a job's number" "the job's environment"
say() { echo "$(date -Is) $*" || true; } # the disk of the log may be full

job=$RUNS/.job-$SLURM_JOB_ID # state of this job across restarts: number of attempts without progress
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then rm -rf "$job"; fi # of an earlier job with this number, which SLURM gives again
mkdir -p "$job"

# Before the time limit only the batch shell gets USR2 (--signal=B:…), so it is forwarded. SLURM itself sends TERM to the ranks;
# in a preemption it sends none to this shell.
# shellcheck disable=SC2317 # called by a trap
forward_signal() {
  say "SIG$1 in the batch shell"
  case $1 in USR1 | USR2) kill -USR2 "$2" 2>/dev/null || true ;; esac
}

# The script's function `progress` prints a text that changes with progress. The file `restarts` has the number of attempts in a
# row without progress, and the last text.
remember() { printf '%s\n%s\n' "$1" "$(progress)" >"$job/restarts" || exit 4; }

# job_field NAME: a field of `scontrol show job`; nothing without scontrol
job_field() { scontrol --oneliner show job "$this_job" 2>/dev/null | sed -nE "s/.* $1=([^ ]*).*/\1/p" || true; }

job_nodes() { scontrol show hostnames "$(job_field NodeList)" 2>/dev/null; }

# ends_itself: whether SLURM is ending this job
ends_itself() { [[ $(job_field JobState) =~ ^(CANCELLED|COMPLETING)$ ]]; }

meeting=${MASTER_ADDR:-} # rendezvous address, if the user has set one: the first node is then never excluded
nodes=()                 # nodes of an attempt, in SLURM's order; empty without scontrol
failed=()                # nodes that the ranks of the last attempt reported as failed
slow=()                  # nodes whose ranks were slow at its end, with EXCLUDE_SLOW=1
named=()                 # nodes that any attempt in this allocation reported: failed ones, the newest first, then slow ones

has() { [[ " ${*:2} " == *" $1 "* ]]; } # has WORD words…

# choose_nodes: set `nodes` to NODES of the job's nodes, without the `named` ones as far as there are spares
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

# slow_nodes: print the nodes of slow ranks in the last attempt; overridden by scripts that train
slow_nodes() { :; }

# name_nodes: collect the nodes that the ranks of the last attempt reported; reports on more than half of the nodes are ignored
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

# drop_failed: give the failed nodes but this one, whose ranks a node that is cut off may report, back to SLURM, so that it does not
# end the job for them; prints them; false if too few nodes remain
drop_failed() {
  local all node keep=() lost=()
  mapfile -t all < <(job_nodes)
  for node in "${all[@]}"; do
    if [ "$node" = "${SLURMD_NODENAME:-}" ] || ! has "$node" "${failed[@]}"; then keep+=("$node"); else lost+=("$node"); fi
  done
  [ "${#keep[@]}" -ge "$NODES" ] && [ "${#keep[@]}" -lt "${#all[@]}" ] || return 1
  (cd "$job" && scontrol update JobId="$this_job" NodeList="$(IFS=, && echo "${keep[*]}")") >/dev/null || return 1
  say "given back, because they do not answer: ${lost[*]}"
}

# on_nodes: whether the ranks' job step is still running on a node
on_nodes() { squeue --noheader --steps --jobs="$this_job" --format=%i 2>/dev/null | grep -qE '\.[0-9]+ *$'; }

# wait_for_lost_node: wait until the ranks' step has ended on all nodes, or the lost nodes are given back; false if SLURM ends
# this job, or at a signal. srun returns although the step remains on a node that does not respond. If the job is requeued in this
# state, SLURM counts its GPUs wrongly once it marks the node as down, and refuses them to the next start (22.05: "Invalid generic
# resource"). It marks the node as down after SlurmdTimeout, and requeues the job itself.
wait_for_lost_node() {
  local patience waited
  patience=$(scontrol show config 2>/dev/null | sed -nE 's/^SlurmdTimeout *= *([0-9]+).*/\1/p') || true # no scontrol here
  for ((waited = 0; waited < ${patience:-300} + 60; waited++)); do
    if [ -n "$stopping" ] || ends_itself; then return 1; fi
    on_nodes || return 0
    if [ "$waited" = 5 ]; then
      if drop_failed; then return; fi
      say "a node does not answer: waiting until SLURM marks it as down"
    fi
    rest 1
  done
  return 1
}

# requeue: requeue this job; excludes the `named` nodes if the partition has enough others
requeue() {
  local out count partition node
  out=$(job_field ExcNodeList | sed 's/(null)//')
  for node in "${named[@]}"; do out+=${out:+,}$node; done
  partition=$(job_field Partition)
  count=$(sinfo --noheader --Node --partition="$partition" --states=idle,mixed,allocated,completing --format=%N 2>/dev/null |
    sort -u | grep -cvxF "$(scontrol show hostnames "$out" 2>/dev/null)") || true
  trap '' TERM # which the requeue sends
  scontrol requeue "$this_job" || return 1
  if [ "${#named[@]}" = 0 ]; then return; fi
  if [ "${count:-0}" -lt "$SLURM_JOB_NUM_NODES" ]; then
    say "not left out: ${named[*]}; $partition has too few others"
  elif scontrol update JobId="$this_job" ExcNodeList="$out"; then # possible only for a pending job
    say "left out from now on: ${named[*]}"
  fi
}

# count_attempt WHAT: set `count`, the number of attempts in a row without progress; exit after too many
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

# run_or_restart WHAT command…: return when the command has finished; otherwise end this job, requeued or not
run_or_restart() {
  local what=$1 count=0 within answered
  shift
  [ -f "$job/restarts" ] || remember 0
  choose_nodes
  for ((within = 1; ; within++)); do
    if [ "${#nodes[@]}" -gt 0 ] && [ "${#nodes[@]}" -lt "$NODES" ]; then # srun would wait for the lost ones
      say "$what: ${#nodes[@]} of $NODES nodes are left"
      ended=4
      break
    fi
    attempt "$job/ranks" "$@"
    case $ended in
      0) return ;;
      2 | 3) say "$what ended with $ended: a restart would not help" && exit "$ended" ;;
    esac
    name_nodes
    # Before a time limit this shell gets USR2. Without it, a job that is completing while this shell runs is ended by SLURM,
    # because it was cancelled or lost a node; in the latter case SLURM requeues it.
    answered=yes
    wait_for_lost_node || answered=
    if [ "$stopping" != USR2 ] && ends_itself; then
      say "$what ended with $ended: SLURM ends this job itself, because it was cancelled or lost a node" && exit "$ended"
    fi
    count_attempt "$what"
    if [ -z "$stopping" ]; then before_restart "$count"; fi
    if [ "$ended" != 4 ] || [ -n "$stopping" ] || [ -z "$answered" ] || [ "$within" -gt "$RESTARTS" ]; then break; fi
    choose_nodes
    say "$what ended with 4, failed nodes: ${failed[*]:-none named}${slow[*]:+, slow nodes: ${slow[*]}};" \
      "restart $within of $RESTARTS in this job on ${nodes[*]:-its nodes}; attempts in a row without progress: $count"
  done
  say "$what ended with $ended: requeued; attempts in a row without progress: $count"
  if ! requeue; then
    say "scontrol cannot requeue this job: it ends with 85, which RequeueExit=85 in slurm.conf requeues; otherwise submit it again"
    # Before a time limit this shell gets USR2, in a preemption no signal. SLURM requeues a preempted job only if it has to end it,
    # not if the job exits.
    rest "$HOLD"
  fi
  exit 85
}
