#!/bin/sh
# Removes what install.sh and `swarm-client service install` have put into this user's folders.
#
#   sh uninstall.sh              the program, its links and its agent; what the client keeps stays
#   sh uninstall.sh --purge      that as well: identity, caches, preferences, logs. Nothing is left
#   sh uninstall.sh --dry-run    says what would be removed, and removes nothing
#   --prefix DIR, --home DIR     as they were given to install.sh and to swarm-client
#
# A client that runs is asked to end in order first. What is not there is no error.
#
# Everything is in functions, and the last line calls the first one: half a download does nothing.

set -eu

LABEL=org.swarmtrain.client

main() {
    purge=no
    dry_run=no
    prefix=
    usual_home="$HOME/Library/Application Support/swarmtrain"
    home=${SWARM_CLIENT_HOME:-$usual_home}
    while [ $# -gt 0 ]; do
        case $1 in
        --purge) purge=yes ;;
        --dry-run) dry_run=yes ;;
        --prefix | --home)
            if [ $# -lt 2 ] || [ -z "$2" ]; then
                refuse "$1 needs a value"
            fi
            case $1 in
            --prefix) prefix=$2 ;;
            --home) home=$2 ;;
            esac
            shift
            ;;
        *) refuse "there is no option $1; there are --purge, --dry-run, --prefix and --home" ;;
        esac
        shift
    done
    [ "$(uname -s)" = Darwin ] || fail "this is not macOS but $(uname -s); use installers/linux"
    if [ -n "$prefix" ]; then
        environment=$prefix/share/swarmtrain-program
    else
        environment=${XDG_DATA_HOME:-$HOME/.local/share}/swarmtrain-program
        prefix=$HOME/.local
    fi
    if [ "$purge" = yes ] && [ "$home" != "$usual_home" ] && [ -d "$home" ] &&
        [ ! -f "$home/identity.key" ]; then
        fail "$home holds no identity.key, so it is not the home of a client; nothing was removed"
    fi
    end_client
    remove_agent
    for program in swarm-client swarm-coordinator; do
        case $(readlink "$prefix/bin/$program" || true) in
        "$environment"/bin/*) remove "$prefix/bin/$program" ;;
        esac
    done
    remove "$environment"
    if [ "$purge" = yes ]; then
        remove "$home"
        remove "$usual_home"
        remove "$HOME/Library/Logs/swarmtrain"
        remove "$HOME/Library/Caches/swarmtrain"
    elif [ -e "$home" ]; then
        say "$home stays; --purge removes it too"
    fi
    [ "$dry_run" = yes ] || say "done"
}

end_client() {
    client=$environment/bin/swarm-client
    "$client" status --home "$home" >/dev/null 2>&1 || return 0
    if [ "$dry_run" = yes ]; then
        say "would end the client that runs"
        return
    fi
    say "ending the client that runs (it hands over what it has in hand)"
    "$client" shutdown --home "$home" >/dev/null 2>&1 || true
    if "$client" status --home "$home" >/dev/null 2>&1; then
        fail "the client in $home does not end; end it yourself and run this again." \
            "Nothing was removed"
    fi
}

remove_agent() {
    agent=$HOME/Library/LaunchAgents/$LABEL.plist
    [ -e "$agent" ] || return 0
    if [ "$dry_run" = no ]; then
        launchctl bootout "gui/$(id -u)/$LABEL" 2>/dev/null || true
    fi
    remove "$agent"
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

say() {
    echo "uninstall: $*"
}

fail() {
    echo "uninstall: error: $*" >&2
    exit 1
}

refuse() {
    echo "uninstall: error: $*" >&2
    exit 2
}

main "$@"
