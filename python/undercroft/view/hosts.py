"""Reads engines at several addresses, each on a thread of its own: one that does not answer delays no other."""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from http.client import HTTPException

from undercroft.cli import engines
from undercroft.cli.sockets import absolute_path
from undercroft.errors import UndercroftError, cause
from undercroft.remote_url import without_credentials
from undercroft.view.readings import Reading, from_page, from_status
from undercroft.view.tables import Engine

# Rates and latencies are those of this time, or of the time since the first reading.
WINDOW_S = 30.0
TIMEOUT_S = 2.0
# A page of a vLLM with many engines is some megabytes long.
PAGE_BYTES_MAX = 64 << 20


def address(text: str) -> str:
    """The address of an engine: ``http(s)://HOST:PORT`` or ``unix://PATH``. Raises ArgumentTypeError."""
    if text.startswith(("unix://", "/", "./", "../", "~")):
        return f"unix://{absolute_path(text)}"
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        raise argparse.ArgumentTypeError(f"{without_credentials(text)}: the port is no number up to 65535") from None
    if "@" in text:
        raise argparse.ArgumentTypeError(
            f"{without_credentials(text)} has credentials, which the picture would show. Leave them out"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text} is no address. Allowed: HOST:PORT, http(s)://HOST:PORT, unix://PATH")
    if not port and "://" not in text:
        raise argparse.ArgumentTypeError(
            f"{text} names no port; a vLLM has 8000 by default, and `undercroft serve` that of --metrics"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/metrics')}"


class Host:
    """The last readings of the engines at one address."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.trouble = ""
        """Why the last attempt failed; empty if it did not."""
        self.attempts = 0
        self._since = time.monotonic()
        """When the address answered last, or when the first attempt began."""
        self._readings: deque[list[Reading]] = deque()
        self._has_status = True

    def name(self) -> str:
        """The address without the scheme that most have."""
        return self.place.removeprefix("http://")

    def read(self) -> None:
        """Read the engines once. Whatever an address answers, only `trouble` tells of it."""
        try:
            found = self._read(time.monotonic())
            self.trouble = "" if found else "undercroft is not on its page of metrics"
        except urllib.error.HTTPError as error:
            found, self.trouble = [], _said(error)
        except (UndercroftError, OSError, ValueError, KeyError, TypeError, HTTPException) as error:
            found, self.trouble = [], _reason(error)
        if found:
            self._readings.append(found)
            self._since = found[0].at
            while len(self._readings) > 2 and self._readings[1][0].at <= self._since - WINDOW_S:
                self._readings.popleft()
        self.attempts += 1

    def engines(self, patience_s: float) -> list[Engine]:
        """The engines at this address; one without a reading if it has not answered for ``patience_s``."""
        silent = time.monotonic() - self._since
        if not self._readings or self.trouble or silent > patience_s:
            why = self.trouble or ("no answer yet" if not self.attempts else "no answer")
            return [Engine(self.name(), trouble=f"{why} ({silent:.0f} s)" if silent >= 1 else why)]
        first = {one.name: one for one in self._readings[0]} if len(self._readings) > 1 else {}
        return [Engine(f"{self.name()} {one.name}".rstrip(), one, first.get(one.name)) for one in self._readings[-1]]

    def _read(self, at: float) -> list[Reading]:
        if self.place.startswith("unix://"):
            return [from_status(engines.ask(self.place.removeprefix("unix://")), at)]
        # A server has a status, which tells more; a vLLM has metrics only, and is asked for a status once.
        if self._has_status:
            try:
                return [from_status(json.loads(_get(f"{self.place}/status")), at)]
            except urllib.error.HTTPError as error:
                if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
            except (ValueError, KeyError, TypeError):
                pass  # Something else has this address.
        found = from_page(_get(f"{self.place}/metrics"), at)
        self._has_status = not found
        return found


class Hosts:
    """Reads all addresses every ``interval_s`` seconds until the process ends."""

    def __init__(self, places: Sequence[str], interval_s: float) -> None:
        self.hosts = [Host(place) for place in dict.fromkeys(places)]
        self._interval_s = interval_s
        self._read = threading.Condition()
        for host in self.hosts:
            threading.Thread(target=self._watch, args=[host], name=host.place, daemon=True).start()

    def engines(self) -> list[Engine]:
        """All engines as they were read last."""
        patience = 2 * self._interval_s + TIMEOUT_S
        return [engine for host in self.hosts for engine in host.engines(patience)]

    def wait(self, attempts: int, timeout_s: float) -> None:
        """Until each address was read so often, or the time is over."""
        with self._read:
            self._read.wait_for(lambda: all(host.attempts >= attempts for host in self.hosts), timeout_s)

    def _watch(self, host: Host) -> None:
        while True:
            began = time.monotonic()
            host.read()
            with self._read:
                self._read.notify_all()
            time.sleep(max(0.0, began + self._interval_s - time.monotonic()))


def _get(url: str) -> str:
    """The text of a page. Raises OSError, HTTPException, and ValueError if it has no end."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        text: bytes = answer.read(PAGE_BYTES_MAX + 1)
    if len(text) > PAGE_BYTES_MAX:
        raise ValueError(f"the page is longer than {PAGE_BYTES_MAX >> 20} MiB")
    return text.decode(errors="replace")


def _said(error: urllib.error.HTTPError) -> str:
    """The status of an answer, and the reason that its first line gives."""
    with error:
        try:
            lines = error.read(200).decode(errors="replace").strip().splitlines()
        except (OSError, HTTPException):
            lines = []
    return f"HTTP {error.code}" + (f": {lines[0]}" if lines and error.code == HTTPStatus.SERVICE_UNAVAILABLE else "")


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", error)
    if isinstance(inner, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(inner, OSError):
        return cause(inner)
    return f"not a page of an engine ({inner})" if isinstance(error, (ValueError, KeyError, TypeError)) else str(inner)
