"""Multiaddresses: their binary form and the order in which they are dialled."""
