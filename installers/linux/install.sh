#!/bin/sh
# Installs swarmtrain on Linux and macOS for the user who runs it: no root, nothing outside the home.
#
#   sh install.sh                        from the checkout that this script lies in
#   sh install.sh --from PATH_OR_URL     from a wheel, or from a folder with the source
#   sh install.sh --uninstall            removes program, links and service; what the client keeps stays
#   sh install.sh --uninstall --purge    that as well: identity, caches, preferences, logs
#   sh install.sh --dry-run              says what would be done, and does nothing
#   sh install.sh --help                 all options
#
# uv does the work: it finds or downloads a Python, resolves and downloads the packages, compares the
# wheel's hash and makes the environment. Without a uv here, one from PyPI is used and not kept.
#
# The environment goes to ~/.local/share/swarmtrain-program, with a link for each program in
# ~/.local/bin; `swarm-client paths` lists what the client keeps elsewhere. Over an installed one it is
# an upgrade: the new environment takes the old one's place when its program has started, not before.
# A client that runs ends in order just then, and is started again. `--uninstall` ends it too; what is
# not there is no error.
#
# Everything is in functions, and the last line calls the first one: half a download does nothing.

set -eu

PROGRAMS="swarm-client swarm-coordinator"
UNIT=swarm-client.service
LABEL=org.swarmtrain.client
# 3.11 is what everything was measured with; for a newer one than these, packages may be missing.
PYTHONS='>=3.11,<3.14'
# libp2p asks for exactly 2.3.2, which exists as source only (docs/decisions/0001).
OVERRIDE='fastecdsa>=4,<5'
verb=install

main() {
    from='' prefix='' python='' sha256='' extra='' dry_run=no service=no purge=no ended=no
    while [ $# -gt 0 ]; do
        case $1 in
        --*=*)
            option=${1%%=*} value=${1#*=}
            shift
            set -- "$option" "$value" "$@"
            continue
            ;;
        --dry-run) dry_run=yes ;;
        --service) service=yes ;;
        --coordinator) extra='[coordinator]' ;;
        --uninstall) verb=uninstall ;;
        --purge) purge=yes ;;
        -h | --help)
            usage
            exit 0
            ;;
        --from | --prefix | --python | --sha256 | --home)
            [ -n "${2:-}" ] || refuse "$1 needs a value"
            set_option "$1" "$2"
            shift
            ;;
        *) refuse "there is no option $1" ;;
        esac
        shift
    done
    settle_places
    if [ "$verb" = uninstall ]; then
        uninstall
        exit 0
    fi
    [ "$purge" = no ] || refuse "--purge goes with --uninstall"
    check_machine
    settle_source
    settle_uv
    if [ "$dry_run" = yes ]; then
        describe
        exit 0
    fi
    take_back
    trap end EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # A service's user may run what is installed, and none but its owner change it.
    umask 022
    rm -rf "$work"
    mkdir -p "$work" || fail "$work cannot be made"
    # Python looks for modules, and uv for its settings, where they are started.
    cd /
    build_environment
    end_running
    put_in_place
    start_again || fail "the client that ran could not be started again; 'swarm-client daemon' does" \
        "that, and says what is wrong"
    tell
    [ "$service" = no ] || "$links/swarm-client" service install
}

# The end of an installation, whatever ends it.
end() {
    code=$?
    take_back || true
    start_again || true
    rm -rf "$work"
    exit "$code"
}

usage() {
    cat <<'END'
usage: install.sh [OPTIONS]
       install.sh --uninstall [--purge] [--prefix DIR] [--home DIR] [--dry-run]
  --from PATH_OR_URL   a wheel, or a folder with the source [default: the checkout around this file]
  --sha256 HEX         what the wheel has to be; without it, the SHA256SUMS beside a file says so
  --prefix DIR         programs into DIR/bin, the rest into DIR/share [default: ~/.local]
  --python PYTHON      a program or a version [default: one of 3.11 to 3.13, found or downloaded]
  --home DIR           where the client that runs keeps its own, if not at the usual place
  --coordinator        also what swarm-coordinator needs beside the client
  --service            have it started at every login as well
  --dry-run            say what would be done, and do nothing
END
}

set_option() {
    case $1 in
    --from) from=$2 ;;
    --prefix) prefix=$(absolute "$2") ;;
    --python)
        python=$2
        case $2 in */*) python=$(absolute "$2") ;; esac
        ;;
    --sha256) sha256=$2 ;;
    --home)
        SWARM_CLIENT_HOME=$(absolute "$2")
        export SWARM_CLIENT_HOME
        ;;
    esac
}

say() {
    echo "$verb: $*"
}

fail() {
    echo "$verb: error: $*" >&2
    exit 1
}

refuse() {
    echo "$verb: error: $* (see --help)" >&2
    exit 2
}

absolute() {
    case $1 in
    /*) echo "$1" ;;
    *) echo "$PWD/$1" ;;
    esac
}

# ---------------------------------------------------------------- what, from where, to where

check_machine() {
    case $(uname -s) in
    Linux) ;;
    Darwin)
        # torch has wheels for Apple's own processors only.
        [ "$(uname -m)" = arm64 ] || fail "this Mac's processor is $(uname -m), and torch has no" \
            "packages for it any more; a Mac with Apple's own processor is needed"
        ;;
    *) fail "this is neither Linux nor macOS but $(uname -s); under Windows, use installers/windows" ;;
    esac
    for program in $PROGRAMS; do
        link=$links/$program
        case $(readlink "$link" || true) in
        */swarmtrain-program/bin/*) ;;
        *) [ ! -e "$link" ] || fail "$link is there and is not from this script; move it away, or" \
            "choose another --prefix" ;;
        esac
    done
}

settle_places() {
    [ -n "${HOME:-}" ] || fail "HOME is not set; set it, or this script cannot know its places"
    environment=${prefix:-${XDG_DATA_HOME:-$HOME/.local/share}}${prefix:+/share}/swarmtrain-program
    links=${prefix:-$HOME/.local}/bin
    work=$environment.new
    client=$environment/bin/swarm-client
}

settle_source() {
    if [ -z "$from" ]; then
        # Piped into sh there is no file, and $0 is the shell.
        from=$(cd "$(dirname "$0")/../.." 2>/dev/null && pwd -P) || from=
        [ -f "$from/installers/linux/install.sh" ] ||
            refuse "say with --from which wheel or which folder to install"
    fi
    case $from in
    http://*) [ -n "$sha256" ] || refuse "over plain http the wheel needs --sha256" ;;
    https://*) ;;
    *)
        [ -e "$from" ] || fail "there is no $from; name a wheel, a folder with the source, or a URL"
        from=$(absolute "$from")
        ;;
    esac
    constraints=/dev/null
    if [ -d "$from" ]; then
        [ -f "$from/pyproject.toml" ] || fail "$from holds no pyproject.toml, so it is not the source"
        [ -z "$sha256" ] || refuse "--sha256 is for a wheel, and $from is a folder"
        [ ! -f "$from/constraints.txt" ] || constraints=$from/constraints.txt
        return
    fi
    case $from in *.whl) ;; *) refuse "$from is neither a wheel (.whl) nor a folder" ;; esac
    if [ -z "$sha256" ] && [ -f "$(dirname "$from")/SHA256SUMS" ]; then
        settle_hashes "$(dirname "$from")"
    fi
}

# What is installed decides what runs, and so do its constraints: a line `name @ URL` names any code.
# So they are taken only where the same list vouches for both.
settle_hashes() {
    sha256=$(listed "$1" "$(basename "$from")")
    [ -n "$sha256" ] || fail "the SHA256SUMS beside $from does not list it; nothing was installed"
    right=$(listed "$1" constraints.txt)
    [ -n "$right" ] && [ -f "$1/constraints.txt" ] || return 0
    constraints=$1/constraints.txt
    [ "$( (sha256sum "$constraints" 2>/dev/null || shasum -a 256 "$constraints") | cut -c 1-64)" = \
        "$right" ] || fail "constraints.txt is damaged or not the one that was meant; nothing was" \
        "installed"
}

# Two columns: the hash, then the name with an asterisk before it where it was read binary.
listed() {
    awk -v name="$2" '$2 == name || $2 == "*" name { print $1; exit }' "$1/SHA256SUMS"
}

settle_uv() {
    uv=$(command -v uv) && return
    for getter in "$python" python3; do
        ! "$getter" -I -c 'import ensurepip, venv' >/dev/null 2>&1 || return 0
    done
    fail "neither uv nor a Python with its 'venv' module was found; install one of them (Debian and" \
        "Ubuntu: 'apt-get install python3-venv') and run this again"
}

describe() {
    say "would install $from with ${uv:-a uv from PyPI, which is not kept}"
    say "would make a virtual environment in $environment with Python ${python:-$PYTHONS}"
    for program in $PROGRAMS; do
        say "would link $links/$program to $environment/bin/$program"
    done
    [ ! -d "$environment" ] || say "would replace the one that is there"
    find_running
    [ "$running" = no ] || say "would end the client that runs in order, and start it again"
    [ "$service" = no ] || say "would run $links/swarm-client service install"
}

# ---------------------------------------------------------------- the environment

# Beside its place, so that a failure leaves the old one as it was.
build_environment() {
    # Ours alone, so that nothing stays after an uninstall; beside the environment, so that uv can
    # link files into it.
    export UV_CACHE_DIR="$work/cache" UV_PYTHON_INSTALL_DIR="$environment.python"
    if [ -z "$uv" ]; then
        say "getting uv from PyPI for this installation"
        "$getter" -I -m venv "$work/uv" || give_up venv
        "$work/uv/bin/python" -I -m pip --quiet --disable-pip-version-check --no-input \
            --no-cache-dir install uv || give_up pip
        uv=$work/uv/bin/uv
    fi
    echo "$OVERRIDE" >"$work/overrides.txt"
    "$uv" venv --quiet --relocatable --python "${python:-$PYTHONS}" "$work/env" || give_up uv
    say "installing $from and what it needs (torch is large: minutes the first time)"
    "$uv" pip install --quiet --python "$work/env" --overrides "$work/overrides.txt" \
        --constraints "$constraints" "swarmtrain$extra @ $(url)${sha256:+#sha256=$sha256}" || give_up uv
    "$work/env/bin/swarm-client" version >/dev/null || fail "the installed program does not start; the" \
        "message above says why. Nothing was changed"
}

url() {
    case $from in
    *://*) echo "$from" ;;
    *) echo "file://$from" | sed 's/%/%25/g; s/ /%20/g; s/#/%23/g; s/?/%3F/g' ;;
    esac
}

give_up() {
    fail "the packages could not be installed; $1's message above says why (the first installation" \
        "needs a network). Nothing was changed"
}

put_in_place() {
    # First the content, then the name: a power cut would leave programs without content.
    sync
    rm -rf "$environment.old"
    [ ! -d "$environment" ] || mv "$environment" "$environment.old"
    mv "$work/env" "$environment" ||
        fail "$environment could not be put in place; what was there is there again"
    rm -rf "$environment.old"
    mkdir -p "$links"
    for program in $PROGRAMS; do
        ln -sf "$environment/bin/$program" "$links/$program"
    done
}

# The environment that was there before, where an installation was cut off between two names.
take_back() {
    [ -d "$environment" ] || [ ! -d "$environment.old" ] || mv "$environment.old" "$environment"
}

# ---------------------------------------------------------------- the client that runs

# Whether one does, and who looks after it: a service manager, or nobody. Isolated (-I): else Python
# takes `json` from the folder in which this script is called, where another user may have put one.
find_running() {
    running=no manager='' state=''
    [ -x "$client" ] || return 0
    if is_served_by systemctl --user; then
        manager="systemctl --user"
    elif [ "$(id -u)" = 0 ] && is_served_by systemctl; then
        manager=systemctl
    elif ! state=$("$client" status --json 2>/dev/null | "$environment/bin/python" -I -c \
        'import json, sys; print(json.load(sys.stdin)["state"])' 2>/dev/null); then
        return 0
    fi
    running=yes
}

is_served_by() {
    command -v systemctl >/dev/null 2>&1 && "$@" is-active --quiet "$UNIT" 2>/dev/null &&
        "$@" show --property=ExecStart "$UNIT" | grep -qF "$environment/"
}

# By the old program: it speaks the language of the daemon that runs.
end_running() {
    find_running
    [ "$running" = yes ] || return 0
    say "ending the client that runs, in order (it hands over what it has in hand)"
    ended=yes
    if [ -n "$manager" ]; then
        $manager stop "$UNIT" || fail "the service could not be stopped; nothing was changed"
    else
        "$client" shutdown >/dev/null || fail "the client that runs did not end; end it (Ctrl-C where" \
            "it runs, or kill) and run this again. Nothing was changed"
    fi
}

# Also after a failure: whoever ends a client starts it again.
start_again() {
    [ "$ended" = yes ] || return 0
    ended=no
    if [ -n "$manager" ]; then
        $manager start "$UNIT"
    elif ! "$client" status >/dev/null 2>&1; then
        # One that worked for no run is not to take one up now.
        [ "$state" != stopped ] || set -- --idle
        "$client" daemon --detach "$@" && say "the client runs again, behind the terminal"
    fi
}

tell() {
    say "installed swarmtrain $("$environment/bin/swarm-client" version) in $environment"
    say "its programs are in $links: $PROGRAMS"
    command=swarm-client
    case :$PATH: in
    *:"$links":*) ;;
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

# ---------------------------------------------------------------- removal

uninstall() {
    data=${XDG_DATA_HOME:-$HOME/.local/share} config=${XDG_CONFIG_HOME:-$HOME/.config}
    state=${XDG_STATE_HOME:-$HOME/.local/state} cache=${XDG_CACHE_HOME:-$HOME/.cache}
    if [ "$(uname -s)" = Darwin ]; then
        data="$HOME/Library/Application Support" config="$HOME/Library/Application Support"
        state=$HOME/Library/Logs cache=$HOME/Library/Caches
    fi
    home=$(absolute "${SWARM_CLIENT_HOME:-$data/swarmtrain}")
    set -- "$data/swarmtrain" "$config/swarmtrain" "$state/swarmtrain" "$cache/swarmtrain"
    [ "$home" = "$1" ] || set -- "$home" "$@"
    [ "$purge" = no ] || [ $# = 4 ] || check_home
    if [ "$dry_run" = no ]; then
        end_running
    elif find_running && [ "$running" = yes ]; then
        say "would end the client that runs, in order"
    fi
    remove_service "$config/systemd/user" "$HOME/Library/LaunchAgents/$LABEL.plist"
    remove_program
    for folder in "$@"; do
        if [ "$purge" = yes ]; then
            [ ! -L "$folder" ] || say "$folder is a link; what it leads to stays: $(readlink "$folder")"
            remove "$folder"
        elif [ -e "$folder" ]; then
            say "$folder stays; --purge removes it too"
        fi
    done
    [ "$dry_run" = yes ] || say "done"
}

# A folder that somebody named by mistake must not be emptied.
check_home() {
    [ -d "$home" ] || return 0
    [ -f "$home/identity.key" ] ||
        fail "$home holds no identity.key, so it is not the home of a client; nothing was removed"
    case $(cd "$HOME" && pwd -P)/ in
    "$(cd "$home" && pwd -P)"/*) fail "$home is more than a client's home; nothing was removed" ;;
    esac
}

# Its own way first, which tells the system; by hand where the program is broken.
remove_service() {
    wanted=$1/default.target.wants
    [ -e "$1/$UNIT" ] || [ -L "$wanted/$UNIT" ] || [ -e "$2" ] || return 0
    if [ "$dry_run" = no ]; then
        "$client" service uninstall >/dev/null 2>&1 || systemctl --user stop "$UNIT" 2>/dev/null ||
            launchctl bootout "gui/$(id -u)/$LABEL" 2>/dev/null || true
        say "ended the service"
    fi
    remove "$wanted/$UNIT"
    remove "$1/$UNIT"
    remove "$2"
    if [ "$dry_run" = no ]; then
        systemctl --user daemon-reload 2>/dev/null || true
        # As far as they are empty now: with something in it a folder is somebody else's.
        rmdir "$wanted" "$1" "${1%/user}" 2>/dev/null || true
    fi
}

remove_program() {
    for program in $PROGRAMS; do
        case $(readlink "$links/$program" || true) in
        "$environment"/bin/*) remove "$links/$program" ;;
        ?*) say "leaving $links/$program, which is not from this script" ;;
        esac
    done
    # Also a Python that uv has downloaded for it, and what a broken installation left.
    for folder in "$environment" "$environment.python" "$work" "$environment.old"; do
        remove "$folder"
    done
}

remove() {
    [ -e "$1" ] || [ -L "$1" ] || return 0
    if [ "$dry_run" = yes ]; then
        say "would remove $1"
        return
    fi
    rm -rf "$1" || fail "$1 could not be removed; the message above says why"
    say "removed $1"
}

main "$@"
