"""The commands of `swarm-client`, by what they need: a daemon's socket, or a daemon of their own.

Each module imports what is heavy inside its commands: those that only ask start in a moment.
"""
