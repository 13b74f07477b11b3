"""Entry point of the stage worker: `python -m swarm_client.stage.worker --fd N`, started by the
daemon."""

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
    # Imported here: torch takes seconds to import, and the daemon may die meanwhile.
    from swarm_client.stage.worker.compute_loop import serve

    # The system closes the socket, so that the daemon sees its end only once the exit status
    # exists.
    serve(inherited_link(arguments.fd, worker_requests))


main()
