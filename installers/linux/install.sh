#!/bin/sh
# Installs swarmtrain for the user who runs it: no root, nothing outside the home folder.
#
#   sh install.sh                        from the checkout that this script lies in
#   sh install.sh --from PATH_OR_URL     from a wheel, or from a folder with the source
#   sh install.sh --dry-run              says what would be done, and does nothing
#   sh install.sh --help                 all options
#
# Where it goes: a virtual environment in ~/.local/share/swarmtrain-program, and a link for each of
# its two programs in ~/.local/bin. What the client keeps of its own (identity, caches) comes on
# first use and lies elsewhere: `swarm-client paths` lists it. Over an installed one it is an
# upgrade: the new environment takes the old one's place when it is whole, not before. A client that
# runs ends in order just then, handing over what it has in hand, and is started again.
#
# Everything is in functions, and the last line calls the first one: half a download does nothing.

set -eu

PROGRAMS="swarm-client swarm-coordinator"
UNIT=swarm-client.service
START_SECONDS=60

main() {
    from=
    prefix=
    python=${PYTHON:-}
    packages_of=
    sha256=
    dry_run=no
    ended=no
    while [ $# -gt 0 ]; do
        case $1 in
        --from | --prefix | --python | --packages-of | --sha256 | --home)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            set_option "$1" "$2"
            shift
            ;;
        --from=* | --prefix=* | --python=* | --packages-of=* | --sha256=* | --home=*)
            set_option "${1%%=*}" "${1#*=}"
            ;;
        --dry-run) dry_run=yes ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) refuse "there is no option $1" ;;
        esac
        shift
    done
    settle_places
    settle_source
    settle_python
    if [ "$dry_run" = yes ]; then
        describe
        exit 0
    fi
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/swarmtrain-install.XXXXXX")
    # shellcheck disable=SC2154 # `code` is set inside
    trap 'code=$?; start_again || true; rm -rf "$scratch" "$environment.new"; exit "$code"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # Python looks for modules where it is started; nobody knows what lies there.
    cd "$scratch"
    fetch
    build_environment
    end_running
    put_in_place
    start_again || fail "the client that ran could not be started again; 'swarm-client daemon' does" \
        "that, and says what is wrong"
    tell
}

usage() {
    cat <<'END'
usage: install.sh [OPTIONS]
  --from PATH_OR_URL   a wheel, or a folder with the source [default: the checkout around this file]
  --sha256 HEX         what the wheel has to be; without it, the SHA256SUMS beside it says so
  --prefix DIR         programs into DIR/bin, the rest into DIR/share [default: ~/.local]
  --python PROGRAM     Python 3.11 or newer [default: the first that is found]
  --packages-of PLACE  use what another Python has installed (a GPU vendor's torch, say), and
                       download only what is missing there: its program, or its site-packages
  --home DIR           where the client that runs keeps its own, if not at the usual place
  --dry-run            say what would be done, and do nothing
END
}

set_option() {
    [ -n "$2" ] || refuse "$1 needs a value"
    case $1 in
    --from) from=$2 ;;
    --prefix) prefix=$2 ;;
    --python) python=$2 ;;
    --packages-of) packages_of=$2 ;;
    --sha256) sha256=$2 ;;
    --home)
        SWARM_CLIENT_HOME=$(absolute "$2")
        export SWARM_CLIENT_HOME
        ;;
    esac
}

say() {
    echo "install: $*"
}

fail() {
    echo "install: error: $*" >&2
    exit 1
}

refuse() {
    echo "install: error: $* (see --help)" >&2
    exit 2
}

# ---------------------------------------------------------------- what, from where, to where

settle_places() {
    [ -n "${HOME:-}" ] || fail "HOME is not set; set it, or this script cannot know where to install"
    if [ -n "$prefix" ]; then
        prefix=$(absolute "$prefix")
        environment=$prefix/share/swarmtrain-program
        links=$prefix/bin
    else
        environment=${XDG_DATA_HOME:-$HOME/.local/share}/swarmtrain-program
        links=$HOME/.local/bin
    fi
    case $environment in
    *'
'* | *:*) fail "$environment cannot hold programs: choose a --prefix without line ends and colons" ;;
    esac
    for program in $PROGRAMS; do
        if [ -e "$links/$program" ] && ! is_ours "$links/$program"; then
            fail "$links/$program is there and is not from this script; move it away, or choose" \
                "another --prefix"
        fi
    done
}

absolute() {
    case $1 in
    /*) echo "$1" ;;
    *) echo "$PWD/$1" ;;
    esac
}

is_ours() {
    [ -L "$1" ] && case $(readlink "$1") in */swarmtrain-program/bin/*) true ;; *) false ;; esac
}

settle_source() {
    if [ -z "$from" ]; then
        # Piped into sh there is no file, and $0 is the shell.
        here=$(cd "$(dirname "$0")" 2>/dev/null && pwd -P) || here=
        if [ -n "$here" ] && [ -f "$here/../../pyproject.toml" ] && [ -f "$here/install.sh" ]; then
            from=$(cd "$here/../.." && pwd -P)
        else
            refuse "say with --from which wheel or which folder to install"
        fi
    fi
    case $from in
    http://*) [ -n "$sha256" ] || refuse "over plain http the wheel needs --sha256" ;;
    https://* | file://*) ;;
    *)
        [ -e "$from" ] || fail "there is no $from; name a wheel, a folder with the source, or a URL"
        from=$(absolute "$from")
        ;;
    esac
    if [ -d "$from" ]; then
        [ -f "$from/pyproject.toml" ] || fail "$from holds no pyproject.toml, so it is not the source"
        [ -z "$sha256" ] || refuse "--sha256 is for a wheel, and $from is a folder"
    else
        case $from in
        *.whl) ;;
        *) refuse "$from is neither a wheel (.whl) nor a folder" ;;
        esac
    fi
}

settle_python() {
    if [ -n "$python" ]; then
        command -v "$python" >/dev/null 2>&1 || fail "--python $python names no program"
        is_suitable "$python" || fail "$python does not run, or is older than Python 3.11"
    else
        # 3.11 is what everything was measured with, so it comes first.
        for candidate in python3.11 python3.12 python3.13 python3; do
            if is_suitable "$candidate"; then
                python=$candidate
                break
            fi
        done
        [ -n "$python" ] || fail "no Python 3.11 or newer was found; install one (Debian and" \
            "Ubuntu: 'apt-get install python3 python3-venv') or name it with --python"
    fi
    python=$(command -v "$python")
    "$python" -I -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no 'venv' module; install it (Debian and Ubuntu:" \
            "'apt-get install python3-venv') and run this again"
    if [ -n "$packages_of" ]; then
        borrowed=$(site_packages) || fail "--packages-of $packages_of is neither a Python of the" \
            "same version as $python nor a folder of packages"
    fi
}

site_packages() {
    if [ -d "$packages_of" ]; then
        absolute "$packages_of"
        return
    fi
    [ "$(minor_version "$packages_of" 2>/dev/null)" = "$(minor_version "$python")" ] || return 1
    "$packages_of" -c 'import sysconfig
print(*dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")), sep="\n")'
}

is_suitable() {
    "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

minor_version() {
    "$1" -I -c 'import sys; print(*sys.version_info[:2])'
}

describe() {
    say "would install $from"
    say "would make a virtual environment in $environment with $python"
    [ -z "$packages_of" ] || say "would use the packages of $packages_of"
    for program in $PROGRAMS; do
        say "would link $links/$program to $environment/bin/$program"
    done
    [ ! -d "$environment" ] || say "would replace the one that is there"
    find_running
    [ "$running" = no ] || say "would end the client that runs in order, and start it again"
}

# ---------------------------------------------------------------- the wheel

fetch() {
    case $from in
    *://*)
        wheel=$scratch/$(basename "$from")
        say "downloading $from"
        download "$from" "$wheel" || fail "$from could not be downloaded; is the address right, and" \
            "is there a network?"
        if [ -z "$sha256" ]; then
            # Where nobody lists hashes there is nothing to compare with; the rest is up to https.
            download "${from%/*}/SHA256SUMS" "$scratch/SHA256SUMS" 2>/dev/null ||
                rm -f "$scratch/SHA256SUMS"
        fi
        constraints=$scratch/constraints.txt
        [ -n "$sha256" ] || download "${from%/*}/constraints.txt" "$constraints" 2>/dev/null ||
            rm -f "$constraints"
        check_constraints "$scratch/SHA256SUMS"
        check "$scratch/SHA256SUMS"
        ;;
    *.whl)
        wheel=$from
        constraints=$(dirname "$wheel")/constraints.txt
        check_constraints "$(dirname "$wheel")/SHA256SUMS"
        check "$(dirname "$wheel")/SHA256SUMS"
        ;;
    *)
        wheel=
        constraints=$from/constraints.txt
        ;;
    esac
    [ -n "$constraints" ] && [ -f "$constraints" ] || constraints=/dev/null
}

download() {
    if command -v curl >/dev/null 2>&1; then
        # From https never on to plain http.
        case $1 in https://*) set -- "$1" "$2" --proto-redir =https ;; esac
        source_url=$1 target=$2
        shift 2
        curl --fail --silent --show-error --location "$@" --output "$target" "$source_url"
    elif command -v wget >/dev/null 2>&1; then
        wget --quiet --output-document="$2" "$1"
    else
        fail "neither curl nor wget is here to download with; install one, or download the wheel" \
            "yourself and name it with --from"
    fi
}

check() {
    name=$(basename "$wheel")
    if [ -z "$sha256" ] && [ -f "$1" ]; then
        sha256=$(listed_in "$1" "$name")
        [ -n "$sha256" ] || fail "the SHA256SUMS beside $name does not list it; nothing was installed"
    fi
    if [ -z "$sha256" ]; then
        say "no SHA256SUMS lies beside $name: it is taken as it is"
        return
    fi
    found=$(sha256_of "$wheel")
    [ "$found" = "$sha256" ] || fail "$name is damaged or not the one that was meant: its SHA-256 is" \
        "$found instead of $sha256; nothing was installed"
    say "the SHA-256 of $name is right"
}

# What pip reads decides what it runs: a line `name @ URL` names any code. So the constraints are taken
# only where the same source vouches for the wheel as well, and never beside a hash given by hand,
# which is of the wheel alone.
check_constraints() {
    [ -f "$constraints" ] || return 0
    if [ -n "$sha256" ]; then
        say "constraints.txt is not taken: --sha256 is of the wheel alone"
        constraints=
    elif [ -f "$1" ]; then
        listed=$(listed_in "$1" constraints.txt)
        if [ -z "$listed" ]; then
            say "constraints.txt is not taken: SHA256SUMS does not list it"
            constraints=
        elif [ "$(sha256_of "$constraints")" != "$listed" ]; then
            fail "constraints.txt is damaged or not the one that was meant; nothing was installed"
        fi
    fi
    [ -n "$constraints" ] || return 0
    other=$(grep -Evm 1 '^[[:space:]]*(#.*)?$|^[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+[[:space:]]*$' \
        "$constraints") || return 0
    fail "constraints.txt holds '$other', which is no version such as name==1.2; nothing was installed"
}

# Two columns: the hash, then the name with an asterisk before it where it was read binary.
listed_in() {
    awk -v name="$2" '$2 == name || $2 == "*" name { print $1; exit }' "$1"
}

sha256_of() {
    "$python" -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$1"
}

# ---------------------------------------------------------------- the environment

# Beside its place, so that a failure leaves the old one as it was.
build_environment() {
    mkdir -p "$(dirname "$environment")" || fail "$(dirname "$environment") cannot be made"
    new=$environment.new
    rm -rf "$new"
    say "making a virtual environment with $("$python" --version)"
    "$python" -m venv "$new" || fail "the virtual environment could not be made; the message above" \
        "says why (is there space on the disk?)"
    if [ -n "$packages_of" ]; then
        borrow
    fi
    if [ -z "$wheel" ]; then
        say "building a wheel of $from"
        mkdir "$scratch/wheel"
        build_wheel
        wheel=$(echo "$scratch"/wheel/*.whl)
    fi
    say "installing $(basename "$wheel") and what it needs (torch is large: minutes the first time)"
    install_packages
}

borrow() {
    own=$("$new/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$borrowed" >"$own/borrowed.pth"
    # The one that comes with an environment hides a newer one that is borrowed.
    pip uninstall --yes setuptools || give_up
}

build_wheel() {
    # Without a network, when the tool that builds is there already.
    if "$new/bin/python" -c 'import hatchling' 2>/dev/null; then
        pip wheel --no-deps --no-build-isolation --wheel-dir "$scratch/wheel" "$from" || give_up
    else
        pip wheel --no-deps --wheel-dir "$scratch/wheel" "$from" || give_up
    fi
}

install_packages() {
    # Ours whatever else is there; then what it asks for, as far as it is missing.
    pip install --no-deps --force-reinstall "$wheel" || give_up
    requirements >"$scratch/requirements" || give_up
    # The one dependency that is there as source only: libp2p asks for exactly this one, which takes
    # a C compiler and gmp's headers, and uses it for P-256 keys alone, which nothing here has.
    if pip install fastecdsa==2.3.2 >/dev/null 2>&1; then
        pip install --constraint "$constraints" "$wheel" || give_up
    else
        say "no C compiler with gmp's and Python's headers here; doing without"
        grep '^libp2p' "$scratch/requirements" >"$scratch/libp2p" || give_up
        pip install --no-deps -r "$scratch/libp2p" || give_up
        others >"$scratch/others" || give_up
        pip install --constraint "$constraints" --only-binary fastecdsa -r "$scratch/others" ||
            give_up
    fi
    "$new/bin/swarm-client" version >/dev/null || fail "the installed program does not start; the" \
        "message above says why; nothing was changed"
}

requirements() {
    "$new/bin/python" -c 'import importlib.metadata as m
print(*(line for line in m.requires("swarmtrain") or () if "extra ==" not in line), sep="\n")'
}

others() {
    grep -v '^libp2p' "$scratch/requirements"
    "$new/bin/python" -c 'import importlib.metadata as m
lines = (line for line in m.requires("libp2p") or () if "extra ==" not in line)
print(*(line for line in lines if not line.startswith("fastecdsa")), "fastecdsa>=4,<5", sep="\n")'
}

pip() {
    # What pip keeps for the next time would stay after an uninstall.
    "$new/bin/python" -m pip --quiet --disable-pip-version-check --no-input --no-cache-dir "$@"
}

give_up() {
    fail "the packages could not be installed; pip's message above says why (the first installation" \
        "needs a network). Nothing was changed"
}

# ---------------------------------------------------------------- the client that runs

# Whether one does, and who looks after it: a service manager, or nobody.
find_running() {
    running=no
    manager=
    state=
    [ -x "$environment/bin/swarm-client" ] || return 0
    if is_served_by systemctl --user; then
        manager="systemctl --user"
    elif [ "$(id -u)" = 0 ] && is_served_by systemctl; then
        manager=systemctl
    elif ! state=$(state_of_client 2>/dev/null); then
        return 0
    fi
    running=yes
}

is_served_by() {
    command -v systemctl >/dev/null 2>&1 && "$@" is-active --quiet "$UNIT" 2>/dev/null &&
        "$@" show --property=ExecStart "$UNIT" | grep -qF "$environment/"
}

state_of_client() {
    "$environment/bin/swarm-client" status --json | "$environment/bin/python" -c 'import json, sys
print(json.load(sys.stdin)["state"])'
}

# By the old program: it speaks the language of the daemon that runs.
end_running() {
    find_running
    [ "$running" = yes ] || return 0
    say "ending the client that runs, in order; it is started again"
    ended=yes
    if [ -n "$manager" ]; then
        $manager stop "$UNIT" || fail "the service could not be stopped; nothing was changed"
    else
        "$environment/bin/swarm-client" shutdown >/dev/null ||
            fail "the client that runs did not end; end it (Ctrl-C where it runs, or kill) and run" \
                "this again. Nothing was changed"
    fi
}

# Also after a failure: whoever ends a client starts it again.
start_again() {
    [ "$ended" = yes ] || return 0
    ended=no
    if [ -n "$manager" ]; then
        $manager start "$UNIT"
        return
    fi
    client=$environment/bin/swarm-client
    ! "$client" status >/dev/null 2>&1 || return 0
    logs=$("$client" paths --json | "$environment/bin/python" -c 'import json, sys
print(json.load(sys.stdin)["logs"])') || return 1
    # One that worked for no run is not to take one up now.
    idle=
    [ "$state" != stopped ] || idle=--idle
    # shellcheck disable=SC2086 # no word when it is empty
    nohup "$client" daemon $idle >>"$logs/daemon.log" 2>&1 </dev/null &
    waited=0
    until "$client" status >/dev/null 2>&1; do
        [ "$waited" -lt "$START_SECONDS" ] || return 1
        sleep 1
        waited=$((waited + 1))
    done
    say "the client runs again, behind the terminal"
}

# ---------------------------------------------------------------- in place

put_in_place() {
    rename_inside
    rm -rf "$environment.old"
    if [ -d "$environment" ]; then
        mv "$environment" "$environment.old"
    fi
    if ! mv "$new" "$environment"; then
        [ ! -d "$environment.old" ] || mv "$environment.old" "$environment"
        fail "$environment could not be put in place; what was there is there again"
    fi
    rm -rf "$environment.old"
    mkdir -p "$links"
    for program in $PROGRAMS; do
        rm -f "$links/$program"
        ln -s "$environment/bin/$program" "$links/$program"
    done
}

# The environment was made beside its place; what names a folder in it names the final one now.
rename_inside() {
    "$new/bin/python" - "$new" "$environment" <<'END'
import pathlib
import sys

new, final = (path.encode() for path in sys.argv[1:])
for file in [*pathlib.Path(sys.argv[1], "bin").iterdir(), pathlib.Path(sys.argv[1], "pyvenv.cfg")]:
    if file.is_symlink() or not file.is_file():
        continue
    content = file.read_bytes()
    if new in content:
        file.write_bytes(content.replace(new, final))
END
}

tell() {
    say "installed swarmtrain $("$environment/bin/swarm-client" version) in $environment"
    say "its programs are in $links: $PROGRAMS"
    case :$PATH: in
    *:"$links":*) command=swarm-client ;;
    *)
        command=$links/swarm-client
        say "$links is not on your PATH; this line in ~/.profile puts it there:"
        # shellcheck disable=SC2016 # a line for a file, not for now
        say "    export PATH=\"$links:\$PATH\""
        ;;
    esac
    if "$environment/bin/swarm-client" status >/dev/null 2>&1; then
        say "a client runs here, with this program; '$command status' says what it does"
    else
        say "next: $command join INVITE"
    fi
}

main "$@"
