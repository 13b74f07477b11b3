"""An index of packages in a folder, so that an installation needs no network and no gigabytes.

A package that swarmtrain depends on is there as a stand-in: a wheel of the version that the tests
run with, whose only content makes Python look into the tests' own packages. uv is there itself,
packed from what is installed. So resolving, installing and running are real; of what a person's
machine does, the download of the packages alone is left out.
"""

from __future__ import annotations

import base64
import hashlib
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement

PACKAGES = Path(sysconfig.get_path("purelib"))
UV_SETTINGS = "uv.toml"
FASTECDSA = "fastecdsa"
COMPILED_RELEASE, WHEEL_RELEASE = "2.3.2", "4.0.0"
"""What libp2p asks for, which is there as source only, and what the installers take instead."""


def fill(folder: Path, wheel: Path) -> None:
    """Write all that an installation of `wheel`, or of its source, asks an index for."""
    folder.mkdir()
    for name in _needed(wheel):
        requires = (f"{FASTECDSA}=={COMPILED_RELEASE}",) if name == "libp2p" else ()
        _write_stand_in(folder, name, version(name), requires)
    _write_stand_in(folder, FASTECDSA, WHEEL_RELEASE)
    _write_stand_in(folder, "hatchling", version("hatchling"))
    _pack(folder, "uv")
    (folder / UV_SETTINGS).write_text('no-index = true\npython-downloads = "never"\n')


def environment(folder: Path) -> Mapping[str, str]:
    """The environment in which pip and uv use this folder as their only index."""
    return {
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder.as_uri(),
        "UV_CONFIG_FILE": str(folder / UV_SETTINGS), "UV_FIND_LINKS": folder.as_uri(),
    }  # fmt: skip


def _needed(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    extras = ["", *(line.split(": ")[1] for line in lines if line.startswith("Provides-Extra: "))]
    for line in lines:
        if line.startswith("Requires-Dist: "):
            requirement = Requirement(line.removeprefix("Requires-Dist: "))
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                try:
                    version(requirement.name)
                except PackageNotFoundError:
                    continue  # an extra that these tests do without
                yield requirement.name


def _write_stand_in(folder: Path, name: str, number: str, requires: tuple[str, ...] = ()) -> None:
    stem = f"{name.replace('-', '_')}-{number}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    tag = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    _write_wheel(
        folder / f"{stem}-py3-none-any.whl",
        {f"{name}_stand_in.pth": f"{PACKAGES}\n".encode(),
         f"{stem}.dist-info/METADATA": metadata.encode(),
         f"{stem}.dist-info/WHEEL": tag.encode()},
    )  # fmt: skip


def _pack(folder: Path, name: str) -> None:
    """The wheel that an installed package came from."""
    installed = distribution(name)
    tags = [line.split(": ")[1] for line in (installed.read_text("WHEEL") or "").splitlines()
            if line.startswith("Tag: ")]  # fmt: skip
    stem = f"{name}-{installed.version}"
    content = {}
    for file in installed.files or []:
        made_here = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
        if file.name in made_here or file.suffix == ".pyc":
            continue
        path = str(file)
        if path.startswith("../"):
            path = f"{stem}.data/scripts/{file.name}"
        content[path] = Path(str(file.locate())).read_bytes()
    python, abi, _ = tags[0].split("-")
    platforms = ".".join(tag.split("-")[2] for tag in tags)
    _write_wheel(folder / f"{stem}-{python}-{abi}-{platforms}.whl", content)


def _write_wheel(path: Path, content: Mapping[str, bytes]) -> None:
    record = f"{'-'.join(path.name.split('-')[:2])}.dist-info/RECORD"
    lines = []
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o100755 if ".data/scripts/" in name else 0o100644) << 16
            archive.writestr(member, data)
        archive.writestr(record, "".join(lines) + f"{record},,\n")
