#!/usr/bin/env bash
# Functions of the launch scripts: check values before they reach a command, run a command with signal forwarding, and determine
# its exit code. Sourced by keep.sh, network.sh and job.sh.
set -euo pipefail

in_place= # whether the ranks were given --in-place
stopping= # the first signal that requested a stop; ranks save and exit with 85
child=    # the process of the running attempt
# shellcheck disable=SC2034 # read by the scripts
ended=0 # exit code of the last attempt: 0 finished, 2 a mistake, 3 bad training, 4 a fault, 85 saved

fail() { # one line, also if values have several
  printf 'error: %s\n' "$*" | tr '\n' ' ' | sed 's/ $//' >&2
  echo >&2
  exit 2
}

# check NAME PATTERN MEANING [where]: fail unless the variable's value matches
check() {
  [[ ${!1-} =~ ^($2)$ ]] || fail "$1=$(printf %q "${!1-}") is not $3; set it in ${4:-launch/env.sh}"
}

NUMBER='0|[1-9][0-9]{0,8}'
# shellcheck disable=SC2034 # read by the scripts
URL='[a-z][a-z0-9]*://[^[:cntrl:][:space:]"\\$]+'
RESTART_WAIT=${RESTART_WAIT:-5} # seconds before the first restart after an attempt without progress
LONGEST_WAIT=${LONGEST_WAIT:-300}

# before_restart COUNT: exponential backoff after COUNT attempts in a row without progress, until a signal requests a stop
before_restart() {
  local seconds=$RESTART_WAIT turn
  [ "$1" -gt 0 ] || return 0
  for ((turn = 1; turn < $1 && seconds < LONGEST_WAIT; turn++)); do seconds=$((seconds * 2)); done
  if [ "$seconds" -gt "$LONGEST_WAIT" ]; then seconds=$LONGEST_WAIT; fi
  rest "$seconds"
}

# rest SECONDS: sleep, until a signal requests a stop
rest() {
  local seconds=$1
  while [ "$seconds" -gt 0 ] && [ -z "$stopping" ]; do # second by second: a signal may arrive just before `sleep`
    sleep 1 || true # Ctrl-C ends it too
    seconds=$((seconds - 1))
  done
}
HOST='[A-Za-z0-9][A-Za-z0-9._-]*|[0-9a-fA-F:]*:[0-9a-fA-F:.]*'
INTERFACE='[=^]*[A-Za-z0-9_.,@-]+' # NCCL accepts a list, a prefix, =exact and ^not; gloo a list

# in_network NETWORK [command…]: print interface and address in NETWORK, as "fast0 10.78.0.1", of this node, or of the node on
# which `command… ip` runs; nothing if there is none
in_network() { "${@:2}" ip -o address show to "$1" | awk 'NR == 1 { sub("/.*", "", $4); print $2, $4 }'; }

check_rendezvous() { # check the variables of the rendezvous, which may be unset
  [ -z "${MASTER_ADDR+set}" ] || check MASTER_ADDR "$HOST" "a host name or an address" "the environment"
  if [ -n "${MASTER_PORT+set}" ]; then
    check MASTER_PORT "$NUMBER" "a port" "the environment"
    ((MASTER_PORT >= 1 && MASTER_PORT <= 65535)) || fail "MASTER_PORT=$MASTER_PORT is outside 1 to 65535"
  fi
  local name
  for name in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do
    [ -z "${!name+set}" ] || check "$name" "$INTERFACE" "a list of network interfaces"
  done
}

check_stop() { # check the options of a script that trains two phases, each with the same ones
  [[ " $*" != *" --stop"* ]] || fail "--stop-after: phase 2 would start from an unfinished phase 1; set schedule.total_steps instead"
}

# catch_signals FORWARD: from now on note the first signal in `stopping`, and call FORWARD <signal> <pid> if an attempt's command runs
catch_signals() {
  local signal
  # shellcheck disable=SC2064 # expand the values now
  for signal in USR1 USR2 TERM INT HUP; do
    trap "stopping=\${stopping:-$signal}; if [ -n \"\$child\" ]; then $1 $signal \"\$child\"; fi" "$signal"
  done
}

# attempt FOLDER command…: run the command and set `ended`. Each rank writes its exit code to FOLDER, because launchers change or
# lose it. At a signal continue to wait for the command.
attempt() {
  local folder=$1 status=0 exits
  shift
  rm -rf "$folder"
  # another one each time: ranks that outlived the last attempt's launcher do not report to this one
  mkdir -p "$folder" && exits=$(mktemp -d "$folder/XXXXXX") || exit 4
  if [ -n "$stopping" ]; then # since the start or the last attempt, such as between two phases
    ended=85
    return
  fi
  set -m # a process group of its own: Ctrl-C reaches this script alone, and launchers kill their ranks at it
  MEGABERT_EXIT_DIR=$exits "$@" </dev/null &
  child=$!
  set +m
  if [ -n "$stopping" ]; then kill -"$stopping" $$; fi # it came before `child` was known: handle it again
  while :; do
    status=0
    wait "$child" || status=$?
    if [ "$status" -le 128 ] || ! kill -0 "$child" 2>/dev/null; then break; fi # otherwise a trap interrupted `wait`
  done
  child=
  # shellcheck disable=SC2034
  ended=$(verdict "$folder" "$status")
}

# verdict FOLDER STATUS: print the exit code of an attempt, from those of the ranks if there are any, otherwise from the launcher's
# STATUS. A single rank's 3 decides, since all ranks find bad training. 2 counts only if no rank reports a fault: a file that is
# missing on a single node may be a problem of its mounts. Ranks that restart in place (`in_place`) finish without those of a lost
# node, for which the launcher's STATUS is not 0. After a signal a rank's 4 remains, unless another reports 85: it could not save.
verdict() {
  local codes
  codes=" $(find "$1" -type f -exec cat {} + | tr '\n' ' ')"
  if [[ $codes == ' ' ]]; then
    codes=" $2 "
    case $2$stopping in # deepspeed's is 0 if its child was killed, which leaves no file; on a full disk files are empty
      0) find "$1" -type f | grep -q . || codes=' 4 ' ;;
      0*) codes=' 85 ' ;;
    esac
  fi
  if [[ $codes == *" 3 "* ]]; then
    echo 3
  elif [[ $codes == *" 2 "* && $codes != *" 4 "* ]]; then
    echo 2
  elif { [ "$2" = 0 ] || [ -n "$in_place" ]; } && [[ ! $codes =~ (^| )[1-9] ]]; then
    echo 0
  elif [[ $codes == *" 85 "* || (-n $stopping && $codes != *" 4 "*) ]]; then
    echo 85
  else
    echo 4
  fi
}
