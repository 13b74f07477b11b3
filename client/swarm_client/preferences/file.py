"""The commented TOML file: how a new one looks, and changing one value in it.

In a new file every preference stands as a comment with its default, so that the file says only
what a person has said. A change touches that one line; what a person wrote around it stays.
"""

from __future__ import annotations

import re
from pathlib import Path

import tomlkit
import tomlkit.items
from pydantic.fields import FieldInfo

from swarm_client.preferences.layers import (
    FlatValues,
    Origin,
    build,
    check_name,
    flatten,
    parse_file,
    parse_value,
    read_file,
)
from swarm_client.preferences.model import GPU, GROUPS, VERSION, GpuPreferences, Preferences
from swarm_shared.base.atomic_file import PRIVATE_MODE, make_folder, write_atomically
from swarm_shared.base.errors import StorageError
from swarm_shared.settings.commented_toml import comment, setting, toml_value

_HEAD = f"""\
# What swarmtrain may use of this machine, and when.
#
# A line that begins with "# name =" shows the default; take the "# " away and change the value, or
# use `swarm-client config set NAME VALUE`. A client that runs takes a change up within seconds.
# `swarm-client config validate` checks this file, `swarm-client config get` shows what holds.

version = {VERSION}
"""

_TABLES: dict[str, str] = {
    "hours_on": '# saturday = "always"',
    "network_hours_on": '# saturday = "always"',
}


def template() -> str:
    """A new file: every preference with its meaning and its default, all of them comments."""
    lines = [_HEAD]
    tables: list[str] = []
    for group in GROUPS[:-1]:
        lines += [f"# ---- {group}", ""]
        for name, field in fields_of(group):
            if name in _TABLES:
                tables += [comment(field.description or ""), f"[{name}]", _TABLES[name], ""]
            else:
                lines += [*setting(name, field, default_of(field), as_comment=True), ""]
    tables += [f"# ---- {GPU}. [gpu.0] is the first one; [gpu.all] is for those not named.", ""]
    tables.append("[gpu.all]")
    for name, field in GpuPreferences.model_fields.items():
        tables += setting(name, field, default_of(field), as_comment=True)
    return "\n".join([*lines, *tables]) + "\n"


def fields_of(group: str) -> list[tuple[str, FieldInfo]]:
    return [
        (name, field)
        for name, field in Preferences.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra["group"] == group
    ]


def default_of(field: FieldInfo) -> object:
    return field.get_default(call_default_factory=True)


_BOUNDS = (("ge", "from {}"), ("gt", "above {}"), ("le", "to {}"), ("lt", "below {}"))


def allowed(field: FieldInfo) -> str:
    """Describe the values that a preference may have, for people; empty where that takes more than
    a few words."""
    bounds = {
        name: getattr(part, name) for part in field.metadata for name, _ in _BOUNDS
        if getattr(part, name, None) is not None
    }  # fmt: skip
    if bounds:
        return " ".join(
            form.format(toml_value(float(bounds[name]))) for name, form in _BOUNDS if name in bounds
        )
    return {bool: "true, false", str: "text"}.get(field.annotation or object, "")  # type: ignore[arg-type]


def set_preference(path: Path, name: str, text: str | None) -> object:
    """Change one value in the file, made anew if there is none; None takes it out.

    ConfigurationError when the name or the value cannot be, and the file stays as it was. Returns
    the value as it was understood.
    """
    check_name(name, "swarm-client config set")
    value = None if text is None else parse_value(name, text)
    named = read_file(path)
    if text is None:
        named.pop(name, None)
    else:
        named[name] = value
    origins = dict.fromkeys(named, Origin("file", str(path)))
    origins[name] = Origin("flag", "swarm-client config set")
    preferences = build(named, origins)
    content = edited(path.read_text() if path.exists() else template(), name, value)
    _check_same(content, named, path)
    try:
        make_folder(path.parent, 0o700)
    except OSError as error:
        raise StorageError(
            f"the folder {path.parent} cannot be made: {error.strerror}; choose one with --home"
        ) from error
    write_atomically(path, content.encode(), PRIVATE_MODE)
    return flatten(preferences.model_dump())[name] if text is not None else None


def edited(content: str, name: str, value: object) -> str:
    """The text with one value set, or with none of that name."""
    *tables, key = name.split(".")
    document = tomlkit.parse(content)
    table: tomlkit.TOMLDocument | tomlkit.items.Table = document
    for part in tables:
        if part not in table:
            if value is None:
                return content
            table[part] = tomlkit.table(is_super_table=part == "gpu")
        inner = table[part]
        assert isinstance(inner, tomlkit.items.Table)
        table = inner
    if value is None:
        table.pop(key, None)
        return document.as_string()
    if key not in table:
        uncommented = _uncomment(content, ".".join(tables), key, value)
        if uncommented is not None:
            return uncommented
    table[key] = list(value) if isinstance(value, tuple) else value
    return document.as_string()


def _uncomment(content: str, table: str, key: str, value: object) -> str | None:
    """Put the value in place of the comment that shows its default, where the file has one."""
    lines = content.split("\n")
    within = ""
    for index, line in enumerate(lines):
        header = re.fullmatch(r"\s*\[([\w.]+)\]\s*(#.*)?", line)
        if header:
            within = header[1]
        elif within == table and re.match(rf"# {re.escape(key)} = ", line):
            lines[index] = f"{key} = {toml_value(value)}"
            return "\n".join(lines)
    return None


def _check_same(content: str, named: FlatValues, path: Path) -> None:
    """Raise StorageError unless the new content says exactly what was meant; nothing is written
    then."""
    if parse_file(content.encode(), str(path)) != named:
        raise StorageError(
            f"{path} is written in a way that this program cannot change; edit it by hand"
        )
