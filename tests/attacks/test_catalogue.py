"""The catalogue of attacks: its tests exist, and docs/testing.md has its table."""

from __future__ import annotations

import re
from pathlib import Path

from kits.attack.catalogue import STRANGERS, every_attack, table
from kits.attack.strangers import ADAPTIVE, CHEATS

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "testing.md"


def _functions(file: str) -> set[str]:
    text = (TESTS / file).read_text()
    return set(re.findall(r"^(?:async )?def (\w+)", text, re.MULTILINE))


def test_every_test_of_the_catalogue_exists() -> None:
    named = {tuple(test.split("::")) for attack in every_attack() for test in attack.tests}
    assert len(named) > 50
    assert {(file, name) for file, name in named if name not in _functions(file)} == set()
    assert all((TESTS / file).exists() for file in STRANGERS)


def test_every_attack_is_carried_out_and_every_modified_client_is_in_the_catalogue() -> None:
    assert [a.attempt for a in every_attack() if not (a.tests or a.kinds)] == []
    kinds = [kind for attack in every_attack() for kind in attack.kinds]
    assert sorted(kinds) == sorted(CHEATS | ADAPTIVE)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "put the output of kits.attack.catalogue --table there"
