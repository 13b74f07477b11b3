"""Reduce-scatter share sizes per member, chosen so that the slowest uplink does not dominate.

In a reduce-scatter and an all-gather of n members (Patarasuk & Yuan 2009, doi
10.1016/j.jpdc.2008.09.002), a member that reduces the share s of the vector sends the rest of its
own part, 1 - s, and its sums to n - 1 members: 1 + s(n - 2) vectors in all, and receives as many.
Equal shares make that 2(n - 1)/n for every member. A slow uplink sends one vector at best, when its
share is 0; with two members that is what each sends in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

MAX_WEIGHT = 1000
"""Weight of the largest share."""

UNMEASURED_RATE_FACTOR = 4.0
"""Assumed rate of an uplink that has never limited sending, over the fastest measured one."""

MAX_SHARE_FACTOR = 4.0
"""Bound of a share over an equal one: an estimated uplink can be wrong, and then a round takes at
most 2.5 times as long as with equal shares."""

MIN_SPEEDUP = 1.05
"""Unequal shares are used only where they make a round faster by more than this factor."""


def reduce_weights(up_bytes_per_second: Sequence[float]) -> tuple[int, ...]:
    """Return each member's share in proportion, 0 to `MAX_WEIGHT`; none when equal shares are as
    good.

    `up_bytes_per_second`: more than 0 each, infinite where the uplink has never been the limit.
    """
    measured = [rate for rate in up_bytes_per_second if math.isfinite(rate)]
    if len(up_bytes_per_second) < 3 or not measured:
        return ()
    best = UNMEASURED_RATE_FACTOR * max(measured)
    rates = [rate if math.isfinite(rate) else best for rate in up_bytes_per_second]
    shares = _fastest_shares(rates)
    equal = [1 / len(rates)] * len(rates)
    if round_seconds(1, rates, equal) < MIN_SPEEDUP * round_seconds(1, rates, shares):
        return ()
    largest = max(shares)
    return tuple(round(MAX_WEIGHT * share / largest) for share in shares)


def round_seconds(nbytes: float, rates: Sequence[float], shares: Sequence[float]) -> float:
    """Return the time of a vector of so many bytes with two or more members; the slowest decides.

    `rates`: bytes per second of each uplink; `shares` of the vector add up to 1.
    """
    others = len(rates) - 2
    return max(nbytes * (1 + s * others) / rate for rate, s in zip(rates, shares, strict=True))


def _fastest_shares(rates: Sequence[float]) -> list[float]:
    """Return the shares of the least time in which the members can reduce the whole vector.

    By a time t a member has sent t * rate vectors, and so can have reduced (t * rate - 1)/(n - 2).
    """
    count, others = len(rates), len(rates) - 2
    max_share = MAX_SHARE_FACTOR / count

    def possible(seconds: float) -> list[float]:
        return [min(max_share, max(0.0, (seconds * rate - 1) / others)) for rate in rates]

    # No round is faster than the slowest uplink sends its one vector.
    shares = possible(1 / min(rates))
    if (total := sum(shares)) < 1:
        shares = possible(_seconds_beyond_that(sorted(rates, reverse=True), others, max_share))
        total = sum(shares)
    return [share / total for share in shares]


def _seconds_beyond_that(fastest_first: Sequence[float], others: int, max_share: float) -> float:
    """Return the time at which the shares add up to the whole vector, when every member has one.

    The first `at_most` members reduce the largest share allowed; the shares of all others must come
    out below it.
    """
    # Added from the slowest up: subtracting a rate from the sum of all could leave nothing of it.
    rests = list(accumulate(reversed(fastest_first)))
    for at_most, rate in enumerate(fastest_first):
        below = len(fastest_first) - at_most
        seconds = (others * (1 - at_most * max_share) + below) / rests[below - 1]
        if seconds * rate - 1 <= max_share * others:
            break
    return seconds
