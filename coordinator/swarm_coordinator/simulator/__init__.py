"""A whole swarm on a virtual clock, to see what a fleet would do before there is one.

What is the product's own code, and what is a model of the world around it:

    production   the coordinator's core (`transition` and all it imports: membership, leases,
                 close, apply, recovery, rebalancing), the choice of a newcomer (`placement`), in
                 the fine level also the routing of every sender (`routing`). Each word between a
                 volunteer and the coordinator is the real message.
    model        volunteers' hardware and lines (`hardware`), when they come and go (`trace`,
                 `churn`), how long computing, sending, downloading and averaging take.

Two levels of the data plane. `microbatches` follows every microbatch through queues, credits and
links, for fleets of some dozens. `fluid` lets microbatches flow at the rate of the thinnest stage
and shares them out by the peers' rates, for thousands. docs/simulator.md says more, and how far
the two and real processes agree.
"""
