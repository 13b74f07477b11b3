#!/bin/sh
# Builds a Debian package of swarmtrain with all that it needs but Python itself, which is the
# system's. Needs dpkg-deb and python3-venv; no root.
#
#   sh build_deb.sh --out DIR                  from the checkout that this script lies in
#   sh build_deb.sh --out DIR --from WHEEL     from a wheel
#   sh build_deb.sh --help                     all options
#
# It is for the machine's kind of processor and its version of Python. The packages inside come from
# where pip has them (with torch that is much; its CPU build is a fraction of it).

set -eu

PLACE=/usr/lib/swarmtrain

main() {
    out='' from='' revision=1 python=/usr/bin/python3
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --out | --from | --revision | --python)
            [ -n "${2:-}" ] || refuse "$1 needs a value"
            case $1 in
            --out) out=$2 ;;
            --from) from=$2 ;;
            --revision) revision=$2 ;;
            --python) python=$2 ;;
            esac
            shift 2
            ;;
        *) refuse "there is no option $1" ;;
        esac
    done
    settle
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/swarmtrain-deb.XXXXXX")
    # shellcheck disable=SC2154 # `code` is set inside
    trap 'code=$?; rm -rf "$scratch"; exit "$code"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    tree=$scratch/tree
    install_program
    add_files
    pack
}

usage() {
    cat <<'END'
usage: build_deb.sh --out DIR [OPTIONS]
  --out DIR            where the package is written
  --from PATH_OR_URL   what install.sh takes [default: the checkout around this file]
  --revision N         of the package [default: 1]
  --python PROGRAM     the system's Python that it is for [default: /usr/bin/python3]
END
}

fail() {
    echo "build_deb: error: $*" >&2
    exit 1
}

refuse() {
    echo "build_deb: error: $* (see --help)" >&2
    exit 2
}

settle() {
    here=$(cd "$(dirname "$0")" && pwd -P)
    [ -n "$out" ] || refuse "say with --out where the package is to be written"
    mkdir -p "$out" || fail "$out cannot be made"
    out=$(cd "$out" && pwd -P)
    [ -n "$from" ] || from=$(cd "$here/../.." && pwd -P)
    case $revision in
    "" | *[!0-9a-z.+~]*) refuse "--revision $revision: digits, small letters, . + and ~ only" ;;
    esac
    case $(command -v "$python" || true) in
    /usr/bin/*) ;;
    *) refuse "--python $python is not the system's own (/usr/bin/python3): on another machine the" \
        "package would find none there" ;;
    esac
    command -v dpkg-deb >/dev/null || fail "there is no dpkg-deb here; Debian and Ubuntu have it"
}

# The install script does the work; its environment can be moved, and becomes the package's.
install_program() {
    sh "$here/install.sh" --coordinator --prefix "$scratch/made" --from "$from" --python "$python" \
        >"$scratch/log" 2>&1 || {
        cat "$scratch/log" >&2
        fail "the program could not be installed; see above"
    }
    mkdir -p "$tree${PLACE%/*}" "$tree/usr/bin"
    mv "$scratch/made/share/swarmtrain-program" "$tree$PLACE"
    site=$(echo "$tree$PLACE"/lib/python3.*/site-packages)
    version=$("$tree$PLACE/bin/python" -I -c \
        'import importlib.metadata as m; print(m.version("swarmtrain"))')
    # A package brings no programs but its own, and nothing of where it was made.
    find "$tree$PLACE/bin" -type f ! -name 'swarm-*' -delete
    rm -rf "$site"/swarmtrain-*.dist-info/direct_url.json "$tree$PLACE/CACHEDIR.TAG" \
        "$tree$PLACE/include" "$tree$PLACE/share"
    ln -s ../lib/swarmtrain/bin/swarm-client ../lib/swarmtrain/bin/swarm-coordinator "$tree/usr/bin"
    # Compiled here, so that the files are the package's and go with it.
    find "$tree" -name __pycache__ -type d -prune -exec rm -rf {} +
    "$python" -I -m compileall -q -s "$tree" -p / --invalidation-mode unchecked-hash "$site" || true
}

add_files() {
    mkdir -p "$tree/usr/lib/systemd/system" "$tree/usr/share/doc/swarmtrain" "$tree/DEBIAN"
    # Through the link: inside the package there is no checkout to point to.
    cp -L "$here/swarm-client-system.service" "$tree/usr/lib/systemd/system/swarm-client.service"
    cp "$here/swarm-coordinator@.service" "$tree/usr/lib/systemd/system"
    "$tree$PLACE/bin/python" -I "$here/deb/documents.py" "$tree" ||
        fail "the manual pages could not be written; see above"
    cp "$here/deb/copyright" "$tree/usr/share/doc/swarmtrain"
    (cd "$here/deb" && cp postinst prerm postrm "$tree/DEBIAN" && cd "$tree/DEBIAN" && chmod 755 ./*)
    "$python" -I -c 'import sys
minor = sys.version_info.minor
print(f"python3 (>= 3.{minor}), python3 (<< 3.{minor + 1})")' >"$scratch/depends"
    (
        cd "$tree"
        find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | xargs -0 md5sum
    ) >"$tree/DEBIAN/md5sums"
    cat >"$tree/DEBIAN/control" <<END
Package: swarmtrain
Version: $version-$revision
Architecture: $(dpkg --print-architecture)
Maintainer: The swarmtrain developers <swarmtrain@localhost>
Installed-Size: $(du -sk "$tree" | cut -f1)
Depends: $(cat "$scratch/depends"), init-system-helpers (>= 1.54~), passwd
Section: science
Priority: optional
Description: trains one language model on many ordinary computers at once
 A volunteer's client lends this machine to a training run, within the limits that its owner sets;
 a coordinator organises such a run. The package brings a service that waits until somebody says
 which run to join: nothing is computed before that.
END
}

pack() {
    chmod -R u=rwX,go=rX "$tree"
    chmod 755 "$tree$PLACE/bin"/*
    package=$out/swarmtrain_$version-${revision}_$(dpkg --print-architecture).deb
    dpkg-deb --root-owner-group --build "$tree" "$package" >/dev/null
    echo "$package"
}

main "$@"
