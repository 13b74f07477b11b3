"""Exception groups: their leaves, the expected error, and the unwrapping of a group of one."""

from __future__ import annotations

import pytest

from swarm_shared.base.error_groups import expected_error, leaves, single_error_unwrapped
from swarm_shared.base.errors import NetworkError, SwarmError, UsageError


def test_leaves_are_those_of_nested_groups_in_order() -> None:
    one, two, three = ValueError("1"), KeyError("2"), OSError("3")
    group = ExceptionGroup("", [one, ExceptionGroup("", [two, three])])
    assert list(leaves(group)) == [one, two, three]
    assert list(leaves(one)) == [one]


def test_an_error_is_expected_only_if_all_of_its_group_are() -> None:
    first = NetworkError("first")
    assert expected_error(ExceptionGroup("", [first, UsageError("second")])) is first
    assert expected_error(ExceptionGroup("", [first, ValueError("a bug")])) is None
    assert expected_error(first) is first


def test_a_group_of_one_is_raised_as_its_error_with_its_cause() -> None:
    cause = OSError("below")
    error = SwarmError("above")
    error.__cause__ = cause
    with pytest.raises(SwarmError) as caught, single_error_unwrapped():
        raise ExceptionGroup("", [error])
    assert caught.value.__cause__ is cause
    assert caught.value.__context__ is None


def test_a_larger_group_stays_one() -> None:
    with pytest.raises(ExceptionGroup), single_error_unwrapped():
        raise ExceptionGroup("", [SwarmError("one"), SwarmError("two")])
