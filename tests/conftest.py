"""Runs `async def` tests under trio, each with a time limit so that a dead-lock names its test.

Property tests have no deadline: they run beside other work, and how long an example takes says
nothing about what it tests.
"""

from __future__ import annotations

import inspect
from functools import partial

import hypothesis
import pytest
import trio

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

_TEST_SECONDS = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})

    async def main() -> None:
        with trio.fail_after(_TEST_SECONDS):
            await test()

    trio.run(main)
    return True
