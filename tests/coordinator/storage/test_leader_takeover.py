"""The lease on PostgreSQL: one coordinator writes, and one that lost it never does again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psycopg
import pytest
import trio

from kits.coordinator.postgresql import Server
from kits.coordinator.run import one_start_at, put_checkpoint, step, write
from kits.coordinator.shell_world import make_run
from swarm_coordinator.admission.book import PeerBanned
from swarm_coordinator.cli.main import run as cli
from swarm_coordinator.durability.backup import make_backup
from swarm_coordinator.durability.journal_audit import check_database
from swarm_coordinator.durability.restore import restore_backup
from swarm_coordinator.durability.run_files import load_settings
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage import postgresql as postgresql_module
from swarm_coordinator.storage.admission_rows import read_admission
from swarm_coordinator.storage.connection import PostgresqlLocation
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.leader_election import wait_for_leadership
from swarm_coordinator.storage.postgresql import (
    LeaderWatch,
    connect,
    copy_database,
    create_schema,
    explain,
    load_backup,
    open_for_writing,
)
from swarm_coordinator.storage.postgresql_store import PostgresqlStore
from swarm_coordinator.storage.schema import SCHEMA, TABLES
from swarm_coordinator.storage.sqlite import open_for_writing as open_sqlite
from swarm_coordinator.storage.store import open_store
from swarm_shared.base.errors import LeadershipError, StorageError, UsageError, VersionError
from swarm_shared.base.types import PeerId


@pytest.fixture
def run(postgresql: Server) -> PostgresqlLocation:
    return postgresql.place(lease_seconds=60.0)


def sql(run: PostgresqlLocation, statement: str) -> None:
    with psycopg.connect(run.url, autocommit=True) as connection:
        connection.execute(statement.encode())


def leader_of(run: PostgresqlLocation) -> str | None:
    with contextlib.closing(LeaderWatch(run)) as watch:
        return watch.leader()


def expire(run: PostgresqlLocation) -> None:
    """As time does, without waiting for it."""
    sql(run, "UPDATE leadership SET expires_at = clock_timestamp() - interval '1 second'")


def test_while_one_leads_nobody_else_does(run: PostgresqlLocation) -> None:
    first, second = PostgresqlStore.open(run), PostgresqlStore.open(run)
    assert leader_of(run) is None
    assert first.next_generation() == 1
    assert "process" in str(leader_of(run))
    with pytest.raises(LeadershipError, match="serves this run; start this one with --standby"):
        second.next_generation()
    assert not second.leads
    first.close()
    assert second.next_generation() == 2
    second.close()


def test_a_leader_whose_lease_ran_out_and_that_was_succeeded_writes_nothing(
    run: PostgresqlLocation,
) -> None:
    old, new = PostgresqlStore.open(run), PostgresqlStore.open(run)
    old.next_generation()
    trio.run(old.write, step(1))
    expire(run)
    trio.run(old.write, step(2))  # late, and nobody has taken over
    assert new.next_generation() == 2
    with pytest.raises(LeadershipError, match="has taken over"):
        trio.run(old.write, step(3))
    with pytest.raises(LeadershipError):
        trio.run(old.renew_lease)
    trio.run(new.write, step(3))
    old.close()
    assert leader_of(run) is not None, "what the old one left behind is not its lease"
    new.close()
    with open_for_reading(run) as connection:
        assert check_database(connection) == []
    assert [s.step for s in history(run).steps] == [1, 2, 3]


def test_a_leader_in_the_middle_of_a_commit_is_waited_for_and_a_frozen_one_is_not(
    postgresql: Server,
) -> None:
    run = postgresql.place(lease_seconds=1.0)
    frozen = PostgresqlStore(run)
    connection = frozen._open_database()
    store = PostgresqlStore.open(run)
    frozen._generation = store.next_generation()
    frozen._begin()  # holds the lock, and goes no further: as after SIGSTOP
    connection.execute("INSERT INTO notes (text, written_at) VALUES ('half', 1.0)")
    expire(run)
    successor = PostgresqlStore.open(run)
    assert successor.next_generation() == 2  # when the server has ended that session
    with pytest.raises(psycopg.Error) as failure:
        connection.execute("COMMIT")
    assert isinstance(frozen._explain(failure.value), LeadershipError)
    assert history(run).notes == ()
    for one in (successor, store):
        one.close()
    frozen._close_database()


def test_a_leader_frozen_between_two_rows_of_one_statement_is_not_waited_for(
    postgresql: Server,
) -> None:
    """The server waits for the next row, a state to which its limit on idle transactions is blind.

    psycopg sends the rows of one `executemany` so: as a pipeline that a last message ends.
    """
    run = postgresql.place(lease_seconds=1.0)
    frozen, successor = PostgresqlStore.open(run), PostgresqlStore.open(run)
    frozen.next_generation()
    expire(run)
    frozen._begin()
    server = frozen._connection.raw.pgconn
    server.enter_pipeline_mode()
    server.send_query_params(b"INSERT INTO notes (text, written_at) VALUES ('half', 1.0)", None)
    server.send_flush_request()
    while server.flush():
        pass
    while server.is_busy():
        server.consume_input()  # the row is in, the transaction open, and nothing follows
    assert successor.next_generation() == 2
    assert history(run).notes == ()
    successor.close()
    frozen.close()


def test_a_lease_ends_with_the_connection_of_its_holder(run: PostgresqlLocation) -> None:
    killed, successor = PostgresqlStore.open(run), PostgresqlStore.open(run)
    killed.next_generation()
    sql(run, "SELECT pg_terminate_backend(backend) FROM leadership")
    while leader_of(run) is not None:  # the server ends the session in its own time
        pass
    assert successor.next_generation() == 2
    with pytest.raises(LeadershipError):
        trio.run(killed.write, step(1))
    killed.close()
    successor.close()


def test_a_leader_that_lost_its_connection_says_what_to_do(run: PostgresqlLocation) -> None:
    store = PostgresqlStore.open(run)
    store.next_generation()
    sql(run, "SELECT pg_terminate_backend(backend) FROM leadership")
    with pytest.raises(StorageError, match="start again when it is back"):
        trio.run(store.write, step(1))
    store.close()


def test_a_process_that_slept_asks_before_it_says_another_word(run: PostgresqlLocation) -> None:
    now = 0.0
    slept, successor = PostgresqlStore(run, boot=lambda: now)._start(), PostgresqlStore.open(run)
    slept.next_generation()
    trio.run(slept.ensure_leadership)
    now += 59.0
    trio.run(slept.ensure_leadership)
    now += 2.0
    trio.run(slept.ensure_leadership)  # nobody has taken over: it goes on, with a new lease
    expire(run)
    successor.next_generation()
    trio.run(slept.ensure_leadership)  # within its own lease, by the server's clock
    now += 61.0
    with pytest.raises(LeadershipError):
        trio.run(slept.ensure_leadership)
    slept.close()
    successor.close()


def test_a_command_writes_without_a_leader_and_not_beside_one(run: PostgresqlLocation) -> None:
    command = PostgresqlStore.open(run)
    trio.run(command.write, PeerBanned(PeerId("12D3KooWBert"), "noise"))
    leader = PostgresqlStore.open(run)
    leader.next_generation()
    with pytest.raises(UsageError, match="give the command there"):
        trio.run(command.write, PeerBanned(PeerId("12D3KooWAnna"), "noise"))
    assert set(leader.read(read_admission).bans) == {"12D3KooWBert"}
    leader.close()
    command.close()


async def test_a_start_waits_for_a_dead_leaders_lease_and_not_for_a_living_ones(
    postgresql: Server,
) -> None:
    run = postgresql.place(lease_seconds=1.0)
    leader = PostgresqlStore.open(run)
    leader.next_generation()
    await wait_for_leadership(run, print, stand_by=False)  # never renewed: it runs out
    assert leader_of(run) is None

    alive = trio.Event()

    async def live() -> None:
        while True:
            await leader.renew_lease()
            alive.set()
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        await alive.wait()
        with pytest.raises(LeadershipError):
            await wait_for_leadership(run, print, stand_by=False)
        nursery.cancel_scope.cancel()
    leader.close()


async def test_a_standby_waits_as_long_as_it_takes_and_says_for_whom(
    run: PostgresqlLocation,
) -> None:
    leader = PostgresqlStore.open(run)
    leader.next_generation()
    said: list[str] = []
    waiting = trio.Event()

    def report(line: str) -> None:
        said.append(line)
        waiting.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: wait_for_leadership(run, report, stand_by=True))
        await waiting.wait()
        await trio.to_thread.run_sync(leader.close)
    assert len(said) == 1
    assert "standing by: the coordinator on" in said[0]


# ---------------------------------------------------------------- schema, copies, refusals


def test_the_tables_of_a_server_are_made_once_and_keep_what_is_there(
    run: PostgresqlLocation,
) -> None:
    one_start_at(run)
    one_start_at(run, step(1))
    connection = open_for_writing(run)
    create_schema(connection.raw, run)
    connection.close()
    assert [s.step for s in history(run).steps] == [1]


def test_tables_that_cannot_be_made_leave_the_server_empty(
    run: PostgresqlLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(postgresql_module, "SCHEMA", f"{SCHEMA} SELECT * FROM nowhere;")
        with pytest.raises(StorageError):
            open_for_writing(run)
    raw = connect(run)
    found = raw.execute("SELECT to_regclass('swarm_format'), to_regclass('peers')").fetchone()
    raw.close()
    assert found == (None, None)
    open_store(run).close()


def test_a_server_of_another_schema_version_is_refused(run: PostgresqlLocation) -> None:
    open_store(run).close()
    sql(run, "UPDATE swarm_format SET number = number + 1")
    with pytest.raises(VersionError, match=r"has schema version .* needs"):
        open_store(run)
    with pytest.raises(VersionError, match=r"has schema version .* needs"):
        history(run)


def test_a_run_moves_to_a_file_and_back_without_a_difference(
    run: PostgresqlLocation, postgresql: Server, tmp_path
) -> None:
    one_start_at(run, step(1), step(2), step(3), PeerBanned(PeerId("12D3KooWBert"), "noise"))
    copy = tmp_path / "copy.sqlite3"
    copy_database(run, copy)
    assert history(copy) == history(run)
    other = postgresql.place()
    load_backup(other, copy, force=False)
    assert history(other) == history(run)
    with open_for_reading(other) as connection:
        assert check_database(connection) == []
    with pytest.raises(UsageError, match="--force"):
        load_backup(other, copy, force=False)
    load_backup(other, copy, force=True)
    store = open_store(other)
    assert store.next_generation() == 2
    trio.run(store.write, step(4))
    with pytest.raises(UsageError, match="stop it first"):
        load_backup(other, copy, force=True)
    store.close()
    assert history(other).restored.version == 4


def test_both_have_the_same_tables_and_columns(run: PostgresqlLocation, tmp_path) -> None:
    open_store(run).close()
    here = open_sqlite(tmp_path / "run.sqlite3")
    with open_for_reading(run) as there:
        for table in TABLES:
            columns = [
                row[0] for row in there.execute(
                    "SELECT column_name FROM information_schema.columns WHERE table_name = ? "
                    "ORDER BY ordinal_position", (table,),
                )
            ]  # fmt: skip
            assert columns == [row[1] for row in here.execute(f"PRAGMA table_info({table})")]
    here.close()


def test_a_server_that_is_not_there_is_one_sentence_without_the_password() -> None:
    place = PostgresqlLocation("postgresql://anna:secret@127.0.0.1:1/run")
    with pytest.raises(StorageError, match="cannot be reached") as failure:
        open_store(place)
    assert "secret" not in str(failure.value)
    assert "secret" not in str(place)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://anna:secret@127.0.0.1/run", "postgresql://127.0.0.1/run?password=secret",
        "postgresql:///run?host=/tmp&user=anna&pass%77ord=secret",
        "postgresql://anna:other@secret@127.0.0.1/run", "postgresql://anna:other?secret@host/run",
        "postgresql://:secret@127.0.0.1:5432/run",
    ],
)  # fmt: skip
def test_no_message_has_a_password_wherever_the_address_has_it(address: str) -> None:
    place = PostgresqlLocation(address)
    assert "secret" not in f"{place} {place!r}"
    assert "secret" not in place.public_url


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("postgresql://anna:secret@h1:1,h2/run?target_session_attrs=any",
         "postgresql://anna@h1:1,h2/run?target_session_attrs=any"),
        ("postgresql:///run?host=/tmp&sslpassword=secret&user=anna",
         "postgresql:///run?host=/tmp&user=anna"),
        ("postgresql://127.0.0.1:5432/run?password=secret", "postgresql://127.0.0.1:5432/run"),
        ("postgresql://anna@host/run", "postgresql://anna@host/run"),
        ("postgresql://[::1]:5432/run?application_name=a@b",
         "postgresql://[::1]:5432/run?application_name=a@b"),
    ],
)  # fmt: skip
def test_an_address_without_its_password_leads_to_the_same_database(
    address: str, public: str
) -> None:
    place = PostgresqlLocation(address)
    assert place.public_url == public
    secrets = ("password", "sslpassword")
    whole = psycopg.conninfo.conninfo_to_dict(address)
    assert psycopg.conninfo.conninfo_to_dict(public) == {
        name: value for name, value in whole.items() if name not in secrets
    }


def test_a_server_that_asks_for_a_password_says_where_it_belongs() -> None:
    place = PostgresqlLocation("postgresql://anna@127.0.0.1/run")
    error = explain(place, psycopg.OperationalError("fe_sendauth: no password supplied"))
    assert "asks for a password" in str(error)
    assert "~/.pgpass" in str(error)


def test_a_database_that_is_not_there_says_how_to_make_it(postgresql: Server) -> None:
    with pytest.raises(StorageError, match="does not exist; make the database"):
        open_store(PostgresqlLocation(postgresql.url("nowhere")))


def test_every_commit_waits_for_the_disk_whatever_the_server_prefers(
    postgresql: Server,
) -> None:
    place = postgresql.place()
    name = place.url.rsplit("/", 1)[1]
    sql(place, f"ALTER DATABASE {name} SET synchronous_commit = off")
    raw = connect(place)
    assert raw.execute("SHOW synchronous_commit").fetchone() == ("on",)
    raw.close()


# ---------------------------------------------------------------- backup and restore


@pytest.fixture
def folder(run: PostgresqlLocation, tmp_path: Path) -> RunFolder:
    """A run whose database is on the server, with checkpoints in its folder."""
    made = make_run(tmp_path / "a run", steps=50, coordinator__store=run.url)
    one_start_at(run, step(1), step(2), put_checkpoint(made, 2), step(3))
    return made


def test_a_run_on_a_server_is_saved_and_taken_back_behind_a_fence(
    folder: RunFolder, run: PostgresqlLocation, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    summary = make_backup(folder, saved)
    assert (summary.version, summary.checkpoint) == (3, 2)
    store = open_store(run)
    store.next_generation(above=2**28)
    write(store, step(4))
    with pytest.raises(UsageError, match="stop it first"):
        restore_backup(saved, folder.path, force=True)
    store.close()
    with pytest.raises(UsageError, match="--force"):
        restore_backup(saved, tmp_path / "new")
    done = restore_backup(saved, folder.path, force=True)
    assert done.generation > 2**28 + 1, "what the server knew counts, too"
    restored = history(run).restored
    assert (restored.version, restored.generation) == (2, done.generation)
    assert not folder.database.exists()
    assert cli(["verify", str(folder.path)]) == 0
    assert one_start_at(run, step(3, attempt=9)) == done.generation + 1


def test_a_backup_without_the_key_has_no_password_of_the_database(
    folder: RunFolder,
    run: PostgresqlLocation,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = folder.settings.read_text()
    folder.settings.write_text(plain.replace("tester@", "tester:s3cret@"))
    saved = tmp_path / "saved"
    assert cli(["backup", str(folder.path), str(saved), "--no-key"]) == 0
    assert "the password of the database is not in the backup" in capsys.readouterr().out
    for path in (path for path in saved.rglob("*") if path.is_file()):
        assert b"s3cret" not in path.read_bytes(), path.name
    assert (saved / "run.toml").read_text() == plain
    assert cli(["verify", str(saved)]) == 0
    assert cli(["restore", str(saved), str(tmp_path / "standby"), "--files-only"]) == 0
    assert load_settings(RunFolder(tmp_path / "standby")).coordinator.store == run.url


def test_a_password_that_cannot_be_left_out_of_a_backup_refuses_it(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    escaped = folder.settings.read_text().replace("tester@", "tester:s3\\u0063ret@")
    folder.settings.write_text(escaped)
    assert cli(["backup", str(folder.path), str(tmp_path / "saved"), "--no-key"]) == 3
    assert "cannot be left out of the backup; write it plainly" in capsys.readouterr().err
    assert not (tmp_path / "saved").exists()
    assert cli(["backup", str(folder.path), str(tmp_path / "saved")]) == 0


def test_a_folder_for_a_standby_is_made_without_touching_the_database(
    folder: RunFolder, run: PostgresqlLocation, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    make_backup(folder, saved)
    before = history(run)
    assert cli(["restore", str(saved), str(tmp_path / "standby"), "--files-only"]) == 0
    assert history(run) == before
    assert cli(["verify", str(tmp_path / "standby")]) == 0


def test_a_changed_row_on_a_server_is_named(
    folder: RunFolder, run: PostgresqlLocation, capsys: pytest.CaptureFixture[str]
) -> None:
    sql(run, "UPDATE applied_steps SET loss = 1.0 WHERE step = 2")
    assert cli(["verify", str(folder.path)]) == 7
    assert "table applied_steps: row 2 is not what was written" in capsys.readouterr().err
    assert cli(["start", str(folder.path)]) == 7
