"""Leaves on the disk: within the budget, the least recently needed gives way, damage is found."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.power_cut.lab import FEW_SEEDS, PowerCutDisk, at_every_instant
from swarm_client.training_data.leaf_cache import LeafCache, SlotTable
from swarm_shared.base.errors import StorageError
from swarm_shared.data.merkle import LEAF_BYTES
from swarm_shared.data.sample_ranges import LeafId


def leaf(number: int) -> LeafId:
    return LeafId(number % 2, number)


def content(number: int) -> bytes:
    """The last leaf of a shard is short."""
    size = LEAF_BYTES if number % 5 else 1 + number
    return hashlib.shake_256(str(number).encode()).digest(size)


def opened(folder: Path, leaves: int) -> LeafCache:
    cache = LeafCache(folder, leaves * LEAF_BYTES)
    cache.open()
    return cache


def write(cache: LeafCache, *numbers: int) -> None:
    for number in numbers:
        cache.grow(cache.growth_bytes())
        cache.write([(leaf(number), content(number))])


def read(cache: LeafCache, *numbers: int) -> set[int]:
    found = cache.read([leaf(number) for number in numbers])
    assert all(found[leaf(n)] == content(n) for n in numbers if leaf(n) in found)
    return {number for number in numbers if leaf(number) in found}


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(["place", "need", "drop"]), st.integers(0, 9)), max_size=60),
)
def test_slots_are_one_to_one_bounded_and_given_up_by_the_least_recently_needed(
    granted: int, actions: list[tuple[str, int]]
) -> None:
    table, order = SlotTable(granted), list[LeafId]()
    for action, number in actions:
        one = leaf(number)
        if action == "need":
            assert (table.needed(one) is not None) == (one in order)
            if one in order:
                order.append(order.pop(order.index(one)))
        elif action == "drop" and one in order:
            table.drop(one)
            order.remove(one)
        elif action == "place" and one not in order:
            assert (table.place(one) is None) == (granted == 0)
            order = [*order, one][-granted:] if granted else []
        assert [known in table for known in order] == [True] * len(order)
        slots = [table._slots[known] for known in order]
        assert len(table) == len(order) == len(set(slots)) <= granted
        assert all(0 <= slot < granted for slot in slots)
        assert table.is_full == (len(order) == granted)


def test_leaves_come_back_after_a_restart_and_the_files_stay_within_the_budget(
    tmp_path: Path,
) -> None:
    cache = opened(tmp_path / "data", 4)
    write(cache, 1, 2, 3, 5)
    assert read(cache, 1) == {1}
    write(cache, 6)
    assert read(cache, 1, 2, 3, 5, 6) == {1, 3, 5, 6}
    cache.close()
    again = opened(tmp_path / "data", 4)
    assert [again.holds(leaf(number)) for number in (1, 2)] == [True, False]
    assert read(again, 1, 2, 3, 5, 6) == {1, 3, 5, 6}
    write(again, 7, 8)
    assert (tmp_path / "data" / "leaves").stat().st_size <= 4 * LEAF_BYTES
    again.close()


def test_a_smaller_budget_shrinks_the_files_at_the_next_start(tmp_path: Path) -> None:
    cache = opened(tmp_path, 8)
    write(cache, *range(8))
    cache.close()
    smaller = opened(tmp_path, 3)
    assert read(smaller, *range(8)) == {0, 1, 2}
    assert (tmp_path / "leaves").stat().st_size <= 3 * LEAF_BYTES
    smaller.close()


def test_without_a_budget_nothing_is_kept(tmp_path: Path) -> None:
    cache = opened(tmp_path, 0)
    write(cache, 1)
    assert read(cache, 1) == set()
    assert cache.growth_bytes() == 0


def test_a_damaged_leaf_counts_as_missing_and_its_slot_is_used_again(tmp_path: Path) -> None:
    cache = opened(tmp_path, 2)
    write(cache, 1, 2)
    damaged = bytearray((tmp_path / "leaves").read_bytes())
    damaged[7] ^= 1
    (tmp_path / "leaves").write_bytes(damaged)
    assert read(cache, 1, 2) == {2}
    write(cache, 1)
    assert read(cache, 1, 2) == {1, 2}


def test_foreign_files_are_no_leaves(tmp_path: Path) -> None:
    (tmp_path / "leaves.index").write_bytes(b"\xff" * 500)
    (tmp_path / "leaves").write_bytes(b"x")
    cache = opened(tmp_path, 4)
    assert read(cache, 1, 2) == set()
    write(cache, 1, 2)
    assert read(cache, 1, 2) == {1, 2}


def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"a file, no folder")
    with pytest.raises(StorageError, match="cannot write"):
        opened(tmp_path / "data", 4)


@pytest.mark.process
def test_a_power_cut_leaves_no_wrong_leaf(tmp_path: Path, disk: PowerCutDisk) -> None:
    folder = disk.place / "home" / "data"

    def fill() -> None:
        cache = opened(folder, 3)
        for number in range(1, 6):
            write(cache, number)
        cache.close()

    def check(ended: bool) -> None:
        cache = opened(folder, 3)
        read(cache, *range(1, 6))  # compares their bytes
        write(cache, 1, 2, 3)
        assert read(cache, 1, 2, 3) == {1, 2, 3}
        cache.close()

    assert at_every_instant(disk, fill, check, FEW_SEEDS) > 10
