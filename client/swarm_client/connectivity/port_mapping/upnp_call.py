"""One call to a router by UPnP, as a program of its own; run as a file, with a request as argument.

miniupnpc reads what a router answers for as long as it sends, into memory, and cannot be stopped:
in a strange network the gateway may belong to anyone. So each call has a process, whose memory the
system bounds, and which is killed when it takes too long. Prints one line of JSON: a result, or an
error. Imports nothing of the project, to start quickly.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

MAX_MEMORY_BYTES = 512 * 2**20
"""Address space of the process; Python and miniupnpc take a tenth of it."""

ELSEWHERE = "the router's description points to another host"


def is_at(url: str, host: str) -> bool:
    """Whether `url` is plain HTTP to this IP address, under any reading."""
    return re.fullmatch(rf"http://{re.escape(host)}(:[0-9]{{1,5}})?(/[!-~]*)?", url) is not None


def call(url: str, host: str, function: str, arguments: list[Any]) -> str:
    """Read the router's description at `url` and call one of its functions; return its answer.

    ValueError if the description points to another host than `host`; any exception of miniupnpc.
    """
    import miniupnpc

    router = miniupnpc.UPnP()
    control_url = router.selectigd(url)
    if not isinstance(control_url, str) or not is_at(control_url, host):
        raise ValueError(ELSEWHERE)
    if function == "addportmapping":
        external_port, port, description, lease_seconds = arguments
        done = router.addportmapping(
            external_port, "TCP", router.lanaddr, port, description, "", lease_seconds
        )
    elif function == "deleteportmapping":
        (external_port,) = arguments
        done = router.deleteportmapping(external_port, "TCP", "")
    else:
        done = router.externalipaddress()
    return str(done)


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:
        return  # Windows: the time limit alone
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def main() -> None:
    url, host, function, *arguments = json.loads(sys.argv[1])
    _bound_memory()
    try:
        answer = {"result": call(url, host, function, arguments)}
    except Exception as error:  # noqa: BLE001 (miniupnpc raises nothing narrower)
        answer = {"error": str(error)[:100] or "no reason given"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
