from __future__ import annotations

from collections.abc import Iterator

import pytest

from network_lab import Lab, why_not_here


@pytest.fixture
def lab() -> Iterator[Lab]:
    if (reason := why_not_here()) is not None:
        pytest.skip(reason)
    with Lab() as made:
        yield made
