"""Sums of the gradients of a step, exact to the bit, with digests of what was added."""
