"""The attacks of attacks.toml. `make test-strangers` runs their tests; docs/testing.md has a table.

    python -m kits.attack.catalogue            the tests, as arguments of pytest
    python -m kits.attack.catalogue --table    the table

A kind of modified client is carried out in a real run by tests/integration/test_strangers.py.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

STRANGERS = ("integration/test_strangers.py", "integration/test_strangers_late.py")
"""Files of real runs with modified clients; whole."""


@dataclass(frozen=True)
class Attack:
    subject: str
    attempt: str
    outcome: str
    tests: tuple[str, ...] = ()
    """Node IDs below tests/."""
    kinds: tuple[str, ...] = ()
    """Kinds of modified clients that carry it out."""


def every_attack() -> list[Attack]:
    document = tomllib.loads((Path(__file__).parent / "attacks.toml").read_text())
    return [Attack(**attack) for attack in document["attack"]]


def node_ids() -> list[str]:
    """All tests that carry out an attack, the real runs with modified clients first."""
    single = {test for attack in every_attack() for test in attack.tests}
    return [*STRANGERS, *sorted(t for t in single if t.split("::")[0] not in STRANGERS)]


def table() -> str:
    """The table of docs/testing.md."""
    lines, subject = ["| attempt | what happens | carried out by |", "|---|---|---|"], ""
    for attack in every_attack():
        if attack.subject != subject:
            subject = attack.subject
            lines.append(f"| **{subject}** | | |")
        kinds = [f"a client with *{kind}*" for kind in attack.kinds]
        files = dict.fromkeys(f"`{test.split('::')[0]}`" for test in attack.tests)
        lines.append(f"| {attack.attempt} | {attack.outcome} | {'; '.join([*kinds, *files])} |")
    return "\n".join(lines)


def main() -> None:
    if "--table" in sys.argv:
        print(table())
    else:
        print("\n".join(f"tests/{test}" for test in node_ids()))


if __name__ == "__main__":
    main()
