"""``undercroft bench lookup --pending``: a scheduler's step that asks for requests whose reads are pending."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

from undercroft.cli.output import CommandError
from undercroft_bench.lookup import Group, save

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft._core import Engine, Session
    from undercroft.config import UndercroftConfig
    from undercroft.connector.connector import UndercroftConnector

BLOCK_TOKENS = 128
BLOCKS = 8
"""Blocks of each prompt."""
PAYLOAD_BYTES = 4096
CROWD_S = 4.0
"""How long the engine is asked for all requests."""


def measure(pending: int) -> dict[str, Any]:
    """Cost of the hook that vLLM calls once in a step for each of ``pending`` waiting requests.

    The prefixes lie on disk, and reads may hold one block, which the first request keeps: the others wait.
    """
    from undercroft.config import UndercroftConfig
    from undercroft.engine import open_engine

    with tempfile.TemporaryDirectory(prefix="undercroft-bench-") as directory:
        payloads = (pending + 1) * BLOCKS * PAYLOAD_BYTES
        options = {
            "host_memory": 2 * payloads + (64 << 20),
            "disk_path": directory,
            "disk_capacity": 2 * payloads + (64 << 20),
            "promotion_memory": PAYLOAD_BYTES,
            # All wait to the end: a plan would have the first ones computed meanwhile.
            "promotion_wait": "complete",
        }
        config = UndercroftConfig.parse(options, {})
        prompts = [[index * 7919 + at for at in range(BLOCKS * BLOCK_TOKENS + 1)] for index in range(pending + 1)]
        _fill(open_engine(config), prompts)
        steps = _crowd(open_engine(config), config, prompts)
    return {
        "mode": "embedded",
        "pending": pending,
        "steps": len(steps),
        "step_ms": statistics.median(steps) / 1e6,
        "step_p99_ms": statistics.quantiles(steps, n=100)[98] / 1e6,
    }


def _hashes(prompt: list[int]) -> list[bytes]:
    hashes, parent = [], b""
    for start in range(0, BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS):
        parent = hashlib.sha256(parent + repr(prompt[start : start + BLOCK_TOKENS]).encode()).digest()
        hashes.append(parent)
    return hashes


def _session(engine: Engine) -> Session:
    return engine.register("undercroft bench lookup", [Group("full", BLOCK_TOKENS, PAYLOAD_BYTES)], BLOCK_TOKENS)


def _fill(engine: Engine, prompts: list[list[int]]) -> None:
    """Put every prompt's blocks on disk, and close the engine."""
    try:
        session = _session(engine)
        for index, prompt in enumerate(prompts):
            save(session, str(index), _hashes(prompt), BLOCKS * BLOCK_TOKENS)
        if not engine.flush(60.0):
            raise CommandError("the disk did not take all blocks within a minute")
    finally:
        engine.close()


def _crowd(engine: Engine, config: UndercroftConfig, prompts: list[list[int]]) -> list[float]:
    """Nanoseconds of the steps in which all requests but the first wait. Closes the engine."""
    from vllm.v1.core.sched.output import SchedulerOutput

    connector, idle = _connector(engine, config), SchedulerOutput.make_empty()
    scheduler = connector._scheduler
    assert scheduler is not None
    try:
        first, *waiting = (_request(f"cmpl-{index:032x}-0-8864979c", prompt) for index, prompt in enumerate(prompts))
        scheduler.on_new_request(first)
        while connector.get_num_new_matched_tokens(first, 0)[0] is None:
            pass
        for request in waiting:
            scheduler.on_new_request(request)
        steps: list[float] = []
        end = time.perf_counter() + CROWD_S
        # The first step is not counted.
        while time.perf_counter() < end or len(steps) < 2:
            start = time.perf_counter_ns()
            for request in waiting:
                connector.get_num_new_matched_tokens(request, 0)
            steps.append(float(time.perf_counter_ns() - start))
            scheduler.build_connector_meta(idle)
        if any(connector.get_num_new_matched_tokens(request, 0)[0] is not None for request in waiting):
            raise CommandError("some requests did not wait: this machine is too slow for so many")
    finally:
        connector.shutdown()
    # The first step looks the prompts up.
    return steps[1:]


def _connector(engine: Engine, config: UndercroftConfig) -> UndercroftConnector:
    """The scheduler's connector as vLLM has it, without a vLLM around it."""
    from undercroft.connector.announcement import Announcement
    from undercroft.connector.connector import UndercroftConnector
    from undercroft.connector.groups import Groups
    from undercroft.connector.observe.stats import Counts
    from undercroft.connector.scheduler.scheduler import SchedulerConnector
    from undercroft.log import LogOnce
    from undercroft.threshold import HitThreshold

    connector = UndercroftConnector.__new__(UndercroftConnector)
    connector._engine, connector._worker, connector._recorder = engine, None, None
    connector._explanations, connector._shadow, connector._engine_stats = None, None, None
    connector._announcement = Announcement(config, "bench")
    connector._counts, connector._log_once = Counts(), LogOnce()
    connector._threshold, connector._is_child = HitThreshold(config.cache_hit_threshold), False
    groups = Groups(BLOCK_TOKENS, BLOCK_TOKENS, ("full",), (BLOCK_TOKENS,), (0,), 0)
    connector._scheduler = SchedulerConnector(
        _session(engine), groups, config, 1, lambda: engine.arena, connector._counts, connector._report
    )
    return connector


def _request(name: str, prompt: list[int]) -> Request:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    hashes = _hashes(prompt)
    return Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=lambda request: hashes)
