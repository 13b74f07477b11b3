"""The coordinator's pure core: a function of (state, event, now), without I/O and without a clock.

transition  the function
rules       one concern each: microbatches, step close, membership, recovery, ...
state       the values that the rules change
events      what goes in (events) and what comes out (commands)
"""
