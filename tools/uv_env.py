"""Print shell exports that make uv use the package indexes this machine's pip is configured for.

uv reads neither pip.conf nor PIP_* variables. The variables of uv itself (UV_*) win.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys

# pip option -> environment variable of uv; the separator joins several values.
OPTIONS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "no-index": ("UV_NO_INDEX", " "),
}
# pip lets the environment win over `[install]`, and that over `[global]`.
SECTIONS = (":env:", "install", "global")


def parse(listing: str) -> dict[str, str]:
    """Environment variables for uv from the output of ``pip config list``."""
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, _, quoted = line.partition("=")
        section, _, option = key.strip().partition(".")
        if option not in OPTIONS or section not in SECTIONS:
            continue
        variable, separator = OPTIONS[option]
        value = separator.join(str(ast.literal_eval(quoted)).split())
        rank = SECTIONS.index(section)
        if value and (variable not in found or rank < found[variable][0]):
            found[variable] = (rank, value)
    return {variable: value for variable, (_, value) in found.items()}


def main() -> int:
    """Print the exports."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for variable, value in sorted(parse(listing).items()):
        if variable not in os.environ:
            print(f"export {variable}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
