"""`swarm-coordinator top`: the run in its folder, whether its coordinator runs or not.

It reads `status.json` and the database and writes nothing, so that it works over SSH and beside a
running coordinator without slowing it down. A ban goes the way of `swarm-coordinator ban`.
"""
