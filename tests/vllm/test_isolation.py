"""Adapters and salts do not share a cache. Blocks that a sleeping engine forgets are still cached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_checks import BLOCK, Reference, nothing_left, stats, worker
from real_engine import Engine, prompt
from undercroft.identity import adapters

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
MEMORY = {"host_memory": "64MiB"}
IDS = prompt(5 * BLOCK + 1, seed=4)
HIT = 5 * BLOCK


def make_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter strong enough to change the tokens: rank 8 on queries and values."""
    directory.mkdir()
    torch.manual_seed(seed)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(4):
        for name, rows in (("q_proj", 256), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 256) / 16
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 8)
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    return directory


def test_adapters_are_kept_apart(engine: Make, llama: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    adapters = [
        None,
        *(LoRARequest(f"adapter{i}", i, str(make_adapter(tmp_path / f"adapter{i}", i))) for i in (1, 2)),
    ]
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "blocks": 64}

    plain = engine(llama, enable_prefix_caching=False, **lora)
    expected = [plain.generate(IDS, 16, lora_request=adapter).tokens for adapter in adapters]
    plain.close()
    assert len({tuple(tokens) for tokens in expected}) == 3

    one = engine(llama, MEMORY, **lora)
    for cached in (0, HIT):
        for adapter, tokens in zip(adapters, expected, strict=True):
            answer = one.generate(IDS, 16, lora_request=adapter)
            assert (answer.cached, answer.tokens) == (cached, tokens)
            nothing_left(one)
    assert stats(one)["host_blocks"] == 3 * HIT // BLOCK


def test_an_adapter_that_was_trained_again_in_its_place_is_another(engine: Make, llama: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "blocks": 64}
    disk = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    path = tmp_path / "sql"
    adapter = LoRARequest("sql", 1, str(path))
    answers = []
    # Twice the first weights, then others under the same name and path; the last engine is without undercroft.
    for seed, options in ((1, disk), (1, disk), (2, disk), (2, None)):
        if seed == 2 and len(answers) == 2:
            shutil.rmtree(path)
        if not path.exists():
            make_adapter(path, seed)
        one = engine(llama, options, **lora)
        answers.append(one.generate(IDS, 16, lora_request=adapter))
        if options:
            nothing_left(one)
        one.close()
    assert [answer.cached for answer in answers[:3]] == [0, HIT, 0]
    assert answers[1].tokens == answers[0].tokens != answers[2].tokens == answers[3].tokens


def test_an_adapter_that_changes_under_a_process_is_nobody_elses(
    engine: Make, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.request import LoRARequest

    monkeypatch.setattr(adapters, "_LOOK_AGAIN_S", 0.0)

    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "blocks": 64}
    adapter = LoRARequest("chat", 1, str(make_adapter(tmp_path / "chat", 3)))
    one = engine(llama, MEMORY, **lora)
    assert one.generate(IDS, 1, lora_request=adapter).cached == 0
    nothing_left(one)
    make_adapter(tmp_path / "other", 4)
    (tmp_path / "other" / "adapter_model.safetensors").replace(tmp_path / "chat" / "adapter_model.safetensors")
    # The worker's weights are unknown: blocks that are saved now are found in this process only.
    assert one.generate(IDS, 1, lora_request=adapter).cached == 0
    nothing_left(one)
    assert one.generate(IDS, 1, lora_request=adapter).cached == HIT


def test_salts_are_kept_apart(engine: Make, llama: Path) -> None:
    one = engine(llama, MEMORY, blocks=64)
    for cached in (0, HIT):
        for salt in (None, "one", "two"):
            assert one.generate(IDS, 1, cache_salt=salt).cached == cached
            nothing_left(one)
    assert stats(one)["host_blocks"] == 3 * HIT // BLOCK


def test_requests_may_ask_not_to_read(engine: Make, llama: Path) -> None:
    """Prompt log probabilities need every token computed."""
    one = engine(llama, MEMORY, blocks=64)
    cold = one.generate(IDS, 4, prompt_logprobs=1)
    nothing_left(one)
    again = one.generate(IDS, 4, prompt_logprobs=1)
    assert (again.cached, again.tokens) == (0, cold.tokens)
    nothing_left(one)
    assert one.generate(IDS, 4).cached == HIT


def test_sleep_and_wake_up(engine: Make, llama: Path, reference: Reference) -> None:
    """Sleep from level 1 on drops every cache, undercroft's too, as vLLM demands: weights may be others afterwards.

    The CPU platform keeps its memory, so the hooks around its loss (vLLM 0.33 calls them) are called by hand.
    """
    one = engine(llama, MEMORY, blocks=64)
    one.generate(IDS, 1)  # its saves are still under way
    for _ in range(2):
        one.llm.sleep(level=1)
        worker().unregister_kv_caches()
        worker().unregister_kv_caches()
        for cache in one.core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.zero_()
        worker().restore_kv_caches()
        worker().restore_kv_caches()
        one.llm.wake_up()
        answer = one.generate(IDS, 16)
        assert (answer.cached, answer.tokens) == (0, reference(IDS, 16))
        nothing_left(one)
    one.llm.sleep(level=0)  # only a pause
    one.llm.wake_up()
    answer = one.generate(IDS, 16)
    assert (answer.cached, answer.tokens) == (HIT, reference(IDS, 16))
    nothing_left(one)


def test_a_checkpoint_of_the_device_loses_no_block(engine: Make, llama: Path, reference: Reference) -> None:
    """vLLM lets a tool suspend the device: the worker holds no host memory then, and has it again afterwards."""
    one = engine(llama, MEMORY, blocks=64)
    one.generate(IDS, 1)  # its saves are still under way
    one.core.collective_rpc("checkpoint_prepare")
    assert worker()._arena.attached is None
    one.core.collective_rpc("checkpoint_restore")
    nothing_left(one)
    answer = one.generate(IDS, 16)
    assert (answer.cached, answer.tokens) == (HIT, reference(IDS, 16))
    nothing_left(one)
    assert worker()._arena.attached is not None
    assert (stats(one)["load_failures"], stats(one)["save_failures"]) == (0, 0)
