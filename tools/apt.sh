# What the install_*.sh scripts of this folder share; they source it.
# shellcheck shell=sh

missing=

# PROGRAM PACKAGE: notes the package as missing unless the program is there.
needs() {
    command -v "$1" >/dev/null || missing="$missing $2"
}

# Ends the script unless it can install these packages.
can_install() {
    [ "$(id -u)" -eq 0 ] || fail "needs root to install: $*"
    command -v apt-get >/dev/null ||
        fail "there is no apt-get here; install what your system has instead of Debian's: $*"
}

install_packages() {
    can_install "$@"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

install_missing() {
    # shellcheck disable=SC2086 # one word per package
    [ -z "$missing" ] || install_packages $missing
}

fail() {
    echo "$(basename "$0" .sh): $*" >&2
    exit 1
}
