"""What crosses between the daemon and the stage worker: messages and shared-memory sizes."""
