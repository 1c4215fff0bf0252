"""After any failure, requests get the tokens that they would get without a cache, and the engine goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_checks import PAYLOAD, Override, Reference, nothing_left, override_session, stats, worker
from real_engine import Engine, prompt
from undercroft.device.api import Ended, Job

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
MEMORY = {"host_memory": "64MiB"}
LONG = prompt(897)
HIT = 896
SESSION_CALLS = (
    "lookup",
    "begin_load",
    "begin_save",
    "poll_saves",
    "end_transfer",
    "end_lookup",
    "finish_request",
    "reset",
)


class BrokenError(RuntimeError):
    """The error that the tests raise."""


def raising(*_: Any, **__: Any) -> Any:
    raise BrokenError


def hook_errors(one: Engine) -> int:
    return one.connector._counts.collect().get("counters", {}).get("hook_errors", 0)


def keep_counts(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep vLLM from taking the counts, so that a test can."""
    monkeypatch.setattr(one.connector, "get_kv_connector_stats", lambda: None)


def test_every_call_to_the_engine_may_fail(
    engine: Make, llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(llama, MEMORY, blocks=128)
    keep_counts(one, monkeypatch)
    one.generate(LONG, 4)
    nothing_left(one)
    for number, call in enumerate(SESSION_CALLS):
        session = override_session(one, **{call: raising})
        fresh = prompt(300, seed=100 + number)
        warm, cold = one.generate_all([LONG, fresh], 4)
        assert (warm.finish_reason, warm.tokens) == ("length", reference(LONG, 4)), call
        assert (cold.finish_reason, cold.tokens) == ("length", reference(fresh, 4)), call
        one.idle_steps()
        assert one.device_blocks_in_use() == 0, call
        assert one.reset_device_cache(connector=call == "reset") is (call != "reset"), call
        # An engine of this process grants saves at once, so no step asks for grants.
        assert hook_errors(one) > 0 or call == "poll_saves", call
        session.methods.clear()
        if call in ("end_transfer", "end_lookup"):
            continue  # the engine was not told that the transfer or lookup ended: its blocks stay
        assert one.generate(LONG, 4).tokens == reference(LONG, 4)
        one.idle_steps()
        assert one.reset_device_cache()
        assert hook_errors(one) == 0


def scheduler_hooks() -> list[str]:
    return [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "get_external_cache_hit_sources",
        "get_loaded_kv_cache_group_ids",
        "request_finished",
        "has_pending_block_frees",
    ]


def test_every_hook_of_the_scheduler_may_fail(
    engine: Make, llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(llama, MEMORY, blocks=128)
    keep_counts(one, monkeypatch)
    one.generate(LONG, 4)
    nothing_left(one)
    for number, hook in enumerate(scheduler_hooks()):
        fresh = prompt(300, seed=200 + number)
        with monkeypatch.context() as patch:
            if hook == "update_state_after_alloc":
                # A load that was promised and never begun would wait for ever: only the plan before it may fail.
                patch.setattr("undercroft.connector.scheduler.scheduler.plan_load", raising)
            else:
                patch.setattr(one.connector._scheduler, hook, raising)
            answers = one.generate_all([LONG, fresh], 4)
            one.idle_steps()
        assert [answer.tokens for answer in answers] == [reference(LONG, 4), reference(fresh, 4)], hook
        assert one.device_blocks_in_use() == 0, hook
        assert hook_errors(one) > 0 or hook == "has_pending_block_frees", hook
        assert one.reset_device_cache(), hook


def test_copies_that_cannot_start_or_fail(
    engine: Make, llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(llama, MEMORY, blocks=128)
    one.generate(LONG, 4)
    nothing_left(one)
    copier = worker()._copier

    def failed_poll() -> list[Ended]:
        return [Ended(ended.ticket, False, ended.seconds) for ended in copier.poll()]

    for failure in ({"submit": raising}, {"poll": failed_poll}):
        before = stats(one)
        monkeypatch.setattr(worker(), "_copier", Override(copier, failure))
        fresh = prompt(300, seed=300 + len(failure))
        answers = one.generate_all([LONG, fresh], 16)
        assert [answer.tokens for answer in answers] == [reference(LONG, 16), reference(fresh, 16)]
        assert [answer.finish_reason for answer in answers] == ["length"] * 2
        nothing_left(one)
        after = stats(one)
        assert after["load_failures"] == before["load_failures"] + 1
        assert after["save_failures"] > before["save_failures"]
        assert after["host_blocks"] == before["host_blocks"]
        monkeypatch.setattr(worker(), "_copier", copier)
        # It was the misfortune of these requests alone.
        again = one.generate(LONG, 16)
        assert (again.cached, again.tokens) == (HIT, reference(LONG, 16))
        nothing_left(one)


def test_claiming_a_load_that_never_happened_is_noticed(
    engine: Make, llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle of all these tests: blocks that were not loaded change the tokens."""
    one = engine(llama, MEMORY, blocks=64)
    one.generate(LONG, 4)
    nothing_left(one)
    one.core.model_executor.driver_worker.worker.model_runner.kv_caches[0].zero_()
    ended: list[Ended] = []

    def pretend(to_arena: bool, jobs: Sequence[Job]) -> list[int]:
        ended.extend(Ended(job.ticket, True, 0.0) for job in jobs)
        return [0] * len(jobs)

    def poll() -> list[Ended]:
        taken, ended[:] = list(ended), []
        return taken

    monkeypatch.setattr(worker(), "_copier", Override(worker()._copier, {"submit": pretend, "poll": poll}))
    wrong = one.generate(LONG, 16)
    assert wrong.cached == HIT
    assert wrong.tokens != reference(LONG, 16)


@pytest.fixture(scope="module")
def saved(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds LONG, of an engine that has ended."""
    directory = tmp_path_factory.mktemp("faults") / "cache"
    one = Engine(llama, on_disk_options(directory), blocks=64)
    one.generate(LONG, 4)
    nothing_left(one)
    one.close()
    return directory


@pytest.fixture
def on_disk(saved: Path, tmp_path: Path) -> dict[str, Any]:
    """Configuration with a copy of it."""
    return on_disk_options(Path(shutil.copytree(saved, tmp_path / "cache")))


def on_disk_options(directory: Path) -> dict[str, Any]:
    return {**MEMORY, "disk_path": str(directory), "disk_capacity": "64MiB"}


def payload_offsets(data: Path) -> list[int]:
    """Offsets of the payloads in the data file: the blocks that are not zero."""
    content = data.read_bytes()
    return [start for start in range(0, len(content), PAYLOAD) if any(content[start : start + 4096])]


@pytest.mark.parametrize("which", [0, 3])
def test_flipped_byte_on_disk(
    engine: Make, llama: Path, reference: Reference, on_disk: dict[str, Any], which: int
) -> None:
    data = Path(on_disk["disk_path"], "data")
    offset = payload_offsets(data)[which] + PAYLOAD // 2
    with data.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
    one = engine(llama, on_disk, blocks=64)
    damaged = one.generate(LONG, 16)
    assert damaged.tokens == reference(LONG, 16)
    assert damaged.cached < HIT
    nothing_left(one)
    assert stats(one)["checksum_failures"] == 1
    # The block that was computed anew has taken the damaged block's place.
    again = one.generate(LONG, 16)
    assert (again.cached, again.tokens) == (HIT, reference(LONG, 16))
    nothing_left(one)
    one.close()
    healed = engine(llama, on_disk, blocks=64)
    again = healed.generate(LONG, 16)
    assert (again.cached, again.tokens) == (HIT, reference(LONG, 16))


def test_truncated_data_file(engine: Make, llama: Path, reference: Reference, on_disk: dict[str, Any]) -> None:
    data = Path(on_disk["disk_path"], "data")
    with data.open("r+b") as file:
        file.truncate(payload_offsets(data)[3] + 4096)
    one = engine(llama, on_disk, blocks=64)
    answer = one.generate(LONG, 16)
    assert answer.tokens == reference(LONG, 16)
    assert answer.cached < HIT
    nothing_left(one)
    again = one.generate(LONG, 16)
    assert (again.cached, again.tokens) == (HIT, reference(LONG, 16))
    nothing_left(one)


@pytest.mark.parametrize("file", ["table", "super"])
def test_garbage_in_the_tables(
    engine: Make, llama: Path, reference: Reference, on_disk: dict[str, Any], file: str
) -> None:
    """Damaged records are misses; so is a damaged superblock, unless it is to refuse the start."""
    path = Path(on_disk["disk_path"], file)
    content = bytearray(path.read_bytes())
    for at in range(8, len(content), 97):
        content[at] ^= 0x55
    path.write_bytes(content)
    if file == "super":
        with pytest.raises(Exception, match=r"(?s)cache.*(version|checksum|another program)"):
            engine(llama, {**on_disk, "on_disk_error": "refuse", "disk_on_other_version": "refuse"}, blocks=64)
    one = engine(llama, on_disk, blocks=64)
    answer = one.generate(LONG, 16)
    assert (answer.cached, answer.tokens) == (0, reference(LONG, 16))
    nothing_left(one)
