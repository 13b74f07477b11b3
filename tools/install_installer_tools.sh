#!/bin/sh
# Installs what tests/installers needs, on Debian and its kin: shellcheck, groff, systemd with its
# analysis (the program alone; no service of it is started on this machine) and its login manager,
# and the system's own Python with venv. Does nothing when all of it is there. Needs root.

set -eu
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

main() {
    needs shellcheck shellcheck
    needs systemd-analyze systemd
    needs dpkg-deb dpkg
    needs groff groff-base
    [ -e /usr/lib/systemd/system/systemd-logind.service ] ||
        [ -e /lib/systemd/system/systemd-logind.service ] || missing="$missing systemd"
    [ -x /usr/bin/python3 ] && /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null ||
        missing="$missing python3 python3-venv"
    install_missing
}

main
