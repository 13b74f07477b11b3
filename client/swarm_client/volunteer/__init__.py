"""One device's participation in a run: session, stage, heartbeats, gradient averaging."""
