"""Bytes and instructions, counted: what costs more than it did, on however noisy a machine.

    messages      bytes of each message that a step in the steady state is made of
    exchange      bytes of two microbatches on the wire, between real connections in one process
    workloads     small pieces of work from fixed seeds, one for each thing done over and over
    instructions  bytecode instructions and calls of this project's own code
    comparison    against the baseline that is committed: what grew, and by how much

`make bench-counts` compares; `make bench-counts ARGS=--accept` writes the new baseline.
"""
