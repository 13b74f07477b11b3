"""Links and joining behind NAT, on real network stacks: `make bench-net`."""
