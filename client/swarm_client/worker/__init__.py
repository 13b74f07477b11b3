"""The stage worker: a child process per device that holds one pipeline stage and computes.

`protocol` are the messages, `sizes` what a slot must hold, `client` the daemon's handle (trio, no
torch); `compute` is the torch logic, `loop` and `__main__` the process around it.
"""
