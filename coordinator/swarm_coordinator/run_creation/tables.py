"""The rows of one column of `.parquet` and `.arrow` files; the only door to pyarrow.

Rows are streamed: parquet is decoded in batches of rows, and Arrow files are mapped, so that memory
holds a batch of one column.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from swarm_shared.base.errors import ConfigurationError, DataError

TABLE_SUFFIXES = (".parquet", ".arrow")
BATCH_ROWS = 256
_BUFFER_BYTES = 1024 * 1024
"""Bytes of a column that are read ahead; without a bound, a row group's whole column is."""
_FILE_MAGIC = b"ARROW1"
"""Beginning of Arrow's file format. Its stream format, which data sets are cached in, has none."""


def column_texts(path: Path, column: str) -> Iterator[str | None]:
    """Yield the text of each row; None for a missing value. DataError names what is wrong."""
    arrow = require_pyarrow(str(path))
    batches = _parquet_batches if path.suffix == ".parquet" else _arrow_batches
    try:
        for batch in batches(path, column):
            values = batch.column(0)
            if isinstance(values, arrow.DictionaryArray):
                values = values.dictionary_decode()
            for value in values:
                yield value.as_py()
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{path} cannot be read as {path.suffix[1:]} ({reason}); copy or download it again"
        ) from error


def require_pyarrow(name: str) -> ModuleType:
    """Import pyarrow. ConfigurationError that names the file without it."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigurationError(
            f"reading {name} needs pyarrow, which is not installed; install it with `pip install "
            "'swarmtrain[data]'`"
        ) from error
    module: ModuleType = pyarrow
    return module


def _parquet_batches(path: Path, column: str) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        _check_column(path, column, file.schema_arrow)
        yield from file.iter_batches(BATCH_ROWS, columns=[column], use_threads=False)


def _arrow_batches(path: Path, column: str) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc

    with pyarrow.memory_map(str(path)) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        open_table = ipc.open_file if is_file else ipc.open_stream
        schema = open_table(source).schema
        _check_column(path, column, schema)
        options = ipc.IpcReadOptions(included_fields=[schema.get_field_index(column)])
        source.seek(0)
        with open_table(source, options=options) as reader:
            if not is_file:
                yield from reader
                return
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


def _check_column(path: Path, column: str, schema: Any) -> None:
    from pyarrow import types

    if schema.names.count(column) != 1:
        raise DataError(
            f"{path} has no column {column!r}, but {', '.join(schema.names)}; name the one with "
            "the text, as in --set data.column=NAME"
        )
    kind = schema.field(column).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise DataError(
            f"column {column!r} of {path} holds {kind} and not text; name the one with the text, "
            "as in --set data.column=NAME"
        )
