"""A forked child of a process with an engine, with a client or with a worker keeps nothing of them.

The parent is killed while its child lives: a killed process releases nothing itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core_values import Group
from serve_process import ServeProcess
from undercroft import _core

pytestmark = [
    pytest.mark.server,
    # Threads of other tests live in this process. The children only call functions that need none of them.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
GROUPS = [Group("full", 16, 4096)]


def opened(place: Path, **options: object) -> _core.Engine:
    return _core.Engine({"host_memory": 16 << 20, "socket_dir": str(place / "run"), **options})


def owner(place: Path) -> _core.Engine:
    return opened(place, disks=[{"path": str(place / "disk"), "capacity": 64 << 20}], share=True)


def client(place: Path) -> _core.Engine:
    """Of a server."""
    return _core.Engine({"server": f"unix://{place}/serve.sock", "server_timeout_ms": 30_000})


def using(engine: _core.Engine) -> tuple[object, ...]:
    """All that a process has of an engine: a session, and the arena as a worker has it."""
    session = engine.register("forks", GROUPS, 16)
    return session, _core.Arena.attach(engine.arena.socket, engine.arena.session)


def held(pid: int | str) -> set[str]:
    """The open files and mappings of a process that an engine could have made."""
    files = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target != "/dev/null":
            files.add(f"{entry.name} {target}")
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return files | {line.split(maxsplit=5)[5] for line in maps if "undercroft-arena" in line or "io_uring" in line}


def forked(work: Callable[[], None]) -> int:
    """The pid of a child that does ``work`` and then lives until it is killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            signal.pause()
        finally:
            os._exit(1)
    return child


def ended(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextmanager
def family(make: Callable[[], object], place: Path) -> Iterator[tuple[int, int, set[str]]]:
    """A process that has called ``make``, its forked child, and the files that the process had before. Both live."""
    told, tell = os.pipe()

    def tell_pid() -> None:
        os.write(tell, str(os.getpid()).encode())

    def parent() -> None:
        before = held("self")
        kept = make()
        (place / "before").write_text("\n".join(before))
        # The child itself says that it is there: what it does with its parent's engine is over by then.
        forked(tell_pid)
        assert kept is not None

    parent_pid = forked(parent)
    os.close(tell)
    child_pid = 0
    try:
        child_pid = int(os.read(told, 20) or 0)
        assert child_pid, "the parent has failed"
        yield parent_pid, child_pid, set((place / "before").read_text().split("\n"))
    finally:
        os.close(told)
        for pid in (parent_pid, child_pid):
            if pid:
                os.kill(pid, signal.SIGKILL)
        os.waitpid(parent_pid, 0)


def until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["owner", "client of the owner", "client of a server"])
@pytest.mark.timeout(120)
def test_a_forked_child_has_nothing_of_its_parents_engine(kind: str, tmp_path: Path) -> None:
    kept: list[object] = []

    def make() -> object:
        engine = client(tmp_path) if kind == "client of a server" else owner(tmp_path)
        kept.extend((engine, *using(engine)))
        return engine

    first = owner(tmp_path) if kind == "client of the owner" else None
    server = ServeProcess(tmp_path / "serve.sock") if kind == "client of a server" else None
    try:
        with family(make, tmp_path) as (parent, child, before):
            assert held(parent) - before, "the parent has files of its engine"
            assert held(child) - before == set()
            if server is not None:
                assert [session["connected"] for session in server.status()["sessions"]] == [True]
                os.kill(parent, signal.SIGKILL)
                until("the server sees the end", lambda: server.status()["sessions"] == [])
    finally:
        for one in (first, server):
            if one is not None:
                one.close()


def has_ended(process: int) -> bool:
    """Whether a child has ended with all its threads: until then they keep its files open."""
    state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2][1]
    return state == "Z" and len(list(Path(f"/proc/{process}/task").iterdir())) == 1


@pytest.mark.timeout(120)
def test_the_directory_of_a_killed_engine_is_free_at_once_although_its_child_lives(tmp_path: Path) -> None:
    kept: list[object] = []

    def make() -> object:
        kept.append(owner(tmp_path))
        return kept

    with family(make, tmp_path) as (parent, child, _):
        with pytest.raises(_core.StoreError, match=f"is in use by process {parent}; stop that process"):
            opened(tmp_path, disks=[{"path": str(tmp_path / "disk"), "capacity": 64 << 20}])
        os.kill(parent, signal.SIGKILL)
        until("the parent has ended", lambda: has_ended(parent))
        engine = owner(tmp_path)
        assert not engine.is_shared and Path(f"/proc/{child}").exists()
        engine.close()


@pytest.mark.timeout(60)
def test_the_message_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    """Also if the lock file names another, such as the last engine before a crash."""
    disk = tmp_path / "disk"
    holder = tmp_path / "holder"

    def hold() -> None:
        engine = opened(tmp_path, disks=[{"path": str(disk), "capacity": 64 << 20}])
        (disk / "lock").write_text("4194305\n")
        holder.write_text(str(engine))
        signal.pause()

    pid = forked(hold)
    try:
        until("the directory is locked", holder.exists)
        for named in ("4194305", str(os.getpid()), "1", ""):
            (disk / "lock").write_text(f"{named}\n")
            with pytest.raises(_core.StoreError, match=f"is in use by process {pid}; stop that process"):
                opened(tmp_path, disks=[{"path": str(disk), "capacity": 64 << 20}])
            assert _core.inspect(str(disk))["used_by"] == pid
    finally:
        ended(pid)


@pytest.mark.timeout(60)
def test_a_child_that_ends_by_itself_leaves_its_parents_engine_alone(tmp_path: Path) -> None:
    engine = owner(tmp_path)
    session, arena = using(engine)
    socket = Path(engine.arena.socket)
    said = tmp_path / "said"

    def work() -> None:
        nonlocal engine, session, arena
        try:
            engine.stats()
        except _core.UndercroftError as error:
            said.write_text(str(error))
        session.close()
        engine.close()
        # Dropped as at the end of a program: an end that waited for the parent's threads would never come.
        del engine, session, arena
        os._exit(7)

    child = forked(work)
    deadline = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            ended(child)
            pytest.fail("the child waits for threads that it does not have")
        time.sleep(0.005)
    assert "open another engine here" in said.read_text()
    assert socket.exists() and engine.status()["pid"] == os.getpid()
    assert arena.is_served and session.lookup("r", [b"1" * 32]).tokens == 0
    session.close()
    engine.close()
