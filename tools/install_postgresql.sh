#!/bin/sh
# Installs a PostgreSQL server, on Debian and its kin, for the tests of the store that uses one (they
# start servers of their own in temporary folders). The service that Debian's package would run on
# this machine is not started. Does nothing when a server is there. Needs root.

set -eu
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

main() {
    if is_there; then
        exit 0
    fi
    can_install postgresql
    # Read by Debian's own tools when they install the server: make no cluster, so start none.
    mkdir -p /etc/postgresql-common
    if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
        echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf
    fi
    install_packages postgresql
    is_there || fail "postgresql is installed, and its initdb is nowhere"
}

is_there() {
    command -v initdb >/dev/null && return 0
    for program in /usr/lib/postgresql/*/bin/initdb; do
        [ -x "$program" ] && return 0
    done
    return 1
}

main
