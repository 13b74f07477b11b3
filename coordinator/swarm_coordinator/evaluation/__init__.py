"""The evaluation of checkpoints on the organiser's machine: a process beside the coordinator.

While a run goes on, a checkpoint is evaluated every so many steps: its loss on the held-out data,
and a text that it writes. The process reads the run folder, prints each result, and writes nothing;
`server.processes.evaluator` supervises it and has results stored and shown (decision 0047).
"""
