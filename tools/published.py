"""What libraries of others say of packages for an index, one problem a line: `python tools/published.py FILE...`.

Runs in the environment of `make release-check`, which has these libraries. The list of components in each wheel must
be CycloneDX, and each file must have a name for which an index takes an attestation; the digest that it attests must be
the file's own.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from pypi_attestations import Distribution


def main(paths: list[str]) -> int:
    """Command line."""
    for path in map(Path, paths):
        problems = attested_problem(path) + (component_problems(path) if path.suffix == ".whl" else [])
        for problem in problems:
            print(f"{path.name}: {problem}")
    return 0


def attested_problem(path: Path) -> list[str]:
    """The problem of a file as the subject of an attestation."""
    try:
        subject = Distribution.from_file(path)
    except ValueError as error:
        return [f"an index takes no attestation for it ({error})".replace("\n", " ")]
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    return [] if (subject.name, subject.digest) == (path.name, own) else [f"{subject} would be attested"]


def component_problems(path: Path) -> list[str]:
    """Problems of a wheel's lists of components."""
    found = []
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if not re.search(r"/sboms/.*\.json$", name):
                continue
            text = wheel.read(name).decode()
            version = SchemaVersion.from_version(json.loads(text)["specVersion"])
            if error := JsonStrictValidator(version).validate_str(text):
                said = str(error).splitlines()[0]
                found.append(f"{name} is not CycloneDX {version.to_version()} ({said[:300]})")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
