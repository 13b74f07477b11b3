"""Delays packets on a TUN device in the middle of an emulated network.

    python -m benchmarks.wan.links.forwarder
        '{"machines": {"1.2.3.4": [0.02, 0.001, 0.0]}, "seed": 1}'

All traffic between machines is routed into the device, waits here for the delay of its path, and
leaves through it. netem is not used because many kernels lack it. Rates are limited by tbf, in the
kernel, at both ends of every link.

Python is fast enough because packets arrive as the kernel holds them, up to 64 KiB at once
(`IFF_VNET_HDR`: with a header for segmentation), and leave in the same form.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from benchmarks.wan.links.delay_line import Access, DelayLine

DEVICE = "tun0"
READY = "ready"
READ_BYTES = 65_536 + 64
READS_IN_A_ROW = 64
LATE_SECONDS = 0.002
PRIORITY = 1

# include/uapi/linux/if_tun.h
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_VNET_HEADER_BYTES = 10
_VERSION = _VNET_HEADER_BYTES
_SOURCE = slice(_VNET_HEADER_BYTES + 12, _VNET_HEADER_BYTES + 16)
_TARGET = slice(_VNET_HEADER_BYTES + 16, _VNET_HEADER_BYTES + 20)


@dataclass(slots=True)
class Counts:
    """Statistics of the forwarder, printed at the end."""

    packets: int = 0
    bytes: int = 0
    late: int = 0
    """Packets that left more than LATE_SECONDS after they were due."""
    latest_seconds: float = 0.0
    lost: int = 0
    refused: int = 0
    failed: int = 0
    """Packets that the kernel did not accept."""


def open_tun() -> int:
    """Open a TUN device for IPv4 packets of this network namespace, each with a virtio header."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return device


def forward(device: int, line: DelayLine, stopped: Callable[[], bool]) -> Counts:
    """Forward packets until `stopped` returns true."""
    counts = Counts()
    while not stopped():
        due = line.next_due()
        timeout = 0.5 if due is None else max(0.0, min(0.5, due - time.monotonic()))
        ready, _, _ = select.select([device], [], [], timeout)
        if ready:
            _read_some(device, line)
        while (left := line.take_due(time.monotonic())) is not None:
            _write(device, *left, counts)
    counts.lost, counts.refused = line.lost, line.refused
    return counts


def _read_some(device: int, line: DelayLine) -> None:
    with suppress(BlockingIOError):
        for _ in range(READS_IN_A_ROW):
            packet = os.read(device, READ_BYTES)
            if packet[_VERSION] >> 4 == 4:
                line.accept(time.monotonic(), packet[_SOURCE], packet[_TARGET], packet)


def _write(device: int, due: float, packet: bytes, counts: Counts) -> None:
    try:
        os.write(device, packet)
    except OSError:
        counts.failed += 1
        return
    late = time.monotonic() - due
    counts.packets += 1
    counts.bytes += len(packet) - _VNET_HEADER_BYTES
    counts.late += late > LATE_SECONDS
    counts.latest_seconds = max(counts.latest_seconds, late)


def main(text: str) -> None:
    settings = json.loads(text)
    machines = {
        socket.inet_aton(address): Access(*access)
        for address, access in settings["machines"].items()
    }
    # Packets must leave on time under any load: the emulation must not affect the measurement.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: stopping.append(got))
    gc.disable()  # nothing here creates cycles, and a collection would delay packets
    device = open_tun()
    print(READY, flush=True)
    line = DelayLine(machines, random.Random(settings["seed"]).random)
    counts = forward(device, line, lambda: bool(stopping))
    print(json.dumps(asdict(counts)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
