"""All-reduce of a stage's gradients over emulated links: `make bench-all-reduce`."""
