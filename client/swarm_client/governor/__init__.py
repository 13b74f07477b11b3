"""The resource governor: this machine stays its owner's.

`policy` decides, purely, from preferences and readings; `probes` read; `governor` is the shell that
does both once a second and tells the volunteer; `binding`, `ledger` and `disk` make limits hold.
"""
