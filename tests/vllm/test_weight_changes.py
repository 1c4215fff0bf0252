"""Weights that change in the process: nobody else finds what the changed vLLM saves, and no restart does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connector_engine import LONG, OTHER, TOKENS, References, core, settled, worker
from real_engine import Engine, prompt
from served_client import until

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
MIB = 1 << 20
HIT = 896
"""Tokens of the whole blocks of `LONG`."""
FILL = prompt(897, seed=8)
"""Takes the place of every other prompt on a small device."""
SMALL: dict[str, Any] = {"blocks": 12, "max_model_len": 1280}
"""A device with room for one prompt."""


def disk(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"host_memory": "64MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB", **more}


def scale(model: Any) -> None:
    """Other weights: every token that the model generates changes."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layernorm" in name:
                weight.mul_(torch.linspace(-2, 2, weight.numel()))


def update(of_worker: Any) -> None:
    """A trainer's function, as ``collective_rpc`` sends it to the workers."""
    scale(of_worker.model_runner.model)


def by_function(one: Engine) -> None:
    one.core.collective_rpc(update)


def by_model(one: Engine) -> None:
    one.llm.apply_model(scale)


def of_a_draft(one: Engine) -> None:
    """This vLLM has neither a draft model nor a weight transfer. The call counts even if it fails."""
    with pytest.raises(RuntimeError):
        one.core.collective_rpc("start_draft_weight_update")
    scale(one.core.model_executor.driver_worker.worker.get_model())


def by_loading(one: Engine) -> None:
    """A trainer in vLLM's process loads weights into the model, without a call to vLLM."""
    model = one.core.model_executor.driver_worker.worker.get_model()
    model.load_weights(iter(()))
    scale(model)


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (OTHER, TOKENS), (FILL, 1))


@pytest.fixture(scope="module")
def updated(llama: Path) -> dict[tuple[int, ...], list[int]]:
    """The tokens of a vLLM without any cache whose weights were updated."""
    plain = Engine(llama, enable_prefix_caching=False)
    try:
        plain.core.collective_rpc(update)
        return {tuple(ids): plain.generate(ids, TOKENS).tokens for ids in (LONG, OTHER)}
    finally:
        plain.close()


def stop(one: Engine) -> None:
    """Stop an engine whose blocks are written."""
    settled(one, reset=False)
    core(one).flush(30.0)
    one.close()


@pytest.mark.parametrize("change", [by_function, by_model, of_a_draft, by_loading])
def test_no_restart_finds_blocks_of_updated_weights(
    engine: Make,
    llama: Path,
    tmp_path: Path,
    reference: References,
    updated: dict[tuple[int, ...], list[int]],
    change: Callable[[Engine], None],
) -> None:
    one = engine(llama, disk(tmp_path, remote=f"file://{tmp_path}/remote", remote_object="1MiB"))
    assert one.generate(OTHER, TOKENS).tokens == reference(OTHER)
    settled(one, reset=False)
    # A trainer that keeps the prefix cache.
    one.core.pause_scheduler("keep", False)
    change(one)
    one.core.resume_scheduler()
    assert one.generate(LONG[::-1], TOKENS).cached == 0
    first = one.generate(LONG, TOKENS)
    # vLLM itself keeps the device's blocks of the old weights.
    assert first.cached == 640
    until("nothing is to be put", lambda: core(one).stats()["remote_put_queue_segments"] == 0)
    stop(one)
    # On another host with the same remote store, and then on this disk alone.
    remote = {"remote": f"file://{tmp_path}/remote", "remote_object": "1MiB"}
    for cache, more in (("elsewhere", remote), ("cache", {})):
        two = engine(llama, {**disk(tmp_path), "disk_path": str(tmp_path / cache), **more})
        for ids in (LONG, OTHER):
            answer = two.generate(ids, TOKENS)
            # Blocks from before the update are found: they are the files' weights'. The store has whole segments.
            assert 0 < answer.cached <= (640 if ids is LONG else 1152), cache
            assert answer.tokens == reference(ids), cache
            settled(two)
        assert two.generate(LONG[::-1], TOKENS).cached == 0, cache
        stop(two)


def test_calls_that_leave_the_weights_keep_sharing(engine: Make, llama: Path, tmp_path: Path) -> None:
    one = engine(llama, disk(tmp_path))
    one.core.compute_weight_checksums()
    for call in ("check_health", "get_model_inspection", "reset_mm_cache", "synchronize_device"):
        one.core.collective_rpc(call)
    one.generate(LONG, 1)
    assert not one.connector._scheduler.origin.is_private
    stop(one)
    assert engine(llama, disk(tmp_path)).generate(LONG, 1).cached == HIT


def test_hits_of_the_updated_vllm_go_on_until_a_reset(
    engine: Make, llama: Path, updated: dict[tuple[int, ...], list[int]]
) -> None:
    one = engine(llama, {"host_memory": "64MiB"}, blocks=9, max_model_len=1024)
    one.generate(LONG, 1)
    one.generate(FILL, 1)
    settled(one, reset=False)
    for cached in (0, HIT, HIT):
        # Each update is another training step, with the same weights here.
        one.core.collective_rpc(update if not cached else (lambda worker: None))
        answer = one.generate(LONG, TOKENS)
        assert (answer.cached, answer.tokens) == (cached, updated[tuple(LONG)])
        one.generate(FILL, 1)
        settled(one, reset=False)
    # The documented reset after an update.
    assert one.reset_device_cache()
    answer = one.generate(LONG, TOKENS)
    assert (answer.cached, answer.tokens) == (0, updated[tuple(LONG)])


def test_a_save_under_way_at_the_update_is_nobody_elses(
    engine: Make, llama: Path, tmp_path: Path, reference: References
) -> None:
    one = engine(llama, disk(tmp_path))
    half = worker()
    collect, half._collect = half._collect, lambda: None
    one.generate(LONG, 1)
    assert len(one.connector._scheduler.saves) == 1
    one.core.collective_rpc(update)
    half._collect = collect
    settled(one, reset=False)
    stats = core(one).stats()
    assert (stats["given_up_saves_weights"], stats["save_failures"], stats["saved_blocks"]) == (1, 0, 0)
    stop(one)
    two = engine(llama, disk(tmp_path))
    answer = two.generate(LONG, TOKENS)
    assert (answer.cached, answer.tokens) == (0, reference(LONG))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    from undercroft import _core

    socket = str(tmp_path / "serve.sock")
    one = _core.Engine({"host_memory": 64 * MIB, "socket": socket})
    yield one
    one.close()


class Neighbour:
    """Another vLLM with the same model, on the same server or the same directory."""

    def __init__(self, one: Engine, options: dict[str, Any]) -> None:
        from undercroft.config import UndercroftConfig
        from undercroft.connector.groups import Groups
        from undercroft.device.layout import group_shard_bytes
        from undercroft.engine import open_engine
        from undercroft.identity.namespace import describe

        config, of_model = one.llm.llm_engine.vllm_config, one.connector._kv_cache_config
        groups = Groups.of(config, of_model)
        registration = groups.registration([group_shard_bytes(of_model, index) for index in range(len(groups.kinds))])
        self._engine = open_engine(UndercroftConfig.parse(options), ranks=1)
        self.session = self._engine.register(
            describe(config, of_model), registration, groups.engine_block_size, groups.alignment, groups.dropped_tokens
        )
        until("connected", lambda: self._engine.connection()[0] == "up")
        self._asked = 0

    def finds(self, hashes: list[bytes]) -> int:
        """The tokens of a prompt that this vLLM could load."""
        self._asked += 1
        name = f"question {self._asked}"
        answer = self.session.lookup(name, hashes)
        while answer.pending:
            self.session.wait(name, 1.0)
            answer = self.session.lookup(name, hashes)
        self.session.finish_request(name)
        return answer.tokens

    def close(self) -> None:
        self._engine.close()


@pytest.mark.parametrize("kind", ["server", "directory"])
def test_the_other_vllm_never_sees_blocks_of_the_updated_one(
    engine: Make, llama: Path, tmp_path: Path, server: Any, kind: str
) -> None:
    patient = {"server_timeout_ms": 30_000, "lookup_spin_us": 100_000}
    options = {"server": f"unix://{server.arena.socket}"} if kind == "server" else disk(tmp_path)
    one = engine(llama, {**options, **patient}, **SMALL)
    until("connected", lambda: core(one).connection()[0] == "up")
    hashes: dict[str, list[bytes]] = {}
    seen = one.connector._scheduler.on_new_request
    one.connector._scheduler.on_new_request = lambda request: (
        hashes.setdefault(str(len(hashes)), request.block_hashes),
        seen(request),
    )[1]
    neighbour = Neighbour(one, {**options, **patient})
    try:
        one.generate(LONG, 1)
        one.idle_steps()
        until("saved", lambda: neighbour.finds(hashes["0"]) == HIT)
        one.core.collective_rpc(update)
        one.generate(FILL, 1)
        one.idle_steps()
        one.generate(OTHER, 1)
        one.idle_steps()
        # Its own hits go on.
        until("saved", lambda: one.connector._scheduler.idle())
        assert one.generate(FILL, 1).cached == HIT
        one.idle_steps()
        assert [neighbour.finds(hashes[name]) for name in ("0", "1", "2")] == [HIT, 0, 640]
    finally:
        neighbour.close()


def test_versions_of_the_weights_are_cached_by_name(
    engine: Make, llama: Path, tmp_path: Path, reference: References, updated: dict[tuple[int, ...], list[int]]
) -> None:
    options = disk(tmp_path, share_weight_versions=True)

    def step(one: Engine, version: str) -> None:
        """A training step as the frameworks do it."""
        one.core.pause_scheduler(clear_cache=True)
        one.core.collective_rpc(update)
        one.core.set_weight_version(version)
        one.core.resume_scheduler()

    for cached in (0, HIT):
        one = engine(llama, options)
        base = one.generate(LONG, TOKENS)
        assert (base.cached, base.tokens) == (cached, reference(LONG))
        settled(one, reset=False)
        step(one, "step 1")
        first = one.generate(LONG, TOKENS)
        assert (first.cached, first.tokens) == (cached, updated[tuple(LONG)])
        settled(one, reset=False)
        # A change without a name is nobody else's, and ends what the name stands for.
        one.core.collective_rpc(update)
        assert one.reset_device_cache()
        assert one.generate(LONG, TOKENS).cached == 0
        stop(one)
