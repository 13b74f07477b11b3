"""The daemon as a service of the machine: systemd's user and system units, a macOS LaunchAgent.

The work is planned as a tuple of `steps` that touches nothing, so that `--dry-run` shows exactly
what would be done. The units are files in this package, since they are part of what is installed;
`installers/` uses them.
"""
