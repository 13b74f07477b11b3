"""Counters of bytecode instructions executed and calls made by this project's own code.

Bytecode counts do not depend on machine or load and need no processor performance counters, which
virtual machines seldom offer. Work inside a library call is invisible; therefore calls are counted
as well. Bytecode differs between minor versions of Python.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

PACKAGES = ("swarm_shared", "swarm_client", "swarm_coordinator")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one workload; `calls` are calls of Python and C functions by the project's code."""

    instructions: int
    calls: int


class Meter:
    """Counts while it is entered; unsuitable for code that sets a tracer."""

    def __init__(self) -> None:
        self._instructions = 0
        self._calls = 0
        self._ours: dict[str, bool] = {}

    @property
    def cost(self) -> Cost:
        return Cost(self._instructions, self._calls)

    def __enter__(self) -> Meter:
        # A garbage collection may run the project's code: finalizers, weak reference callbacks.
        gc.collect()
        gc.disable()
        self._before = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        trace, profile = self._before
        sys.settrace(trace)
        sys.setprofile(profile)
        gc.enable()

    def _is_ours(self, frame: FrameType) -> bool:
        module = frame.f_globals.get("__name__", "")
        known = self._ours.get(module)
        if known is None:
            known = self._ours[module] = module.partition(".")[0] in PACKAGES
        return known

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._instructions += 1
            return self._trace
        if event == "call":
            if not self._is_ours(frame):
                return None
            frame.f_trace_lines = False
            frame.f_trace_opcodes = True
        return self._trace

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            self._calls += self._is_ours(frame)
        elif event == "call" and frame.f_back is not None:
            self._calls += self._is_ours(frame.f_back)


def cost_of(prepare: Callable[[], Callable[[], object]]) -> Cost:
    """Return the cost of the second run of what `prepare` returns; the first one fills caches."""
    prepare()()
    work = prepare()
    with Meter() as meter:
        work()
    return meter.cost
