"""`swarm-client` as a release with other protocol versions would be.

    python -m kits.runs.other_version OLDEST NEWEST WORDS...

Its hello has a field that this version does not know, as a newer one may.
"""

from __future__ import annotations

import sys

from swarm_client.cli.main import main
from swarm_client.volunteer import volunteer
from swarm_shared.protocol import Hello
from swarm_shared.protocol.versions import VersionRange


class OtherHello(Hello):
    invented_later: str = "unknown here"


if __name__ == "__main__":
    oldest, newest = map(int, sys.argv[1:3])
    del sys.argv[1:3]
    volunteer.PROTOCOL_VERSIONS = VersionRange(oldest=oldest, newest=newest)  # type: ignore[misc]
    volunteer.Hello = OtherHello  # type: ignore[misc]
    main()
