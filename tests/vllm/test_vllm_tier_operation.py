"""Operators of undercroft as a tier of vLLM's offloading: the commands see it, and a hung disk holds nothing up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from connector_engine import LONG, OTHER, TOKENS, References
from engine_checks import add, finish, inject_faults, step, step_until
from real_engine import Engine, prompt
from serve_process import ServeProcess
from served_client import until
from test_engine_with_server import PATIENT
from tier_engine import OFFLOADING, Make, extra_config, hits, saved, settled, stats, tier_of
from undercroft.cli import main
from undercroft.vllm_tier import prompts

APART = prompt(897, seed=90)
"""Shares no chunk with `LONG`."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (OTHER, TOKENS), (APART, TOKENS))


def said(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    """The answer of a command as JSON."""
    capsys.readouterr()
    main.main([*command, "--json"])
    return dict(json.loads(capsys.readouterr().out))


def test_status_and_explain_show_the_tier(
    engine: Make, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = extra_config(tmp_path / "cache")
    saved(engine, llama, options, LONG)
    one = engine(llama, options, **OFFLOADING)
    one.generate(OTHER, 1)
    settled(one)
    place = ("--disk-path", str(tmp_path / "cache"))
    [lookup] = said(capsys, "explain", *place)["lookups"]
    found = {name: lookup[name] for name in ("device_tokens", "found_tokens", "hit_tokens", "disk_tokens", "loaded")}
    assert found == {"device_tokens": 0, "found_tokens": 640, "hit_tokens": 640, "disk_tokens": 640, "loaded": True}
    assert lookup["reason"] == "never_seen"
    status = said(capsys, "status", *place)
    assert status["stats"]["disk_reads"] == 5
    [session] = status["sessions"]
    assert session["hits"] == 1


def test_vllm_asks_for_each_chunk_only_when_the_answer_may_be_new(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_faults(monkeypatch)
    monkeypatch.setattr(prompts, "_WALK_S", 3600.0)
    options = extra_config(tmp_path / "cache")
    saved(engine, llama, options, LONG, APART)
    one = engine(llama, options, **OFFLOADING)
    tier, asked = tier_of(one), []
    lookup = tier.lookup
    monkeypatch.setattr(tier, "lookup", lambda key, context: asked.append(lookup(key, context)) or asked[-1])
    assert tier._cache.engine.limit_reads(0.0)
    add(one, "waits", LONG, TOKENS)
    step(one, 10)
    assert [answer.name for answer in asked] == ["RETRY"] * 7, "one question for each chunk in ten steps"
    assert tier._cache.engine.limit_reads(None)
    assert finish(one)["waits"] == reference(LONG)
    assert [answer.name for answer in asked[7:14]] == ["HIT"] * 7
    settled(one)

    # After some time vLLM asks again, since its own memory may have the chunks by then.
    monkeypatch.setattr(prompts, "_WALK_S", 0.0)
    asked.clear()
    assert tier._cache.engine.limit_reads(0.0)
    add(one, "waits again", APART, TOKENS)
    step(one, 10)
    assert [answer.name for answer in asked] == ["RETRY"] * 70
    assert tier._cache.engine.limit_reads(None)
    assert finish(one)["waits again"] == reference(APART)


class Prefetches:
    """A session that notes where reads begin."""

    def __init__(self, session: Any) -> None:
        self._session, self.begins = session, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def prefetch(self, name: str, chain: list[bytes], begin: int, *more: Any) -> Any:
        self.begins.append(begin)
        return self._session.prefetch(name, chain, begin, *more)


def test_reads_begin_behind_the_chunks_of_vllms_host_memory(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = extra_config(tmp_path / "cache")
    saved(engine, llama, options, LONG)
    one = engine(llama, options, **OFFLOADING)
    cache = tier_of(one)._cache
    session = Prefetches(cache.session)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "session", session)
        add(one, "arrives", OTHER, TOKENS)
        until("its chunks are read before a step", lambda: stats(one)["disk_reads"] == 5)
        assert finish(one)["arrives"] == reference(OTHER)
        settled(one)
        assert stats(one)["disk_reads"] == 5
        hits(one, reference, LONG, 896)
    assert session.begins == [0, 640], "vLLM's host memory has the first five chunks"
    assert stats(one)["disk_reads"] == 7


def test_a_prompt_waits_for_a_hung_disk_for_a_quarter_of_its_computing_time(
    engine: Make, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inject_faults(monkeypatch)
    plain, options = References(llama, (LONG, TOKENS)), extra_config(tmp_path / "cache", promotion_wait="planned")
    known = [prompt(897, seed=200 + number) for number in range(2)]
    saved(engine, llama, options, LONG, *known)
    one = engine(llama, options, **OFFLOADING)
    for number in range(8):
        # The planner learns how long a prompt takes to compute.
        one.generate(prompt(897, seed=300 + number), 1)
        settled(one)
    assert [one.generate(ids, 1).cached for ids in known] == [896] * 2
    settled(one)
    assert tier_of(one)._cache.engine.limit_reads(0.0)
    hung = one.generate(LONG, TOKENS)
    assert (hung.cached < 896, hung.tokens) == (True, plain(LONG))
    found = stats(one)
    assert sum(found[f"plans_stopped_{why}"] for why in ("rest", "guarantee")) == 1
    lookup = said(capsys, "explain", "--disk-path", str(tmp_path / "cache"))["lookups"][-1]
    assert (lookup["asked_tokens"], lookup["hit_tokens"]) == (896, hung.cached)
    computing_ms = 897_000 / found["plan_prefill_tokens_per_s"]
    assert lookup["waited_ms"] < 0.25 * computing_ms + 1000, "a step may come late beside other work"
    assert tier_of(one)._cache.engine.limit_reads(None)
    settled(one)


def test_a_hung_disk_holds_up_neither_aborts_nor_resets_nor_the_end(
    engine: Make, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_faults(monkeypatch)
    options = extra_config(tmp_path / "cache")
    saved(engine, llama, options, LONG)
    one = engine(llama, options, **OFFLOADING)
    assert tier_of(one)._cache.engine.limit_reads(0.0)
    # promotion_wait is "complete": the prompt waits for the disk.
    add(one, "hung", LONG, 1)
    step_until(one, lambda: stats(one)["active_lookups"] == 1)
    begin = time.monotonic()
    one.llm.llm_engine.abort_request(["hung"])
    one.idle_steps()
    assert stats(one)["active_lookups"] == 0
    add(one, "hung again", LONG, 1)
    step_until(one, lambda: stats(one)["active_lookups"] == 1)
    tier_of(one).drain_jobs()
    assert one.reset_device_cache(connector=True)
    one.llm.llm_engine.abort_request(["hung again"])
    assert one.generate(OTHER, 1).cached == 0
    one.close()
    assert time.monotonic() - begin < 60, "the end waits for writes in flight only"


def test_a_disk_that_disappears_costs_hits_only(
    engine: Make, llama: Path, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = extra_config(tmp_path / "cache")
    saved(engine, llama, options, LONG)
    one = engine(llama, options, **OFFLOADING)
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    (tmp_path / "cache").rmdir()
    answer = one.generate(LONG, TOKENS)
    assert answer.tokens == reference(LONG)
    settled(one)
    assert one.generate(OTHER, TOKENS).tokens == reference(OTHER)
    settled(one)
    one.close()
    again = engine(llama, options, **OFFLOADING)
    hits(again, reference, LONG, 0)


def test_a_servers_memory_has_the_chunks_and_its_end_costs_hits_only(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    def started() -> Engine:
        one = engine(llama, extra_config(None, server=f"unix://{server.socket}", **PATIENT), **OFFLOADING)
        until("the server answers", lambda: tier_of(one)._cache.engine.connection()[0] == "up")
        return one

    def asked(one: Engine, ids: list[int]) -> int:
        answer = one.generate(ids, TOKENS)
        assert answer.tokens == reference(ids)
        one.idle_steps()
        assert not tier_of(one).has_pending_work()
        assert one.device_blocks_in_use() == 0
        assert one.reset_device_cache()
        return answer.cached

    with ServeProcess(tmp_path / "s") as server:
        first = started()
        assert asked(first, LONG) == 0
        first.close()
        second = started()
        assert [asked(second, ids) for ids in (OTHER, LONG)] == [640, 896]
        server.process.kill()
        assert [asked(second, ids) for ids in (APART, LONG)] == [0, 896], "vLLM's own host memory has the latter"
