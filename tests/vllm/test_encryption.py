"""Real engines whose blocks are encrypted on disk and in a remote store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_engine import TOKENS, References, core, settled
from real_engine import Engine, prompt
from undercroft import _core

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
PROMPT = prompt(1025, seed=51)
"""Eight blocks and one token."""
RECORDS_AT = 4096 + 28672
"""Where the blocks of an exported file begin, each with a record before it."""
RECORD_BYTES = 128
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (PROMPT, TOKENS))


def key_file(place: Path, name: str, *keys: int) -> str:
    path = place / name
    path.write_text("".join(f"{key:02x}" * 32 + "\n" for key in keys))
    path.chmod(0o600)
    return str(path)


def options(place: Path, keys: str, name: str = "store", **others: Any) -> dict[str, Any]:
    return {
        "host_memory": "64MiB",
        "disk_path": str(place / name),
        "disk_capacity": "128MiB",
        "key_file": keys,
        "promotion_wait": "complete",
        **others,
    }


def plain_payloads(place: Path, keys: str) -> list[bytes]:
    """The payloads of the one namespace in a store, decrypted."""
    exported = place / f"blocks-{os.urandom(4).hex()}"
    store = str(place / "store")
    (found,) = _core.inspect(store)["namespaces"]
    told = _core.export_namespace([store], found["digest"], str(exported), keys, lambda done, total: None)
    size = found["bytes"] // found["blocks"]
    assert (told["blocks"], told["left_out"]) == (found["blocks"], 0)
    content = exported.read_bytes()
    exported.unlink()
    starts = [RECORDS_AT + block * (RECORD_BYTES + size) + RECORD_BYTES for block in range(told["blocks"])]
    return [content[start : start + size] for start in starts]


def test_blocks_outlast_a_restart_and_only_their_key_reads_them(
    engine: Make, llama: Path, tmp_path: Path, reference: References
) -> None:
    keys, other = key_file(tmp_path, "keys", 1), key_file(tmp_path, "other", 2)
    first = engine(llama, options(tmp_path, keys))
    cold = first.generate(PROMPT, TOKENS)
    assert (cold.cached, cold.tokens) == (0, reference(PROMPT))
    settled(first)
    first.close()

    payloads = plain_payloads(tmp_path, keys)
    assert len(payloads) >= 8
    files = [(tmp_path / "store" / name).read_bytes() for name in ("data", "table", "super")]
    for payload in payloads:
        pieces = {payload[at : at + 64] for at in range(0, len(payload) - 64, len(payload) // 8)} - {bytes(64)}
        assert pieces and not any(piece in content for piece in pieces for content in files)
    assert _core.verify(str(tmp_path / "store"), lambda done, total: None)["corrupt"] == 0

    again = engine(llama, options(tmp_path, keys))
    warm = again.generate(PROMPT, TOKENS)
    assert (warm.cached, warm.tokens) == (1024, reference(PROMPT))
    settled(again)
    assert core(again).stats()["decryption_failures"] == 0
    again.close()

    wrong = engine(llama, options(tmp_path, other))
    cold = wrong.generate(PROMPT, TOKENS)
    assert (cold.cached, cold.tokens) == (0, reference(PROMPT))
    settled(wrong)
    stats = core(wrong).stats()
    assert stats["decryption_failures"] > 0 and stats["checksum_failures"] == 0
    wrong.close()

    both = engine(llama, options(tmp_path, key_file(tmp_path, "both", 1, 2)))
    warm = both.generate(PROMPT, TOKENS)
    assert (warm.cached, warm.tokens) == (1024, reference(PROMPT))
    settled(both)


def test_hosts_with_the_key_share_objects_that_others_cannot_use(
    engine: Make, llama: Path, tmp_path: Path, reference: References
) -> None:
    keys = key_file(tmp_path, "keys", 1)
    remote = {"remote": f"file://{tmp_path}/remote", "remote_object": "1MiB"}
    first = engine(llama, options(tmp_path, keys, "first", **remote))
    assert first.generate(PROMPT, TOKENS).tokens == reference(PROMPT)
    settled(first)
    deadline = time.monotonic() + PATIENCE_S
    while (stats := core(first).stats())["remote_put_queue_segments"] > 0 or stats["remote_puts"] == 0:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    first.close()
    objects = [path for path in (tmp_path / "remote").rglob("*-*") if path.is_file()]
    assert objects and all(path.relative_to(tmp_path / "remote").parts[0] == "2" for path in objects)

    second = engine(llama, options(tmp_path, keys, "second", **remote))
    warm = second.generate(PROMPT, TOKENS)
    assert (warm.cached, warm.tokens) == (1024, reference(PROMPT))
    settled(second)
    second.close()

    without = engine(llama, options(tmp_path, "", "third", **remote, remote_write="none"))
    cold = without.generate(PROMPT, TOKENS)
    assert (cold.cached, cold.tokens) == (0, reference(PROMPT))
    settled(without)
