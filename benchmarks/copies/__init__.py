"""Bytes copied on the way of one tensor from a stage to the next one: `make bench-copies`.

    interpose.c     counts copies in memory and to and from the kernel, for a whole process
    counting        builds it, and reads it from inside the process that it was loaded into
    program         one end of the way over the wire, in a process of its own
    worker_program  the way between a daemon and its worker

docs/tensor-path.md says what the hops are and which copies are needed.
"""
