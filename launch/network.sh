#!/usr/bin/env bash
# network.sh NETWORK command…: run the command with NCCL's and gloo's sockets on this node's interface in NETWORK, e.g.
# 10.78.0.0/24; its name may differ between nodes. Interfaces that are set in the environment take precedence.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -ge 2 ] || fail "usage: launch/network.sh NETWORK command…"
NETWORK=$1
shift
command -v ip >/dev/null || fail "NETWORK=$NETWORK needs the command ip, which is missing on node $(hostname); install iproute2"
interface=$(in_network "$NETWORK")
[ -n "$interface" ] || fail "node $(hostname) has no address in NETWORK=$NETWORK; set it in launch/env.sh"
interface=${interface% *}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$interface} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
exec "$@"
