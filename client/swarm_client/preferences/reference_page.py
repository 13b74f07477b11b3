"""Generates docs/preferences.md: `python -m swarm_client.preferences.reference_page`.

A test compares the page in the repository with this, but for the measured figures in it, which
`benchmarks.pages` puts there.
"""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from swarm_client.preferences.file import allowed, default_of, fields_of
from swarm_client.preferences.model import GPU, GROUPS, GpuPreferences
from swarm_shared.settings.commented_toml import toml_value

_HEAD = """\
# Preferences

<!-- Made by `python -m swarm_client.preferences.reference_page > docs/preferences.md`. -->

What `swarm-client` may use of a machine, and when. The preferences are in `preferences.toml`, in
the folder given with `--home` or else where your system keeps settings (`swarm-client config get`
shows where). A flag (`join --set NAME=VALUE`) overrides the environment (`SWARM_` and the name in
capitals, as `SWARM_CPU_PERCENT` or `SWARM_GPU_0_VRAM_GIB`), which overrides the file, which
overrides the default. A running client applies a changed file within two seconds; a file with an
error changes nothing, and the error is reported.

```sh
swarm-client config get                       # all effective values and their sources
swarm-client config set cpu_percent 50        # changes the file, keeps its comments
swarm-client config set cpu_percent --default # removes it again
swarm-client config validate                  # checks the file without changing anything
swarm-client config schema                    # a JSON schema of the file, for editors
```

The defaults never stop a machine without battery, display and user.
"""


def page() -> str:
    lines = [_HEAD]
    for group in GROUPS[:-1]:
        lines += [f"## {group}", "", *_table(dict(fields_of(group))), ""]
    lines += [f"## {GPU}", "", "In a table for each GPU by its number, `[gpu.0]`, and `[gpu.all]` "]
    lines += ["for the remaining ones. On the command line: `gpu.0.vram_gib`.", ""]
    lines += [*_table(GpuPreferences.model_fields), "", _NOTES]
    return "\n".join(lines)


def _table(fields: dict[str, FieldInfo]) -> list[str]:
    rows = ["| name | default | allowed | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        cells = (f"`{name}`", f"`{_default(field)}`", allowed(field), field.description or "")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _default(field: FieldInfo) -> str:
    default: Any = default_of(field)
    return "" if default == {} else toml_value(default)


_NOTES = """\
## What happens

- **A reason is always shown** when nothing is computed: in the lines of `join`, in the status and
  in the log. Several can apply at once; the most important one comes first.
- **Cores and nice** apply to the compute and the averaging process and their children. Where the
  system cannot bind a process to cores (macOS), fewer threads compute.
- **`cpu_percent` and `duty_cycle_percent`** are kept by resting after each computation, not by
  slowing it down; the reported rate includes the rests.
- **`vram_gib`** limits what is offered to the run and what torch's allocator takes.
- **`memory_percent_busy` and `memory_percent_idle`** cover the whole program, which takes up to
  0.9 GiB for each device beside its stage. A stage is offered what remains, on a machine with a
  display what remains while it is in use. A stage that is held when they are lowered keeps less of
  each microbatch; where that is not enough, it is handed over, and a smaller one asked for. Where
  none fits, it pauses until more is left.
- **When other programs take the memory** of the stage, less is kept of each microbatch and more is
  computed twice; 1 GiB of the host's memory is left free (an eighth on small machines). Where even
  that fails, the stage is handed over and a smaller one asked for; where none fits, it pauses for
  ten minutes, and longer each time.
- **Bytes per second** are counted on the wire, over all connections of the program together.
  The all-reduce usually uses hivemind's p2pd, a separate program that cannot be limited: with a
  limit or a quota set, p2pd is stopped and the all-reduce uses the limited connections.
- **`transfer_gib`** is counted in `transfer.json` in the home folder, by day. When it is used up,
  everything pauses until enough of it is older than `transfer_days`; the keep-alive traffic with
  the coordinator (some KB per minute) continues. Setting the clock back frees nothing.
- **`disk_gib`** and `disk_leave_free_gib`: caches of runs other than the current one are removed
  first, the longest unused first; then everything pauses.
- **Power of a GPU** can only be limited through its driver, as root. When a GPU is too hot, the
  shown reason names the command.
- **Whether the machine is in use** is read from X11, GNOME, KDE, logind (these three over D-Bus),
  macOS and the terminals (windows, ssh, consoles), whichever exist. Where none exists, the machine
  is not in use. GNOME and KDE are asked on the session bus of the user who runs the program: a
  service of the whole machine asks logind alone, which learns only some minutes later that a
  desktop is idle. Under Wayland KDE tells no time, so that logind decides. These three have been
  tried with stand-ins on a real message bus, and not on a desktop yet.
- **Before the machine sleeps** (a closed lid, too) the volunteer hands back what it has in hand and
  says goodbye to the coordinator, where logind announces a sleep. That delays the sleep by at most
  0.6 of logind's `InhibitDelayMaxSec` (3 s of 5 s) and a second for closing connections.
- **A returning user has the machine within two seconds.** Input is checked twice a second. From
  then on no new work is taken; what is in flight has 0.9 s to be finished, then it is handed back
  for other peers to compute, and a running computation ends at its next layer. Linux updates a
  terminal's access time in steps of eight seconds, so a terminal user may count as present for up
  to eight seconds longer.

<!-- yielding figures -->

<!-- /yielding figures -->
"""


def main() -> None:
    print(page(), end="")


if __name__ == "__main__":
    main()
