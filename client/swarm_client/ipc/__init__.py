"""Inter-process communication with child processes: framed messages and shared memory."""
