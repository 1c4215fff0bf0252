"""Resets at every point of a load and of a save: vLLM answers as without undercroft, and nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_engine import LONG, MEMORY, TOKENS, References, core, settled, worker
from modelled_vllm import BLOCK, Vllm, continuation, vllm
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
OPTIONS = {"host_memory": "16MiB", "promotion_wait": "complete", "min_load_tokens": 1}
RUNNING = prompt(300, seed=5)


def ids(seed: int, blocks: int = 6) -> list[int]:
    """A prompt of whole blocks and some tokens."""
    return [random.Random(seed).randrange(50) for _ in range(blocks * BLOCK)] + [1, 2, 3]


def stats(one: Vllm) -> dict[str, float]:
    return one.scheduler.connector._engine.stats()


def at_rest(one: Vllm) -> None:
    one.run(limit=300)
    assert one.blocks_in_use() == 0
    assert one.scheduler.connector._scheduler.idle()
    found = stats(one)
    assert (found["loads"], found["saves"], found["active_lookups"]) == (0, 0, 0)
    assert (found["load_failures"], found["save_failures"]) == (0, 0)
    assert not one.scheduler.connector._counts.collect().get("counters", {}).get("hook_errors")


def scenario(one: Vllm, faults: dict[str, float], at: int, *, connector: bool) -> bool:
    """Load a prompt beside a running request, and reset after ``at`` steps. Returns whether a load was under way."""
    for name in ("saved", "aborted"):
        one.add(name, ids(len(name)), 1)
        one.run()
        assert one.scheduler.reset_prefix_cache()
    # Copies take some steps.
    faults["delay"] = 0.7
    one.add("running", ids(1, 2), 12)
    one.step()
    one.add("loaded", ids(len("saved")), 5)
    one.add("twin", ids(len("saved")), 5)
    one.add("leaves", ids(len("aborted")), 5)
    for step in range(at):
        one.step()
        if step == 1:
            one.abort("leaves")
    loading = len(one.scheduler.connector._scheduler._loading)
    one.drain()
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=connector) is True
    one.add("after", ids(len("saved")), 5)
    at_rest(one)
    for name, wanted in (("running", ids(1, 2)), ("loaded", ids(5)), ("twin", ids(5)), ("after", ids(5))):
        count = 12 if name == "running" else 5
        assert one.outputs[name] == continuation(wanted, count), name
    return loading > 0


@pytest.mark.parametrize("connector", [False, True], ids=["device", "both"])
@pytest.mark.parametrize(
    "shape",
    [{"kinds": "f"}, {"kinds": "f", "ranks": 2, "ahead": 1}, {"kinds": "wf"}, {"kinds": "sf", "max_model_len": 320}],
    ids=["full", "ranks", "window", "state"],
)
def test_a_reset_at_every_step_of_loads_and_saves(llama: Path, shape: dict[str, Any], connector: bool) -> None:
    overtaken = 0
    for at in range(9):
        faults: dict[str, float] = {}
        with vllm(llama, OPTIONS, random.Random(at), faults=faults, blocks=80, **shape) as one:
            overtaken += scenario(one, faults, at, connector=connector)
    assert overtaken >= 2, "some resets came while loads were under way"


def hold_in_the_tiers_only(one: Vllm, faults: dict[str, float]) -> None:
    """Save a prompt and drop it from the device. Copies are slow from now on."""
    one.add("saved", ids(1), 1)
    one.run()
    assert one.scheduler.reset_prefix_cache()
    faults["delay"] = 1.0


def test_requests_whose_loads_a_reset_overtakes_are_looked_up_again(llama: Path) -> None:
    faults: dict[str, float] = {}
    with vllm(llama, OPTIONS, random.Random(0), faults=faults) as one:
        hold_in_the_tiers_only(one, faults)
        one.add("loaded", ids(1), 5)
        for _ in range(3):
            one.step()
        assert one.scheduler.reset_prefix_cache(reset_running_requests=True) is True
        faults["delay"] = 0.0
        at_rest(one)
        assert one.outputs["loaded"] == continuation(ids(1), 5)
        assert one.cached["loaded"] == 6 * BLOCK, "the tiers still hold the prompt"
        found = stats(one)
        assert found["given_up_loads_reset"] == 1


def test_a_reset_of_the_tiers_gives_loads_up_where_vllm_keeps_its_own_cache(llama: Path) -> None:
    """A running request holds blocks, so vLLM refuses its own part. No block of the tiers reaches the device after the
    call all the same: the weights may have changed before it."""
    faults: dict[str, float] = {}
    with vllm(llama, OPTIONS, random.Random(0), faults=faults) as one:
        hold_in_the_tiers_only(one, faults)
        one.add("running", ids(2), 12)
        one.step()
        one.add("loaded", ids(1), 5)
        for _ in range(3):
            one.step()
        assert list(one.scheduler.connector._scheduler._loading) == ["loaded"]
        assert one.scheduler.reset_prefix_cache(reset_connector=True) is False
        faults["delay"] = 0.0
        at_rest(one)
        assert one.outputs["loaded"] == continuation(ids(1), 5)
        assert one.cached["loaded"] == 0
        assert stats(one)["given_up_loads_reset"] == 1


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (RUNNING, TOKENS))


def answers(one: Engine, copies_run: Callable[[bool], None]) -> list[Any]:
    """What a trainer's calls return while a load is under way, and after an abort of its request."""
    from vllm import SamplingParams

    llm = one.llm.llm_engine

    def add(name: str, tokens: list[int], count: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
        llm.add_request(name, {"prompt_token_ids": tokens}, sampling)

    one.generate(LONG, 1)
    one.idle_steps()
    one.reset_device_cache()
    copies_run(False)
    add("running", RUNNING, 60)
    for _ in range(2):
        llm.step()
    add("loaded", LONG, 4)
    for _ in range(2):
        llm.step()
    returned: list[Any] = [one.core.reset_prefix_cache(True, False)]
    llm.abort_request(["running", "loaded"])
    returned.append(one.core.pause_scheduler("abort", True))
    one.core.resume_scheduler()
    returned.append(one.core.sleep(1))
    returned.append(one.core.wake_up())
    returned.append(one.core.is_scheduler_paused())
    copies_run(True)
    return returned


def test_a_trainers_calls_return_as_in_vllm_alone(engine: Make, llama: Path, reference: References) -> None:
    alone = engine(llama, None)
    wanted = answers(alone, lambda runs: None)
    alone.close()
    one = engine(llama, MEMORY)
    half = worker()
    collect = half._collect

    def copies_run(runs: bool) -> None:
        # As of a slow device: the ends of copies are noticed later.
        half._collect = collect if runs else lambda: None

    assert answers(one, copies_run) == wanted
    settled(one)
    assert one.generate(LONG, TOKENS).tokens == reference(LONG)
    settled(one)


def test_a_reset_while_a_save_runs_is_no_failure(engine: Make, llama: Path) -> None:
    one = engine(llama, MEMORY)
    half = worker()
    collect, half._collect = half._collect, lambda: None
    one.generate(LONG, 1)
    assert one.reset_device_cache()
    half._collect = collect
    settled(one)
    found = core(one).stats()
    assert (found["save_failures"], found["given_up_saves_reset"]) == (0, 1)
