#!/bin/sh
# Makes .venv and installs this checkout into it. `make setup` and everything that needs the
# virtual environment call it; it does nothing, and needs no network, when nothing has changed.
#
#   sh tools/setup.sh user    what running needs
#   sh tools/setup.sh dev     that, and what testing and checking need
#
# What is installed is written to .venv/swarmtrain-installed: the folder, the extras and hashes of
# pyproject.toml and constraints.txt. Content is compared rather than file times, because a clone,
# a copy and a moved folder all change times without changing what has to be installed.

set -eu

main() {
    cd "$(dirname "$0")/.."
    extras=${1:-user}
    case $extras in
    user | dev) ;;
    *) fail "there is no set of packages called '$extras'; use user or dev" ;;
    esac
    note=.venv/swarmtrain-installed
    not_ours="the .venv here belongs to another user and has to be set up anew; ask them to run this \
command, or work in a clone of your own"
    # A developer's environment also runs everything: `make demo` must not undo `make test`.
    if is_current "$extras" || { [ "$extras" = user ] && is_current dev; }; then
        exit 0
    fi
    if ! runs .venv/bin/python; then
        create_environment
    elif [ ! -w .venv ]; then
        fail "$not_ours"
    fi
    install "$extras"
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

runs() {
    [ -x "$1" ] && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

description() {
    # $(pwd -P): an editable install and the scripts in .venv/bin name the folder they were made in.
    printf 'folder %s\nextras %s\n' "$(pwd -P)" "$1"
    cksum pyproject.toml constraints.txt
}

is_current() {
    [ -f "$note" ] && [ -x .venv/bin/python ] && [ "$(description "$1")" = "$(cat "$note")" ]
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON names no program"
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "PYTHON=$PYTHON is older than Python 3.11; name a newer one"
        echo "$PYTHON"
        return
    fi
    # 3.11 is what everything was measured with, so it comes first.
    for candidate in python3.11 python3.12 python3.13 python3; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        if runs "$path"; then
            echo "$path"
            return
        fi
    done
    fail "no Python 3.11 or newer was found; install one (Debian and Ubuntu:" \
        "'apt-get install python3 python3-venv') or name it with 'make setup PYTHON=/path/to/python3'"
}

create_environment() {
    # One that another user made with an interpreter of their own must not be half removed.
    if [ -e .venv ] && [ ! -w .venv ]; then
        fail "$not_ours"
    fi
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no 'venv' module; install it (Debian and Ubuntu:" \
            "'apt-get install python3-venv') and run this again"
    echo "setup: making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv || {
        rm -rf .venv
        fail "the virtual environment could not be made; see the message above" \
            "(is the folder writable, is there space on the disk?)"
    }
}

install() {
    rm -f "$note"
    if [ "$1" = dev ]; then
        wanted='coordinator dev' target='.[coordinator,dev]'
        echo "setup: installing swarmtrain with what testing needs (minutes the first time)"
    else
        wanted=coordinator target='.[coordinator]'
        echo "setup: installing swarmtrain (torch is large: minutes the first time)"
    fi
    if ! install_offline "$target"; then
        # What a later change of pyproject.toml is taken over with, offline.
        pip_install hatchling editables || give_up
        # The one dependency that is there as source only (tools/install_without_compiler.py).
        if pip_install fastecdsa==2.3.2 >/dev/null 2>&1; then
            pip_install --editable "$target" || give_up
        else
            echo "setup: no C compiler with gmp's and Python's headers here; doing without" \
                "(pip will remark that fastecdsa is newer than libp2p asks for; that is meant)"
            # shellcheck disable=SC2086 # one word for each extra
            .venv/bin/python tools/install_without_compiler.py $wanted || give_up
        fi
    fi
    description "$1" >"$note"
    echo "setup: done"
}

install_offline() {
    # After an edit of pyproject.toml, or of where this folder lies, everything is usually there.
    .venv/bin/python -c 'import editables, hatchling' 2>/dev/null &&
        pip_install --no-index --no-build-isolation --editable "$1" >/dev/null 2>&1
}

pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
        --constraint constraints.txt "$@"
}

give_up() {
    fail "the packages could not be installed; pip's message above says why (the first" \
        "installation needs network access)"
}

main "$@"
