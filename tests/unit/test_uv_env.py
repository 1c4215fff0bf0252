"""uv gets pip's configuration."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("uv_env", Path(__file__).resolve().parents[2] / "tools/uv_env.py")
uv_env = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(uv_env)


def test_options_are_translated() -> None:
    listing = "global.index-url='https://mirror.example/simple'\nglobal.find-links='/a\\n/b'\nglobal.quiet='1'\n"
    assert uv_env.parse(listing) == {"UV_DEFAULT_INDEX": "https://mirror.example/simple", "UV_FIND_LINKS": "/a,/b"}


def test_the_environment_wins_over_the_file_in_any_order() -> None:
    lines = ["global.cert='/file.pem'", ":env:.cert='/env.pem'", "install.cert='/install.pem'"]
    for listing in ("\n".join(lines), "\n".join(reversed(lines))):
        assert uv_env.parse(listing) == {"SSL_CERT_FILE": "/env.pem"}


def test_other_commands_options_are_left_out() -> None:
    assert uv_env.parse("freeze.index-url='https://x'\nbroken line\n") == {}
