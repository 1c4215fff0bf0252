"""The client of a Mooncake store, in a process of its own: ``python -m undercroft.mooncake_helper``.

undercroft's core starts it for ``remote: "mooncake://..."`` and ends it if it hangs. Standard input is a Unix socket.
Its first line has the settings, and the descriptor of the memory through which objects pass. Each further line is a
request, and the request's answer has the same number. When the socket ends, the process ends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import socket
import sys
import threading
import traceback
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

Request = dict[str, Any]

CLIENT_MEMORY = 16 << 20
"""Bytes of memory that Mooncake's client allocates for itself."""
BATCH = 8
"""Most objects in one call of the client."""
BATCH_BYTES = 32 << 20
"""A call with so many bytes takes no further object: all objects of a call arrive together, at its end."""
CLOSE_LIMIT_S = 2.0
ADMIN_LIMIT_S = 5.0
CONNECT_LIMIT_S = 1.0
ADMIN_BYTES = 16 << 20
"""Most bytes of an answer of the metrics port. The longest has the names of all objects."""

# Values of Mooncake's ErrorCode.
NO_SPACE = -200
INVALID_PARAMETERS = -600
NOT_READY = -703
NOT_FOUND = -704
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
REPLICA_NOT_FOUND = -710
REPLICA_GONE = -712
RPC_FAILED = -900
RPC_LATE = -901
WORDS = {
    NO_SPACE: ("full", "no process that lends memory has room"),
    NOT_READY: ("not_found", "the object is being written"),
    NOT_FOUND: ("not_found", "no such object"),
    LEASE_EXPIRED: ("late", "the object might have been evicted while it was read"),
    TRANSFER_FAILED: ("unreachable", "the transfer failed"),
    RPC_FAILED: ("unreachable", "mooncake_master does not answer"),
    RPC_LATE: ("late", "mooncake_master does not answer in time"),
}
SETTLED = {NO_SPACE, NOT_READY, NOT_FOUND, LEASE_EXPIRED, REPLICA_NOT_FOUND, REPLICA_GONE, RPC_FAILED, RPC_LATE}
"""Codes of requests without a transfer, or whose transfer has ended. After other codes a transfer may still run."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes each redirect an error: a store would choose where this host sends its requests."""

    def redirect_request(self, *_: Any) -> None:
        """Name no other address."""


_OPENER = urllib.request.build_opener(_NoRedirect)


class OperationError(Exception):
    """An operation failed: the kind of failure, a text for the operator, and whether no transfer runs any more."""

    def __init__(self, kind: str, detail: str, *, settled: bool = False) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.settled = kind, detail, settled


def error_of(code: int) -> OperationError:
    """The error for a code of Mooncake."""
    kind, words = WORDS.get(code, ("unreachable", "an error"))
    return OperationError(kind, f"Mooncake: {words} (code {code})", settled=code in SETTLED)


class Helper:
    """The client, and a thread for each kind of operation: an operation that hangs does not delay other kinds."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._store: Any = None
        self._address = 0
        self._admin = ""
        self._memory: mmap.mmap | None = None
        self._queues: dict[str, queue.SimpleQueue[Request]] = {}

    def run(self) -> None:
        """Serve until the socket ends."""
        line, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 1)
        settings = json.loads(line)
        try:
            self._start(settings, descriptors[0])
        except OperationError as error:
            self._answer(0, error=error.kind, detail=error.detail)
            return
        works: tuple[tuple[tuple[str, ...], Callable[[list[Request]], None]], ...] = (
            (("exist", "remove", "memory"), self._each),
            (("list", "sizes"), self._each),
            (("get",), self._get),
            (("put",), self._each),
        )
        for kinds, work in works:
            requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
            self._queues |= dict.fromkeys(kinds, requests)
            threading.Thread(target=self._work, args=(requests, work), daemon=True).start()
        self._answer(0)
        with self._connection.makefile("rb") as lines:
            for line in lines:
                request = json.loads(line)
                self._queues[request["op"]].put(request)

    def close(self) -> None:
        """Disconnect from the store, unless this takes long."""
        if self._store is None:
            return
        closing = threading.Thread(target=self._store.close, daemon=True)
        closing.start()
        closing.join(CLOSE_LIMIT_S)

    def _start(self, settings: dict[str, Any], descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, settings["bytes"])
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._admin = settings["admin"]
        try:
            from mooncake.store import MooncakeDistributedStore
        except ModuleNotFoundError as error:
            raise OperationError("no_wheel", f"{error} in {sys.executable}") from None
        except ImportError as error:
            raise OperationError("no_library", str(error)) from None
        store = MooncakeDistributedStore()
        found = own_address(settings["master"])
        host = settings["host"] or found
        code = store.setup(
            host,
            settings["metadata"],
            settings["segment"],
            CLIENT_MEMORY,
            settings["protocol"],
            settings["device"],
            settings["master"],
        )
        if code != 0:
            raise OperationError("no_setup", f"Mooncake's client cannot use {settings['master']} (code {code})")
        code = store.register_buffer(self._address, settings["bytes"])
        if code != 0:
            raise OperationError("no_setup", f"Mooncake's client cannot register its memory (code {code})")
        self._store = store

    def _work(self, requests: queue.SimpleQueue[Request], work: Callable[[list[Request]], None]) -> None:
        """The body of a thread: carries out waiting requests of a kind together."""
        while True:
            work(next_batch(requests))

    def _each(self, batch: list[Request]) -> None:
        for request in batch:
            self._carry_out(request, getattr(self, f"_{request['op']}_one"))

    def _carry_out(self, request: Request, work: Callable[[Request], dict[str, Any]]) -> None:
        """Answer a request with the result of ``work``, or with its failure."""
        try:
            fields = work(request)
        except OperationError as error:
            fields = {"error": error.kind, "detail": error.detail, "settled": error.settled}
        except Exception as error:  # Whatever the client raises is a failure of this request.
            fields = {"error": "unreachable", "detail": f"Mooncake: {error}"}
        self._answer(request["id"], **fields)

    def _exist_one(self, request: Request) -> dict[str, Any]:
        found = self._store.batch_is_exist(request["keys"])
        for code in found:
            if code < 0:
                raise error_of(code)
        return {"values": found}

    def _remove_one(self, request: Request) -> dict[str, Any]:
        # After a read an object has a lease for some seconds. `True` (force) removes it all the same.
        for code in self._store.batch_remove(request["keys"], True):
            if code not in (0, NOT_FOUND):
                raise error_of(code)
        return {}

    def _put_one(self, request: Request) -> dict[str, Any]:
        key, place, size = request["key"], self._address + request["at"], request["bytes"]
        if not request["if_absent"]:
            code = self._store.batch_upsert_from([key], [place], [size])[0]
        elif self._store.is_exist(key) == 1:
            return {"values": [0]}
        else:
            code = self._store.batch_put_from([key], [place], [size])[0]
        if code != 0:
            raise error_of(code)
        return {"values": [1]}

    def _sizes_one(self, request: Request) -> dict[str, Any]:
        """The sizes of objects; -1 for an object that is missing or is being written."""
        sizes = [self._store.get_size(key) for key in request["keys"]]
        for size in sizes:
            if size < 0 and (failed := error_of(size)).kind != "not_found":
                raise failed
        return {"values": [max(size, -1) for size in sizes]}

    def _list_one(self, request: Request) -> dict[str, Any]:
        names = self._ask_admin("get_all_keys").splitlines()
        return {"names": [name for name in names if name.startswith(request["prefix"])]}

    def _memory_one(self, _request: Request) -> dict[str, Any]:
        metrics = dict(line.rsplit(" ", 1) for line in self._ask_admin("metrics").splitlines() if line[:1] != "#")
        names = ("master_allocated_bytes", "master_total_capacity_bytes")
        return {"values": [int(float(metrics.get(name, 0))) for name in names]}

    def _ask_admin(self, page: str) -> str:
        try:
            with _OPENER.open(f"http://{self._admin}/{page}", timeout=ADMIN_LIMIT_S) as answer:
                text = answer.read(ADMIN_BYTES + 1)
                if len(text) > ADMIN_BYTES:
                    raise OSError(f"an answer of more than {ADMIN_BYTES >> 20} MiB")
                return str(text, "utf-8", "replace")
        except OSError as error:
            raise OperationError(
                "unreachable", f"mooncake_master at http://{self._admin}: {error}; the parameter admin has its address"
            ) from None

    def _get(self, batch: list[Request]) -> None:
        """Read objects, or their first bytes. It reads ranges, which need half the CPU time of whole objects."""
        sizes: list[int] = []
        failed: Exception | None = None
        try:
            sizes = self._read(batch)
        except Exception as error:
            failed = error

        def result(place: int, request: Request) -> dict[str, Any]:
            if failed is not None:
                raise failed
            size = sizes[place]
            if size == INVALID_PARAMETERS:
                size = self._read_short(request)
            if size < 0:
                raise error_of(size)
            return {"values": [size]}

        for place, request in enumerate(batch):
            self._carry_out(request, partial(result, place))

    def _read(self, batch: list[Request]) -> list[int]:
        places = [self._address + request["at"] for request in batch]
        zeros = [[[0]] for _ in batch]
        sizes = [[[request["bytes"]]] for request in batch]
        found = self._store.get_into_ranges(places, [[request["key"]] for request in batch], zeros, zeros, sizes)
        if len(found) != len(batch):
            raise OperationError("unreachable", f"Mooncake: {len(found)} results for {len(batch)} reads")
        return [of_object[0][0] for of_object in found]

    def _read_short(self, request: Request) -> int:
        """Read an object that has fewer bytes than requested. Returns its size, or an error code."""
        size = int(self._store.get_size(request["key"]))
        if not 0 < size < request["bytes"]:
            return min(size, INVALID_PARAMETERS) if size < 0 else INVALID_PARAMETERS
        return self._read([{**request, "bytes": size}])[0]

    def _answer(self, number: int, **fields: Any) -> None:
        line = json.dumps({"id": number, **fields}).encode() + b"\n"
        with self._sending:
            self._connection.sendall(line)


def next_batch(requests: queue.SimpleQueue[Request]) -> list[Request]:
    """Wait for a request, and take the requests after it that have come already, up to the limits of a call."""
    batch = [requests.get()]
    while len(batch) < BATCH and sum(one.get("bytes", 0) for one in batch) < BATCH_BYTES and not requests.empty():
        batch.append(requests.get())
    return batch


def own_address(master: str) -> str:
    """This machine's address on the route to the master. The client itself would try for minutes to reach a master."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise OperationError("no_setup", f"mooncake_master at {master}: {error}") from None


def main() -> None:
    """Serve the core until it closes the socket."""
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # The core gets each line of Mooncake's log, and keeps the last line for messages.
    for name, level in (("GLOG_minloglevel", "2"), ("MC_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, level)
    helper = Helper(connection)
    code = 1
    try:
        helper.run()
        helper.close()
        code = 0
    except BaseException:
        # The last line is the reason that the core reports.
        traceback.print_exc()
    finally:
        # Threads of the client may hang.
        os._exit(code)


if __name__ == "__main__":
    main()
