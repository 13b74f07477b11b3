"""Canonical JSON against the examples of RFC 8785."""

from __future__ import annotations

import math
import struct

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


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555555", "333333333.3333333"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
    ],
)
def test_numbers_are_written_as_in_the_rfcs_table(bits: str, text: str) -> None:
    # Appendix B.
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json({"n": number}) == b'{"n":' + text.encode() + b"}"


def test_keys_are_in_the_order_of_their_utf_16() -> None:
    # In UTF-8 and by code points the second one would be last.
    assert list(canonical_json({"\ufb33": 1, "\U0001f600": 2}).decode()) == list(
        '{"\U0001f600":2,"\ufb33":1}'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**53, -(2**53), "\ud800"])
def test_what_json_cannot_say_alike_everywhere_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"JSON floats|JCS|UTF-8"):
        canonical_json({"value": value})
