"""The arena becomes pinned memory in the background, as far as the driver allows."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from undercroft._core import Arena
from undercroft.device import cuda_streams, pinning
from undercroft.device.pinning import MAX_CHUNKS, PIN_CHUNK, ArenaPinner, EnginePages, Turns, Unsupported, chunk_bytes

BASE = 1 << 20


class Driver:
    def __init__(self, refuse_from: int | None = None) -> None:
        self.refuse_from = refuse_from
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []
        self.may_go_on = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)

    def register(self, address: int, size: int) -> str | None:
        self.asked.release()
        assert self.may_go_on.acquire(timeout=60)
        if self.refuse_from is not None and address + size > self.refuse_from:
            return "out of memory, error 2"
        self.registered[address] = size
        return None

    def unregister(self, address: int) -> str | None:
        self.unregistered.append(address)
        return None


def pinner(driver: Driver, size: int) -> ArenaPinner:
    return ArenaPinner(BASE, size, driver.register, driver.unregister, chunk=1000)


def test_chunks_cover_the_region_one_by_one() -> None:
    driver = Driver()
    one = pinner(driver, 2500)
    assert driver.asked.acquire(timeout=60)
    assert one.pinned_bytes == 0, "the first chunk is not registered yet"
    driver.may_go_on.release()
    assert driver.asked.acquire(timeout=60)
    assert one.pinned_bytes == 1000
    driver.may_go_on.release(2)
    assert one.wait(60)
    assert one.pinned_bytes == 2500
    assert driver.registered == {BASE: 1000, BASE + 1000: 1000, BASE + 2000: 500}
    one.close()
    one.close()
    assert sorted(driver.unregistered) == sorted(driver.registered)
    assert one.pinned_bytes == 0


def test_a_refusal_keeps_the_pinned_memory_and_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(pinning.logger, "propagate", False)
    driver = Driver(refuse_from=BASE + 1500)
    driver.may_go_on.release(10)
    one = pinner(driver, 2500)
    assert one.wait(60)
    assert one.pinned_bytes == 1000
    one.close()
    assert driver.unregistered == [BASE]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "1000 of 2500 bytes of host memory are pinned" in record.message
    assert "out of memory, error 2" in record.message
    assert "ulimit -l" in record.message


def test_a_refusal_of_any_memory_advises_no_setting(warnings: pytest.LogCaptureFixture) -> None:
    one = ArenaPinner(BASE, 2500, lambda *_: Unsupported("not supported, error 801"), lambda _: None, chunk=1000)
    assert one.wait(60)
    one.close()
    (record,) = warnings.records
    assert "0 of 2500 bytes of host memory are pinned" in record.message
    assert "error 801" in record.message
    assert "No setting changes this" in record.message
    assert "host_memory, or" not in record.message


@pytest.mark.parametrize(("code", "refuses_all"), [(0, None), (2, False), (801, True)])
def test_confidential_computing_is_distinguished_from_a_lack_of_memory(code: int, refuses_all: bool | None) -> None:
    runtime = SimpleNamespace(cudaGetErrorString=lambda number: f"text of {number}")
    refusal = cuda_streams.refusal(runtime, code)
    assert (refusal is None) is (refuses_all is None)
    if refusal is not None:
        assert isinstance(refusal, Unsupported) is refuses_all
        assert f"error {code}" in refusal
        assert ("confidential computing" in refusal) is refuses_all


@pytest.mark.parametrize("pause_s", [0.0, 3600.0])
def test_registration_says_how_far_it_is_and_when_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    monkeypatch.setattr(pinning.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(pinning.logger, "propagate", False)
    caplog.set_level(logging.INFO, pinning.logger.name)
    monkeypatch.setattr(pinning, "PROGRESS_S", pause_s)
    one = ArenaPinner(BASE, 2500, lambda *_: None, lambda _: None, chunk=1000)
    assert one.wait(60)
    one.close()
    said = [record.message.split(" of host")[0].removeprefix("undercroft: ") for record in caplog.records]
    assert said == ["1000 of 2500 bytes", "2000 of 2500 bytes", "2500 of 2500 bytes"][-3 if not pause_s else -1 :]


def test_closing_stops_after_the_chunk_under_way() -> None:
    driver = Driver()
    one = pinner(driver, 1_000_000)
    assert driver.asked.acquire(timeout=60)
    closer = threading.Thread(target=one.close)
    closer.start()
    one._stop.wait()
    driver.may_go_on.release(1)
    closer.join(60)
    assert not closer.is_alive()
    assert driver.unregistered == list(driver.registered) == [BASE]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(pinning.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(pinning.logger, "propagate", False)
    return caplog


@pytest.mark.parametrize("gib", [1, 64, 128, 129, 1024, 4096])
def test_chunks_grow_with_the_arena_and_stay_few(gib: int) -> None:
    chunk = chunk_bytes(gib << 30)
    assert chunk >= PIN_CHUNK
    assert chunk.bit_count() == 1
    assert (gib << 30) / chunk <= MAX_CHUNKS
    assert chunk == PIN_CHUNK or (gib << 30) / chunk > MAX_CHUNKS / 2, "no larger than it must be"


def test_an_error_of_the_driver_counts_as_a_refusal_and_loses_no_registration(
    warnings: pytest.LogCaptureFixture,
) -> None:
    registered: list[int] = []
    unregistered: list[int] = []

    def register(address: int, size: int) -> str | None:
        if registered:
            raise RuntimeError("CUDA error: out of memory")
        registered.append(address)
        return None

    def unregister(address: int) -> str | None:
        unregistered.append(address)
        raise RuntimeError("CUDA error: context is destroyed")

    one = ArenaPinner(BASE, 2500, register, unregister, chunk=1000)
    assert one.wait(60)
    assert one.pinned_bytes == 1000
    one.close()
    assert unregistered == registered == [BASE]
    assert "RuntimeError: CUDA error: out of memory" in warnings.records[0].message
    assert "context is destroyed" in warnings.records[1].message


def test_no_chunk_is_registered_before_it_has_memory(warnings: pytest.LogCaptureFixture) -> None:
    steps: list[tuple[str, int, int]] = []

    def populate(offset: int, size: int) -> None:
        steps.append(("populate", offset, size))
        if offset == 2000:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def register(address: int, size: int) -> None:
        steps.append(("register", address - BASE, size))

    one = ArenaPinner(BASE, 2500, register, lambda address: None, populate=populate, chunk=1000)
    assert one.wait(60)
    one.close()
    assert steps == [
        ("populate", 0, 1000),
        ("register", 0, 1000),
        ("populate", 1000, 1000),
        ("register", 1000, 1000),
        ("populate", 2000, 500),
    ]
    assert "2000 of 2500 bytes of host memory are pinned" in warnings.records[0].message
    assert "Cannot allocate memory" in warnings.records[0].message


def test_populating_puts_memory_behind_the_range_of_a_real_arena() -> None:
    arena = Arena.create(8 << 20)
    before = os.fstat(arena.fileno()).st_blocks
    arena.prefault(2 << 20, 2 << 20)
    assert (os.fstat(arena.fileno()).st_blocks - before) * 512 == 2 << 20
    with pytest.raises(OSError, match="outside"):
        arena.prefault(8 << 20, 1)


MIB = 1 << 20


def test_no_part_is_touched_before_the_engine_has_populated_it() -> None:
    arena = Arena.create(8 * MIB)
    touched: list[int] = []
    looked = threading.Semaphore(0)

    class Pages(EnginePages):
        def wait(self, begin: int, size: int, stop: threading.Event) -> None:
            looked.release()
            super().wait(begin, size, stop)

    def populate(offset: int, size: int) -> None:
        touched.append(offset)
        assert os.lseek(arena.fileno(), offset, os.SEEK_HOLE) >= offset + size, "the worker would pay for it"

    one = ArenaPinner(
        arena.address,
        arena.size,
        lambda *_: None,
        lambda _: None,
        populate=populate,
        pages=Pages(arena.fileno()),
        chunk=2 * MIB,
    )
    for part in range(4):
        assert looked.acquire(timeout=60)
        assert not one.wait(3 * pinning.POPULATING_PAUSE_S)
        assert touched == [2 * MIB * before for before in range(part)]
        # The engine populates in smaller steps than a registration.
        for half in range(2):
            arena.prefault(2 * MIB * part + MIB * half, MIB)
    assert one.wait(60)
    assert (one.pinned_bytes, len(touched)) == (8 * MIB, 4)
    one.close()


def test_an_engine_that_populates_no_more_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "POPULATING_STALL_S", 0.05)
    arena = Arena.create(8 * MIB)
    arena.prefault(0, 3 * MIB)
    pages = EnginePages(arena.fileno())
    one = ArenaPinner(
        arena.address, arena.size, lambda *_: None, lambda _: None, populate=arena.prefault, pages=pages, chunk=2 * MIB
    )
    assert one.wait(60)
    assert one.pinned_bytes == 8 * MIB
    one.close()
    assert [record.getMessage().partition(" bytes")[0] for record in warnings.records] == [
        f"undercroft: the engine has populated {3 * MIB}"
    ]


def test_a_pinner_that_waits_for_the_engine_can_be_closed() -> None:
    arena = Arena.create(8 * MIB)
    pages = EnginePages(arena.fileno())
    one = ArenaPinner(arena.address, arena.size, lambda *_: None, lambda _: None, pages=pages)
    one.close()
    assert os.fstat(arena.fileno()).st_blocks == 0


HOLD = """
import sys, threading
from undercroft.device.pinning import Turns
with Turns(int(sys.argv[1])).turn(threading.Event()) as has_turn:
    print("has the turn" if has_turn else "has none", flush=True)
    sys.stdin.readline()
"""


def test_a_process_registers_only_while_no_other_one_does() -> None:
    arena = Arena.create(1 << 20)
    descriptor = arena.fileno()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "has the turn\n"
    tries, asked = threading.Semaphore(0), threading.Event()

    class Watched(Turns):
        def _take(self) -> bool:
            taken = super()._take()
            if not taken:
                tries.release()
            return taken

    def register(address: int, size: int) -> None:
        asked.set()
        # The turn is this process's now: no other gets it.
        file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(file)

    one = ArenaPinner(arena.address, arena.size, register, lambda address: None, turns=Watched(descriptor))
    for _ in range(3):
        assert tries.acquire(timeout=60)
    assert not asked.is_set(), "the other process has the turn"
    holder.communicate("go\n", timeout=60)
    assert one.wait(60)
    assert one.pinned_bytes == arena.size
    one.close()


def test_closing_does_not_wait_for_the_turn() -> None:
    arena = Arena.create(1 << 20)
    file = os.open(f"/proc/self/fd/{arena.fileno()}", os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    refused: list[int] = []

    def register(address: int, size: int) -> None:
        refused.append(address)

    one = ArenaPinner(arena.address, arena.size, register, lambda address: None, turns=Turns(arena.fileno()))
    one.close()
    assert one.wait(60)
    assert (one.pinned_bytes, refused) == (0, [])
    os.close(file)
