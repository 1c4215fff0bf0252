"""The core through its Python interface: real arena, real files, real IO thread."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from core_values import Group
from undercroft import _core

BLOCK = 16
PAYLOAD = 10_000
MIB = 1 << 20
DESCRIPTION = '{"model": "test"}'
GROUPS = [Group("full", BLOCK, PAYLOAD)]


def chain(n: int, seed: int = 0) -> list[bytes]:
    """``n`` block hashes, each fixed by those before it."""
    hashes, last = [], b"%d" % seed
    for _ in range(n):
        last = hashlib.sha256(last).digest()
        hashes.append(last)
    return hashes


def payload(block_hash: bytes) -> np.ndarray:
    """The bytes that belong to a block."""
    seed = int.from_bytes(block_hash[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, PAYLOAD, dtype=np.uint8)


class Client:
    """One session with its own mapping of the arena, as a scheduler and its worker have together."""

    def __init__(self, engine: _core.Engine) -> None:
        self.engine = engine
        self.session = engine.register(DESCRIPTION, GROUPS, BLOCK)
        self.arena = _core.Arena.attach(engine.arena.socket, engine.arena.session)
        self.memory = np.ctypeslib.as_array((ctypes.c_uint8 * self.arena.size).from_address(self.arena.address))

    def save(self, hashes: list[bytes]) -> int:
        """Save a prefix; how many blocks were copied."""
        grant = self.session.begin_save("save", hashes, len(hashes) * BLOCK)
        assert grant is not None
        assert not grant.pending
        if not grant.extents:
            return 0
        [extent] = grant.extents
        assert extent.group == 0
        slots = np.frombuffer(extent.offsets, dtype="<i8")
        for index, slot in enumerate(slots.tolist(), extent.first_block):
            self.memory[slot : slot + PAYLOAD] = payload(hashes[index])
        self.session.end_transfer(grant.transfer_id, True)
        return len(slots)

    def load(self, request: str, hashes: list[bytes], local: int = 0) -> int:
        """Look a prefix up, wait for the disk, and check every byte of the load. Tokens that were hit."""
        answer = self.session.lookup(request, hashes, local)
        if answer.pending:
            assert self.session.wait(request, 10)
            answer = self.session.lookup(request, hashes, local)
        boundary = answer.tokens
        if not boundary:
            self.session.finish_request(request)
            return 0
        load = self.session.begin_load(request, local, boundary - local)
        assert load is not None
        assert load.host_tokens + load.disk_tokens == boundary - local
        assert load.session == self.engine.arena.session != 0
        [extent] = load.extents
        slots = np.frombuffer(extent.offsets, dtype="<i8").tolist()
        assert extent.first_block == local // BLOCK
        assert len(slots) == (boundary - local) // BLOCK
        for index, slot in enumerate(slots, extent.first_block):
            assert (self.memory[slot : slot + PAYLOAD] == payload(hashes[index])).all(), index
        self.session.end_transfer(load.transfer_id, True)
        self.session.finish_request(request)
        return boundary


@contextmanager
def opened(path: Path | None, host: int = 16 * MIB, disk: int = 64 * MIB, **options: object) -> Iterator[_core.Engine]:
    """An engine, closed at the end."""
    disks = [{"path": str(path), "capacity": disk}] if path else []
    engine = _core.Engine({"host_memory": host, "disks": disks, **options})
    try:
        yield engine
    finally:
        engine.close()


def test_a_saved_prefix_is_hit_at_once_and_as_far_as_it_reaches():
    with opened(None) as engine:
        client = Client(engine)
        hashes = chain(40)
        assert client.load("a", hashes) == 0
        assert client.save(hashes[:30]) == 30
        assert client.session.lookup("b", hashes).tokens == 30 * BLOCK
        assert client.load("b", hashes) == 30 * BLOCK
        assert client.load("c", hashes, local=7 * BLOCK) == 30 * BLOCK
        assert client.save(hashes) == 10
        assert client.load("d", [*hashes[:5], *chain(5, seed=1)]) == 5 * BLOCK


@pytest.mark.parametrize("io_engine", ["io_uring", "thread_pool"])
def test_a_restart_finds_the_cache_on_disk(tmp_path, io_engine):
    hashes = chain(50)
    try:
        with opened(tmp_path, io_engine=io_engine) as engine:
            assert Client(engine).save(hashes) == 50
            assert engine.flush()
            assert engine.stats()["disk_blocks"] == 50
    except _core.ConfigError as error:
        pytest.skip(str(error))
    with opened(tmp_path, io_engine=io_engine) as engine:
        assert engine.info()["blocks_recovered"] == 50
        client = Client(engine)
        assert client.session.lookup("a", hashes).pending
        assert client.load("a", hashes) == 50 * BLOCK
        assert client.session.lookup("b", hashes).tokens == 50 * BLOCK
        assert engine.stats()["disk_reads"] == 50


def test_a_prefetch_returns_the_shared_tokens_and_pending_lookups_get_one_object(tmp_path):
    ahead, first, second = (chain(4, seed=seed) for seed in range(3))
    with opened(tmp_path) as engine:
        for hashes in (ahead, first, second):
            Client(engine).save(hashes)
        assert engine.flush()
    with opened(tmp_path) as engine:
        session = Client(engine).session
        assert session.prefetch("ahead", [*ahead, *chain(1, seed=3)]) == 4 * BLOCK
        assert session.prefetch("unknown", chain(1, seed=3)) == 0
        answer = session.lookup("first", first)
        assert (answer.pending, answer.tokens, answer.shared_tokens) == (True, 0, 0)
        assert session.lookup("second", second) is answer
        if session.lookup("ahead", ahead) is answer:
            assert session.wait("ahead", 10)
        hit = session.lookup("ahead", ahead)
        assert (hit.pending, hit.tokens, hit.shared_tokens) == (False, 4 * BLOCK, 4 * BLOCK)


def test_more_than_memory_holds_is_evicted_and_read_again(tmp_path):
    with opened(tmp_path, host=2 * MIB) as engine:
        client = Client(engine)
        prefixes = [chain(40, seed) for seed in range(12)]
        for hashes in prefixes:
            done = 0
            while done < len(hashes):
                done += client.save(hashes)
                assert engine.flush()
        for turn in range(3):
            for number, hashes in enumerate(prefixes):
                # One promotion may hold half of the arena: the rest is a partial hit.
                assert client.load(f"{turn}-{number}", hashes) > 0
        stats = engine.stats()
        assert stats["host_evictions"] > 0
        assert stats["checksum_failures"] == 0
        assert stats["active_lookups"] == stats["loads"] == stats["saves"] == stats["host_pinned_bytes"] == 0


def test_a_flipped_bit_on_disk_is_a_miss_and_never_served(tmp_path):
    hashes = chain(20)
    with opened(tmp_path) as engine:
        Client(engine).save(hashes)
        assert engine.flush()
    data = tmp_path / "data"
    block = payload(hashes[8])
    content = bytearray(data.read_bytes())
    at = content.find(block[:4096].tobytes())
    assert at >= 0
    with data.open("r+b") as file:
        file.seek(at + 77)
        file.write(bytes([content[at + 77] ^ 1]))
    with opened(tmp_path) as engine:
        client = Client(engine)
        assert client.load("a", hashes) == 8 * BLOCK
        assert engine.stats()["checksum_failures"] == 1
        assert client.load("b", hashes) == 8 * BLOCK
        assert client.save(hashes) == 12
        assert client.load("c", hashes) == 20 * BLOCK


@pytest.mark.parametrize("name", ["data", "table", "super"])
def test_an_engine_names_a_deleted_file_and_continues_with_the_open_files(tmp_path, name):
    hashes = chain(20)
    with opened(tmp_path) as engine:
        client = Client(engine)
        client.save(hashes[:10])
        assert engine.flush()
        (before,) = engine.info()["disks"]
        assert (before["health"], before["fault"], engine.stats()["disk_degraded"]) == ("good", None, 0)
        (tmp_path / name).unlink()
        (after,) = engine.info()["disks"]
        assert (after["health"], engine.stats()["disk_degraded"]) == ("file_missing", 1)
        assert f"the file {name} " in after["fault"]
        client.save(hashes)
        assert engine.flush()
        assert client.load("a", hashes) == 20 * BLOCK


def test_a_reset_is_durable(tmp_path):
    hashes = chain(20)
    with opened(tmp_path) as engine:
        client = Client(engine)
        client.save(hashes)
        assert engine.flush()
        assert client.session.reset()
        assert client.load("a", hashes) == 0
    with opened(tmp_path) as engine:
        assert engine.info()["blocks_recovered"] == 0
        assert Client(engine).load("a", hashes) == 0


def test_namespaces_are_kept_apart(tmp_path):
    hashes = chain(20)
    with opened(tmp_path) as engine:
        Client(engine).save(hashes)
        other = engine.register('{"model": "another"}', GROUPS, BLOCK)
        answer = other.lookup("a", hashes)
        assert (answer.pending, answer.tokens, answer.shared_tokens) == (False, 0, 0)


def test_a_directory_in_use_is_refused_with_the_owner(tmp_path):
    import os

    with opened(tmp_path), pytest.raises(_core.StoreError, match=f"in use by process {os.getpid()}"), opened(tmp_path):
        pass


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(_core.StoreError, match=r"holiday\.jpg"), opened(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_files_and_sockets_are_private_with_umask_0(tmp_path):
    import os

    before = os.umask(0)
    try:
        with opened(tmp_path / "new") as engine:
            socket = Path(engine.arena.socket)
            assert socket.stat().st_mode & 0o777 == 0o600
            assert socket.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}


def test_a_payload_that_cannot_fit_is_refused_at_registration():
    with (
        opened(None, host=16 * MIB) as engine,
        pytest.raises(_core.ConfigError, match="set host_memory to at least 4 GiB"),
    ):
        engine.register(DESCRIPTION, [Group("full", BLOCK, 64 * MIB)], BLOCK)


def test_hashes_that_are_no_hashes_are_a_miss():
    with opened(None) as engine:
        session = engine.register(DESCRIPTION, GROUPS, BLOCK)
        assert session.lookup("a", [b"", b"x" * 33]).tokens == 0
        grant = session.begin_save("a", [b""], BLOCK)
        assert grant is not None
        assert (grant.pending, grant.extents, grant.refused) == (False, [], None)


def test_options_are_refused_by_their_names():
    for options, message in (
        ({"host_mem": 1}, r"unknown field `host_mem`, expected one of .*`host_memory`"),
        ({"host_memory": 16 * MIB, "io_engine": "aio"}, r"^io_engine: .*`io_uring`"),
        ({"host_memory": 16 * MIB, "disk_admission": "ALL"}, r"^disk_admission: .*`all`"),
        ({"server": "/run/s"}, r'^server is "/run/s"; allowed: "unix:///path"'),
        ({"host_memory": 1 << 60}, r"^host_memory 1048576 TiB: only .*iB of memory are available"),
    ):
        with pytest.raises(_core.ConfigError, match=message):
            _core.Engine(options)


def test_a_share_of_the_memory_is_rounded_to_whole_pages():
    with opened(None, host=16 * MIB + 1000) as engine:
        assert engine.info()["host_memory"] == 16 * MIB


def test_the_exceptions_are_those_of_the_package():
    from undercroft import config, errors

    assert _core.ConfigError is config.ConfigError is errors.ConfigError
    for error in (_core.ConfigError, _core.StoreError, _core.ServerError):
        assert issubclass(error, errors.UndercroftError)
        assert getattr(errors, error.__name__) is error


def test_nobody_at_a_socket_is_a_server_error(tmp_path):
    with pytest.raises(_core.ServerError, match="gone"):
        _core.server_status(str(tmp_path / "gone"), 1.0)
    with pytest.raises(_core.ServerError, match="gone"):
        _core.Arena.attach(str(tmp_path / "gone"), 1)
    engine = _core.Engine({"server": f"unix://{tmp_path}/gone"})
    assert (engine.is_shared, engine.arena.socket, engine.stats(), engine.info()) == (True, "", {}, {})
    with pytest.raises(_core.ServerError, match="not registered yet"):
        engine.status()
    engine.close()
