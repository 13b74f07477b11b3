"""The version of this software, on its own: commands that only print it start in a moment."""

from typing import Final

SOFTWARE_VERSION: Final = "0.1.0"
