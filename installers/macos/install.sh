#!/bin/sh
# Installs swarmtrain on macOS for the user who runs it: no root, nothing outside the home folder.
# It is Linux's script, which knows nothing of Linux alone; this one looks whether the machine can
# hold the program, and asks for the agent that starts it at login.
#
#   sh install.sh [--service] [OPTIONS OF installers/linux/install.sh]
#
#   --service   have it started at every login as well (a LaunchAgent)
#   --dry-run   say what would be done, and do nothing
#
# Everything is in functions, and the last line calls the first one: half a download does nothing.

set -eu

main() {
    service=no
    dry_run=no
    prefix=
    count=$#
    while [ "$count" -gt 0 ]; do
        word=$1
        shift
        count=$((count - 1))
        case $word in
        --service)
            service=yes
            continue
            ;;
        --dry-run) dry_run=yes ;;
        --prefix) prefix=${1:-} ;;
        --prefix=*) prefix=${word#*=} ;;
        esac
        set -- "$@" "$word"
    done
    check_machine
    here=$(cd "$(dirname "$0")" && pwd -P)
    script=$here/../linux/install.sh
    [ -f "$script" ] || fail "installers/linux/install.sh is not beside this folder; take the whole" \
        "'installers' folder"
    sh "$script" "$@"
    if [ "$service" = yes ]; then
        install_service
    fi
}

check_machine() {
    [ "$(uname -s)" = Darwin ] || fail "this is not macOS but $(uname -s); use installers/linux"
    # torch has wheels for Apple's own processors only.
    [ "$(uname -m)" = arm64 ] || fail "this Mac's processor is $(uname -m), and torch has no packages" \
        "for it any more; a Mac with Apple's own processor is needed"
}

install_service() {
    if [ -n "$prefix" ]; then
        client=$prefix/bin/swarm-client
    else
        client=$HOME/.local/bin/swarm-client
    fi
    if [ "$dry_run" = yes ]; then
        echo "install: would run $client service install"
        return
    fi
    "$client" service install
}

fail() {
    echo "install: error: $*" >&2
    exit 1
}

main "$@"
