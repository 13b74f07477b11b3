"""The connection stack: TCP, Noise, yamux, bandwidth limits and uplink estimates."""
