#!/usr/bin/env bash
# Run a launch command, of any launcher, and restart it when it ends with 85 (everything saved) or 4 (a fault: a rank died or hangs,
# the rendezvous failed, I/O failed):
#   launch/keep.sh deepspeed --hostfile hosts megabert/train.py --config base --data DATA --run RUN
#   launch/keep.sh torchrun --nproc-per-node 8 -- megabert/train.py …
#   launch/keep.sh mpirun -n 8 python megabert/train.py …
# --run names a run, or a folder of runs.
#   MAX_RESTARTS=n    restarts in a row without a new checkpoint before it gives up (3)
#   RESTART_WAIT=s    seconds before the first of them (5), doubled for each further one up to LONGEST_WAIT (300)
# TERM, INT, HUP, USR1 and USR2 are forwarded to the ranks of this host as USR2: they save, and the script ends with 85 without a
# restart. A second signal ends the ranks at once. The exit code is train.py's: 0, 2, 3, 4 or 85.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
catch_signals forward_signal
MAX_RESTARTS=${MAX_RESTARTS:-3}
for name in MAX_RESTARTS RESTART_WAIT LONGEST_WAIT; do check "$name" "$NUMBER" "a number" "the environment"; done
check_rendezvous
[ $# -gt 0 ] || fail "launch/keep.sh: which command?"
command -v -- "$1" >/dev/null || fail "launch/keep.sh: $1: command not found; activate its environment or give its path"

run='' previous=
for word in "$@"; do # find the run folder, whose checkpoints show progress
  if [ "$previous" = --run ]; then run=$word; elif [[ $word == --run=* ]]; then run=${word#--run=}; fi
  previous=$word
done
[ -n "$run" ] || fail "launch/keep.sh: the command has no --run FOLDER, whose checkpoints show its progress"
progress() { cat "$run"/checkpoints/pointer.json "$run"/*/checkpoints/pointer.json 2>/dev/null || true; }

# Launchers handle signals differently: deepspeed exits and leaves the ranks training, mpirun and torchrun kill them
# after seconds. So the signal is sent to the ranks: the topmost descendants with a rank in their environment. A variable
# of this script's own environment, as where srun starts it, is also in that of launchers: it counts only if no other one
# is found.
of_rank='LOCAL_RANK|OMPI_COMM_WORLD_RANK|PMI_RANK' set_here=
for name in LOCAL_RANK OMPI_COMM_WORLD_RANK PMI_RANK; do
  [ -z "${!name+set}" ] || set_here+="${set_here:+|}$name"
done

# shellcheck disable=SC2317 # called by a trap
ranks() { # ranks PID VARIABLES
  local child
  # images without procps have no pgrep
  for child in $(pgrep -P "$1" 2>/dev/null || cat "/proc/$1"/task/*/children 2>/dev/null || true); do
    if tr '\0' '\n' 2>/dev/null <"/proc/$child/environ" | grep -E "^($of_rank)=" | grep -qvE "^($2)="; then
      echo "$child"
    else
      ranks "$child" "$2"
    fi
  done
}

# shellcheck disable=SC2317
forward_signal() { # to the command itself if it has no ranks here: it is one process, or its ranks are on other hosts
  local pids
  : >"$exits/stop" || true # in MEGABERT_EXIT_DIR, for phases.sh: ranks that have finished end with 0
  pids=$(ranks "$2" "$set_here")
  if [ -z "$pids" ] && [ -n "$set_here" ]; then pids=$(ranks "$2" ''); fi
  # shellcheck disable=SC2086 # a list
  kill -USR2 ${pids:-$2} 2>/dev/null || true
  trap '' PIPE # the terminal may be closed, or `| tee` have ended
  echo "keep.sh: SIG$1, passed on to $(wc -w <<<"${pids:-$2}") process(es) of this host" >&2 || true
}

# end_left: let what outlived its launcher on this host save and end: ranks hold the run, and a child of deepspeed's that was stopped
# early starts them
end_left() {
  local turn pid left asked=' '
  for ((turn = 0; turn <= LONGEST_WAIT; turn++)); do
    left=$(grep -lsF "MEGABERT_EXIT_DIR=$exits/" /proc/[0-9]*/environ | sed 's/environ$/cmdline/' |
      xargs -r grep -lsF -e --run | tr -dc '0-9\n') || true # not a tracker's process that still uploads
    [ -n "$left" ] || return 0
    for pid in $left; do
      [[ $asked == *" $pid "* ]] || kill -USR2 "$pid" 2>/dev/null || true
      asked+="$pid "
    done
    sleep 1 || true
  done
  # shellcheck disable=SC2086 # a list
  kill -KILL $left 2>/dev/null || true
}

exits=$(mktemp -d) || exit 4 # a full disk
trap 'rm -rf "$exits"' EXIT
restarts=0
checkpoint=$(progress)
while :; do
  attempt "$exits/ranks" "$@"
  case $ended in 0 | 2 | 3) break ;; esac
  end_left
  [ -z "$stopping" ] || break
  newest=$(progress)
  if [ "$newest" = "$checkpoint" ]; then restarts=$((restarts + 1)); else restarts=0; fi
  checkpoint=$newest
  if [ "$restarts" -gt "$MAX_RESTARTS" ]; then
    echo "error: ended with $ended, and $MAX_RESTARTS restarts in a row made no new checkpoint in $run" >&2
    break
  fi
  # where nobody reads the output, every start would end like this one
  (echo "keep.sh: ended with $ended, started again; attempts in a row without a new checkpoint: $restarts") || break
  before_restart "$restarts"
  [ -z "$stopping" ] || break
done
exit "$ended"
