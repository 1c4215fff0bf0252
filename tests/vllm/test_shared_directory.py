"""Real vLLM processes that share one cache with no set-up: the same directory is enough."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engine_checks import Reference
from real_engine import prompt
from threshold_http import Client, start_server, the_choice, wait_until_on_disk
from undercroft.demo.server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

TOKENS = 8
PROMPTS = [prompt(897, seed=90 + seed) for seed in range(3)]
HIT = 896
BLOCK = 128
SMALL = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", "128", "--max-num-seqs", "4")
EXPERTS = ("--enable-expert-parallel", "--worker-extension-cls", "cpu_experts.Experts")


def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "host_memory": "64MiB",
        "disk_path": str(tmp_path / "cache"),
        "disk_capacity": "256MiB",
        "server_timeout_ms": 10_000,  # two cores for all of this
        "lookup_spin_us": 100_000,
    }


def sizes_at_start(log: Path) -> list[str]:
    """The host memory that each engine reported as it started."""
    return re.findall(r"host memory ([\d.]+ \w+)", log.read_text())


def ask(client: Client, ids: list[int], **headers: str) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were cached."""
    answer = client.complete(ids, TOKENS, headers=headers)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return the_choice(answer)["token_ids"], details.get("cached_tokens") or 0


def test_two_servers_share_a_directory_and_one_takes_it_over(
    llama_with_tokenizer: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    config = options(tmp_path)
    with (
        start_server(llama_with_tokenizer, tmp_path / "first.log", config, *SMALL, start=Server) as first,
        start_server(llama_with_tokenizer, tmp_path / "second.log", config, *SMALL) as second,
    ):
        assert "disk_path is in use, shared with the engine at" in (tmp_path / "second.log").read_text()
        assert ask(first, PROMPTS[0]) == (expected[0], 0)
        first.wait_until_idle()
        assert ask(second, PROMPTS[0]) == (expected[0], HIT)
        assert ask(second, PROMPTS[1]) == (expected[1], 0)
        # Then the owner knows of them, too, and they survive its end.
        wait_until_on_disk(tmp_path / "cache", 2 * HIT // BLOCK)
        assert ask(first, PROMPTS[1]) == (expected[1], HIT)
        first.wait_until_idle()
        os.killpg(first.server.process.pid, signal.SIGKILL)
        first.server.process.wait()
        # A hit, or a miss while no engine owns the directory: never anything else, and no error.
        deadline = time.monotonic() + 120
        while ask(second, PROMPTS[2])[1] == 0:
            assert time.monotonic() < deadline
            second.reset_device()
        second.reset_device()
        found = [ask(second, ids) for ids in PROMPTS]
        assert [tokens for tokens, _ in found] == expected
        assert [cached for _, cached in found] == [HIT] * len(PROMPTS)
        assert second.metric("vllm:undercroft_hook_errors_total") == 0
        assert "this process now owns the directory" in (tmp_path / "second.log").read_text()


@pytest.mark.parametrize(("name", "arguments"), [("llama_with_tokenizer", ()), ("mixtral", EXPERTS)])
def test_data_parallel_ranks_share_one_cache(
    name: str,
    arguments: tuple[str, ...],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # vLLM 0.33 gives each rank a memory node of its own, and does not start where there is one; unless this is set.
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")
    model = request.getfixturevalue(name)
    plain = Reference(model)
    expected = [plain(ids, TOKENS) for ids in PROMPTS[:2]]
    plain.close()
    ranks = ("--data-parallel-size", "2", *arguments, *SMALL)
    with start_server(model, tmp_path / "server.log", options(tmp_path), *ranks) as client:
        assert sizes_at_start(tmp_path / "server.log") == ["64 MiB", "64 MiB"], "the second is the first one's"
        assert "shared with the engine at" in (tmp_path / "server.log").read_text()
        for number, ids in enumerate(PROMPTS[:2]):
            one, other = {"X-data-parallel-rank": str(number)}, {"X-data-parallel-rank": str(1 - number)}
            assert ask(client, ids, **one) == (expected[number], 0)
            wait_until_on_disk(tmp_path / "cache", (number + 1) * HIT // BLOCK)
            assert ask(client, ids, **other) == (expected[number], HIT)


def test_data_parallel_ranks_without_a_disk_divide_the_memory(
    llama_with_tokenizer: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")
    expected = reference(PROMPTS[0], TOKENS)
    ranks = ("--data-parallel-size", "2", *SMALL)
    with start_server(llama_with_tokenizer, tmp_path / "server.log", {"host_memory": "64MiB"}, *ranks) as client:
        assert sizes_at_start(tmp_path / "server.log") == ["32 MiB", "32 MiB"]
        assert ask(client, PROMPTS[0], **{"X-data-parallel-rank": "0"}) == (expected, 0)
        client.reset_device()
        assert ask(client, PROMPTS[0], **{"X-data-parallel-rank": "0"}) == (expected, HIT)
