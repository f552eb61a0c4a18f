#!/usr/bin/env bash
# What every launching script does the same way: check values before they reach a command, run a command whose ranks it
# can stop, say how it ended. Sourced by keep.sh and job.sh.
set -euo pipefail

stopping= # the first signal that asked for the end; ranks save and end with 85
# shellcheck disable=SC2034 # read by the scripts
ended=0 # how the last attempt ended: 0 finished, 2 a mistake, 3 bad training, 4 a rank was lost, 85 saved

fail() { # one line, whatever is in the values
  printf 'error: %s\n' "$*" | tr '\n' ' ' | sed 's/ $//' >&2
  echo >&2
  exit 2
}

# check NAME PATTERN MEANING [where]: the variable's whole value matches
check() {
  [[ ${!1-} =~ ^($2)$ ]] || fail "$1=$(printf %q "${!1-}") is not $3; set it in ${4:-launch/env.sh}"
}

NUMBER='0|[1-9][0-9]{0,8}'
RESTART_WAIT=${RESTART_WAIT:-5} # seconds before the first restart that follows an attempt without progress
LONGEST_WAIT=${LONGEST_WAIT:-300}

# before_restart COUNT: waits, twice as long with each attempt in a row without progress: what failed may need time. A
# signal that asks for the end ends the wait.
before_restart() {
  local seconds=$RESTART_WAIT turn
  [ "$1" -gt 0 ] || return 0
  for ((turn = 1; turn < $1 && seconds < LONGEST_WAIT; turn++)); do seconds=$((seconds * 2)); done
  if [ "$seconds" -gt "$LONGEST_WAIT" ]; then seconds=$LONGEST_WAIT; fi
  rest "$seconds"
}

# rest SECONDS: waits so long, or until a signal asks for the end
rest() {
  local seconds=$1
  while [ "$seconds" -gt 0 ] && [ -z "$stopping" ]; do # by the second: a signal may come just before `sleep`
    sleep 1
    seconds=$((seconds - 1))
  done
}
HOST='[A-Za-z0-9][A-Za-z0-9._-]*|[0-9a-fA-F:]*:[0-9a-fA-F:.]*'
INTERFACE='[=^]*[A-Za-z0-9_.,@-]+' # NCCL takes a list, a prefix, =exact and ^not; gloo a list

# in_network NETWORK [command…]: interface and address of this node in it, or of where the command runs what follows it,
# "fast0 10.78.0.1"; nothing where it has none
in_network() { "${@:2}" ip -o address show to "$1" | awk 'NR == 1 { sub("/.*", "", $4); print $2, $4 }'; }

check_rendezvous() { # what the ranks find each other by; each may be unset
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

# attempt FOLDER FORWARD command…: runs the command and sets `ended`. Each rank leaves its exit code in FOLDER, because
# launchers change or lose it. A signal sent to this script is noted, FORWARD <signal> <pid> passes it on, and the command
# is waited for.
attempt() {
  local folder=$1 forward=$2 status=0 child signal
  shift 2
  rm -rf "$folder"
  mkdir -p "$folder"
  MEGABERT_EXIT_DIR=$folder "$@" </dev/null &
  child=$!
  for signal in USR1 USR2 TERM INT; do
    # shellcheck disable=SC2064 # the values of now
    trap "stopping=\${stopping:-$signal}; $forward $signal $child" "$signal"
  done
  while :; do
    status=0
    wait "$child" || status=$?
    if [ "$status" -le 128 ] || ! kill -0 "$child" 2>/dev/null; then break; fi # otherwise a trap ended `wait`
  done
  for signal in USR1 USR2 TERM INT; do
    # shellcheck disable=SC2064
    trap "stopping=\${stopping:-$signal}" "$signal"
  done
  # shellcheck disable=SC2034
  ended=$(verdict "$folder" "$status")
}

# verdict FOLDER STATUS: the ranks' own exit codes before the launcher's. All ranks see bad training alike, so one code is
# enough. A mistake of the user's is one where no rank saw a fault: what a single node finds missing may be its own mount.
verdict() {
  local codes
  codes=" $(find "$1" -type f -exec cat {} + | tr '\n' ' ')"
  if [[ $codes == ' ' ]]; then
    codes=" $2 "
    if [ "$2" = 0 ]; then codes=" 4 "; fi # deepspeed's launcher says 0 where its own child was killed
  fi
  if [[ $codes == *" 3 "* ]]; then
    echo 3
  elif [[ $codes == *" 2 "* && $codes != *" 4 "* ]]; then
    echo 2
  elif [ "$2" = 0 ] && [[ ! $codes =~ [1-9] ]]; then
    echo 0
  elif [[ -n $stopping || $codes == *" 85 "* ]]; then
    echo 85
  else
    echo 4
  fi
}
