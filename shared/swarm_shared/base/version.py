"""The version of this software, in a module of its own so that printing it imports nothing else."""

from typing import Final

SOFTWARE_VERSION: Final = "0.1.0"
