"""Starts real coordinators that die at a chosen boundary of a commit.

A warmed-up parent: what a coordinator imports is there before the first one is forked, so that a
start costs a fifth of a second. One thread, so that forking is safe. Each line on standard input is
a start, `{"words": [...], "output": FILE, "boundary": NAME or null, "passing": N}`, answered by the
process id; a second line is answered when the one before has been waited for, with its status.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from typing import Any

from swarm_coordinator.cli.main import run
from swarm_coordinator.storage import store


def main() -> None:
    for line in sys.stdin:
        question = json.loads(line)
        pid = os.fork()
        if not pid:
            _start(question)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _start(question: dict[str, Any]) -> None:
    passed: Counter[str] = Counter()

    def commit_hook(name: str) -> None:
        passed[name] += 1
        if name == question["boundary"] and passed[name] == question["passing"]:
            os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        store.commit_hook = commit_hook
        output = os.open(question["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = run(question["words"])
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
