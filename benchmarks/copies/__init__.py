"""Bytes copied on the path of one tensor from a stage to the next: `make bench-copies`.

    interpose.c     counts copies in memory and to and from the kernel, for a whole process
    counting        builds it, and reads it inside the process that it is loaded into
    program         one end of the network path, in its own process
    worker_program  the path between a daemon and its worker

docs/tensor-path.md describes the hops and the reasons for each copy.
"""
