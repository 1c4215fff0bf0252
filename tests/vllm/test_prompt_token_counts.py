"""Each prompt token of a real engine counts once, and as vLLM's own metrics count it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_checks import nothing_left
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

OURS = ("asked_tokens", "device_tokens", "hit_tokens", "missed_tokens")
BY_SOURCE = "vllm:prompt_tokens_cached_by_source"


class Counted:
    """The counters of an engine since this was made: those of undercroft by name and label, and some of vLLM."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: dict[tuple[str, str], float] = {}
        self._before = self.now()

    def now(self) -> dict[tuple[str, str], float]:
        """Those that are not zero."""
        nothing_left(self._engine, reset=False)
        self._engine.generate([3], 1)  # changes travel with a step
        found = {}
        for metric in self._engine.llm.get_metrics():
            name = metric.name.removeprefix("vllm:undercroft_")
            if name in (*OURS, BY_SOURCE, "vllm:prompt_tokens", "hook_errors"):
                label = next((metric.labels[key] for key in ("tier", "reason", "source") if key in metric.labels), "")
                if value := metric.value - self._before.get((name, label), 0):
                    found[name, label] = value
        return found

    def by_cause(self) -> dict[str, float]:
        """The parts of the tokens asked for, without those at the ends of prompts. Checks the sum, and the hits against
        vLLM's."""
        found = self.now()
        assert found[OURS[0], ""] == found["vllm:prompt_tokens", ""]
        parts = {label or name: count for (name, label), count in found.items() if name in OURS[1:]}
        assert sum(parts.values()) == found[OURS[0], ""]
        for name, label, source in (
            ("device_tokens", "", "device"),
            ("hit_tokens", "host", "host"),
            ("hit_tokens", "disk", "disk"),
            ("hit_tokens", "remote", "external_unspecified"),
        ):
            assert found.get((name, label)) == found.get((BY_SOURCE, source)), name
        assert ("hook_errors", "") not in found
        assert parts.pop("prompt_end") > 0
        return parts


def test_each_token_of_a_prompt_counts_once(engine: Callable[..., Engine], llama: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "host_memory": "64MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "64MiB", "early_prefetch": False,
    }  # fmt: skip
    block = 128
    first, second = prompt(7 * block + 1), prompt(5 * block + 9, 1)
    one = engine(llama, options, blocks=64)
    counted = Counted(one)
    one.generate_all([first, second], 1)
    assert counted.by_cause() == {"never_seen": 12 * block}
    # From the device, with a new end; from host memory.
    counted = Counted(one)
    one.generate([*first[: 3 * block], *prompt(2 * block + 5, 2)], 1)
    assert counted.by_cause() == {"device_tokens": 3 * block, "never_seen": 2 * block}
    assert one.reset_device_cache()
    counted = Counted(one)
    one.generate_all([first, second], 1)
    one.generate(first, 1, prompt_logprobs=1)
    assert counted.by_cause() == {"host": 12 * block, "not_looked_up": 7 * block}
    # Rules and the dashboard of deploy/ ask for it.
    assert "vllm:time_to_first_token_seconds" in {metric.name for metric in one.llm.get_metrics()}
    one.close()
    two = engine(llama, options, blocks=64)
    counted = Counted(two)
    two.generate_all([second, prompt(3 * block, 3)], 1)
    assert counted.by_cause() == {"disk": 5 * block, "never_seen": 3 * block - 1}


@pytest.mark.parametrize(("model", "blocks"), [("llama", 24), ("gemma2", 24), ("qwen3_next", 12)])
def test_the_sum_holds_where_requests_are_preempted_and_share_prefixes(
    engine: Callable[..., Engine], model: str, blocks: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    options = {"host_memory": "64MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB"}
    one = engine(request.getfixturevalue(model), options, blocks=blocks, max_model_len=1200, dtype="bfloat16")
    counted = Counted(one)
    ends = iter(range(100))
    for turn in range(4):
        size = 300 + 211 * turn
        one.generate_all([[*prompt(size, seed), *prompt(60, 10 + next(ends))] for seed in (0, 0, 1, 2)], 140)
        if turn % 2:
            one.idle_steps()
            assert one.reset_device_cache()
    parts = counted.by_cause()
    assert parts.keys() > {"never_seen"}, parts
    assert any(metric.name == "vllm:num_preemptions" and metric.value for metric in one.llm.get_metrics())
