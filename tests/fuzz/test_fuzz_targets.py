"""Every decoder, for a moment: right inputs with a few bytes changed, and bytes of no kind."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.targets import TARGETS, Target


@st.composite
def inputs(draw: st.DrawFn, target: Target) -> bytes:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(draw(st.sampled_from(target.examples)))
    pieces = st.binary(min_size=1, max_size=4)
    if target.words:
        pieces |= st.sampled_from(target.words)
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(["insert", "overwrite", "delete", "repeat", "cut"]))
        if what == "insert":
            data[at:at] = draw(pieces)
        elif what == "overwrite":
            piece = draw(pieces)
            data[at : at + len(piece)] = piece
        elif what == "cut":
            del data[at:]
        else:
            end = draw(st.integers(at, min(len(data), at + 20)))
            data[at:end] = b"" if what == "delete" else 2 * data[at:end]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_right_is_taken(name: str) -> None:
    """Else the tests below would try nothing but refusals."""
    TARGETS[name].decode(TARGETS[name].examples[0])


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "max_examples", [40, pytest.param(1000, marks=pytest.mark.nightly)], ids=["briefly", "longer"]
)
def test_a_decoder_takes_any_bytes_or_refuses_them_in_its_own_words(
    name: str, max_examples: int
) -> None:
    target = TARGETS[name]

    @settings(max_examples=max_examples, suppress_health_check=[HealthCheck.too_slow])
    @given(inputs(target))
    def attempt(data: bytes) -> None:
        target(data)

    attempt()
