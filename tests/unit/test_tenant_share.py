"""Two models on one server: a share keeps the blocks of one while the other floods, also after a restart."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_process import ServeProcess
from served_client import until
from undercroft.embed import Blocks, Cache, Group, chain
from undercroft.errors import UndercroftError

TOKENS = 16
SIZE = 32 << 10
CHAIN = 32
HOST = (64 << 20) // SIZE
DISK = (256 << 20) // SIZE


class Model:
    """A program with a model of its own, which saves and asks for chains of 32 blocks."""

    def __init__(self, server: ServeProcess, name: str, share: float) -> None:
        options: dict[str, Any] = {"server": f"unix://{server.socket}", "tenant_share": share}
        self.name = name
        self.cache = Cache.open(options, {"model": name}, [Group((SIZE,))], TOKENS)
        self._rows = np.zeros((CHAIN, SIZE), np.uint8)
        address = self.cache.add_region(self._rows)
        self._blocks = [Blocks(0, np.arange(CHAIN), address + np.arange(CHAIN) * SIZE)]
        until("the server is connected", lambda: self.save(-1))

    def _keys(self, number: int) -> list[bytes]:
        return chain(f"{self.name} {number} {block}".encode() for block in range(CHAIN))

    def save(self, number: int) -> bool:
        self._rows[:] = np.random.default_rng(abs(number)).integers(0, 256, self._rows.shape, np.uint8)
        keys = self._keys(number)
        # As an engine does: each request asks before it saves.
        self.cache.exists(keys)
        return self.cache.save(keys, self._blocks).complete

    def found(self, count: int) -> float:
        """The share of the blocks of the first chains that the cache has."""
        tokens = sum(self.cache.exists(self._keys(number)) for number in range(count))
        return tokens / (count * CHAIN * TOKENS)

    def loads(self, number: int) -> bool:
        """Whether a chain comes back with the bytes that were saved."""
        self._rows[:] = 0
        loaded = self.cache.load(self._keys(number), self._blocks)
        wanted = np.random.default_rng(number).integers(0, 256, self._rows.shape, np.uint8)
        return loaded.complete and bool((self._rows == wanted).all())


def flood(model: Model, begin: int, blocks: int) -> None:
    for number in range(begin, begin + blocks // CHAIN):
        model.save(number)


def on_disk(server: ServeProcess) -> bool:
    """Whether all that the model with a share has saved is written. A busy machine's disk falls behind, and then takes
    no blocks for a while."""
    status = server.status()
    (own,) = [session for session in status["sessions"] if session["tenant_share"]]
    return bool(own["disk_bytes"] >= (DISK // 4 + CHAIN) * SIZE)


@pytest.mark.server
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_share_keeps_the_blocks_of_a_model_while_another_floods(share: float, tmp_path: Path) -> None:
    disk = ("--disk-path", str(tmp_path / "disk"), "--disk-capacity", "256MiB")
    # More than a quarter of the directory, which is more than the host memory holds.
    count = DISK // 4 // CHAIN
    with ServeProcess(tmp_path / "s", *disk) as server:
        chats, batch = Model(server, "chats", share), Model(server, "batch", 0.0)
        with chats.cache, batch.cache:
            flood(chats, 0, count * CHAIN)
            if share:
                until("the chats are on disk", lambda: on_disk(server) or flood(chats, -1, (count + 1) * CHAIN))
            flood(batch, 0, 3 * DISK)
            if not share:
                assert chats.found(count) < 0.5
                return
            assert chats.found(count) == 1.0
            assert all(chats.loads(number) for number in (0, count // 2, count - 1))
            by_name = {session["tenant_share"]: session for session in server.status()["sessions"]}
            assert 0.24 * 256 < by_name[share]["disk_bytes"] / (1 << 20) < 0.31 * 256
            assert by_name[0.0]["disk_bytes"] > 0.5 * (256 << 20)
            assert by_name[share]["host_bytes"] + by_name[0.0]["host_bytes"] <= 64 << 20
        assert server.stop() == 0
    with ServeProcess(tmp_path / "s", *disk) as server:
        chats, batch = Model(server, "chats", share), Model(server, "batch", 0.0)
        with chats.cache, batch.cache:
            assert chats.found(count) > 0.95
            flood(batch, 100_000, 2 * DISK)
            assert chats.found(count) > 0.9, "after a restart"


@pytest.mark.server
def test_the_metrics_of_a_server_tell_what_each_model_with_a_share_has(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "s", "--metrics", "0") as server:
        chats, batch = Model(server, "chats", 0.3), Model(server, "batch", 0.0)
        with chats.cache, batch.cache:
            flood(chats, 0, 2 * CHAIN)
            flood(batch, 0, 5 * CHAIN)
            (address,) = [line.partition("http://")[2] for line in server.printed if "metrics on" in line]
            with urllib.request.urlopen(f"http://{address}", timeout=30) as answer:
                found = re.findall(r"^vllm:undercroft_tenant_(\w+){.*} (.*)$", answer.read().decode(), re.MULTILINE)
            own = next(one for one in server.status()["sessions"] if one["tenant_share"])
    host = float(own["host_bytes"])
    assert [(name, float(value)) for name, value in found] == [("share", 0.3), ("bytes", host), ("bytes", 0.0)]
    # With the chain by which the test has found that the server is connected.
    assert host == 3 * CHAIN * SIZE


@pytest.mark.server
def test_a_share_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "s") as server:
        first = Model(server, "first", 0.7)
        with first.cache:
            with pytest.raises(UndercroftError, match=r"tenant_share 40% does not fit: other namespaces.* have 70%"):
                Model(server, "second", 0.4)
            with Model(server, "second", 0.3).cache:
                pass
