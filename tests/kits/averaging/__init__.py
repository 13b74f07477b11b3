"""Groups of real peers that average: hosts, averaging workers, p2pds and relays on loopback."""
