"""How the decisions of a sans-I/O rule are carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

ActionT = TypeVar("ActionT")


class CarryOut(Generic[ActionT]):
    """Carries out all that a rule has decided; to be called after every report to it. What is
    decided meanwhile comes after what was decided before."""

    def __init__(
        self,
        take: Callable[[], list[ActionT]],
        carry_out_one: Callable[[ActionT], None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._take, self._carry_out_one, self._then = take, carry_out_one, then
        self._busy = False

    def __call__(self) -> None:
        if self._busy:
            return
        self._busy = True
        while actions := self._take():
            for action in actions:
                self._carry_out_one(action)
        self._busy = False
        self._then()
