"""The rules of a volunteer as sans-I/O objects: messages, results and times in, decisions out.

No object here sends, waits, computes or reads a clock. Each states its invariants at its top; the
code that drives it only carries bytes and waits. Four drivers exist: the client's daemon, the
simulator, the volunteers of the coordinator's benchmark, and the simulated swarm of the tests.

    stage_account   what a held stage has accumulated, receipted and committed
    delivery        one microbatch to a peer of the next stage: choice, retry, hedge, mask
    step_close      a step close: reconcile, average, report, apply
    stage_tenure    taking, moving and giving up a stage
    lease_queue     leased microbatches: when each starts, and which are handed back
    heartbeat       heartbeats as deltas

The style is that of h11 (https://h11.readthedocs.io): a protocol implementation without I/O can be
tested exhaustively, and is the same code in production and in simulation.
"""
