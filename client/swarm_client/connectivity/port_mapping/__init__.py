"""A port of the home router that is forwarded to this machine: requested, renewed, released.

Three parts: finding the router (`gateway`), its protocols (`nat_pmp`, `upnp`), and the life of a
mapping (`mapper`). Only a probe from outside shows that a mapping works: a router's claim alone is
never announced.
"""

from swarm_client.connectivity.port_mapping.gateway import Gateway
from swarm_client.connectivity.port_mapping.mapper import Mapping, PortMapper

__all__ = ["Gateway", "Mapping", "PortMapper"]
