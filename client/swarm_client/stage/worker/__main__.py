"""`python -m swarm_client.stage.worker --fd N`, started by the daemon; see `protocol`."""

from __future__ import annotations

import argparse
import os

from swarm_client.fault_injection import faults
from swarm_client.ipc.child_process import inherited_link, prepare_child_process
from swarm_client.stage.protocol.messages import worker_requests


def main() -> None:
    parser = argparse.ArgumentParser(prog="swarm_client.stage.worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket of the daemon")
    arguments = parser.parse_args()
    prepare_child_process()
    faults.activate(None, daemon_pid=os.getppid())
    # Only now: importing torch takes seconds, in which the daemon may already have died.
    from swarm_client.stage.worker.compute_loop import serve

    # The socket is left to the system to close: its end then tells the daemon that the exit
    # status is there.
    serve(inherited_link(arguments.fd, worker_requests))


main()
