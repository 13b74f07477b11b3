"""The commands of `swarm-client`, grouped by what they need: a daemon's socket, or a daemon of
their own.

Each command imports heavy modules inside its function, so that commands that only ask a daemon
start quickly.
"""
