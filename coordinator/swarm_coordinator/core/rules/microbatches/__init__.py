"""Microbatches of a step: which are leased, which are counted, and the rates by heartbeats.

Part of the pure core (design: the life of a step, Collect). The evaluation is a step with held-out
microbatches, which are counted and audited like others, and never averaged.
"""
