"""Makes `installer_kit` and `box` importable by the tests beside them."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    # pytest's importlib mode puts no test folder on the path.
    sys.path.append(FOLDER)
