"""Events of several vLLMs on one engine: each tells of all that it can serve, and of its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_process import ServeProcess
from served_client import BLOCK, Peer, prompt, until
from undercroft import _core
from undercroft.connector.groups import Groups
from undercroft.connector.observe.events import Events


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM publishes 64 bits of each hash otherwise."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class Publisher:
    """One vLLM's events, and the index of a router that follows them alone."""

    def __init__(self, peer: Peer) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        caches: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        self.peer = peer
        self.events = Events(peer.session, Groups(BLOCK, BLOCK, ("full",), (BLOCK,), (0,), 0), caches)
        self.known: set[tuple[bytes, str]] = set()
        self.cleared = 0

    def follow(self) -> set[tuple[bytes, str]]:
        """The index after the events up to now."""
        for event in self.events.take():
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.known.clear()
                self.cleared += 1
                continue
            blocks = {(block, event.medium) for block in event.block_hashes}
            assert not blocks & self.known if kind == "BlockStored" else blocks <= self.known
            self.known = self.known | blocks if kind == "BlockStored" else self.known - blocks
        return self.known

    def knows(self, expected: set[tuple[bytes, str]]) -> None:
        """Until the index is this."""
        until(f"{expected} is told", lambda: self.follow() == expected and not self.events.more)


def in_host(*names: str) -> set[tuple[bytes, str]]:
    return {(block, "CPU") for name in names for block in prompt(name)}


def on_disk(*names: str) -> set[tuple[bytes, str]]:
    return {(block, "STORAGE") for name in names for block in prompt(name)}


@pytest.fixture
def publisher() -> Iterator[Callable[..., Publisher]]:
    peers: list[Peer] = []

    def make(**options: Any) -> Publisher:
        peers.append(Peer(_core.Engine(options)))
        until("a connection", peers[-1].is_up)
        return Publisher(peers[-1])

    yield make
    for peer in peers:
        peer.close()


def test_each_vllm_of_a_server_reports_its_blocks_and_their_loss(
    publisher: Callable[..., Publisher], tmp_path: Path
) -> None:
    socket = tmp_path / "s.sock"
    with ServeProcess(socket) as server:
        one, other = (publisher(server=f"unix://{socket}", server_timeout_ms=10_000) for _ in range(2))
        one.peer.save(prompt("a"))
        for each in (one, other):
            each.knows(in_host("a"))
        other.peer.save(prompt("b"))
        for each in (one, other):
            each.knows(in_host("a", "b"))
        assert (one.cleared, other.cleared) == (0, 0)
        # The weights of one may be others now: it shares with no other, and the earlier blocks are gone for both.
        assert one.peer.session.reset(10.0)
        other.knows(set())
        one.peer.save(prompt("c"))
        other.peer.save(prompt("d"))
        one.knows(in_host("c"))
        other.knows(in_host("d"))
        assert (one.cleared, other.cleared) == (1, 1)
        server.close()
        for each in (one, other):
            each.knows(set())
    with ServeProcess(socket):
        until("a connection", other.peer.is_up)
        other.peer.save(prompt("e"))
        other.knows(in_host("e"))
        assert (one.cleared, other.cleared) == (2, 2)


def test_a_vllm_that_takes_a_directory_over_reports_the_blocks_on_disk(
    publisher: Callable[..., Publisher], tmp_path: Path
) -> None:
    disks = [{"path": str(tmp_path / "cache"), "capacity": 64 << 20}]
    options = {"host_memory": 16 << 20, "disks": disks, "share": True, "socket_dir": str(tmp_path / "run")}
    owner = publisher(**options)
    other = publisher(**options)
    assert (owner.peer.engine.is_shared, other.peer.engine.is_shared) == (False, True)
    owner.peer.save(prompt("a"))
    for each in (owner, other):
        each.knows(in_host("a") | on_disk("a"))
    owner.peer.close()
    until("it has taken over", lambda: other.peer.engine.took_over and other.peer.is_up())
    other.knows(on_disk("a"))
    assert other.cleared == 1
