"""The download of leaves: from a mirror with the coordinator's proofs, or from the coordinator.

Owns the tasks that fetch and the requests that wait for them. What to fetch is `fetch_plan`, what
is kept `leaf_cache`. Every leaf is checked against the signed manifest before it is used or kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from swarm_client.membership.membership import CurrentMembership
from swarm_client.training_data.fetch_plan import LeafQueue, Need
from swarm_client.training_data.leaf_cache import LeafCache
from swarm_client.training_data.mirrors import Mirrors
from swarm_shared.base.backoff import Backoff
from swarm_shared.base.errors import (
    AdmissionError,
    NetworkError,
    ProtocolError,
    StorageError,
)
from swarm_shared.data.merkle import LEAF_BYTES
from swarm_shared.data.sample_ranges import LeafId, check_leaf
from swarm_shared.network import Node
from swarm_shared.protocol import MAX_LEAVES_ASKED, TransferHello
from swarm_shared.transfer.download_meter import DownloadMeter, DownloadProgress
from swarm_shared.transfer.leaf_transfer import FetchedLeaf, LeafStream
from swarm_shared.transfer.source import TransferSource
from swarm_shared.transfer.transfer import in_thread

log = logging.getLogger(__name__)

WORKERS = 4
"""Requests to the coordinator at once. With 32 leaves each, 2 MiB per round trip are 20 MB/s at
100 ms, more than the trainer of any stage uses."""
PATIENCE_SECONDS = 60.0
"""Seconds that a microbatch waits for its data before it goes back to the coordinator: half of the
default time of a lease."""
SHOWN_AFTER_SECONDS = 2.0
"""Seconds of waiting after which a download is shown; most take milliseconds."""
IDLE_SECONDS = 30.0
"""Seconds without work after which a stream to the coordinator is closed."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0
"""Pauses after a failure of the coordinator, which grow with each failure in a row."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """One request of a microbatch: the leaves that it has, and those that it waits for."""

    contents: dict[LeafId, bytes]
    missing: set[LeafId]
    done: trio.Event = field(default_factory=trio.Event)

    def arrived(self, leaf: LeafId, content: bytes) -> None:
        """Take a leaf; `done` is set with the last one."""
        self.contents[leaf] = content
        self.missing.discard(leaf)
        if not self.missing:
            self.done.set()


@dataclass(eq=False, slots=True)
class LeafFetcher:
    """Fetches for one volunteer as long as `run` runs. Without requests it sends nothing."""

    node: Node
    membership: CurrentMembership
    coordinator: TransferSource
    cache: LeafCache
    claim_disk: Callable[[int], None]
    mirrors: Mirrors
    report: Callable[[str], None]
    use_mirrors: bool = field(default=True, init=False)
    """False while only this peer's own transport may be used, where bytes are counted."""
    _queue: LeafQueue = field(default_factory=LeafQueue, init=False)
    _waiting: dict[LeafId, list[_Waiting]] = field(default_factory=dict, init=False)
    _work: trio.Event = field(default_factory=trio.Event, init=False)
    _failure: str = field(default="no answer so far", init=False)
    _meter: DownloadMeter | None = field(default=None, init=False)
    """The progress since something began to be waited for; None while nothing is."""
    _metered_bytes: int = field(default=0, init=False)

    def _hello(self) -> TransferHello:
        membership = self.membership.now
        return TransferHello(run=membership.run, certificate=membership.certificate)

    # ---- requests

    async def contents(self, leaves: Iterable[LeafId]) -> dict[LeafId, bytes]:
        """Return these leaves, verified, from the disk or fetched. NetworkError when they cannot be
        had in PATIENCE_SECONDS."""
        wanted = list(dict.fromkeys(leaves))
        contents = await in_thread(self.cache.read, wanted)
        if written := [leaf for leaf in wanted if leaf not in contents and self.cache.holds(leaf)]:
            contents |= await in_thread(self.cache.read, written)  # meanwhile
        missing = {leaf for leaf in wanted if leaf not in contents}
        if not missing:
            return contents
        waiting = _Waiting(contents, missing)
        for leaf in missing:
            self._waiting.setdefault(leaf, []).append(waiting)
        self._want((leaf for leaf in wanted if leaf in missing), Need.WAITED_FOR)
        self._measure(0)
        try:
            with trio.fail_after(PATIENCE_SECONDS):
                await waiting.done.wait()
        except trio.TooSlowError:
            raise NetworkError(
                f"training data could not be fetched in {PATIENCE_SECONDS:.0f} s "
                f"({self._failure}); check the connection"
            ) from None
        finally:
            self._give_up(waiting)
        return contents

    def ahead(self, leaves: Iterable[LeafId]) -> None:
        """Fetch these leaves to the disk when nothing more urgent is wanted."""
        self._want((leaf for leaf in leaves if not self.cache.holds(leaf)), Need.AHEAD)

    def withdraw_ahead(self) -> None:
        """Forget what was to be fetched ahead and is not being fetched."""
        self._queue.withdraw_all(Need.AHEAD)

    def _want(self, leaves: Iterable[LeafId], need: Need) -> None:
        for leaf in leaves:
            self._queue.want(leaf, need)
        if self._queue:
            self._work.set()
            self._work = trio.Event()

    def _give_up(self, waiting: _Waiting) -> None:
        for leaf in waiting.missing:
            requests = self._waiting[leaf]
            requests.remove(waiting)
            if not requests:
                del self._waiting[leaf]
                self._queue.withdraw([leaf])
        self._measure(0)

    @property
    def download(self) -> DownloadProgress | None:
        """The download that microbatches wait for, with what is fetched ahead beside it; None where
        they have waited for a moment only."""
        meter = self._meter
        return None if meter is None or meter.seconds < SHOWN_AFTER_SECONDS else meter.progress

    def _measure(self, received_bytes: int) -> None:
        """Follow the download that something waits for."""
        if not self._waiting:
            self._meter = None
            return
        if self._meter is None:
            self._meter, self._metered_bytes = DownloadMeter("training data", trio.current_time), 0
        self._metered_bytes += received_bytes
        missing_bytes = self._queue.outstanding * LEAF_BYTES
        self._meter.record(self._metered_bytes, self._metered_bytes + missing_bytes)
        if (line := self._meter.due_line()) is not None:
            self.report(line)

    async def _open(self) -> None:
        try:
            await in_thread(self.cache.open)
        except StorageError as error:
            log.warning("training data is not kept: %s", error)
            self.cache.stop_growing()

    # ---- fetching

    async def run(self) -> None:
        """Fetch what is wanted, until cancelled."""
        await self._open()
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(self._work_on)

    async def _work_on(self) -> None:
        stream: LeafStream | None = None
        pause = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            leaves = self._take_leaves()
            if not leaves:
                stream = await self._idle(stream)
                continue
            try:
                if stream is None:
                    stream = await LeafStream.open(
                        self.node, self.coordinator, self._hello(), self.membership.now.manifest
                    )
                await self._fetch(stream, leaves)
                pause.reset()
            except (NetworkError, ProtocolError, AdmissionError) as error:
                self._failure = str(error)
                log.info("training data: %s", error)
                self._put_back(leaves)
                if stream is not None:
                    await stream.close()
                stream = None
                await trio.sleep(pause.next())

    def _take_leaves(self) -> list[LeafId]:
        """Return the next leaves, without those to be fetched ahead that have arrived meanwhile."""
        leaves = self._queue.take(MAX_LEAVES_ASKED)
        present = {leaf for leaf in leaves if leaf not in self._waiting and self.cache.holds(leaf)}
        for leaf in present:
            self._queue.arrived(leaf)
        return [leaf for leaf in leaves if leaf not in present]

    async def _idle(self, stream: LeafStream | None) -> LeafStream | None:
        """Wait for work; return the stream if it is still open then."""
        work = self._work
        if stream is not None:
            with trio.move_on_after(IDLE_SECONDS):
                await work.wait()
                return stream
            await stream.close()
        await work.wait()
        return None

    def _put_back(self, leaves: Iterable[LeafId]) -> None:
        for leaf in leaves:
            waited_for = leaf in self._waiting
            self._queue.put_back([leaf], Need.WAITED_FOR if waited_for else Need.AHEAD)

    async def _fetch(self, stream: LeafStream, leaves: Sequence[LeafId]) -> None:
        mirror = self.mirrors.pick(trio.current_time()) if self.use_mirrors else None
        if mirror is None:
            await self._deliver(await stream.ask(leaves, content=True))
            return
        proofs = {
            fetched.leaf: fetched.proof for fetched in await stream.ask(leaves, content=False)
        }
        contents = await self.mirrors.read(mirror, leaves)
        from_mirror = [FetchedLeaf(leaf, proofs[leaf], contents[leaf]) for leaf in contents]
        for fetched in from_mirror:
            try:
                check_leaf(
                    self.membership.now.manifest, fetched.leaf, fetched.content, fetched.proof
                )
            except ProtocolError as error:
                self.mirrors.ban(mirror, str(error))
        if mirror.banned:
            # Which of both is wrong, proof or bytes, is seen when the coordinator sends both.
            from_mirror = []
        await self._deliver(from_mirror)
        delivered = {fetched.leaf for fetched in from_mirror}
        missing = [leaf for leaf in leaves if leaf not in delivered]
        if missing:
            await self._deliver(await stream.ask(missing, content=True))

    async def _deliver(self, fetched: Sequence[FetchedLeaf]) -> None:
        """Check leaves, and give them to the disk and then to what waits for them: a request in
        between finds them on their way."""
        for fetched_leaf in fetched:
            check_leaf(
                self.membership.now.manifest,
                fetched_leaf.leaf,
                fetched_leaf.content,
                fetched_leaf.proof,
            )
        try:
            self._make_room()
            await in_thread(
                self.cache.write,
                [(fetched_leaf.leaf, fetched_leaf.content) for fetched_leaf in fetched],
            )
        except StorageError as error:
            log.warning("training data is not kept: %s", error)
            self.cache.stop_growing()
        for fetched_leaf in fetched:
            self._queue.arrived(fetched_leaf.leaf)
            for waiting in self._waiting.pop(fetched_leaf.leaf, ()):
                waiting.arrived(fetched_leaf.leaf, fetched_leaf.content)
        self._measure(sum(len(fetched_leaf.content) for fetched_leaf in fetched))

    def _make_room(self) -> None:
        more_bytes = self.cache.growth_bytes()
        if more_bytes == 0:
            return
        try:
            self.claim_disk(more_bytes)
        except StorageError as error:
            log.info("the cache of training data grows no more: %s", error)
            self.cache.stop_growing()
        else:
            self.cache.grow(more_bytes)
