"""The arena becomes pinned memory in the background, as far as the driver allows."""

from __future__ import annotations

import logging
import threading

import pytest

from undercroft.device import pinning
from undercroft.device.pinning import ArenaPinner

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


def test_a_refusal_keeps_what_was_pinned_and_is_said(
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
