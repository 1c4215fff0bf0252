"""``undercroft serve``: the engine as a process of its own, shared by every vLLM of this user on the host."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undercroft.cli.output import CommandError, described
from undercroft.cli.sockets import DEFAULT_SOCKET, absolute_path, default_socket
from undercroft.config import OPTIONS, UndercroftConfig, unknown_environment
from undercroft.engine import open_engine, start_line
from undercroft.errors import ConfigError, cause
from undercroft.health import DiskHealth, NamespaceHealth, RemoteHealth
from undercroft.hours import HourlySums
from undercroft.log import JsonFormatter, log_core_lines, logger
from undercroft.option_values import did_you_mean

if TYPE_CHECKING:
    from undercroft._core import Engine

ENGINE_OPTIONS = tuple(option for option in OPTIONS if option.scope == "engine")
"""The options that are flags of the command. Each vLLM sets the other options itself."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
# Seconds between two checks of the engine's health.
HEALTH_INTERVAL_S = 1.0
# Sessions that must have ended before their memory is given back.
SESSIONS_TRIMMED = 16


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], _: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="run the engine as a process of its own, shared by every vLLM on this host",
        description="Runs in the foreground until SIGTERM or SIGINT. A second signal ends it at once. Each option may "
        "also be given in the environment, as UNDERCROFT_<NAME>. Exit code 0 after a signal, 1 if the engine fails, "
        "2 if an option or a directory cannot be used. Logs to stdout, each line with time and level, or "
        "as a JSON object.",
        epilog="example: undercroft serve --host-memory 64GiB --disk-path /mnt/nvme0/undercroft --metrics 9400",
    )
    parser.add_argument(
        "--socket",
        type=absolute_path,
        metavar="PATH",
        help=f'socket to listen on, which vLLM finds by "server": "unix://PATH" ({DEFAULT_SOCKET})',
    )
    parser.add_argument(
        "--metrics",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve a page for people at /, its figures as JSON at /status, /health (503 unless the engine answers) "
        "and /metrics (in Prometheus form) over HTTP, on 127.0.0.1 unless a host is given",
    )
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, help=f"least level of the lines in the log (default: {LOG_LEVELS[1]})"
    )
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        help="form of the lines in the log (default: text); json: each line is an object with time, level, logger, "
        "message and perhaps traceback, and the error with which the server ends is such a line, too",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a JSON object with any of these options by name, such as host_memory or log_level; a flag wins over the "
        "file, and the file over the environment",
    )
    for option in ENGINE_OPTIONS:
        several = option.name == "disk_path"
        default = f" Default: {option.default}." if option.default not in ([], "") else ""
        kind = "BOOL" if option.type == "true or false" else option.type.partition(" ")[0].upper()
        parser.add_argument(
            option.flag,
            action="append" if several else "store",
            metavar="DIR" if several else kind,
            help=f"{option.help} Allowed: {option.allowed}.{default}".replace("%", "%%"),
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    file = _read_config(args.config) if args.config is not None else {}
    for name, parse in _OWN_OPTIONS.items():
        value = file.pop(name, None)
        if getattr(args, name) is None and value is not None:
            vars(args)[name] = _parsed(parse, value, f"{name} = {value!r} in {args.config}")
    _log_to_stdout(args.log_level or LOG_LEVELS[1], args.log_format or LOG_FORMATS[0])
    try:
        return _serve(args, file)
    except Exception as error:
        if args.log_format != "json":
            raise
        known = described(error)
        code, text = known or (1, f"{type(error).__name__}: {error}")
        logger.error("undercroft: error: %s", text, exc_info=None if known else error)
        return code


def _log_to_stdout(level: str, form: str) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if form == "json":
        # Python prints these on stderr, several lines each.
        logging.captureWarnings(True)
        threading.excepthook = _log_error_of_thread


def _log_error_of_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "unknown"
    logger.error("undercroft: the thread %s has ended with an error", name, exc_info=args.exc_value)


def _serve(args: argparse.Namespace, file: dict[str, Any]) -> int:
    """Serve with the options of the command line and of the file."""
    for message in unknown_environment():
        logger.warning(message)
    given = {option.name: value for option in ENGINE_OPTIONS if (value := getattr(args, option.name)) is not None}
    config = UndercroftConfig.parse(file, flags=given, place=str(args.config))
    path = args.socket or default_socket()
    _check_socket(Path(path))
    stop = _stop_on_signal()
    _raise_descriptor_limit()
    page = None
    if args.metrics is not None:
        from undercroft import exporter

        page = exporter.Page(*args.metrics)
    engine = open_engine(config, path)
    with contextlib.closing(engine):
        # The server has no namespace of its own.
        logger.info("%s", start_line(engine.info(), "").partition("; namespace")[0])
        if page is not None:
            host = args.metrics[0]
            page.opened(engine, path)
            address = f"{f'[{host}]' if ':' in host else host}:{page.port}"
            logger.info("undercroft: metrics on http://%s/metrics", address)
        logger.info("undercroft: ready on unix://%s", path)
        notify("READY=1")
        with contextlib.closing(HourlySums(engine, engine.stats)):
            _watch(engine, stop)
        notify("STOPPING=1")
        logger.info("undercroft: stopping")
    log_core_lines()
    return 0


def _read_config(path: str) -> dict[str, Any]:
    """The options in a file. Raises ConfigError."""
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({cause(error)})") from None
    except ValueError as error:
        raise ConfigError(f"--config {path}: it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f'--config {path}: it is not a JSON object; give one such as {{"host_memory": "64GiB"}}')
    known = [*_OWN_OPTIONS, *(option.name for option in ENGINE_OPTIONS)]
    for key in found:
        if key in known:
            continue
        if key in (option.name for option in OPTIONS):
            raise ConfigError(f"--config {path}: {key} is an option of each vLLM, not of the server; leave it out here")
        raise ConfigError(
            f"--config {path}: unknown option {key!r}{did_you_mean(key, known)}. Allowed: {', '.join(known)}."
        )
    return found


def _parsed(parse: Callable[[str], Any], value: Any, where: str) -> Any:
    try:
        return parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def _one_of(noun: str, allowed: Sequence[str]) -> Callable[[str], str]:
    """A parser of one of these words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(
                f"{text} is no {noun}{did_you_mean(text.lower(), allowed)}. Allowed: {', '.join(allowed)}"
            )
        return text

    return parse


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if separator and not host:
        raise argparse.ArgumentTypeError(f"{text!r} names no host; 0.0.0.0{text} listens on all addresses")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is neither PORT nor HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


_OWN_OPTIONS: dict[str, Callable[[str], Any]] = {
    "socket": absolute_path,
    "metrics": _address,
    "log_level": _one_of("level", LOG_LEVELS),
    "log_format": _one_of("format", LOG_FORMATS),
}
"""The options that only the command has, and their parsers."""


def _check_socket(path: Path) -> None:
    """Raise ConfigError if the path is in use: the socket may only replace the socket of a server that has ended."""
    if path.exists() and not path.is_socket():
        raise ConfigError(f"--socket {path}: there is something that is no socket; choose another path")
    directory = path.parent
    if directory.exists() and directory.stat().st_mode & 0o077:
        raise ConfigError(
            f"--socket {path}: {directory} is open to other users; choose a directory for the socket alone "
            "(one that does not exist yet is made), of mode 0700"
        )


def _stop_on_signal() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets. The second signal ends the process at once.

    A thread waits for the signals, so that they have an effect while the engine opens or closes. They have an effect
    even if this process has the number 1 in a container, for which signals have no default action.
    """
    stop = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        os.read(reader, 1)
        stop.set()
        os._exit(128 + os.read(reader, 1)[0])

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    return stop


def _raise_descriptor_limit() -> None:
    """Raise the limit: each vLLM and each worker needs a descriptor. Service managers set a limit of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # The kernel refuses this if the hard limit is above its own limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _watch(engine: Engine, stop: threading.Event) -> None:
    """Log when a disk stops or starts to work, until ``stop`` is set.

    Raises CommandError if the engine or its server has failed: only a restart helps then.
    """
    health, remote, namespaces = DiskHealth(engine), RemoteHealth(engine), NamespaceHealth()
    memory = SessionMemory(getattr(ctypes.CDLL(None), "malloc_trim", None))
    while not stop.wait(HEALTH_INTERVAL_S):
        stats = engine.stats()
        if not stats["host_capacity_bytes"]:
            raise CommandError("the engine has failed; its panic is in the log above")
        state, why = engine.connection()
        if state != "up":
            raise CommandError(why)
        health.check(stats["disk_degraded"])
        remote.check(stats["remote_degraded"])
        namespaces.check(stats["volatile_namespaces"])
        memory.check(stats["sessions_opened"] - stats["sessions"])


class SessionMemory:
    """Gives the memory of ended sessions back to the system. The allocator keeps it for later sessions, which may never
    come: a crowd leaves hundreds of megabytes."""

    def __init__(self, trim: Callable[[int], object] | None) -> None:
        """``trim``: the C library's `malloc_trim`. Others have no such function, and give memory back themselves."""
        self._trim = trim
        self._ended = 0
        self._trimmed = 0

    def check(self, ended: int) -> None:
        """``ended``: how many sessions have ended so far; called about once a second."""
        # A crowd that is still ending would leave the rest of its memory behind.
        settled, self._ended = ended == self._ended, ended
        # Rarely: allocations of the server's thread wait for it, some milliseconds for each 100 MB.
        if self._trim is not None and settled and ended - self._trimmed >= SESSIONS_TRIMMED:
            logger.debug("undercroft: gave back the memory of %d ended sessions", ended - self._trimmed)
            self._trimmed = ended
            self._trim(0)


def notify(state: str) -> None:
    """Send ``state`` to systemd if it has set a socket for this (sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        try:
            # In an abstract address, @ replaces the leading zero byte.
            notify.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError as error:
            logger.warning("undercroft: cannot send %s to NOTIFY_SOCKET %s: %s", state, address, error.strerror)
