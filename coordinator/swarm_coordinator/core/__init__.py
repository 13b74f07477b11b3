"""The coordinator's pure core: a function of (state, event, now), without I/O and without a clock.

transition  the function
rules       one concern each: microbatches, step close, membership, recovery, ...
state       the values that the rules change
events      the input (events) and the output (commands)
"""
