from __future__ import annotations

import gzip
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_coordinator.run_creation import compressed_files
from swarm_coordinator.run_creation.compressed_files import read_blocks
from swarm_coordinator.run_creation.corpus import TextCorpus, read_corpus
from swarm_shared.base.errors import ConfigurationError, DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
}
suffixes = pytest.mark.parametrize("suffix", COMPRESS)
CONTENT = "".join(f"line {number} größer\n" for number in range(500)).encode()


@suffixes
@given(st.lists(st.binary(max_size=200), max_size=4), st.integers(1, 50))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_files_of_several_parts_give_the_content_back(
    tmp_path: Path, suffix: str, parts: list[bytes], block: int
):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], parts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed_files, "_COMPRESSED_BLOCK_BYTES", block)
        patch.setattr(compressed_files, "BLOCK_BYTES", block)
        assert b"".join(read_blocks(path)) == b"".join(parts)


@suffixes
def test_text_and_json_lines_may_be_compressed(tmp_path: Path, suffix: str):
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(COMPRESS[suffix](b'{"text": "one"}\n'))
    (tmp_path / f"b.txt.{suffix}").write_bytes(COMPRESS[suffix](CONTENT))
    for name, texts in (("a.jsonl", ["one"]), ("b.txt", [CONTENT.decode()])):
        corpus = read_corpus(str(tmp_path / f"{name}.{suffix}"))
        assert isinstance(corpus, TextCorpus)
        assert [document.text for document in corpus.documents()] == texts


@suffixes
@pytest.mark.parametrize("left", [20, 100, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, suffix: str, left: int):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(COMPRESS[suffix](CONTENT)[:left])
    with pytest.raises(DataError, match=rf"data\.{suffix} is cut short; copy or download"):
        list(read_blocks(path))


@suffixes
def test_a_file_of_another_kind_is_refused(tmp_path: Path, suffix: str):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(CONTENT)
    with pytest.raises(DataError, match=rf"data\.{suffix} cannot be decompressed"):
        list(read_blocks(path))
    damaged = bytearray(COMPRESS[suffix](CONTENT * 9))
    damaged[30:60] = bytes(30)
    path.write_bytes(damaged)
    with pytest.raises(DataError):
        list(read_blocks(path))


def test_a_long_window_is_read(tmp_path: Path):
    parameters = zstandard.ZstdCompressionParameters(window_log=31)
    content = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "data.zst"
    path.write_bytes(content.compress(CONTENT) + content.flush())
    assert b"".join(read_blocks(path)) == CONTENT


def test_a_block_of_a_bomb_is_bounded(tmp_path: Path):
    """A block of 128 KiB that repeats one byte takes four bytes of a file."""
    run_length, last, window_128kib = 1 << 1, 1, 7 << 3
    block = 128 * 1024
    header = struct.pack("<IBB", zstandard.MAGIC_NUMBER, 0, window_128kib)
    repeated = (block << 3 | run_length).to_bytes(3, "little") + b"a"
    end = (block << 3 | run_length | last).to_bytes(3, "little") + b"a"
    path = tmp_path / "data.zst"
    path.write_bytes(header + 1000 * repeated + end)
    lengths = [len(content) for content in read_blocks(path)]
    assert sum(lengths) == 1001 * block
    assert max(lengths) <= 32 * 2**20


def test_without_zstandard_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "data.txt.zst"
    path.write_bytes(COMPRESS["zst"](CONTENT))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'swarmtrain\[data\]'"):
        list(read_blocks(path))
