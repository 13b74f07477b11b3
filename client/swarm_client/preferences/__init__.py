"""What a volunteer allows this program to use, and when.

`model` lists all preferences, `hours` is about times of day, `layers` about the source of each
value (flag, environment, file, default), `file` about the commented TOML file and its editing.
"""

from swarm_client.preferences.layers import PreferenceSource
from swarm_client.preferences.model import GpuPreferences, Preferences

__all__ = ["GpuPreferences", "PreferenceSource", "Preferences"]
