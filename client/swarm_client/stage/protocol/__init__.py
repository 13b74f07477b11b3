"""Messages between the daemon and the stage worker, and the sizes of their shared memory."""
