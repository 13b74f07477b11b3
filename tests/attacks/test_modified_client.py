"""Every modification of the client still finds the function that it replaces.

A modified client whose cheat cannot be applied ends at its start, and its run among strangers,
which most runs of the tests leave out, proves nothing.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from kits.attack.strangers import MODIFIED

APPLY_ALL = """
import importlib, sitecustomize
for cheat, patches in sitecustomize.CHEATS.items():
    for module, patch in patches:
        try:
            patch(importlib.import_module(module))
        except AttributeError as error:
            print(f"{cheat}: {error}")
"""


@pytest.mark.process
def test_each_cheat_finds_what_it_replaces() -> None:
    done = subprocess.run(
        [sys.executable, "-c", APPLY_ALL],
        env={"PYTHONPATH": str(MODIFIED)}, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert done.stdout == ""
