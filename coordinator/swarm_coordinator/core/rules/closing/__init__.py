"""Parts of `swarm_coordinator.core.rules.step_close`."""
