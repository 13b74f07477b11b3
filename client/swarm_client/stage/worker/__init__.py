"""The stage worker: the child process that holds one pipeline stage and computes (torch)."""
