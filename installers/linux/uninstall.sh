#!/bin/sh
# Removes what install.sh and `swarm-client service install` have put into this user's folders.
#
#   sh uninstall.sh              the program, its links and its service; what the client keeps stays
#   sh uninstall.sh --purge      that as well: identity, caches, preferences, logs. Nothing is left
#   sh uninstall.sh --dry-run    says what would be removed, and removes nothing
#   sh uninstall.sh --help       all options
#
# A client that runs is asked to end in order first. What is not there is no error. Under macOS it
# does the same with that system's places.
#
# Everything is in functions, and the last line calls the first one: half a download does nothing.

set -eu

PROGRAMS="swarm-client swarm-coordinator"
UNIT=swarm-client.service
LABEL=org.swarmtrain.client

main() {
    prefix=
    home=${SWARM_CLIENT_HOME:-}
    purge=no
    dry_run=no
    while [ $# -gt 0 ]; do
        case $1 in
        --prefix | --home)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            set_option "$1" "$2"
            shift
            ;;
        --prefix=* | --home=*) set_option "${1%%=*}" "${1#*=}" ;;
        --purge) purge=yes ;;
        --dry-run) dry_run=yes ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) refuse "there is no option $1" ;;
        esac
        shift
    done
    system=$(uname -s)
    settle_places
    end_client
    if [ "$system" = Darwin ]; then
        remove_agent
    else
        remove_service
    fi
    remove_program
    if [ "$purge" = yes ]; then
        remove_data
    else
        tell_what_stays
    fi
    [ "$dry_run" = yes ] || say "done"
}

usage() {
    cat <<'END'
usage: uninstall.sh [OPTIONS]
  --purge        remove identity, caches, preferences and logs as well
  --prefix DIR   as it was given to install.sh
  --home DIR     as it was given to swarm-client [default: $SWARM_CLIENT_HOME, or the usual place]
  --dry-run      say what would be removed, and remove nothing
END
}

set_option() {
    [ -n "$2" ] || refuse "$1 needs a value"
    case $1 in
    --prefix) prefix=$(absolute "$2") ;;
    --home) home=$2 ;;
    esac
}

say() {
    echo "uninstall: $*"
}

fail() {
    echo "uninstall: error: $*" >&2
    exit 1
}

refuse() {
    echo "uninstall: error: $* (see --help)" >&2
    exit 2
}

absolute() {
    case $1 in
    /*) echo "$1" ;;
    *) echo "$PWD/$1" ;;
    esac
}

settle_places() {
    [ -n "${HOME:-}" ] || fail "HOME is not set; set it, or this script cannot know what to remove"
    data=${XDG_DATA_HOME:-$HOME/.local/share}
    config=${XDG_CONFIG_HOME:-$HOME/.config}
    state=${XDG_STATE_HOME:-$HOME/.local/state}
    cache=${XDG_CACHE_HOME:-$HOME/.cache}
    if [ -n "$prefix" ]; then
        environment=$prefix/share/swarmtrain-program
        links=$prefix/bin
    else
        environment=$data/swarmtrain-program
        links=$HOME/.local/bin
    fi
    if [ "$system" = Darwin ]; then
        data="$HOME/Library/Application Support"
        config=$data
        state=$HOME/Library/Logs
        cache=$HOME/Library/Caches
    fi
    usual_home=$data/swarmtrain
    home=$(absolute "${home:-$usual_home}")
    client=$environment/bin/swarm-client
    [ "$purge" = no ] || check_home
}

# A folder that somebody named by mistake must not be emptied.
check_home() {
    [ "$home" != "$usual_home" ] && [ -d "$home" ] || return 0
    [ -f "$home/identity.key" ] ||
        fail "$home holds no identity.key, so it is not the home of a client; nothing was removed"
    case $(cd "$HOME" && pwd -P)/ in
    "$(cd "$home" && pwd -P)"/*) fail "$home is more than a client's home; nothing was removed" ;;
    esac
}

end_client() {
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

remove_service() {
    unit=$config/systemd/user/$UNIT
    link=$config/systemd/user/default.target.wants/$UNIT
    [ -e "$unit" ] || [ -L "$link" ] || return 0
    if [ "$dry_run" = no ]; then
        # Its own way first, which tells systemd; by hand where the program is broken.
        "$client" service uninstall >/dev/null 2>&1 || systemctl --user stop "$UNIT" 2>/dev/null || true
    fi
    say "ended the service"
    remove "$link"
    remove "$unit"
    if [ "$dry_run" = no ]; then
        systemctl --user daemon-reload 2>/dev/null || true
        tidy "$config/systemd/user/default.target.wants" "$config/systemd/user" "$config/systemd"
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

remove_program() {
    for program in $PROGRAMS; do
        if [ -L "$links/$program" ]; then
            case $(readlink "$links/$program") in
            "$environment"/bin/*) remove "$links/$program" ;;
            *) say "leaving $links/$program, which is not from install.sh" ;;
            esac
        fi
    done
    for folder in "$environment" "$environment.new" "$environment.old"; do
        remove "$folder"
    done
}

remove_data() {
    if [ "$home" != "$usual_home" ]; then
        remove "$home"
    fi
    for folder in "$usual_home" "$config/swarmtrain" "$state/swarmtrain" "$cache/swarmtrain"; do
        remove "$folder"
    done
}

tell_what_stays() {
    for folder in "$home" "$config/swarmtrain" "$state/swarmtrain" "$cache/swarmtrain"; do
        [ ! -e "$folder" ] || say "$folder stays; --purge removes it too"
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

# Folders that are empty now; a folder with something in it is somebody else's.
tidy() {
    for folder in "$@"; do
        rmdir "$folder" 2>/dev/null || return 0
    done
}

main "$@"
