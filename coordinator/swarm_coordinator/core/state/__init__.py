"""The coordinator's state, as values: the run, peers, leases, the step table, moves."""
