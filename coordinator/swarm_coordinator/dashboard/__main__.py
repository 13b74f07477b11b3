"""`python -m swarm_coordinator.dashboard RUN_DIR DESCRIPTOR`: started by the coordinator only."""

from __future__ import annotations

import sys

from swarm_coordinator.dashboard.process import main

sys.exit(main(sys.argv[1:]))
