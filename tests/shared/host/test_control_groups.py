"""Limits of control groups, from the files of either version and from groups of this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.control_group import control_group
from swarm_shared.host.control_groups import MemoryLimit, core_limits, memory_limits
from swarm_shared.host.cores import usable_cores
from swarm_shared.host.memory import host_memory

MIB = 2**20
UNLIMITED_OF_VERSION_1 = 2**63 - 4096


def process_in(
    folder: Path, own: str, mounts: Mapping[str, str], root: str = "/"
) -> tuple[Path, Path]:
    """A process's folder in /proc, and the folder where groups are mounted; `mounts`: what the
    kernel calls the file system and its options, by the mount's name."""
    process, groups = folder / "proc", folder / "sys fs"
    process.mkdir()
    lines = []
    for name, kind in mounts.items():
        place = str(groups / name).replace(" ", "\\040")
        lines.append(f"36 35 98:0 {root} {place} rw,relatime shared:1 - {kind}")
    (process / "mountinfo").write_text(
        "\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", "broken", *lines, ""])
    )
    (process / "cgroup").write_text(own)
    return process, groups


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_a_process_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert list(memory_limits(2**60, tmp_path)) == []
    assert list(core_limits(tmp_path)) == []
    assert host_memory(tmp_path).total_bytes == psutil.virtual_memory().total
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_limits_of_all_parents_count_in_version_2(tmp_path: Path) -> None:
    process, groups = process_in(tmp_path, "0::/a/b\n", {"": "cgroup2 cgroup2 rw,nsdelegate"})
    write(groups, memory__stat="anon 5")
    write(
        groups / "a", memory__max=900 * MIB, memory__high="max", memory__current=500 * MIB,
        memory__stat=f"anon 1\ninactive_file {100 * MIB}", cpu__max="150000 100000",
    )  # fmt: skip
    write(
        groups / "a/b", memory__max=800 * MIB, memory__high=700 * MIB, memory__current=10 * MIB,
        cpu__max="max 100000",
    )  # fmt: skip
    write(groups / "a/b/c", memory__max=1, memory__current=1)
    write(groups / "z", memory__max=1, memory__current=1)
    assert list(memory_limits(2**60, process)) == [
        MemoryLimit(700 * MIB, 10 * MIB), MemoryLimit(900 * MIB, 400 * MIB),
    ]  # fmt: skip
    assert list(core_limits(process)) == [1.5]
    assert usable_cores(process) == 1
    memory = host_memory(process)
    assert memory.total_bytes == 700 * MIB
    assert memory.available_bytes <= 500 * MIB


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    process, groups = process_in(
        tmp_path, "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n",
        {
            "unified": "cgroup2 cgroup2 rw", "memory": "cgroup cgroup rw,memory",
            "cpu,cpuacct": "cgroup cgroup rw,cpu,cpuacct",
        },
    )  # fmt: skip
    write(groups / "unified", memory__max=1, memory__current=1, cpu__max="1 1000")
    write(
        groups / "memory", memory__limit_in_bytes=UNLIMITED_OF_VERSION_1,
        memory__usage_in_bytes=7 * MIB,
    )  # fmt: skip
    write(
        groups / "memory/docker/x", memory__limit_in_bytes=64 * MIB,
        memory__usage_in_bytes=30 * MIB,
        memory__stat=f"inactive_file {MIB}\ntotal_inactive_file {20 * MIB}",
    )  # fmt: skip
    write(groups / "cpu,cpuacct", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    write(groups / "cpu,cpuacct/docker/x", cpu__cfs_quota_us=250_000, cpu__cfs_period_us=100_000)
    assert list(memory_limits(2**60, process)) == [MemoryLimit(64 * MIB, 10 * MIB)]
    assert host_memory(process).available_bytes == 54 * MIB
    assert list(core_limits(process)) == [2.5]


@pytest.mark.parametrize("own", ["/docker/x", "/", "/../other", "/docker/xy"])
def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, own: str) -> None:
    """With a namespace of groups as without: then its own path names what it cannot see."""
    process, groups = process_in(
        tmp_path, f"0::{own}\n", {"": "cgroup2 cgroup2 rw"}, root="/docker/x"
    )
    write(groups, memory__max=64 * MIB, memory__current=4 * MIB)
    assert list(memory_limits(2**60, process)) == [MemoryLimit(64 * MIB, 4 * MIB)]


sizes = st.one_of(st.just("max"), st.integers(0, 2**62).map(str))


@given(levels=st.lists(st.tuples(sizes, sizes, st.integers(0, 2**62), st.integers(0, 2**62))))
def test_no_limit_of_any_group_is_exceeded(
    tmp_path_factory: pytest.TempPathFactory, levels: list[tuple[str, str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("groups")
    own = "".join(f"/{number}" for number in range(len(levels)))
    process, groups = process_in(folder, f"0::{own or '/'}\n", {"": "cgroup2 cgroup2 rw"})
    at = groups
    for number, (most, high, used, inactive) in enumerate(levels):
        at = at / str(number)
        write(
            at, memory__max=most, memory__high=high, memory__current=used,
            memory__stat=f"inactive_file {inactive}",
        )  # fmt: skip
    memory, machine = host_memory(process), psutil.virtual_memory()
    limited = [
        (int(limit), max(0, used - inactive))
        for most, high, used, inactive in levels
        for limit in (most, high)
        if limit != "max" and int(limit) < machine.total
    ]
    assert memory.total_bytes == min([machine.total, *(limit for limit, _ in limited)])
    left = min((max(0, limit - used) for limit, used in limited), default=machine.total)
    assert 0 <= memory.available_bytes <= left
    if left <= machine.available // 2:
        assert memory.available_bytes == left


@pytest.mark.parametrize("noise", ["", "x", "-5", "9" * 30, "1 2 3", "max max", "\0", "٣"])
def test_files_with_anything_in_them_are_no_error(tmp_path: Path, noise: str) -> None:
    process, groups = process_in(tmp_path, "0::/a\n", {"": "cgroup2 cgroup2 rw"})
    write(
        groups / "a", memory__max=noise, memory__high=noise, memory__current=noise,
        memory__stat=f"inactive_file {noise}", cpu__max=noise, cpu__cfs_quota_us=noise,
        cpu__cfs_period_us=noise,
    )  # fmt: skip
    assert host_memory(process).total_bytes > 0
    assert usable_cores(process) >= 1


IN_A_GROUP = """
import json, os, tempfile
from swarm_shared.host.cores import usable_cores
from swarm_shared.host.memory import host_memory
found = {"cores": usable_cores(), "before": host_memory().available_bytes}
taken = bytearray(range(256)) * (128 * 4096)
found["taken"] = host_memory().available_bytes
del taken
with tempfile.TemporaryFile(dir="/var/tmp") as file:
    file.write(bytes(128 * 2**20))
    file.flush()
    os.fsync(file.fileno())
    found["file"] = host_memory().available_bytes
found["total"] = host_memory().total_bytes
print(json.dumps(found))
"""


def test_a_process_in_a_group_of_this_machine_sees_what_it_may_use() -> None:
    with control_group(512 * MIB, 1.5) as group:
        found = json.loads(group.output_of([sys.executable, "-c", IN_A_GROUP]))
    assert found["total"] == 512 * MIB
    assert found["cores"] == 1
    assert 300 * MIB < found["before"] <= 512 * MIB
    assert 126 * MIB < found["before"] - found["taken"] < 140 * MIB
    assert found["before"] - found["file"] < 20 * MIB, "pages of a file can be dropped"
