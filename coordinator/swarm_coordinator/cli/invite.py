"""`swarm-coordinator invite`: the run's invite, as a line of text and as a QR code."""

from __future__ import annotations

import io
from pathlib import Path

import click
import segno

from swarm_coordinator.admission.requests import standing_token
from swarm_coordinator.cli.arguments import RUN_DIR
from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_coordinator.durability.run_files import (
    load_manifest,
    load_settings,
    read_admission_book,
)
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.server.listen_addresses import (
    dialable_addresses,
    invite_for,
    listen_address,
)
from swarm_coordinator.status.status_file import read_status
from swarm_shared.base.errors import UsageError
from swarm_shared.host.ports import lasting_port


@click.command("invite")
@RUN_DIR
@click.option("--qr", is_flag=True, help="Draw it as a QR code too, to be read off the screen.")
def invite_command(run_dir: Path, qr: bool) -> None:
    """Print the invite of the run in RUN_DIR."""
    folder = RunFolder.open(run_dir)
    settings, manifest = load_settings(folder), load_manifest(folder)
    addresses = run_addresses(folder, settings)
    token = None
    if settings.admission.mode == "token":
        token, _ = standing_token(folder, read_admission_book(folder))
        if token is None:
            raise UsageError(
                "this run has no invite of its own: its token was revoked, or other tokens were "
                f"made; `swarm-coordinator token create {quoted(run_dir)}` makes an invite"
            )
    invite = invite_for(manifest, addresses, token).encode()
    click.echo(invite)
    if qr:
        click.echo(qr_code(invite), nl=False)


def qr_code(invite: str) -> str:
    """Draw an invite with block characters, light on the terminal's dark background.

    In capitals, in which a code needs fewer cells and `join` takes an invite as well.
    """
    drawn = io.StringIO()
    segno.make(invite.upper(), micro=False).terminal(drawn, compact=True)
    return drawn.getvalue()


def run_addresses(folder: RunFolder, settings: RunSettings) -> tuple[str, ...]:
    """Return the coordinator's addresses: the present ones if it runs, otherwise the next
    start's."""
    document = read_status(folder.status) if folder.in_use() else None
    if document is not None and document.running:
        return document.addresses
    network = settings.network
    port = network.listen_port or folder.remembered_port()
    listen_address(network.listen_host, port or 0)
    if port is None:
        port = lasting_port(network.listen_host)
        folder.remember_port(port)
    return dialable_addresses(network.listen_host, port, network.announce)
