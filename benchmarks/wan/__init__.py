"""An emulated wide-area network on one machine, and training compared over it: `make bench-wan`."""
