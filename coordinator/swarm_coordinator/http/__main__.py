"""`python -m swarm_coordinator.http RUN_DIR DESCRIPTOR`: started by the coordinator only."""

from __future__ import annotations

import sys

from swarm_coordinator.http.process import main

sys.exit(main(sys.argv[1:]))
