#!/bin/sh
# Removes what install.sh and `swarm-client service install` have put into this user's folders. It is
# Linux's script, which knows macOS's places.
#
#   sh uninstall.sh [OPTIONS OF installers/linux/uninstall.sh]     --purge, --dry-run, ...
#
# Everything is in functions, and the last line calls the first one: half a download does nothing.

set -eu

main() {
    [ "$(uname -s)" = Darwin ] || fail "this is not macOS but $(uname -s); use installers/linux"
    script=$(cd "$(dirname "$0")" && pwd -P)/../linux/uninstall.sh
    [ -f "$script" ] || fail "installers/linux/uninstall.sh is not beside this folder; take the" \
        "whole 'installers' folder"
    sh "$script" "$@"
}

fail() {
    echo "uninstall: error: $*" >&2
    exit 1
}

main "$@"
