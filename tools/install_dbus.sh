#!/bin/sh
# Installs dbus-daemon, on Debian and its kin, for the tests of what is asked over D-Bus (they start
# buses of their own in temporary folders). No bus of this machine is started or changed. Does
# nothing when the program is there. Needs root.

set -eu

main() {
    if command -v dbus-daemon >/dev/null; then
        exit 0
    fi
    if [ "$(id -u)" -ne 0 ]; then
        fail "needs root to install: dbus-daemon"
    fi
    if ! command -v apt-get >/dev/null; then
        fail "there is no apt-get here; install what your system has instead of Debian's dbus-daemon"
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends dbus-daemon
    command -v dbus-daemon >/dev/null || fail "dbus-daemon is installed and not found"
}

fail() {
    echo "install_dbus: $*" >&2
    exit 1
}

main
