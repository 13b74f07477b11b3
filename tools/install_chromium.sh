#!/bin/sh
# Installs Chromium, on Debian and its kin, for the tests that look at the dashboard in a browser.
# Does nothing when one is there. Needs root.

set -eu

main() {
    if is_there; then
        exit 0
    fi
    if [ "$(id -u)" -ne 0 ]; then
        fail "needs root to install: chromium"
    fi
    if ! command -v apt-get >/dev/null; then
        fail "there is no apt-get here; install what your system has instead of Debian's chromium"
    fi
    apt-get update -qq
    # With a font: pictures of a page without letters show little.
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        chromium fonts-dejavu-core
    is_there || fail "chromium is installed, and no program of that name is there"
}

is_there() {
    for program in chromium chromium-browser google-chrome; do
        command -v "$program" >/dev/null && return 0
    done
    return 1
}

fail() {
    echo "install_chromium: $*" >&2
    exit 1
}

main
