"""``undercroft check-config``: whether a configuration can be used on this machine, without vLLM."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from undercroft.cli import output
from undercroft.cli.output import say
from undercroft.config import EXTRA_CONFIG, OPTIONS, UndercroftConfig, unknown_environment
from undercroft.engine import engine_options
from undercroft.errors import ConfigError, UndercroftError, cause
from undercroft.registration import CONNECTOR, options_in
from undercroft.units import format_size
from undercroft.vllm_tier import options

STATUS_TIMEOUT_S = 2.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "check-config",
        parents=[shared],
        help="check a configuration on this machine, without vLLM",
        description="Reads the options as vLLM's connector does, environment included, turns percentages into sizes of "
        "this machine, and looks at the directories without changing them. Exit code 2 if vLLM would refuse to start.",
        epilog="example: undercroft check-config "
        """'{"host_memory": "64GiB", "disk_path": "/var/cache/undercroft", "disk_capacity": "1TiB"}'""",
    )
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "config",
        nargs="?",
        metavar="JSON|@FILE",
        help=f"the object of --kv-transfer-config, or its {EXTRA_CONFIG}, as text or in a file",
    )
    group.add_argument("--env", action="store_true", help="only the environment variables UNDERCROFT_<NAME>")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the effect of the configuration. Raises ConfigError if vLLM would not start with it."""
    connector, extra = (CONNECTOR, {}) if args.env else read_config(args.config)
    configs = options_in(connector, extra)
    if not configs:
        raise ConfigError(f'no entry of secondary_tiers has module_path "{options.MODULE}", which is undercroft')
    tiers = [one for one in extra.get("secondary_tiers", ()) if one.get("module_path") == options.MODULE]
    found = report(configs[0], tiers[0] if connector != CONNECTOR else extra)
    if args.json:
        output.print_json(found)
    else:
        _print(found)
    return 0 if found["ok"] else 2


def read_config(text: str) -> tuple[str, dict[str, Any]]:
    """The connector and its options from a text, in any form that the command accepts. Raises ConfigError."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{text}: cannot be read: {cause(error)}") from None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the configuration is not JSON ({error}); give an object, @FILE, or --env") from None
    if not isinstance(value, dict):
        raise ConfigError("the configuration is not a JSON object")
    if "kv_connector" not in value and EXTRA_CONFIG not in value:
        return CONNECTOR, value
    if value.get("kv_connector") not in (CONNECTOR, options.CONNECTOR):
        raise ConfigError(
            f'kv_connector is {value.get("kv_connector")!r}; undercroft is "{CONNECTOR}", or a tier of '
            f'"{options.CONNECTOR}"'
        )
    if value.get("kv_role") != "kv_both":
        raise ConfigError(f'kv_role is {value.get("kv_role")!r}; undercroft needs "kv_both"')
    extra = value.get(EXTRA_CONFIG, {})
    if not isinstance(extra, dict):
        raise ConfigError(f"{EXTRA_CONFIG} is not a JSON object")
    return str(value.get("kv_connector")), extra


def report(config: UndercroftConfig, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The effect of the configuration on this machine. Raises ConfigError for impossible sizes."""
    from undercroft import _core

    warnings = unknown_environment()
    found: dict[str, Any] = {"ok": True, "options": _given(extra), "warnings": warnings}
    if config.server:
        try:
            _core.server_status(config.server.removeprefix("unix://"), STATUS_TIMEOUT_S)
        except UndercroftError as error:
            warnings.append(f"{error}; vLLM starts without the server, and connects when it is there")
        return found | {"server": config.server}
    options = engine_options(config)
    examined = config.remote and _core.remote_examine(config.remote, any_owner=config.remote_any_owner)
    if reason := examined:
        warnings.append(f"{reason}; vLLM starts all the same, and does not use the store until this is mended")
    disks = _core.examine(options)
    for disk in disks:
        if disk["error"] is not None and disk["starts"]:
            warnings.append(disk["error"])
        warnings += disk["notes"]
    return found | {
        "ok": all(disk["starts"] for disk in disks),
        "host_memory": options["host_memory"],
        "promotion_memory": options["promotion_memory"],
        "pin_memory": options["pin_memory"],
        "disks": disks,
    }


def _given(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were set, in the form in which they were written."""
    given = {}
    for option in OPTIONS:
        if option.name in extra:
            given[option.name] = extra[option.name]
        elif os.environ.get(option.env, "") != "":
            given[option.name] = os.environ[option.env]
    return given


def _print(found: dict[str, Any]) -> None:
    for name, value in found["options"].items():
        say(f"{name} = {json.dumps(value)}")
    if "server" in found:
        say(f"engine: the server at {found['server']}")
    else:
        say(f"host memory: {format_size(found['host_memory'])}")
        for disk in found["disks"]:
            state = f"{format_size(disk['capacity'])} for blocks"
            if disk["error"] is not None:
                state = "see the warning" if disk["starts"] else disk["error"]
            say(f"disk {disk['path']}: {state}")
    for warning in found["warnings"]:
        say(f"warning: {warning.removeprefix('undercroft: ')}")
    say("vLLM starts with it" if found["ok"] else "vLLM refuses to start with it")
