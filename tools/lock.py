"""Write constraints.txt: the version of every package that `make setup-dev` has installed.

    make lock

pip and uv read the file as constraints, so that a package that a platform or an extra does not need
is not installed because of it. Packages that only some platforms have stay free. Not listed are
this project, what installs packages, and fastecdsa, which is built from source by pip and comes as
a newer wheel by uv (docs/decisions/0041).
"""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
NOT_LISTED = {"swarmtrain", "fastecdsa", "pip", "setuptools", "wheel"}

HEAD = """\
# All versions that were tested together, made by `make lock` (docs/decisions/0001 and 0041). An
# open range of torch can bring several GB of CUDA packages onto a machine that has no GPU.
"""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    found = {normalised(one.metadata["Name"]): one.version for one in distributions()}
    # A local version says of which build torch is; the machine's index decides about that.
    pins = [
        f"{name}=={version.partition('+')[0]}"
        for name, version in sorted(found.items())
        if name not in NOT_LISTED
    ]
    CONSTRAINTS.write_text(HEAD + "\n".join(pins) + "\n")
    print(f"{len(pins)} versions written to {CONSTRAINTS.name}")


if __name__ == "__main__":
    main()
