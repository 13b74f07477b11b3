"""What a program has loaded: a heavy library costs each of its starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence


def loaded(code: str, modules: Sequence[str], *arguments: object) -> list[str]:
    """Which of these modules a process of its own has loaded after this code."""
    script = f"""
{code}
import json, sys
print(json.dumps([m for m in {list(modules)} if m in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
