"""Whether other peers can open a connection to this volunteer, and at which address.

Two parts: `judge` draws the conclusion from sightings and does no I/O; `examine` and
`ReachabilityWatch` ask observers outside (`swarm_shared.probe.server`) and the home router.

Only an observer's fresh connection to the listening port counts as proof, and only of an observer
that sees this machine at a global address: a peer in the same network reaches what others cannot. A
mapping is requested from the router when there is no way in without it, and kept only while an
observer connects through it.

Not distinguishable from outside: a router that admits any remote that this machine has contacted.
Observers always have been. Such home routers are rare, and hole punching works through them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import trio

from swarm_client.connectivity.port_mapping import Mapping, PortMapper
from swarm_shared.addresses.dial_order import Interfaces, is_global
from swarm_shared.base.backoff import Backoff, with_jitter
from swarm_shared.base.endpoint import Endpoint, IpAddress
from swarm_shared.base.errors import AdmissionError, NetworkError, ProtocolError
from swarm_shared.base.types import PeerId
from swarm_shared.network import Node
from swarm_shared.probe.client import ProbeBusy, open_probe
from swarm_shared.protocol import DoctorHello, DoctorWelcome, PeerRecord, Reachability

log = logging.getLogger(__name__)

OBSERVATION_SECONDS = 15.0
"""Timeout of one observation: connecting, a hello, and parallel dials of three seconds each."""
MAX_BUSY_WAIT_SECONDS = 3.0
"""Longest wait for a busy observer; beyond that it is asked at the next check."""
CHECK_INTERVAL_SECONDS = 600.0
"""Seconds between two checks."""
FIRST_RETRY_SECONDS = 5.0
"""First pause while nothing is known; doubled up to CHECK_INTERVAL_SECONDS."""
SETTLE_SECONDS = 1.0
"""Pause after a network change; changes come several in a row."""
OBSERVERS_ASKED = 2
"""Observers asked for a second opinion, besides the first."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The report of one observer: the address at which it saw this peer, and the ports that it
    reached."""

    observer: PeerId
    observed: Endpoint | None
    """Source address of the connection; None over a relay."""
    mapped: Endpoint | None = None
    """The router's mapping of the listening port, when a connection left from that port."""
    reached: frozenset[int] = frozenset()
    """Ports at the observed address at which the observer reached this peer."""

    @property
    def is_outside(self) -> bool:
        """Whether the observer is outside this machine's network."""
        return self.observed is not None and is_global(self.observed.multiaddr)


@dataclass(frozen=True, slots=True)
class ReachabilityFinding:
    """The conclusion of one check."""

    reachability: Reachability = Reachability.UNKNOWN
    addresses: tuple[str, ...] = ()
    """Addresses to announce: an observer connected to them."""
    observed: IpAddress | None = None
    behind_router: bool | None = None
    """False when the observed address is this machine's own."""
    port_preserved: bool | None = None
    """Whether the router keeps the listening port's number outside."""
    endpoint_independent: bool | None = None
    """Whether two observers saw the same mapping of the listening port."""
    note: str = ""
    """Further information for people: why a mapping failed, which observer could not look."""

    @property
    def hole_punching(self) -> bool | None:
        """Whether the address of a future hole can be predicted; None when unknown.

        A mapping that is the same for all remotes can be predicted; one that keeps the port most
        likely can.
        """
        if self.endpoint_independent is not None:
            return self.endpoint_independent
        return True if self.port_preserved or self.behind_router is False else None


@dataclass(slots=True)
class PeerObserver:
    """A peer outside that can be asked: the coordinator, or a volunteer that answers this one."""

    node: Node
    peer: PeerId
    addresses: tuple[str, ...]
    hello: Callable[[], DoctorHello]
    welcome: DoctorWelcome | None = field(default=None, init=False)
    """Welcome of the last observation."""

    async def observe(self, ports: Sequence[int]) -> Sighting:
        """Try these ports at the address that the observer sees. NetworkError and the like."""
        await self.node.connect(self.peer, self.addresses, from_listening_port=True)
        async with open_probe(self.node, self.peer, self.hello(), self.addresses) as probe:
            self.welcome = probe.welcome
            observed = _endpoint(probe.welcome.observed_address)
            reached: frozenset[int] = frozenset()
            if observed is not None:
                candidates = [Endpoint(observed.ip, port).multiaddr for port in ports]
                results = await probe.dial_back(candidates)
                reached = frozenset(
                    port for port, result in zip(ports, results, strict=True) if result.reached
                )
            mapped = _endpoint(self.node.observed_address(self.peer))
            return Sighting(self.peer, observed, mapped, reached)


def member_observers(
    node: Node, records: Iterable[PeerRecord], hello: Callable[[], DoctorHello]
) -> list[PeerObserver]:
    """Members of the run that can be asked, in random order to spread the load."""
    public = (Reachability.PUBLIC, Reachability.MAPPED)
    observers = [
        PeerObserver(node, record.peer, record.addresses, hello)
        for record in records
        if record.reachability in public and record.peer != node.peer_id
    ]
    random.shuffle(observers)
    return observers


def judge(
    port: int,
    own_addresses: frozenset[IpAddress],
    sightings: Sequence[Sighting],
    mapping: Mapping | None,
    note: str = "",
) -> ReachabilityFinding:
    """Conclude from the sightings. The first from outside decides: the coordinator's, if it has
    one.

    `mapping` is the router's claim, accepted when an observer connected through it.
    """
    outside = [sighting for sighting in sightings if sighting.is_outside]
    if not outside:
        inside = [sighting for sighting in sightings if sighting.observed is not None]
        if inside:
            note = note or "all observers are in this machine's own network"
        return ReachabilityFinding(note=note or "no observer was available")
    first = outside[0]
    assert first.observed is not None, "it is outside"
    ip = first.observed.ip
    finding = ReachabilityFinding(
        observed=ip,
        behind_router=ip not in own_addresses,
        port_preserved=_port_preserved(port, outside),
        endpoint_independent=_endpoint_independent(outside),
        note=note,
    )
    if (
        mapping is not None
        and mapping.external_address == str(ip)
        and mapping.external_port in first.reached
    ):
        return replace(finding, reachability=Reachability.MAPPED, addresses=(mapping.multiaddr,))
    if port in first.reached:
        # Half of the homes have no IPv6: peers there need a relay even if others connect directly.
        reachability = Reachability.PUBLIC if ip.version == 4 else Reachability.BEHIND_NAT
        address = Endpoint(ip, port).multiaddr
        return replace(finding, reachability=reachability, addresses=(address,))
    if not finding.behind_router:
        note = note or "a firewall on this machine or in front of it blocks incoming connections"
    return replace(finding, reachability=Reachability.BEHIND_NAT, note=note)


async def examine(
    port: int,
    first: PeerObserver,
    others: Callable[[], Sequence[PeerObserver]],
    mapper: PortMapper,
) -> ReachabilityFinding:
    """Make one complete check, with the router's help if needed. Raises no expected error.

    `others` is called after the first observer has answered, for observers to ask for a second
    opinion.
    """
    own_addresses = Interfaces.of_this_machine().hosts
    mapping = mapper.mapping
    ports = [port] if mapping is None else sorted({port, mapping.external_port})
    notes: list[str] = []
    sightings = await _observe(first, ports, notes)
    observers = [first, *others()]
    sightings += await _second_opinion(observers[1 : 1 + OBSERVERS_ASKED], ports)
    deciding = next((sighting for sighting in sightings if sighting.is_outside), None)
    finding = judge(port, own_addresses, sightings, mapping, "; ".join(notes))
    if (
        deciding is None
        or deciding.observed is None
        or deciding.observed.ip.version != 4
        or finding.behind_router is False
        or finding.reachability is not Reachability.BEHIND_NAT
    ):
        return finding
    observer = next(asked for asked in observers if asked.peer == deciding.observer)
    return await _examine_with_mapping(port, own_addresses, observer, sightings, mapper)


async def _examine_with_mapping(
    port: int,
    own_addresses: frozenset[IpAddress],
    observer: PeerObserver,
    sightings: Sequence[Sighting],
    mapper: PortMapper,
) -> ReachabilityFinding:
    """Request a mapping from the router and have the observer connect through it."""
    mapping = await mapper.map(port)
    if mapping is None:
        return judge(port, own_addresses, sightings, None, mapper.problem)
    notes: list[str] = []
    through_mapping = await _observe(observer, [mapping.external_port], notes)
    if not through_mapping:
        # Neither proved nor refuted: kept until the next check, and not announced.
        return judge(port, own_addresses, sightings, None, "; ".join(notes))
    all_sightings = [
        *through_mapping,
        *(sighting for sighting in sightings if sighting.observer != observer.peer),
    ]
    finding = judge(port, own_addresses, all_sightings, mapping)
    if finding.reachability is Reachability.MAPPED:
        return finding
    note = f"the router claims to forward {mapping.multiaddr}, but no connection arrives through it"
    if finding.observed is not None and mapping.external_address != str(finding.observed):
        note = (
            f"the router gives its address as {mapping.external_address}, but other peers see "
            f"{finding.observed}: there is another router in between (double NAT)"
        )
    await mapper.release()
    return judge(port, own_addresses, sightings, None, note)


async def _observe(
    observer: PeerObserver, ports: Sequence[int], notes: list[str]
) -> list[Sighting]:
    """The observer's sighting in a list; if it has none, the reason is appended to `notes`."""
    for last_try in (False, True):
        try:
            with trio.move_on_after(OBSERVATION_SECONDS):
                return [await observer.observe(ports)]
            notes.append(f"{_short(observer.peer)} took more than {OBSERVATION_SECONDS:g} s")
            return []
        except ProbeBusy as error:
            if last_try or error.retry_after_seconds > MAX_BUSY_WAIT_SECONDS:
                notes.append(f"{_short(observer.peer)} is busy: {error}")
                return []
            await trio.sleep(error.retry_after_seconds)
        except (NetworkError, AdmissionError, ProtocolError) as error:
            log.info("%s gave no sighting: %s", observer.peer, error)
            notes.append(f"{_short(observer.peer)} could not probe this peer: {error}")
            return []
    raise AssertionError("the last try returns")


async def _second_opinion(others: Sequence[PeerObserver], ports: Sequence[int]) -> list[Sighting]:
    """The first sighting from a few observers; their failures are not reported."""
    for observer in others:
        sightings = await _observe(observer, ports, [])
        if sightings:
            return sightings
    return []


def _port_preserved(port: int, sightings: Sequence[Sighting]) -> bool | None:
    mapped = [sighting.mapped.port for sighting in sightings if sighting.mapped is not None]
    return all(number == port for number in mapped) if mapped else None


def _endpoint_independent(sightings: Sequence[Sighting]) -> bool | None:
    mapped = [sighting.mapped for sighting in sightings if sighting.mapped is not None]
    # Of one IP version: this machine may have an address in each.
    same_version = [endpoint for endpoint in mapped if endpoint.ip.version == mapped[0].ip.version]
    return None if len(same_version) < 2 else len(set(same_version)) == 1


def _endpoint(address: str | None) -> Endpoint | None:
    return None if address is None else Endpoint.parse(address)


def _short(peer: PeerId) -> str:
    return f"…{peer[-8:]}"


@dataclass(slots=True, eq=False)
class ReachabilityWatch:
    """Checks at the start, after every network change, and about every ten minutes."""

    port: int
    first: PeerObserver
    others: Callable[[], Sequence[PeerObserver]]
    mapper: PortMapper
    on_change: Callable[[ReachabilityFinding], None]
    check_seconds: float = CHECK_INTERVAL_SECONDS
    settle_seconds: float = SETTLE_SECONDS
    finding: ReachabilityFinding = field(default=ReachabilityFinding(), init=False)
    _examining: bool = field(default=False, init=False)
    _changed: trio.Event = field(default_factory=trio.Event, init=False)

    def network_changed(self) -> None:
        """Check again soon: the last finding may not hold any more."""
        self._changed.set()

    def mapping_changed(self, mapping: Mapping | None) -> None:
        """Check again soon, as the router has removed or moved the mapping
        (`PortMapper(on_change=…)`)."""
        if not self._examining:
            self._changed.set()

    async def run(self) -> None:
        """Run until cancelled."""
        retry = Backoff(FIRST_RETRY_SECONDS, self.check_seconds)
        while True:
            self._changed = trio.Event()
            finding = await self._examine()
            if finding != self.finding:
                self.finding = finding
                self.on_change(finding)
            pause_seconds = with_jitter(self.check_seconds, 0.1)
            if finding.reachability is Reachability.UNKNOWN and finding.observed is None:
                pause_seconds = min(retry.next(), pause_seconds)
            else:
                retry.reset()
            with trio.move_on_after(pause_seconds):
                await self._changed.wait()
                retry.reset()
                await trio.sleep(self.settle_seconds)

    async def _examine(self) -> ReachabilityFinding:
        self._examining = True
        try:
            return await examine(self.port, self.first, self.others, self.mapper)
        finally:
            self._examining = False
