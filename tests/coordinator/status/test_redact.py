"""No network address remains in text that is published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.status.redact import REPLACEMENT, without_addresses

words = st.text("abc XYZ.,;()'…", max_size=20).map(lambda text: f" {text} ")
four = st.ip_addresses(v=4).map(str)
six = st.one_of(
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda address: address.exploded),
    st.ip_addresses(v=4).map(lambda address: f"::ffff:{address}"),
)
ports = st.integers(1, 65_535)
spelt = st.one_of(
    four,
    six,
    st.builds("{}:{}".format, four, ports),
    st.builds("[{}]:{}".format, six, ports),
    st.builds("/ip4/{}/tcp/{}".format, four, ports),
    st.builds("/ip6/{}/tcp/{}/p2p/12D3KooW".format, six, ports),
    st.builds("http://{}:{}/x".format, four, ports),
)


@given(
    words, st.lists(spelt, min_size=1, max_size=3), st.sampled_from([" ", ", ", "; ", "\t"]), words
)
def test_addresses_in_a_sentence_are_replaced_however_they_are_spelt(
    before: str, addresses: list[str], between: str, after: str
) -> None:
    shown = without_addresses(before + between.join(addresses) + after)
    assert REPLACEMENT in shown
    for address in addresses:
        assert address not in shown


@pytest.mark.parametrize(
    "text",
    [
        "anna (…rR4Ey8sA) takes stage 0: the most under-served stage that fits",
        "step 12 was applied at 12:03:44, loss 2.5041",
        "a ratio of 3:1, and half past 7:30",
        "1.5 MB in 0.25 s",
    ],
)
def test_what_is_no_address_stays(text: str) -> None:
    assert without_addresses(text) == text


def test_names_of_hosts_in_multiaddresses_go_too() -> None:
    shown = without_addresses("dialling /dns4/home.example.org/tcp/4001 failed")
    assert shown == f"dialling {REPLACEMENT} failed"
