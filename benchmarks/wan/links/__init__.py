"""The emulated links of the network: built, delayed, verified and counted."""
