"""A throwaway system: an overlay over this machine's files, with systemd as its first process.

It has process, mount, network, host name and IPC namespaces and a control group of its own, and the
upper layer of its overlay lies in memory: what is installed in it is gone when it ends. It needs
root and a kernel that allows all of that; elsewhere `box` skips the test with the reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kits.installers.tree import PATH, PATIENCE_SECONDS

BOOT_SECONDS = 60.0
REFUSALS = ("unshare:", "mount:")
"""Beginnings of the messages of programs that ask the kernel for namespaces and mounts."""
POLL_SECONDS = 0.05

MASKED = """
    systemd-sysctl.service systemd-modules-load.service systemd-binfmt.service
    systemd-udevd.service systemd-udev-trigger.service systemd-remount-fs.service
    systemd-networkd.service systemd-resolved.service systemd-timesyncd.service
    systemd-networkd-wait-online.service NetworkManager-wait-online.service
    ifupdown-wait-online.service networking.service
    systemd-firstboot.service systemd-machine-id-commit.service
    systemd-random-seed.service systemd-journal-flush.service systemd-tmpfiles-setup.service
    proc-sys-fs-binfmt_misc.automount sys-kernel-debug.mount sys-kernel-tracing.mount
    sys-kernel-config.mount sys-fs-fuse-connections.mount dev-hugepages.mount dev-mqueue.mount
"""
"""They would speak to the kernel that the box shares with this machine, or wait for a network;
systemd-tmpfiles-setup would empty /tmp, where what is to be installed may lie."""

BOOT = r"""
set -eu
base=$1
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" overlay "$base/root"
root=$base/root
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
touch "$root/dev/console"
mount --bind /dev/null "$root/dev/console"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
rm -f "$root/etc/machine-id"
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
# What a package may do to services is decided by whether one asks it: here, everything.
rm -f "$root/usr/sbin/policy-rc.d"
for unit in $2; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\n' >"$root/etc/systemd/system/box.target"
container=box exec chroot "$root" /lib/systemd/systemd --unit=box.target --show-status=no \
    --log-target=null
"""


@dataclass(frozen=True, slots=True)
class Box:
    first_process: int

    def types(
        self, *words: str | Path, user: str | None = None, more: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        """As root, or as another user of the box with a session's environment."""
        enter = ["nsenter", "--target", str(self.first_process), "--mount", "--uts", "--ipc",
                 "--net", "--pid", "--root", "env", "--chdir=/"]  # fmt: skip
        if user is not None:
            enter += ["setpriv", "--reuid", user, "--regid", user, "--init-groups"]
        environment = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root"}
        return subprocess.run(
            [*enter, *(str(word) for word in words)], env={**environment, **more},
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip

    def does(
        self, *words: str | Path, user: str | None = None, more: Mapping[str, str] = {}
    ) -> str:
        done = self.types(*words, user=user, more=more)
        assert done.returncode == 0, done
        return done.stdout

    def has(self, path: str | Path) -> bool:
        return self.types("test", "-e", path, "-o", "-L", path).returncode == 0


@contextmanager
def box() -> Iterator[Box]:
    if os.geteuid() != 0:
        pytest.skip("needs root: a system of its own inside namespaces")
    for program in ("unshare", "nsenter", "setpriv", "/lib/systemd/systemd"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here: sh tools/install_installer_tools.sh")
    group = _control_group()
    base = tempfile.mkdtemp(prefix="swarmtrain-box-")
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--ipc",
               "--uts", "--net", "sh", "-c", BOOT, "boot", base, MASKED]  # fmt: skip
    # Inside the group before the namespace is made: its systemd then sees no other group.
    into = ["sh", "-c", 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"', "into", str(group)]
    boot = subprocess.Popen(
        [*into, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield _booted(boot)
    finally:
        for child in psutil.Process(boot.pid).children() if boot.poll() is None else []:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        boot.wait(PATIENCE_SECONDS)
        Path(base).rmdir()
        for folder in sorted(group.rglob("*/"), reverse=True):
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            group.rmdir()


def _control_group() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup2" and "rw" in options.split(","):
            group = Path(place) / f"swarmtrain-box-{os.getpid()}"
            try:
                group.mkdir(exist_ok=True)
            except OSError as error:
                pytest.skip(f"this kernel or container does not allow control groups: {error}")
            return group
    pytest.skip("this kernel or container has no writable cgroup2 file system")


def _booted(boot: subprocess.Popen[str]) -> Box:
    """Wait until systemd has booted.

    Where the kernel refuses a namespace or a mount, the test is skipped. A system that could be
    built and does not boot is skipped for another reason, which continuous integration counts as
    a failure (`kits.skip_policy`).
    """
    process = psutil.Process(boot.pid)
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline:
        if boot.poll() is not None:
            assert boot.stderr is not None
            error = boot.stderr.read().strip()
            if error.startswith(REFUSALS):
                pytest.skip(f"this kernel or container does not allow it: {error}")
            pytest.skip(f"the system in namespaces ended before it had booted: {error}")
        with suppress(psutil.NoSuchProcess):
            for child in process.children():
                if child.name() == "systemd":
                    made = Box(child.pid)
                    # Waits until the box has come up, well or not.
                    made.types("systemctl", "is-system-running", "--wait")
                    said = made.types("systemctl", "is-active", "box.target").stdout.strip()
                    if said == "active":
                        return made
        time.sleep(POLL_SECONDS)
    pytest.skip(f"no systemd came up inside namespaces within {BOOT_SECONDS:g} s")
