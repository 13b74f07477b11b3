"""What a volunteer allows this program to use, and when.

`model` is the list of all of it, `hours` the times of day, `layers` where each value comes from
(flag, environment, file, default), `file` the commented TOML file and its editing.
"""

from swarm_client.preferences.hours import Hours
from swarm_client.preferences.layers import Layered, Origin, PreferenceSource, load
from swarm_client.preferences.model import GpuPreferences, Preferences

__all__ = [
    "GpuPreferences",
    "Hours",
    "Layered",
    "Origin",
    "PreferenceSource",
    "Preferences",
    "load",
]
