#!/bin/sh
# Installs what tests/installers needs, on Debian and its kin: shellcheck, groff, systemd with its
# analysis (the program alone; no service of it is started on this machine) and its login manager,
# and the system's own Python with venv. Does nothing when all of it is there. Needs root.

set -eu

main() {
    missing=
    needs shellcheck shellcheck
    needs systemd-analyze systemd
    needs dpkg-deb dpkg
    needs groff groff-base
    [ -e /usr/lib/systemd/system/systemd-logind.service ] ||
        [ -e /lib/systemd/system/systemd-logind.service ] || missing="$missing systemd"
    [ -x /usr/bin/python3 ] && /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null ||
        missing="$missing python3 python3-venv"
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
    echo "install_installer_tools: $*" >&2
    exit 1
}

main
