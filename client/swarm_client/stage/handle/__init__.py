"""The stage worker as the daemon sees it (trio, no torch)."""
