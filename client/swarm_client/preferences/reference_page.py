"""docs/preferences.md, made from the model: `python -m swarm_client.preferences.reference_page`.

A test compares the page in the repository with this, but for the measured figures in it, which
`benchmarks.pages` puts there.
"""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from swarm_client.preferences.file import allowed, default_of, fields_of
from swarm_client.preferences.model import GPU, GROUPS, GpuPreferences
from swarm_shared.base.commented_toml import toml_value

_HEAD = """\
# Preferences

<!-- Made by `python -m swarm_client.preferences.reference_page > docs/preferences.md`. -->

What `swarm-client` may use of a machine, and when. They stand in `preferences.toml`, in the folder
given with `--home` or else where your system keeps settings (`swarm-client config get` says where).
A flag (`join --set NAME=VALUE`) goes before the environment (`SWARM_` and the name in capitals, as
`SWARM_CPU_PERCENT` or `SWARM_GPU_0_VRAM_GIB`), that before the file, and that before the default.
A client that runs takes a changed file up within two seconds; a file with a mistake changes
nothing, and the mistake is said.

```sh
swarm-client config get                       # all that hold, and where each comes from
swarm-client config set cpu_percent 50        # changes the file, keeps its comments
swarm-client config set cpu_percent --default # takes it out again
swarm-client config validate                  # checks the file without changing anything
swarm-client config schema                    # a JSON schema of the file, for editors
```

The defaults never stop a machine that has no battery, no display and no user at it.
"""


def page() -> str:
    lines = [_HEAD]
    for group in GROUPS[:-1]:
        lines += [f"## {group}", "", *_table(dict(fields_of(group))), ""]
    lines += [f"## {GPU}", "", "In a table for each GPU by its number, `[gpu.0]`, and `[gpu.all]` "]
    lines += ["for what is not said of one. On the command line: `gpu.0.vram_gib`.", ""]
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
  in the log. Several can hold at once; the first is named, the others after it.
- **Cores and nice** hold for the compute and the averaging process and what they start. Where the
  system cannot bind a process to cores (macOS), fewer threads compute.
- **`cpu_percent` and `duty_cycle_percent`** are kept by resting after each computation, not by
  slowing it down; the rate that others see is the one with its rests.
- **`vram_gib`** bounds what is offered to the run and what torch's allocator takes.
- **Bytes per second** are counted on the wire, over all connections of the program together.
  Averaging usually goes through hivemind's p2pd, a program of its own that cannot be held back:
  with a limit or a quota set, p2pd is stopped and averaging goes over the limited connections.
- **`transfer_gib`** is counted in `transfer.json` in the home folder, by day. When it is used up,
  everything pauses until enough of it is older than `transfer_days`; what keeps the link to the
  coordinator alive (some KB a minute) still flows. A clock that is set back frees nothing.
- **`disk_gib`** and `disk_leave_free_gib`: caches of runs that are not worked on are removed first,
  the longest unused first; then everything pauses.
- **Power of a GPU** can be limited by its driver only, as root. When a GPU is too hot, the sentence
  names the command that would help.
- **When somebody uses the machine** is asked of X11, logind, macOS and the terminals (windows, ssh,
  consoles), whichever are there. Where none is, nobody does.
- **Who comes back has the machine within two seconds.** It is looked for twice a second (logind:
  once a second, because asking it costs more). From then on nothing new is taken; what is in hand
  has 0.9 s to be finished, then it is handed back for others to compute, and a computation that is
  under way ends at its next layer. A terminal's time is written by Linux in steps of eight
  seconds, so a user of a terminal may count as there for up to eight seconds longer.

<!-- yielding figures -->
<!-- /yielding figures -->
"""


def main() -> None:
    print(page(), end="")


if __name__ == "__main__":
    main()
