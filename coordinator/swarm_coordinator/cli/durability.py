"""The commands of durability: verify, backup, restore.

Owns their output. The work is done by `durability.integrity_check`, `durability.backup` and
`durability.restore`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from swarm_coordinator.cli.arguments import AS_JSON, RUN_DIR
from swarm_coordinator.durability.backup import is_backup, make_backup, read_summary, verify_backup
from swarm_coordinator.durability.integrity_check import (
    IntegrityFinding,
    RunCheck,
    check_run,
    refuse_damage,
    set_aside,
)
from swarm_coordinator.durability.restore import restore_backup
from swarm_coordinator.durability.run_files import database_location
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.storage.connection import PostgresqlLocation
from swarm_shared.base.errors import UsageError
from swarm_shared.base.text import printable_line


@click.command("verify")
@RUN_DIR
@AS_JSON
@click.option(
    "--set-aside",
    "aside",
    is_flag=True,
    help="Move a damaged database or checkpoint away, so that the run can continue without it.",
)
def verify_command(run_dir: Path, as_json: bool, aside: bool) -> None:
    """Re-read everything in RUN_DIR (or in a backup) and name what is damaged."""
    if is_backup(run_dir):
        if aside:
            raise UsageError("a backup is kept as it is; --set-aside is for the folder of a run")
        summary = verify_backup(run_dir)
        if as_json:
            click.echo(json.dumps({"good": True, **summary.model_dump(exclude={"files"})}))
        else:
            whole = f"the backup is whole: step {summary.version} of {summary.name}"
            click.echo(printable_line(whole))
        return
    folder = RunFolder.open(run_dir, complete=False)
    check = check_run(folder, (lambda line: None) if as_json else click.echo)
    if as_json:
        click.echo(json.dumps(_document(check), indent=1))
    if check.findings and aside:
        with folder.lock():
            for path in set_aside(folder, check):
                click.echo(f"moved to {path}", err=as_json)
        check = check_run(folder)
        check = RunCheck(
            check.good, tuple(f for f in check.findings if _is_still_damage(f)), check.offers
        )
    if check.findings and not as_json:
        for finding in check.findings:
            click.echo(f"DAMAGED: {finding.problem}")
    refuse_damage(check)


def _is_still_damage(finding: IntegrityFinding) -> bool:
    """Return False for a checkpoint that is missing because it was moved away."""
    return not (finding.part == "checkpoint" and finding.version is None)


def _document(check: RunCheck) -> dict[str, object]:
    return {
        "good": not check.findings,
        "verified": list(check.good),
        "damaged": [asdict(finding) for finding in check.findings],
        "offers": list(check.offers),
    }


@click.command("backup")
@RUN_DIR
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--no-key",
    is_flag=True,
    help="Leave out organiser.key, the token of the invite, and the password of a database.",
)
@click.option("--no-data", is_flag=True, help="Leave out the training data.")
def backup_command(run_dir: Path, out: Path, no_key: bool, no_data: bool) -> None:
    """Save the run in RUN_DIR to the new folder OUT; its coordinator may keep running."""
    folder = RunFolder.open(run_dir)
    summary = make_backup(folder, out, with_key=not no_key, with_data=not no_data)
    checkpoint = "no checkpoint yet"
    if summary.checkpoint is not None:
        checkpoint = f"the checkpoint of step {summary.checkpoint}"
    size = sum(file.bytes for file in summary.files)
    click.echo(
        f"saved {summary.name} at step {summary.version} with {checkpoint} to {out} "
        f"({size / 2**20:.1f} MiB, read back and found whole)"
    )
    if no_key:
        click.echo(
            "organiser.key is not in the backup, and the run cannot be continued without it; "
            "keep a copy"
        )
        location = database_location(folder)
        if isinstance(location, PostgresqlLocation) and location.public_url != location.url:
            click.echo(
                "the password of the database is not in the backup; write it into ~/.pgpass on the "
                "machine that restores it"
            )
    else:
        click.echo("the backup holds organiser.key, which gives full control of this run")


@click.command("restore")
@click.argument("backup", type=click.Path(path_type=Path))
@RUN_DIR
@click.option(
    "--force", is_flag=True, help="Allow an existing run in RUN_DIR; its folder is moved aside."
)
@click.option(
    "--files-only",
    is_flag=True,
    help="Leave the database on its server unchanged: for a standby coordinator.",
)
def restore_command(backup: Path, run_dir: Path, force: bool, files_only: bool) -> None:
    """Restore BACKUP to RUN_DIR. The run continues from the checkpoint in the backup."""
    read_summary(backup)
    done = restore_backup(backup, run_dir, force=force, files_only=files_only)
    if files_only:
        name = printable_line(done.summary.name)
        click.echo(f"{run_dir} has the files of {name}; its database is where it was")
        click.echo(
            f"start it as a standby with: swarm-coordinator start {quoted(run_dir)} --standby"
        )
        return
    click.echo(
        f"{run_dir} is {printable_line(done.summary.name)} as it was at step "
        f"{done.summary.version}; it continues "
        f"from its checkpoint of step {done.version}, as generation {done.generation + 1}"
    )
    if done.replaced is not None:
        click.echo(f"the replaced folder is now {done.replaced}")
    for name in done.missing:
        click.echo(
            f"put {name} back into {run_dir} before the next start; the backup does not have it"
        )
    click.echo(f"start it with: swarm-coordinator start {quoted(run_dir)}")
