"""The resource governor: keeps this machine usable for its owner.

`policy` decides, purely, from preferences and readings; `probes` read the machine; `governor` is
the shell that does both twice a second and applies the result to the volunteers; `process_limits`,
`transfer_quota` and `disk_space` enforce limits.
"""
