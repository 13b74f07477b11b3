"""What both sides of a swarm share: values, signatures, the wire, the model."""

from typing import Final

SOFTWARE_VERSION: Final = "0.1.0"
