"""Canonical JSON against the examples of RFC 8785."""

from __future__ import annotations

import math

import pytest

from swarm_shared.identity.canonical_json import canonical_json


def test_the_example_of_the_rfc_has_the_bytes_of_the_rfc() -> None:
    # Section 3.2.2 to 3.2.4.
    content = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/",
        "literals": [None, True, False],
    }
    assert (
        canonical_json(content)
        == (
            '{"literals":[null,true,false],'
            '"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ).encode()
    )


def test_keys_are_in_the_order_of_their_utf_16_and_numbers_as_ecmascript_writes_them() -> None:
    """Python's own JSON differs in both."""
    content = {"\ufb33": 2.0**68, "\U0001f600": 1e21}
    expected = '{"\U0001f600":1e+21,"\ufb33":295147905179352830000}'
    assert canonical_json(content) == expected.encode()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**53, -(2**53), "\ud800"])
def test_what_json_cannot_say_alike_everywhere_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"JSON floats|JCS|UTF-8"):
        canonical_json({"value": value})
