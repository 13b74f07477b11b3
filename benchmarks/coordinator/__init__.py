"""The real coordinator under thousands of simulated volunteers: `make bench-coordinator`."""
