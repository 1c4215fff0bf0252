"""`undercroft clear`, `drain`, `resize`, `export` and `import`, over the socket of a live engine."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from core_values import Group, places
from undercroft import _core
from undercroft.cli import main
from undercroft.device.pinning import ArenaPinner, Turns

BLOCK = 16
PAYLOAD = 64 << 10
MODEL = '{"model": "one"}'


def hashes(prompt: int, blocks: int) -> list[bytes]:
    return [bytes([prompt, block]) * 16 for block in range(blocks)]


def payload(prompt: int, block: int) -> bytes:
    return bytes([prompt, block, 1, 7]) * (PAYLOAD // 4)


def opened(root: Path, name: str, **options: Any) -> _core.Engine:
    disks = [{"path": str(root / name), "capacity": 32 << 20}]
    return _core.Engine({"host_memory": 16 << 20, "disks": disks, "min_load_tokens": 0, **options})


def registered(engine: _core.Engine, description: str = MODEL) -> _core.Session:
    return engine.register(description, [Group("full", BLOCK, PAYLOAD)], BLOCK)


def save(engine: _core.Engine, session: _core.Session, prompt: int, blocks: int) -> bool:
    """Whether there was anything to save."""
    grant = session.begin_save(f"save-{prompt}", hashes(prompt, blocks), blocks * BLOCK)
    if grant is None or not grant.extents:
        return False
    arena = _core.Arena.attach(engine.arena.socket, engine.arena.session)
    for offset, hashed in places(grant.extents, hashes(prompt, blocks)):
        ctypes.memmove(arena.address + offset, payload(prompt, hashed[1]), PAYLOAD)
    arena.let_go()
    session.end_transfer(grant.transfer_id, True)
    session.finish_request(f"save-{prompt}")
    return True


def save_to_disk(engine: _core.Engine, session: _core.Session, prompts: range) -> None:
    """Saves eight blocks of each prompt. Writes in the queue hold half of host memory, so each half is awaited."""
    for prompt in prompts:
        save(engine, session, prompt, 8)
        if prompt % 12 == 11:
            assert engine.flush(30)
    assert engine.stats()["refused_disk_behind"] == 0


def hit(session: _core.Session, prompt: int, blocks: int) -> int:
    deadline = time.monotonic() + 30
    while (found := session.lookup("hit", hashes(prompt, blocks))).pending:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    session.finish_request("hit")
    return found.tokens


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def engine(place: Path) -> Iterator[_core.Engine]:
    engine = opened(place, "store")
    yield engine
    engine.close()


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main.main([*argv, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_clear_reports_the_removed_blocks_and_the_session_continues(
    engine: _core.Engine, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session, other = registered(engine), registered(engine, '{"model": "two"}')
    save(engine, session, 1, 4)
    save(engine, other, 2, 4)
    assert engine.flush(30)
    cleared = run(capsys, "clear", "--namespace", session.namespace[:12], "--erase", "--yes")
    assert cleared["finished"] and cleared["durable"] and not cleared["removing"]
    assert (cleared["host_blocks"], cleared["disk_blocks"], cleared["pending"]) == (4, 4, 0)
    assert cleared["erased_bytes"] == cleared["disk_bytes"] == 4 * PAYLOAD
    data = (place / "store" / "data").read_bytes()
    assert payload(1, 0)[:4096] not in data and payload(2, 0)[:4096] in data
    assert (hit(session, 1, 4), hit(other, 2, 4)) == (0, 64)
    assert save(engine, session, 1, 4) and hit(session, 1, 4) == 64
    assert main.main(["clear", "--all", "--yes"]) == 0
    text = capsys.readouterr().out
    assert "removed from host memory: 8 blocks, 512 KiB" in text, text
    assert (hit(session, 1, 4), hit(other, 2, 4)) == (0, 0)
    assert main.main(["clear", "--namespace", "00000000", "--yes"]) == 1
    assert "no namespace has a digest that begins with 00000000" in capsys.readouterr().err


def test_clear_by_age_leaves_recently_used_blocks(engine: _core.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    session = registered(engine)
    save(engine, session, 1, 4)
    assert run(capsys, "clear", "--older-than", "1h", "--yes")["host_blocks"] == 0
    assert hit(session, 1, 4) == 64
    # Blocks that are being written are in use.
    assert engine.flush(30)
    assert run(capsys, "clear", "--older-than", "0s", "--yes")["host_blocks"] == 4
    assert hit(session, 1, 4) == 0


def test_drain_waits_for_writes_and_reports_its_end(
    engine: _core.Engine, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = registered(engine)
    save(engine, session, 1, 4)
    drained = run(capsys, "drain")
    assert drained["clean"] and drained["draining"] and drained["queued_bytes"] == 0
    found = _core.inspect(str(place / "store"))
    assert found["records"] == 4
    assert not save(engine, session, 2, 4)
    assert hit(session, 1, 4) == 64
    assert main.main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "draining: no save" in shown
    # The session of this process, with its saved bytes.
    assert session.namespace[:12] in shown and "256 KiB" in shown
    assert not run(capsys, "drain", "--cancel")["draining"]
    assert save(engine, session, 2, 4)


def test_a_drain_that_times_out_reports_the_saves_in_progress(
    engine: _core.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    session = registered(engine)
    grant = session.begin_save("slow", hashes(1, 4), 64)
    assert grant is not None
    assert main.main(["drain", "--timeout", "0.2"]) == 1
    assert "1 saves in progress" in capsys.readouterr().err
    session.end_transfer(grant.transfer_id, False)
    assert main.main(["drain"]) == 0


def memory_of(arena: _core.Arena) -> int:
    return os.fstat(arena.fileno()).st_blocks * 512


def test_resize_gives_memory_and_space_back_and_takes_them_again(
    engine: _core.Engine, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = registered(engine)
    save_to_disk(engine, session, range(24))
    arena = _core.Arena.attach(engine.arena.socket, engine.arena.session)
    data = place / "store" / "data"
    memory, space = memory_of(arena), data.stat().st_blocks * 512
    resized = run(capsys, "resize", "--host-memory", "4MiB", "--disk-capacity", "12MiB")
    assert resized["finished"] and resized["host"]["kept_bytes"] == resized["disk"]["kept_bytes"] == 0
    assert resized["host"]["capacity_bytes"] <= 4 << 20 and resized["disk"]["capacity_bytes"] <= 12 << 20
    assert memory_of(arena) <= memory - (10 << 20)
    assert data.stat().st_blocks * 512 <= space - (16 << 20)
    stats = engine.stats()
    assert stats["host_used_bytes"] <= stats["host_capacity_bytes"] == resized["host"]["capacity_bytes"]
    assert stats["disk_target_bytes"] == resized["disk"]["target_bytes"] < 12 << 20
    assert main.main(["status", "--socket", engine.arena.socket]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    # The disk tier's share of 32 MiB that holds blocks.
    assert " 4 MiB (16 MiB at the start) " in shown and " MiB (30.75 MiB at the start) " in shown, shown
    kept = [prompt for prompt in range(24) if hit(session, prompt, 8) == 8 * BLOCK]
    # The page of the last prompt may be nearly empty, and then cheaper to evict than a full one of older prompts.
    assert set(range(12, 23)) <= set(kept), kept
    assert main.main(["resize", "--host-memory", "16MiB", "--disk-capacity", "32MiB"]) == 0
    assert "host  16 MiB     16 MiB     16 MiB" in (shown := capsys.readouterr().out), shown
    save_to_disk(engine, session, range(24, 48))
    assert sum(hit(session, prompt, 8) for prompt in range(24, 48)) == 24 * 8 * BLOCK
    assert engine.stats()["checksum_failures"] == engine.stats()["host_checksum_failures"] == 0
    arena.let_go()
    engine.close()
    again = opened(place, "store")
    theirs = registered(again)
    assert sum(hit(theirs, prompt, 8) for prompt in range(24, 48)) == 24 * 8 * BLOCK
    assert again.stats()["checksum_failures"] == 0
    again.close()


def test_resize_reports_the_allowed_sizes_and_memory_that_it_cannot_return(
    engine: _core.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    session = registered(engine)
    save(engine, session, 1, 8)
    assert main.main(["resize", "--host-memory", "20MiB"]) == 2
    assert "error: --host-memory 20 MiB: allowed is 1 MiB to 16 MiB; restart with" in capsys.readouterr().err
    assert main.main(["resize", "--disk-capacity", "1MiB"]) == 2
    assert "error: --disk-capacity 1 MiB: allowed is" in capsys.readouterr().err
    assert main.main(["resize", "--disk-capacity", "9000TiB"]) == 2
    assert "free space there, or ask for less" in capsys.readouterr().err
    arena = _core.Arena.attach(engine.arena.socket, engine.arena.session)
    pinner = ArenaPinner(arena.address, arena.size, lambda *_: None, lambda _: None, turns=Turns(arena.fileno()))
    assert pinner.wait(30)
    before = memory_of(arena)
    assert main.main(["resize", "--host-memory", "8MiB"]) == 0
    shown = capsys.readouterr().out
    assert "host memory: 8 MiB are unused, and the system does not have them back: a worker has pinned" in shown, shown
    assert memory_of(arena) == before
    # The pinned memory can be used again.
    assert run(capsys, "resize", "--host-memory", "16MiB")["host"]["capacity_bytes"] == 16 << 20
    pinner.close()
    assert run(capsys, "resize", "--host-memory", "8MiB")["host"]["kept_bytes"] == 0
    assert memory_of(arena) <= before - (8 << 20)
    assert main.main(["status"]) == 0
    assert "8 MiB" in capsys.readouterr().out
    assert hit(session, 1, 8) == 8 * BLOCK
    arena.let_go()


def test_a_namespace_is_exported_to_another_host_byte_for_byte(
    engine: _core.Engine, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = registered(engine)
    for prompt, blocks in ((1, 4), (2, 40), (3, 1)):
        save(engine, session, prompt, blocks)
    assert engine.flush(30)
    file = place / "blocks"
    exported = run(capsys, "export", session.namespace[:8], str(file), "--disk-path", str(place / "store"))
    assert (exported["blocks"], exported["bytes"], exported["left_out"]) == (45, 45 * PAYLOAD, 0)
    assert main.main(["export", session.namespace[:8], str(file)]) == 1
    assert "it exists; delete it or name another" in capsys.readouterr().err
    engine.close()
    other = opened(place, "other")
    imported = run(capsys, "import", str(file))
    assert (imported["blocks"], imported["saved_blocks"]) == (45, 45)
    assert run(capsys, "import", str(file))["saved_blocks"] == 0
    theirs = registered(other)
    assert [hit(theirs, prompt, blocks) for prompt, blocks in ((1, 4), (2, 40), (3, 1))] == [64, 640, 16]
    assert other.flush(30)
    data = (place / "other" / "data").read_bytes()
    assert all(payload(2, block) in data for block in range(40))
    other.close()


def test_windows_go_with_the_blocks_that_need_them(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [Group("full", BLOCK, PAYLOAD), Group("sliding_window", BLOCK, 4096, 2 * BLOCK)]

    class Offer(NamedTuple):
        group: int
        first_block: int
        end_block: int

    engine = opened(place, "store")
    session = engine.register(MODEL, groups, BLOCK)
    grant = session.begin_save("save", hashes(1, 6), 6 * BLOCK, [Offer(1, 3, 6)])
    assert grant is not None
    arena = _core.Arena.attach(engine.arena.socket, engine.arena.session)
    for extent in grant.extents:
        for offset, hashed in places([extent], hashes(1, 6)):
            content = payload(1, hashed[1]) if extent.group == 0 else bytes([9, hashed[1]]) * 2048
            ctypes.memmove(arena.address + offset, content, len(content))
    arena.let_go()
    session.end_transfer(grant.transfer_id, True)
    session.finish_request("save")
    assert engine.flush(30)
    file = place / "blocks"
    assert run(capsys, "export", session.namespace[:8], str(file))["blocks"] == 9
    engine.close()
    other = opened(place, "other")
    assert run(capsys, "import", str(file))["saved_blocks"] == 9
    theirs = other.register(MODEL, groups, BLOCK)
    assert hit(theirs, 1, 6) == 96
    assert other.flush(30)
    data = (place / "other" / "data").read_bytes()
    assert all(bytes([9, block]) * 2048 in data for block in (3, 4, 5))
    other.close()


def test_a_damaged_file_changes_nothing(engine: _core.Engine, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = registered(engine)
    save(engine, session, 1, 4)
    assert engine.flush(30)
    file = place / "blocks"
    run(capsys, "export", session.namespace[:8], str(file))
    run(capsys, "clear", "--all", "--yes")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9000] + b"x" + whole[-8999:])
    assert main.main(["import", str(file)]) == 1
    assert "payload has another checksum" in capsys.readouterr().err
    file.write_bytes(whole[:-1000])
    assert main.main(["import", str(file)]) == 1
    assert "ends too early" in capsys.readouterr().err
    assert main.main(["import", __file__]) == 2
    assert "not a file that undercroft export has written" in capsys.readouterr().err
    assert hit(session, 1, 4) == 0


def test_an_interrupted_export_leaves_no_file(engine: _core.Engine, place: Path) -> None:
    session = registered(engine)
    save(engine, session, 1, 4)
    assert engine.flush(30)

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.export_namespace([str(place / "store")], session.namespace, str(place / "blocks"), "", interrupted)
    assert [path.name for path in place.iterdir() if path.name.startswith("blocks")] == []
