"""Real vLLM servers with undercroft as a tier of vLLM's offloading: killed and restarted, and beside the connector."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from engine_checks import Reference
from real_engine import prompt
from served_client import until
from test_kill_and_restart import FIRST, HIT, TRAFFIC, ask, kill_during_traffic
from threshold_http import Client, start_server, wait_until_on_disk
from tier_engine import extra_config
from undercroft.demo.server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

TOKENS = 8
BLOCK = 128
SMALL = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", "128", "--max-num-seqs", "8")
TIER = ("OffloadingConnector", None)


def right(client: Client, reference: Reference, prompts: list[list[int]]) -> list[int]:
    """Ask for each prompt; all answers are right. Returns how many tokens of each were cached."""
    found = [ask(client, ids) for ids in prompts]
    assert [tokens for tokens, _ in found] == [reference(ids, TOKENS) for ids in prompts]
    return [cached for _, cached in found]


def test_a_server_that_is_killed_finds_its_chunks_again(
    llama_with_tokenizer: Path, reference: Reference, tmp_path: Path
) -> None:
    options = extra_config(tmp_path / "cache")
    with start_server(
        llama_with_tokenizer, tmp_path / "first.log", options, *SMALL, connector=TIER, start=Server
    ) as client:
        assert right(client, reference, FIRST) == [0] * len(FIRST)
        client.wait_until_idle()
        wait_until_on_disk(tmp_path / "cache", len(FIRST) * HIT // BLOCK)
        assert kill_during_traffic(client, reference) >= len(TRAFFIC) // 2
    with start_server(llama_with_tokenizer, tmp_path / "second.log", options, *SMALL, connector=TIER) as client:
        assert right(client, reference, FIRST) == [HIT] * len(FIRST)
        right(client, reference, TRAFFIC)
        client.wait_until_idle()

        def reads_are_counted() -> bool:
            # A step reads the engine's counters at most once in a second.
            right(client, reference, FIRST[:1])
            return client.metric("vllm:undercroft_transfers_total", tier="disk", direction="load") > 0

        until("the reads are counted", reads_are_counted)
        read = client.metric("vllm:kv_offload_tiering_read_bytes_total", tier="1:UndercroftTier")
        assert read >= len(FIRST) * HIT * 4096
        assert client.metric("vllm:undercroft_checksum_failures_total") == 0


def test_the_connector_and_the_tier_have_one_directory_open_at_once(
    llama_with_tokenizer: Path, reference: Reference, tmp_path: Path
) -> None:
    ids = prompt(897, seed=90)
    of_connector = {
        "host_memory": "64MiB",
        "disk_path": str(tmp_path / "cache"),
        "disk_capacity": "256MiB",
        "server_timeout_ms": 10_000,  # two cores for all of this
        "lookup_spin_us": 100_000,
    }
    of_tier = extra_config(tmp_path / "cache", rows=8, server_timeout_ms=10_000, lookup_spin_us=100_000)
    with (
        start_server(llama_with_tokenizer, tmp_path / "first.log", of_connector, *SMALL) as first,
        start_server(llama_with_tokenizer, tmp_path / "second.log", of_tier, *SMALL, connector=TIER) as second,
    ):
        assert "disk_path is in use, shared with the engine at" in (tmp_path / "second.log").read_text()
        for client in (first, second):
            assert right(client, reference, [ids]) == [0], "neither finds the other's blocks"
            client.wait_until_idle()
        wait_until_on_disk(tmp_path / "cache", 2 * HIT // BLOCK)
        # Other prompts take vLLM's host memory and the device's cache.
        right(second, reference, FIRST)
        second.wait_until_idle()
        for client in (first, second):
            client.reset_device()
            assert right(client, reference, [ids]) == [HIT]
            client.wait_until_idle()
        # The engine ends with its process, and the tier goes on with the directory.
        os.killpg(first.server.process.pid, signal.SIGKILL)
        first.server.process.wait()
        right(second, reference, [ids, *FIRST])
        second.reset_device()
        right(second, reference, [ids])
