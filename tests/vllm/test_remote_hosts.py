"""Two hosts with disks of their own and one remote store: full attention, windows and states, over several stores."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bad_network import redis_server
from connector_engine import core
from hybrid_engine import MODELS, Model, ask
from mooncake_store import mooncake_store
from real_engine import Engine, prompt
from remote_objects import blocks_of, repeat_block
from test_remote import options, until
from undercroft import _core

pytestmark = pytest.mark.vllm

FAMILIES = {"llama": ("float32", 128, -1), **MODELS}
PROMPTS = {"llama": (4, 6), "gemma2": (3, 5), "qwen3_next": (3, 5)}
"""Blocks of two prompts. Those of full attention are whole segments."""
STORES = ["file", "redis", "s3", "mooncake"]


@contextlib.contextmanager
def store(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty store."""
    if kind == "file":
        yield f"file://{tmp_path}/remote"
    elif kind == "redis":
        with redis_server() as port:
            yield f"redis://127.0.0.1:{port}/0"
    elif kind == "mooncake":
        with mooncake_store(monkeypatch) as url:
            yield url
    elif bucket := os.environ.get("UNDERCROFT_TEST_S3"):
        yield f"{bucket}/{secrets.token_hex(8)}"
    else:
        pytest.skip("UNDERCROFT_TEST_S3 names no bucket; make test-remote starts one")


class Hosts:
    """Engines that share nothing but a store."""

    def __init__(self, model: Model, tmp_path: Path, url: str) -> None:
        self.model, self._tmp_path, self._url, self._count = model, tmp_path, url, 0

    @contextlib.contextmanager
    def start(self, **others: Any) -> Iterator[Engine]:
        """Another host."""
        self._count += 1
        running = self.model.start(options(self._tmp_path, f"host-{self._count}", remote=self._url, **others))
        try:
            # Nothing waits for a store, and Mooncake's client starts slowly on a busy machine.
            until(running, lambda _: core(running).info()["remote"]["health"] == "good")
            yield running
        finally:
            running.close()


def written(running: Engine) -> None:
    """Waits until the engine has written everything."""
    socket = core(running).arena.socket
    until(running, lambda _: bool(_core.operate(socket, {"drain": {"cancel": False}})["clean"]))
    assert core(running).stats()["remote_puts"] > 0


def model_of(request: pytest.FixtureRequest, name: str) -> Model:
    return Model(name, request.getfixturevalue(name), *FAMILIES[name])


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_host_hits_blocks_that_another_has_computed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    with store(kind, tmp_path, monkeypatch) as url:
        hosts = Hosts(model_of(request, name), tmp_path, url)
        model = hosts.model
        shorter, longest = (model.ids(blocks) for blocks in PROMPTS[name])
        whole = len(longest) - 1
        onwards = longest + prompt(model.block, seed=43)
        with hosts.start() as first:
            cold = [ask(first, ids) for ids in (shorter, longest)]
            assert not cold[0].cached
            written(first)
        with hosts.start() as second:
            for ids, expected in zip((shorter, longest), cold, strict=True):
                warm = ask(second, ids)
                assert (warm.cached, model.same(warm, expected)) == (len(ids) - 1, True)
            # The second prompt brings what the first lacks only.
            stats = core(second).stats()
            assert (stats["remote_hit_tokens"], stats["remote_corrupt"]) == (whole, 0)
            # Other weights may come with a reset: from then on, the store is not touched.
            assert second.reset_device_cache(connector=True)
            before = core(second).stats()
            assert ask(second, onwards, 1).cached == 0
            after = core(second).stats()
            used = ("remote_lookups", "remote_probes", "remote_gets", "remote_puts", "remote_put_queue_segments")
            assert [after[of] - before[of] for of in used] == [0] * len(used)
        with hosts.start() as third:
            # A longer prompt hits where the other host ended.
            assert ask(third, onwards, 1).cached == whole


@pytest.mark.parametrize("name", MODELS)
def test_without_its_windows_or_states_a_prompt_is_computed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with store("file", tmp_path, monkeypatch) as url:
        hosts = Hosts(model_of(request, name), tmp_path, url)
        model = hosts.model
        with hosts.start() as first:
            cold = ask(first, model.ids(5))
            written(first)
        ends = [path for path in (tmp_path / "remote").rglob(f"*-g{model.optional_group}") if path.is_file()]
        assert ends
        for path in ends:
            path.unlink()
        with hosts.start() as second:
            answer = ask(second, model.ids(5))
            assert (answer.cached, model.same(answer, cold)) == (0, True)


def test_blocks_at_wrong_positions_change_the_answer(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter-check: equal tokens show that each block of the store comes to its place."""
    with store("file", tmp_path, monkeypatch) as url:
        hosts = Hosts(model_of(request, "llama"), tmp_path, url)
        model = hosts.model
        with hosts.start() as first:
            cold = ask(first, model.ids(6))
            written(first)
        objects = [path for path in (tmp_path / "remote").rglob("*-*") if path.is_file() and blocks_of(path) > 1]
        assert objects
        for path in objects:
            repeat_block(path)
        with hosts.start() as second:
            warm = ask(second, model.ids(6))
            assert (warm.cached, core(second).stats()["remote_corrupt"]) == (6 * model.block, 0)
            assert not model.same(warm, cold)
