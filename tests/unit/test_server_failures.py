"""A server that is absent, killed, frozen, restarted or slow, at every moment of a request: misses, and hits again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_process import ServeProcess
from served_client import BLOCK, Peer, prompt, until
from undercroft import _core
from undercroft.connector.observe.stats import EngineStats

pytestmark = pytest.mark.server

DEADLINE_MS = 20
LIMIT_S = 20.0
"""Far above every deadline, so that a loaded machine does not fail a test; a call that waits for a server that is gone
would wait for ever."""
PROMPT = prompt("p")
TOKENS = len(PROMPT) * BLOCK


class Host:
    """A server that can be struck and brought back, at one socket over one directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.socket = place / "run" / "serve.sock"
        self.server: ServeProcess | None = None

    def start(self) -> None:
        disk = ["--disk-path", str(self.place / "disk"), "--disk-capacity", "64MiB"]
        self.server = ServeProcess(self.socket, *disk)
        self.server.__enter__()

    def peer(self) -> Peer:
        options = {"server": f"unix://{self.socket}", "server_timeout_ms": DEADLINE_MS, "lookup_spin_us": 5000}
        return Peer(_core.Engine(options))

    def strike(self, state: str) -> None:
        assert self.server is not None
        if state == "frozen":
            pid = self.server.process.pid
            os.kill(pid, signal.SIGSTOP)
            # Each thread stops when it next runs, or ends before.
            until("it is frozen", lambda: set(thread_states(pid)) == {"T"})
        else:
            self.server.stop(signal.SIGTERM if state == "stopped" else signal.SIGKILL)

    def revive(self, state: str) -> None:
        assert self.server is not None
        if state == "frozen":
            os.kill(self.server.process.pid, signal.SIGCONT)
        else:
            self.server.__exit__(None, None, None)
            self.start()

    def close(self) -> None:
        if self.server is not None:
            if self.server.process.poll() is None:
                os.kill(self.server.process.pid, signal.SIGCONT)
            self.server.__exit__(None, None, None)


def thread_states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def written(host: Host) -> Callable[[], bool]:
    """Whether a crash would leave the prompt's blocks."""
    return lambda: sum(one["blocks"] for one in _core.inspect(str(host.place / "disk"))["namespaces"]) == len(PROMPT)


def ask(peer: Peer, request: str, mode: str) -> int:
    if mode == "blocking" and peer.call("lookup", request, PROMPT).pending:
        peer.session.wait(request, 0.05)
        answer = peer.call("lookup", request, PROMPT)
        if answer.pending:
            peer.call("end_lookup", request)
        return answer.tokens
    return peer.answer(request, PROMPT)


@pytest.mark.parametrize("moment", ["before", "submitted", "answered", "loading", "saving"])
@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize("state", ["killed", "stopped", "frozen"])
def test_a_server_that_is_struck_costs_misses_and_comes_back(host: Host, state: str, mode: str, moment: str) -> None:
    host.start()
    peer = host.peer()
    peer.save(PROMPT)
    until("it is on disk", written(host))
    load = save = None
    if moment == "submitted":
        peer.call("prefetch", "r", PROMPT)
    elif moment == "answered":
        until("a hit", lambda: peer.answer("r", PROMPT) == TOKENS)
    elif moment == "loading":
        until("a hit", lambda: peer.answer("r", PROMPT) == TOKENS)
        load = peer.begin_load("r", PROMPT, TOKENS)
        assert load is not None
        peer.memory(load[0].session)
    elif moment == "saving":
        save = peer.begin_save("s", prompt("saving"))
        peer.memory(save[0].session)
    host.strike(state)

    found = ask(peer, "r", mode)
    assert found in (0, TOKENS)
    if found and moment != "loading":
        # An answer from before: its slots are leased as long as the server lives, and are not touched when it is dead.
        begun = peer.begin_load("r", PROMPT, found)
        if begun is not None:
            peer.check(begun[0].session, begun[1])
            peer.call("end_transfer", begun[0].transfer_id, True)
    if load is not None:
        peer.check(load[0].session, load[1])
        peer.call("end_transfer", load[0].transfer_id, True)
    if save is not None:
        peer.fill(save[0].session, save[1])
        peer.call("end_transfer", save[0].transfer_id, True)
    peer.call("finish_request", "r")
    waits = []
    for number in range(100):
        start = time.perf_counter()
        assert ask(peer, f"later {number}", mode) == 0
        waits.append(time.perf_counter() - start)
        peer.call("finish_request", f"later {number}")
    assert sorted(waits)[50] < DEADLINE_MS / 1e3 / 2, "one wait, not one for each request"
    assert peer.worst_s < LIMIT_S

    host.revive(state)
    until("hits are back", lambda: peer.load(PROMPT) == TOKENS)
    if save is not None:
        # The memory of a killed server is gone; a frozen one gets the message that the save succeeded.
        expected = TOKENS if state == "frozen" else 0
        until("the save", lambda: peer.load(prompt("saving")) == expected)
    peer.save(prompt("after"))
    until("saves are back", lambda: peer.load(prompt("after")) == TOKENS)
    peer.close()
    assert host.server is not None
    until("nothing is left", lambda: host.server.status()["stats"]["host_pinned_bytes"] == 0)


def test_a_server_that_is_absent_at_start_is_found_when_it_comes(host: Host) -> None:
    peer = host.peer()
    assert peer.engine.connection()[0] == "down"
    assert peer.answer("r", PROMPT) == 0
    assert peer.call("begin_save", "r", PROMPT, TOKENS) is None
    assert peer.call("reset", 10.0) is False
    host.start()
    until("connected", peer.is_up)
    peer.save(PROMPT)
    until("hits", lambda: peer.load(PROMPT) == TOKENS)
    peer.close()


def test_a_server_that_freezes_and_resumes_is_never_waited_for_and_never_wrong(host: Host) -> None:
    host.start()
    peer = host.peer()
    peer.save(PROMPT)
    until("visible", lambda: peer.load(PROMPT) == TOKENS)
    hits = 0
    for number in range(40):
        host.strike("frozen")
        hits += peer.load(PROMPT, f"a {number}") > 0
        host.revive("frozen")
        hits += peer.load(PROMPT, f"b {number}") > 0
    assert peer.worst_s < LIMIT_S
    until("hits are back", lambda: peer.load(PROMPT) == TOKENS)
    peer.close()


def share(path: Path, runtime: Path) -> _core.Engine:
    options = {"host_memory": 16 << 20, "disks": [{"path": str(path), "capacity": 64 << 20}]}
    return _core.Engine(options | {"socket_dir": str(runtime), "share": True, "server_timeout_ms": 1000})


@pytest.mark.parametrize("state", ["killed", "stopped"])
def test_one_of_those_that_share_a_directory_takes_it_over_and_the_rest_follow(
    host: Host, tmp_path: Path, state: str
) -> None:
    host.start()
    peers = [Peer(share(host.place / "disk", tmp_path / str(number))) for number in range(3)]
    assert all(peer.engine.is_shared for peer in peers)
    peers[0].save(PROMPT)
    until("shared", lambda: all(peer.load(PROMPT) == TOKENS for peer in peers))
    until("it is on disk", written(host))
    until("the owner has told", lambda: all(peer.engine.stats()["saved_blocks"] == len(PROMPT) for peer in peers))
    counted = [EngineStats(peer.engine) for peer in peers]
    totals: Counter[str] = Counter()

    def count() -> None:
        for stats in counted:
            taken = stats.collect(time.monotonic(), force=True).get("counters", {})
            assert all(amount > 0 for amount in taken.values())
            totals.update(taken)

    def counting(condition: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: (count(), condition())[1]

    host.strike(state)
    until("one has taken it over", counting(lambda: sum(peer.engine.took_over for peer in peers) == 1))
    until("all follow", counting(lambda: all(peer.load(PROMPT) == TOKENS for peer in peers)))
    until("it counts", counting(lambda: totals["disk_reads"] > 0))
    # The new owner's reads are counted, and none of the former owner's numbers.
    assert totals["saved_blocks"] == 0
    assert totals["disk_reads"] <= len(PROMPT)
    first = next(peer for peer in peers if peer.engine.took_over)
    peers.remove(first)
    peers[0].save(prompt("more"))
    until("shared again", lambda: peers[1].load(prompt("more")) == TOKENS)
    # Once more: the one that took over ends, too.
    first.close()
    until("another has taken it over", lambda: sum(peer.engine.took_over for peer in peers) == 1)
    until("and has all of it", lambda: all(peer.load(prompt("more")) == TOKENS for peer in peers))
    last = next(peer for peer in peers if peer.engine.took_over)
    (host.place / "disk" / "data").unlink()
    assert last.engine.stats()["disk_degraded"] == 1
    assert [disk["health"] for disk in last.engine.info()["disks"]] == ["file_missing"]
    for peer in peers:
        peer.close()


@pytest.mark.timeout(120)
def test_a_directory_whose_owner_does_not_answer_refuses_the_start_with_its_pid(host: Host, tmp_path: Path) -> None:
    host.start()
    assert host.server is not None
    host.strike("frozen")
    with pytest.raises(_core.StoreError) as refused:
        Peer(share(host.place / "disk", tmp_path / "own"))
    for part in (str(host.place / "disk"), f"in use by process {host.server.process.pid}", "does not answer"):
        assert part in str(refused.value)


def test_the_next_owner_waits_for_the_last_one_to_end(tmp_path: Path) -> None:
    share(tmp_path / "disk", tmp_path / "own").close()
    opened: list[_core.Engine] = []
    with (tmp_path / "disk" / "lock").open("r+") as lock:
        # An owner whose socket is gone and whose last writes are under way.
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"1\n{tmp_path}/gone.sock\n")
        lock.flush()
        opening = threading.Thread(target=lambda: opened.append(share(tmp_path / "disk", tmp_path / "own")))
        opening.start()
        opening.join(0.1)
        assert opened == []
    opening.join()
    assert not opened[0].is_shared
    opened[0].close()
