"""`python -m swarm_coordinator.evaluation RUN_DIR`: started by the coordinator only."""

from __future__ import annotations

import sys

from swarm_coordinator.evaluation.process import main

sys.exit(main(sys.argv[1:]))
