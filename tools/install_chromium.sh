#!/bin/sh
# Installs Chromium, on Debian and its kin, for the tests that look at the dashboard in a browser.
# Does nothing when one is there. Needs root.

set -eu
# shellcheck source-path=SCRIPTDIR source=apt.sh
. "$(dirname "$0")/apt.sh"

main() {
    if is_there; then
        exit 0
    fi
    # With a font: pictures of a page without letters show little.
    install_packages chromium fonts-dejavu-core
    is_there || fail "chromium is installed, and no program of that name is there"
}

is_there() {
    for program in chromium chromium-browser google-chrome; do
        command -v "$program" >/dev/null && return 0
    done
    return 1
}

main
