"""Real processes: an API server, its engine and two workers, killed in the middle of traffic and started again."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_checks import Reference
from real_engine import prompt
from threshold_http import Client, start_server, the_choice, wait_until_on_disk

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

TOKENS = 8
FIRST = [prompt(897, seed=seed) for seed in range(4)]
TRAFFIC = [prompt(640, seed=20 + seed) + prompt(60, seed=40 + seed) for seed in range(8)]
HIT = 896
TWO_RANKS = ("--tensor-parallel-size", "2", "--num-gpu-blocks-override", "256", "--max-num-seqs", "8")


def ask(client: Client, ids: list[int]) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were cached."""
    answer = client.complete(ids, TOKENS)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return the_choice(answer)["token_ids"], details.get("cached_tokens") or 0


def kill_during_traffic(client: Client, reference: Reference) -> int:
    """SIGKILL every process once half of the traffic is answered; how many answers there were, all right."""
    answered = threading.Semaphore(0)

    def one(ids: list[int]) -> list[int] | None:
        try:
            tokens = ask(client, ids)[0]
        except (httpx.HTTPError, AssertionError):  # the server has gone
            return None
        answered.release()
        return tokens

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(one, ids) for ids in TRAFFIC]
        for _ in range(len(TRAFFIC) // 2):
            assert answered.acquire(timeout=300)
        os.killpg(client.server.process.pid, signal.SIGKILL)
        answers = [future.result() for future in running]
    client.server.process.wait()
    for ids, tokens in zip(TRAFFIC, answers, strict=True):
        assert tokens is None or tokens == reference(ids, TOKENS)
    return sum(tokens is not None for tokens in answers)


def hit_tokens(client: Client, tier: str) -> float:
    return client.metric("vllm:undercroft_hit_tokens_total", tier=tier)


def test_two_ranks_killed_and_restarted(
    llama_with_tokenizer: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference runs the same weights on one rank, in this process.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    for ids in FIRST + TRAFFIC:
        reference(ids, TOKENS)
    options: dict[str, Any] = {
        "host_memory": "128MiB",
        "disk_path": str(tmp_path / "cache"),
        "disk_capacity": "512MiB",
    }

    with start_server(llama_with_tokenizer, tmp_path / "first.log", options, *TWO_RANKS) as client:
        assert [ask(client, ids) for ids in FIRST] == [(reference(ids, TOKENS), 0) for ids in FIRST]
        client.reset_device()
        assert [ask(client, ids) for ids in FIRST] == [(reference(ids, TOKENS), HIT) for ids in FIRST]
        client.wait_until_idle()
        assert hit_tokens(client, "host") == len(FIRST) * HIT
        assert client.metric("vllm:prompt_tokens_cached_by_source_total", source="host") == len(FIRST) * HIT
        wait_until_on_disk(tmp_path / "cache", len(FIRST) * HIT // 128)
        assert kill_during_traffic(client, reference) >= len(TRAFFIC) // 2

    with start_server(llama_with_tokenizer, tmp_path / "second.log", options, *TWO_RANKS) as client:
        found = [ask(client, ids) for ids in FIRST + TRAFFIC]
        assert [tokens for tokens, _ in found] == [reference(ids, TOKENS) for ids in FIRST + TRAFFIC]
        # Blocks that were saved long before the kill are on disk; later ones only if they had reached it.
        assert [cached for _, cached in found[: len(FIRST)]] == [HIT] * len(FIRST)
        client.wait_until_idle()
        assert hit_tokens(client, "disk") >= len(FIRST) * HIT
        assert client.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") == hit_tokens(client, "disk")
        for trouble in ("hook_errors", "checksum_failures", "load_failures", "save_failures"):
            assert client.metric(f"vllm:undercroft_{trouble}_total") == 0, trouble

    with start_server(llama_with_tokenizer, tmp_path / "third.log", options, *TWO_RANKS) as client:
        found = [ask(client, ids) for ids in FIRST + TRAFFIC]
        assert [tokens for tokens, _ in found] == [reference(ids, TOKENS) for ids in FIRST + TRAFFIC]
        # The second server ended in an orderly way: none of its blocks is missing.
        assert [cached for _, cached in found] == [HIT] * len(FIRST) + [640] * len(TRAFFIC)
