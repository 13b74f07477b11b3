"""Reading a run folder: settings, organiser's key, signed manifest, admission, progress.

Owns reading these files with checks, and the differences between run.toml and the manifest. Imports
no torch, so that the running coordinator can use it. `run_creation.initialise` makes the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from swarm_coordinator.admission.book import AdmissionBook
from swarm_coordinator.configuration.run_settings import (
    SQLITE,
    RunSettings,
    parse_run_toml,
    settings_differences,
)
from swarm_coordinator.core.events import Restored
from swarm_coordinator.run_dir.folder import RunFolder, read_bytes
from swarm_coordinator.run_dir.shard_index import read_shard_index
from swarm_coordinator.storage.admission_rows import read_admission
from swarm_coordinator.storage.connection import Connection, DatabaseLocation, PostgresqlLocation
from swarm_coordinator.storage.database import database_exists, open_for_reading
from swarm_coordinator.storage.records import read_restored
from swarm_shared.base.errors import ConfigurationError, ProtocolError, StorageError, VersionError
from swarm_shared.base.json_messages import first_error
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import MAX_MANIFEST_BYTES, open_manifest
from swarm_shared.run.manifest import Manifest

T = TypeVar("T")


def load_settings(folder: RunFolder) -> RunSettings:
    """Read run.toml; ConfigurationError names what is wrong in it."""
    content = read_bytes(folder.settings)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{folder.settings} is not UTF-8 text (at byte {error.start}); save it as UTF-8"
        ) from error
    return parse_run_toml(text, str(folder.settings))


def load_identity(folder: RunFolder) -> Identity:
    """Read the organiser's key; StorageError when it is missing."""
    try:
        return Identity.load(folder.organiser_key)
    except FileNotFoundError as error:
        raise StorageError(
            f"the run folder {folder.path} has lost its organiser.key; restore it from a copy, "
            "without it this run cannot be continued"
        ) from error


def load_manifest(folder: RunFolder) -> Manifest:
    """Read the manifest; StorageError unless the folder's own organiser signed it, VersionError if
    another release did."""
    envelope = read_bytes(folder.manifest, MAX_MANIFEST_BYTES)
    try:
        return open_manifest(envelope, load_identity(folder).peer_id)
    except ProtocolError as error:
        if isinstance(error.__cause__, ValidationError):  # its signature has been verified by then
            raise VersionError(
                f"{folder.manifest} is of another release of swarm-coordinator "
                f"({first_error(error.__cause__)}); use the release that wrote it, or make a new "
                "run with `swarm-coordinator init`"
            ) from error
        raise StorageError(
            f"{folder.manifest} is damaged or was not signed with this folder's organiser.key "
            f"({error}); restore both from a copy"
        ) from error


def database_location(folder: RunFolder) -> DatabaseLocation:
    """Return where the run's database is, according to run.toml."""
    settings = load_settings(folder).coordinator
    if settings.store == SQLITE:
        return folder.database
    return PostgresqlLocation(settings.store, settings.lease_seconds)


def read_database(folder: RunFolder, read: Callable[[Connection], T]) -> T | None:
    """Read from the database, whether a coordinator is running or not; None while there is none."""
    location = database_location(folder)
    if not database_exists(location):
        return None
    with open_for_reading(location) as connection:
        return read(connection)


def read_admission_book(folder: RunFolder) -> AdmissionBook:
    """The admission rules in the run's database; empty ones without a database."""
    return read_database(folder, read_admission) or AdmissionBook()


def read_progress(folder: RunFolder) -> Restored | None:
    """The run's progress; None without a database."""
    return read_database(folder, read_restored)


def changed_settings(folder: RunFolder, settings: RunSettings, manifest: Manifest) -> list[str]:
    """Return a sentence for each setting of run.toml that the run does not follow."""
    return settings_differences(settings, manifest) + data_differences(folder, settings)


def data_differences(folder: RunFolder, settings: RunSettings) -> list[str]:
    """Return a sentence for each setting that differs from what the data was made with."""
    made_from = read_shard_index(folder.data)
    pairs = (
        ("source", settings.data.source, made_from.source),
        ("column", settings.data.column, made_from.column),
        ("tokenizer", settings.data.tokenizer, made_from.tokenizer),
        ("heldout_share", settings.data.heldout_share, made_from.heldout_share),
        ("similarity", settings.data.similarity, made_from.similarity),
    )
    return [
        f"[data] {name} is {now!r} in run.toml but the run's data was made with {then!r}"
        for name, now, then in pairs
        if now != then
    ]
