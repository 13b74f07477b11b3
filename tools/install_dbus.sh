#!/bin/sh
# Installs dbus-daemon, on Debian and its kin, for the tests of what is asked over D-Bus (they start
# buses of their own in temporary folders). No bus of this machine is started or changed. Does
# nothing when the program is there. Needs root.

set -eu
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

main() {
    needs dbus-daemon dbus-daemon
    install_missing
    command -v dbus-daemon >/dev/null || fail "dbus-daemon is installed and not found"
}

main
