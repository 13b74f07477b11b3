"""The daemon as a service of the machine: systemd's user and system units, a macOS LaunchAgent.

What is to be done is worked out as a tuple of `steps` that touches nothing, so that `--dry-run`
shows exactly what would be carried out. The units themselves lie here as files, since they are
part of what is installed; `installers/` leads to them.
"""
