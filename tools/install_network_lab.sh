#!/bin/sh
# Installs what tests/kits/network_lab and benchmarks/wan need, on Debian and its kin: ip and tc,
# iptables, miniupnpd (its binary alone, not the service that would run it on this machine), and
# iperf3 and ping, which check an emulated network. Does nothing when all of it is there. Needs
# root; everything else of this project does not.

set -eu
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

main() {
    needs ip iproute2
    needs iptables iptables
    needs miniupnpd miniupnpd-iptables
    needs iperf3 iperf3
    needs ping iputils-ping
    install_missing
}

main
