"""Checks licenses, versions and sources of all crates against deny.toml, without the network: `make lint` runs it.

cargo-deny does the same and more; this is for machines that lack it, since no registry that `make build` uses has a
build of it that understands this version of cargo, and building it takes minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# How cargo names the registry that it uses by default, whatever mirror serves it.
REGISTRY = "registry+https://github.com/rust-lang/crates" + ".io-index"


def licensed(expression: str, allowed: Iterable[str]) -> bool:
    """Whether a license expression can be met with the allowed licenses only. ``A/B`` is the old form of ``A OR B``."""
    known = set(allowed)
    tokens = re.findall(r"[()]|\bAND\b|\bOR\b|[\w.+-]+(?: WITH [\w.+-]+)?", expression.replace("/", " OR "))

    def alternatives() -> bool:
        met = conjunction()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            met = conjunction() or met
        return met

    def conjunction() -> bool:
        met = term()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            met = term() and met
        return met

    def term() -> bool:
        token = tokens.pop(0) if tokens else ""
        if token != "(":
            return token in known
        met = alternatives()
        return bool(tokens) and tokens.pop(0) == ")" and met

    return alternatives() and not tokens


def problems(packages: Iterable[Mapping[str, Any]], policy: Mapping[str, Any]) -> list[str]:
    """Properties of the packages of ``cargo metadata`` that the policy does not allow."""
    allowed = policy["licenses"]["allow"]
    skipped = {one["crate"] for one in policy["bans"]["skip"]}
    found = []
    versions: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        name, version, license_text = package["name"], package["version"], package["license"] or "none"
        versions[name].add(version)
        if not licensed(license_text, allowed):
            found.append(f"{name} {version}: license {license_text} is not in licenses.allow ({', '.join(allowed)})")
        if package["source"] not in (None, REGISTRY):
            found.append(f"{name} {version}: comes from {package['source']}, not from the registry")
    for name, several in sorted(versions.items()):
        left = {version for version in several if f"{name}@{version}" not in skipped}
        if len(left) > 1:
            found.append(f"{name}: versions {', '.join(sorted(several))}; keep one, or give a reason in bans.skip")
    present = {f"{name}@{version}" for name, several in versions.items() if len(several) > 1 for version in several}
    found += [f"{one}: in bans.skip, but there is no second version of it" for one in sorted(skipped - present)]
    return found


def main() -> int:
    """Print the problems."""
    policy = tomllib.loads((ROOT / "deny.toml").read_text(encoding="utf-8"))
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if result.returncode:
        return result.returncode
    packages = json.loads(result.stdout)["packages"]
    found = problems(packages, policy)
    for one in found:
        print(f"deny.toml: {one}", file=sys.stderr)
    print(f"{len(packages)} crates checked against deny.toml, {len(found)} problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
