"""A real vLLM engine with vLLM's own offloading and undercroft as its tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from connector_engine import TOKENS, References
from engine_checks import PAYLOAD
from real_engine import Engine
from served_client import until

Make = Callable[..., Engine]
OFFLOADING = {"connector": "OffloadingConnector"}
ROW = PAYLOAD
"""Bytes of a chunk of one block of the Llama model."""


_VLLMS = ("blocks_per_chunk", "canonical_layout", "cpu_bytes_to_use")


def extra_config(disk: Path | None, *, rows: int = 32, **more: Any) -> dict[str, Any]:
    """The options of vLLM's offloading connector. ``rows``: blocks in vLLM's host memory. ``more``: options of vLLM,
    or else of undercroft."""
    options: dict[str, Any] = {"promotion_wait": "complete"} | ({} if "server" in more else {"host_memory": "64MiB"})
    if disk is not None:
        options |= {"disk_path": str(disk), "disk_capacity": "256MiB"}
    entry = {"type": "UndercroftTier", "module_path": "undercroft.vllm_tier", **options}
    entry |= {name: value for name, value in more.items() if name not in _VLLMS}
    return {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_tier_spec",
        "cpu_bytes_to_use": rows * ROW,
        "offload_prompt_only": False,
        "secondary_tiers": [entry],
        **{name: value for name, value in more.items() if name in _VLLMS},
    }


def tier_of(running: Engine) -> Any:
    """undercroft's tier in the scheduler's connector."""
    [tier] = running.connector.connector_scheduler.manager.secondary_tiers
    return tier


def stats(running: Engine) -> dict[str, Any]:
    """The counters of the tier's engine."""
    return tier_of(running)._cache.stats()


def health(one: Engine) -> str:
    """The health of the tier's only directory."""
    [found] = tier_of(one)._cache.engine.info()["disks"]
    return str(found["health"])


def until_no_writes(one: Engine) -> None:
    """Wait until the disk is known to be full."""
    until("the disk is full", lambda: health(one) == "no_writes")


def settled(running: Engine, *, writes: bool = True) -> None:
    """Let all copies end, and all ``writes`` if the disk takes any. Check that nothing is held, and empty the device's
    own cache."""
    running.idle_steps()
    tier = tier_of(running)
    assert not tier.has_pending_work()
    assert running.device_blocks_in_use() == 0
    found = stats(running)
    assert (found["loads"], found["saves"], found["active_lookups"]) == (0, 0, 0)
    assert not writes or tier._cache.engine.flush(30.0)
    assert running.reset_device_cache()


def saved(engine: Make, model: Path, options: dict[str, Any], *prompts: list[int]) -> None:
    """Let an engine compute prompts, save them, and end."""
    one = engine(model, options, **OFFLOADING)
    for ids in prompts:
        one.generate(ids, 4)
        settled(one)
    one.close()


def hits(one: Engine, reference: References, ids: list[int], cached: int, tokens: int = TOKENS) -> None:
    """A prompt's answer is right, with so many tokens from a cache."""
    answer = one.generate(ids, tokens)
    assert (answer.cached, answer.tokens) == (cached, reference(ids, tokens))
    settled(one)


def flip_payload_bytes(directory: Path, payload: int = PAYLOAD) -> None:
    """Change bytes of each ``payload`` bytes of the payloads of a cache directory, and none of its records."""
    data = directory / "data"
    with data.open("r+b") as file:
        size = data.stat().st_size
        for at in range(0, size, payload // 2):
            file.seek(at)
            byte = file.read(1)
            if byte and byte != b"\0":
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x10]))
