"""Runs `async def` tests under trio, each with a time limit so that a dead-lock names its test.

Property tests have no deadline: they run beside other work, and how long an example takes says
nothing about what it tests.
"""

from __future__ import annotations

import inspect
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


@pytest.fixture
def files_no_larger_than() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which the kernel refuses to grow a file beyond so many bytes, like a full disk.

    Not for a whole test: the limit also holds for the file that pytest may write its report to.
    """

    @contextmanager
    def limit(size_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
