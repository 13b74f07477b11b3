"""The commands of admission: token, allow, ban, unban.

Owns their output, and the way of a request: to the socket of a running coordinator, or, without
one, directly to the run's database under the folder's lock.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import trio

from swarm_coordinator.admission.book import (
    MAX_TEXT_CHARACTERS,
    PeerAllowed,
    PeerBanned,
    PeerDisallowed,
    PeerUnbanned,
    TokenRevoked,
)
from swarm_coordinator.admission.requests import (
    CreateToken,
    Request,
    carry_out,
    requests,
    token_document,
)
from swarm_coordinator.cli.arguments import AS_JSON, RUN_DIR
from swarm_coordinator.cli.invite import run_addresses
from swarm_coordinator.demo.run_summary import table
from swarm_coordinator.durability.run_files import (
    database_location,
    load_identity,
    load_manifest,
    load_settings,
    read_admission_book,
    read_database,
)
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.server import admin_socket
from swarm_coordinator.server.listen_addresses import invite_for
from swarm_coordinator.storage.admission_rows import read_admission, read_seen_since
from swarm_coordinator.storage.connection import Connection
from swarm_coordinator.storage.store import open_store
from swarm_shared.base.clock import wall
from swarm_shared.base.errors import (
    NetworkError,
    SignatureError,
    StorageError,
    SwarmError,
    UsageError,
)
from swarm_shared.base.text import printable
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import public_key_of

CONNECT_SECONDS = 15.0
"""Seconds to wait for a coordinator that is starting or ending, until it accepts commands or
releases the folder."""
SHORTEST_SUFFIX = 6
"""Least characters of the end of a peer ID, as shown by the demo's summary."""
LONGEST_EXPIRY_SECONDS = 100 * 365 * 86_400.0

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_ERRORS: dict[int, type[SwarmError]] = {
    error.exit_code: error for error in (UsageError, StorageError, NetworkError)
}

PEER = click.argument("peer")
REASON = click.option("--reason", default="", help="Reason sent to the peer and shown by `status`.")


# ---------------------------------------------------------------- executing a request


def submit_request(folder: RunFolder, request: Request) -> dict[str, Any]:
    """Execute the request; print its warning, return its answer."""
    answer = execute_request(folder, request)
    if answer.get("warning"):
        click.echo(f"note: {answer['warning']}", err=True)
    return answer


def execute_request(folder: RunFolder, request: Request) -> dict[str, Any]:
    """Execute the request, in the running coordinator or here; return its answer."""
    folder.refuse_backup()
    answer = _execute(folder, request)
    if not answer.get("ok"):
        kind = _ERRORS.get(answer.get("exit_code", 1), SwarmError)
        raise kind(str(answer.get("error", "the coordinator gave no reason")))
    return answer


def _execute(folder: RunFolder, request: Request) -> dict[str, Any]:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            return admin_socket.send_request(folder.socket, requests.dump_python(request))
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(folder.lock())
            except UsageError as error:
                if time.monotonic() > deadline:
                    raise NetworkError(
                        f"a process uses {folder.path} and takes no commands; wait until it is "
                        f"ready or has ended, and try again"
                    ) from error
            else:
                return trio.run(_execute_offline, folder, request)
        time.sleep(0.1)


async def _execute_offline(folder: RunFolder, request: Request) -> dict[str, Any]:
    settings, organiser = load_settings(folder), load_identity(folder).peer_id
    store = open_store(database_location(folder))
    try:
        change, concerned = await carry_out(
            request, folder, settings.admission.mode, organiser, store.read(read_admission),
            store.write, wall,
        )  # fmt: skip
    finally:
        store.close()
    effect = "no coordinator is running, so it takes effect at the next start"
    return change.answer(effect if concerned else "")


def _change(run_dir: Path, peer: str, kind: Callable[..., Request], **values: str) -> None:
    """Execute a request about a peer, and print what it has changed."""
    folder = RunFolder.open(run_dir)
    click.echo(submit_request(folder, kind(peer=_peer_named(folder, peer), **values))["text"])


def _peer_named(folder: RunFolder, text: str) -> PeerId:
    """Find a peer by its ID, or by the end of the ID of a peer that the run knows."""
    wanted = text.strip().removeprefix("…").removeprefix("...")
    try:
        public_key_of(PeerId(wanted))
        return PeerId(wanted)
    except SignatureError:
        known = read_database(folder, _known_peers) or set()
    if len(wanted) >= SHORTEST_SUFFIX:
        found = sorted(peer for peer in known if peer.endswith(wanted))
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{text} is the end of several peer IDs: {', '.join(found)}")
    example = load_identity(folder).peer_id
    raise UsageError(
        f"{text!r} is neither a peer ID nor the end ({SHORTEST_SUFFIX} characters or more) of one "
        f"that has taken part in this run; `swarm-client join` prints a volunteer's, and "
        f"it looks like {example}"
    )


def _known_peers(connection: Connection) -> set[PeerId]:
    book = read_admission(connection)
    return {*read_seen_since(connection, 0.0), *book.bans, *book.allowed}


# ---------------------------------------------------------------- token


class Duration(click.ParamType[float]):
    """Converts `90s`, `30m`, `12h`, `7d`, `2w` to seconds."""

    name = "duration"

    def convert(self, value: Any, parameter: Any, context: Any) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", str(value).strip(), re.ASCII)
        seconds = float(match[1]) * _UNIT_SECONDS[match[2]] if match else math.nan
        if not 0 < seconds <= LONGEST_EXPIRY_SECONDS:
            self.fail(
                f"{value!r} is not a duration; write a number and a unit, like 90s, 30m, 12h, "
                "7d or 2w",
                parameter,
                context,
            )
        return seconds


@click.group("token")
def token_command() -> None:
    """Manage tokens: an invite with a token admits its bearer ([admission] mode = "token")."""


@token_command.command("create")
@RUN_DIR
@click.option(
    "--uses",
    type=click.IntRange(1, 2**53 - 1),
    help="Number of peers that it admits; unlimited by default.",
)
@click.option(
    "--expires",
    type=Duration(),
    metavar="7d",
    help="Time after which it admits no peer; never by default.",
)
@click.option("--note", default="", help="Private note, for example the recipient.")
@AS_JSON
def token_create_command(
    run_dir: Path, uses: int | None, expires: float | None, note: str, as_json: bool
) -> None:
    """Create a token and print the invite that carries it. The invite is shown only once."""
    folder, note = RunFolder.open(run_dir), _checked(note, "--note")
    settings, manifest = load_settings(folder), load_manifest(folder)
    addresses = run_addresses(folder, settings)
    # Checked before the token is made, so that an invalid address does not use up a token.
    invite_for(manifest, addresses, None)
    made = submit_request(folder, CreateToken(uses=uses, expires_seconds=expires, note=note))
    details = made["details"]
    invite = invite_for(manifest, addresses, details["secret"]).encode()
    if as_json:
        click.echo(json.dumps({**details, "note": note, "invite": invite}, indent=1))
        return
    until = f", until {_time_text(details['expires_at'])}" if details["expires_at"] else ""
    click.echo(
        f"token {details['token']}: admits {_uses_text(uses)}{until}; this invite carries it and "
        "is not shown again:"
    )
    click.echo(invite)


@token_command.command("list")
@RUN_DIR
@AS_JSON
def token_list_command(run_dir: Path, as_json: bool) -> None:
    """List all tokens; their secrets are not stored."""
    tokens = token_document(read_admission_book(RunFolder.open(run_dir)), wall())
    if as_json:
        click.echo(json.dumps(tokens, indent=1))
    elif not tokens:
        click.echo(
            f"no token yet; make one with `swarm-coordinator token create {quoted(run_dir)}`"
        )
    else:
        rows = [
            (
                str(token["token"]), token["state"],
                _uses_left(token),
                str(len(token["admitted"])), _time_text(token["created_at"]),
                _time_text(token["expires_at"]) if token["expires_at"] else "never",
                printable(token["note"]),
            )
            for token in tokens
        ]  # fmt: skip
        header = ("token", "state", "uses left", "admitted", "created", "expires", "note")
        click.echo(table(header, rows, right=(0, 3)))


@token_command.command("revoke")
@RUN_DIR
@click.argument("token", type=int)
def token_revoke_command(run_dir: Path, token: int) -> None:
    """Revoke TOKEN and end the membership of all peers that it admitted.

    TOKEN is its number, as `list` shows it.
    """
    click.echo(submit_request(RunFolder.open(run_dir), TokenRevoked(token=token))["text"])


# ---------------------------------------------------------------- allow


@click.group("allow")
def allow_command() -> None:
    """Manage the list of peers that may join ([admission] mode = "allow-list")."""


@allow_command.command("add")
@RUN_DIR
@PEER
def allow_add_command(run_dir: Path, peer: str) -> None:
    """Add PEER (its peer ID) to the list."""
    _change(run_dir, peer, PeerAllowed)


@allow_command.command("remove")
@RUN_DIR
@PEER
def allow_remove_command(run_dir: Path, peer: str) -> None:
    """Remove PEER from the list; in mode "allow-list" that ends its membership."""
    _change(run_dir, peer, PeerDisallowed)


@allow_command.command("list")
@RUN_DIR
@AS_JSON
def allow_list_command(run_dir: Path, as_json: bool) -> None:
    """Print the list."""
    book = read_admission_book(RunFolder.open(run_dir))
    if as_json:
        rows = [{"peer": peer, "added_at": added} for peer, added in book.allowed.items()]
        click.echo(json.dumps(rows, indent=1))
    elif not book.allowed:
        click.echo(f"no peer yet; `swarm-coordinator allow add {quoted(run_dir)} PEER` adds a peer")
    else:
        for peer in book.allowed:
            click.echo(peer)


# ---------------------------------------------------------------- ban


@click.command("ban")
@RUN_DIR
@PEER
@REASON
def ban_command(run_dir: Path, peer: str, reason: str) -> None:
    """Exclude PEER from the run at once, in every admission mode, until it is unbanned.

    PEER is its peer ID, or the end of it as `status` shows it.
    """
    _change(run_dir, peer, PeerBanned, reason=_checked(reason, "--reason"))


@click.command("unban")
@RUN_DIR
@PEER
def unban_command(run_dir: Path, peer: str) -> None:
    """Lift the ban of PEER; the admission mode decides whether it may rejoin."""
    _change(run_dir, peer, PeerUnbanned)


# ---------------------------------------------------------------- texts


def _checked(text: str, what: str) -> str:
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UsageError(f"{what} has at most {MAX_TEXT_CHARACTERS} characters, not {len(text)}")
    return printable(text)


def _time_text(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_seconds))


def _uses_left(token: dict[str, Any]) -> str:
    return "any number" if token["uses"] is None else f"{token['uses_left']} of {token['uses']}"


def _uses_text(uses: int | None) -> str:
    if uses is None:
        return "any number of peers"
    return "one peer" if uses == 1 else f"{uses} peers"
