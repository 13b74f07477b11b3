#!/bin/sh
# Installs what tests/kits/network_lab and benchmarks/wan need, on Debian and its kin: ip and tc,
# iptables, miniupnpd (its binary alone, not the service that would run it on this machine), and
# iperf3 and ping, which check an emulated network. Does nothing when all of it is there. Needs
# root; everything else of this project does not.

set -eu

main() {
    missing=
    needs ip iproute2
    needs iptables iptables
    needs miniupnpd miniupnpd-iptables
    needs iperf3 iperf3
    needs ping iputils-ping
    if [ -z "$missing" ]; then
        exit 0
    fi
    if [ "$(id -u)" -ne 0 ]; then
        fail "needs root to install:$missing"
    fi
    if ! command -v apt-get >/dev/null; then
        fail "there is no apt-get here; install what your system has instead of Debian's:$missing"
    fi
    apt-get update -qq
    # shellcheck disable=SC2086 # one word per package
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
}

needs() {
    command -v "$1" >/dev/null || missing="$missing $2"
}

fail() {
    echo "install_network_lab: $*" >&2
    exit 1
}

main
