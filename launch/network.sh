#!/usr/bin/env bash
# network.sh NETWORK command…: runs the command with NCCL's and gloo's sockets on this node's interface in NETWORK, e.g.
# 10.78.0.0/24, whatever it is called here. Interfaces that are named in the environment stay.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
NETWORK=$1
shift
command -v ip >/dev/null || fail "NETWORK=$NETWORK is looked up with ip, which node $(hostname) has not here; install iproute2"
here=$(in_network "$NETWORK")
[ -n "$here" ] || fail "node $(hostname) has no address in NETWORK=$NETWORK; set it in launch/env.sh"
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=${here% *}} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${here% *}}
exec "$@"
