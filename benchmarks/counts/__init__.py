"""Counts of bytes and instructions: regressions on a machine with any load.

    messages      bytes of each message of a steady-state step
    exchange      bytes of two microbatches on the wire, between real connections in one process
    workloads     small workloads with fixed seeds, one per frequent operation
    instructions  bytecode instructions and calls of this project's own code
    comparison    difference to the committed baseline

`make bench-counts` compares; `make bench-counts ARGS=--accept` writes the new baseline.
"""
