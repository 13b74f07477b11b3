"""A port of the home router that leads to this machine: asked for, renewed, given back.

Three parts: who the router is (`gateway`), how it is asked (`nat_pmp`, `upnp`), and the life of
a mapping (`mapper`). Only a probe from outside shows that a mapping works: a router's word alone
is never announced.
"""

from swarm_client.connectivity.port_mapping.gateway import Gateway, default_gateway
from swarm_client.connectivity.port_mapping.mapper import Mapping, PortMapper

__all__ = ["Gateway", "Mapping", "PortMapper", "default_gateway"]
