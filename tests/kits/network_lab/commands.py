"""The tools of the lab (`ip`, `iptables`, `tc`), and whether this machine lets them be used."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

TOOL_SECONDS = 20.0

IPTABLES = ("iptables-legacy", "iptables-nft", "iptables")
"""In order of preference: miniupnpd, as Debian builds it for iptables, needs the legacy kind."""


class LabError(Exception):
    """The lab itself could not be built or used; says nothing about what is tested in it."""


def run_tool(words: Sequence[str], text: str = "") -> str:
    """Runs one tool to its end, with `text` as its input; what it printed."""
    try:
        done = subprocess.run(
            list(words), input=text, capture_output=True, text=True,
            timeout=TOOL_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip()
        raise LabError(f"{' '.join(words)} failed with exit code {done.returncode}: {reason}")
    return done.stdout


@functools.cache
def iptables_tool() -> str:
    """The iptables whose kernel side can do what the lab needs; LabError when there is none."""
    reasons: list[str] = []
    for tool in IPTABLES:
        if shutil.which(tool) is None:
            continue
        name = f"swarmlab-try-{os.getpid()}"
        run_tool(["ip", "netns", "add", name])
        inside = ["ip", "netns", "exec", name]
        try:
            run_tool(
                [*inside, *f"{tool} -t nat -A POSTROUTING -j MASQUERADE --random-fully".split()]
            )
            run_tool([*inside, *f"{tool} -A INPUT -m conntrack --ctstate NEW -j DROP".split()])
            run_tool([*inside, *f"{tool} -t mangle -A PREROUTING -m comment --comment x".split()])
        except LabError as error:
            reasons.append(str(error))
        else:
            return tool
        finally:
            run_tool(["ip", "netns", "delete", name])
    raise LabError("; ".join(reasons) or "iptables is not installed")


def ip6tables_tool() -> str:
    return iptables_tool().replace("iptables", "ip6tables")


@functools.cache
def why_not_here() -> str | None:
    """Why no lab can be built on this machine, for a test's skip; None when one can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (tools/install_network_lab.sh installs it)"
    if not any(shutil.which(tool) for tool in IPTABLES):
        return "iptables is not installed (tools/install_network_lab.sh installs it)"
    try:
        iptables_tool()
    except LabError as error:
        return f"this machine's kernel or container does not allow it: {error}"
    return None


def why_no_port_mapping() -> str | None:
    """Why no router of a lab can run a UPnP and NAT-PMP daemon here; None when one can."""
    if (reason := why_not_here()) is not None:
        return reason
    if shutil.which("miniupnpd") is None:
        return "miniupnpd is not installed (tools/install_network_lab.sh installs it)"
    if iptables_tool() != "iptables-legacy":
        return "miniupnpd needs iptables-legacy, which does not work here"
    return None
