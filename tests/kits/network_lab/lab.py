"""A lab: machines of its own on this one, each with a network stack of its own.

    with Lab() as lab:
        coordinator = lab.public_host("coordinator")
        router = lab.router("router", Nat.SYMMETRIC)
        volunteer = lab.lan_host("volunteer", router)

Everything is gone when the block ends. After a kill without warning the next lab clears it away.
"""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Self

from kits.network_lab.addressing import MOVED_IPV4, PUBLIC_IPV4, PUBLIC_IPV6, Allocator
from kits.network_lab.commands import LabError, why_not_here
from kits.network_lab.machines import Host, Machine, Nat, Router
from kits.network_lab.namespace import Namespace, sweep
from kits.network_lab.segment import Segment
from swarm_coordinator.demo.subprocesses import Subprocesses

MAX_LANS = 254
GRACE_SECONDS = 2.0
"""Programs get so long to end by themselves when a lab is cleared away."""


class Lab:
    def __init__(self) -> None:
        self.children = Subprocesses(GRACE_SECONDS)
        """The programs started on hosts."""
        self._namespaces: list[Namespace] = []
        self._lan_index = itertools.count(1)
        self._moved = Allocator(MOVED_IPV4)

    def __enter__(self) -> Self:
        if (reason := why_not_here()) is not None:
            raise LabError(reason)
        sweep()
        try:
            core = Machine("internet", self._make_namespace("internet"))
            core.namespace.set(**{
                "ipv4__ip_forward": 1, "ipv6__conf__all__forwarding": 1,
                "bridge__bridge-nf-call-iptables": 0, "bridge__bridge-nf-call-ip6tables": 0,
            })  # fmt: skip
            self.internet = Segment(
                core.namespace, "bridge0", Allocator(PUBLIC_IPV4), Allocator(PUBLIC_IPV6)
            )
            moved = self._moved.with_length(self._moved.gateway)
            core.namespace.ip(f"address add {moved} dev bridge0")
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.children.end()
        finally:
            self._clear()

    def public_host(self, name: str, *, versions: tuple[int, ...] = (4,)) -> Host:
        """A machine with public addresses of these IP versions, and nothing in front of it."""
        return Host(name, self._make_namespace(name), self.internet, versions, self.children)

    def router(self, name: str, nat: Nat, *, versions: tuple[int, ...] = (4,)) -> Router:
        """A home's router with a LAN of its own; `lan_host` puts machines there."""
        index = next(self._lan_index)
        if index > MAX_LANS:
            raise LabError(f"a lab has at most {MAX_LANS} LANs")
        return Router(name, self._make_namespace(name), self.internet, nat, index, versions)

    def lan_host(self, name: str, router: Router) -> Host:
        namespace = self._make_namespace(name)
        return Host(name, namespace, router.lan, router.versions, self.children)

    def home(self, name: str, nat: Nat, *, versions: tuple[int, ...] = (4,)) -> tuple[Router, Host]:
        """A router and the one machine behind it."""
        router = self.router(f"{name}-router", nat, versions=versions)
        return router, self.lan_host(name, router)

    def change_wan_address(self, router: Router) -> str:
        """The router's provider gives it another address, of another network; the new one."""
        return router.change_wan_address(self._moved)

    def _make_namespace(self, name: str) -> Namespace:
        namespace = Namespace(name)
        self._namespaces.append(namespace)
        return namespace

    def _clear(self) -> None:
        """The newest first; one that does not go must not keep the others."""
        failures: list[str] = []
        while self._namespaces:
            try:
                self._namespaces.pop().delete()
            except LabError as error:
                failures.append(str(error))
        if failures:
            raise LabError("; ".join(failures))
