"""Simulation of a whole swarm on a virtual clock, to predict the behaviour of a fleet.

What is production code, and what is a model:

    production   the coordinator's core (`core.transition` and all it imports: membership, leases,
                 close, apply, recovery, rebalancing), the stage choice of a joining peer
                 (`placement`), and the volunteers' rules (`volunteer_rules`): of stages and step
                 closes at both levels, of microbatches at the fine one. Volunteers and coordinator
                 exchange the real messages.
    model        the volunteers' hardware and links (`fleet`), their arrivals and departures
                 (`trace`, `churn_models`), and the time that computing, sending, downloading and
                 averaging take.

The data plane has two levels. `microbatch_plane` follows every microbatch through queues, credits
and links, for fleets of some dozens. `fluid_plane` lets microbatches flow at the rate of the
bottleneck stage and distributes them by the peers' rates, for thousands. docs/simulator.md has
more, including the agreement of both with real processes.
"""
