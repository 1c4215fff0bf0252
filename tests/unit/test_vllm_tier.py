"""Chunks of vLLM's offloading as blocks of the engine, and the options of the tier."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext, make_offload_key

import fake_config
from undercroft import registration
from undercroft.config import OPTIONS
from undercroft.embed import Group, Job
from undercroft.errors import ConfigError
from undercroft.identity.namespace import Naming
from undercroft.log import LogOnce
from undercroft.vllm_tier import options
from undercroft.vllm_tier.chunks import Chunks, KeyRun, Place, canonical_shards, why_unsupported
from undercroft.vllm_tier.identity import describe_tier
from undercroft.vllm_tier.tier import UndercroftTier, _Begun

ROW = 8192
HASH = 16


def full(tokens: int = HASH) -> Any:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=8, dtype=torch.float32)


def window(size: int, tokens: int = HASH) -> Any:
    return SlidingWindowSpec(block_size=tokens, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=size)


def state(tokens: int = HASH) -> Any:
    return MambaSpec(block_size=tokens, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def chunks(
    specs: Sequence[Any], per_chunk: int = 1, offloaded: Sequence[int] | None = None, drafts: Sequence[int] = ()
) -> Chunks:
    groups = [
        KVCacheGroupSpec([f"layer{index}"], spec, is_eagle_group=index in drafts) for index, spec in enumerate(specs)
    ]
    of_vllm = SimpleNamespace(
        groups=[
            SimpleNamespace(group_id=index, tokens_per_block=specs[index].block_size)
            for index in (range(len(specs)) if offloaded is None else offloaded)
        ],
        cache=SimpleNamespace(tokens_per_hash=HASH, blocks_per_chunk=per_chunk),
    )
    return Chunks(of_vllm, KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups), ROW)


def key(group: int, number: int = 1) -> bytes:
    return make_offload_key(number.to_bytes(32, "big"), group)


def place_of(made: Chunks, chunk: bytes, end: int | None) -> Place | None:
    """The place of a chunk of a prompt that has its hash."""
    return made.place(chunk, end, [chunk[:-4]] * 16)


HASHES = [number.to_bytes(32, "big") for number in range(1, 33)]


def served(made: Chunks, boundary: int, begin: int = 0) -> dict[int, list[int]]:
    """By engine group, the blocks of a hit, each with vLLM's key of it."""
    keys = {key(group, end // HASH): end for group in range(4) for end in range(HASH, 33 * HASH, HASH)}
    context = SimpleNamespace(get_offload_key_position=keys.get)
    found: dict[int, list[int]] = {}
    for one, place in made.served(context, HASHES, begin, boundary).items():
        assert made.place(one, keys[one], HASHES) == place
        found.setdefault(place.engine_group, []).append(place.number)
    return found


def test_a_chunk_of_several_blocks_is_one_block_of_the_engine() -> None:
    made = chunks([full()], per_chunk=4)
    assert made.groups.engine_block_size == 64
    assert made.registration() == [Group((ROW,), "full", 64)]
    assert place_of(made, key(0), 128) == Place(0, 1, 128)
    assert place_of(made, key(0), 96) is None, "the beginning of a chunk at a prompt's end"
    assert place_of(made, key(1), 128) is None
    assert place_of(made, key(0), None) is None
    assert served(made, 128) == {0: [0, 1]}
    assert served(made, 127) == {0: [0]}
    assert served(made, 256, begin=64) == {0: [1, 2, 3]}


def test_a_hit_has_as_many_chunks_of_a_window_as_vllm_asks_for() -> None:
    for size, wanted in ((16, 1), (17, 2), (32, 2), (33, 3), (40, 3)):
        made = chunks([full(), window(size)])
        assert served(made, 160) == {0: [*range(10)], 1: [*range(10 - wanted, 10)]}, size
    # vLLM's lookup knows no chunks of attention: it wants whole ones before the hit's end.
    spec = ChunkedLocalAttentionSpec(
        block_size=HASH, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=48
    )
    made = chunks([full(), spec])
    assert served(made, 160)[1] == [7, 8, 9]


def test_a_hit_beside_a_draft_has_another_chunk_of_each_window() -> None:
    made = chunks([full(), window(32), window(48)], drafts=[2])
    assert served(made, 160) == {0: [*range(10)], 1: [7, 8, 9], 2: [6, 7, 8, 9]}


def test_a_hit_has_the_state_at_its_end_only() -> None:
    made = chunks([full(), state()])
    assert served(made, 160)[1] == [9]


def test_chunks_of_different_sizes_meet_in_blocks_of_the_engine() -> None:
    made = chunks([full(), window(100, 32)])
    assert made.groups.engine_block_size == 32
    assert [(one.group, one.index, one.block_tokens) for one in made.engine_groups] == [
        (0, 0, 32),
        (0, 1, 32),
        (1, 0, 32),
    ]
    places = [place_of(made, key(0), end) for end in (16, 32, 48, 64)]
    assert places == [Place(0, 0, 16), Place(1, 0, 32), Place(0, 1, 48), Place(1, 1, 64)]
    hashes = [number.to_bytes(32, "big") for number in range(1, 5)]
    for end, place in zip((16, 32, 48, 64), places, strict=True):
        assert place is not None
        assert made.at(place.engine_group, place.number) == place
        assert made.key(place, hashes) == key(0, end // HASH)
    assert made.key(made.at(2, 1), hashes) == key(1, 4)
    assert made.key(made.at(2, 2), hashes) is None


def test_a_key_that_is_not_the_prompts_is_no_block() -> None:
    made = chunks([full()])
    hashes = [number.to_bytes(32, "big") for number in range(1, 5)]
    assert made.place(key(0, 2), 32, hashes) == Place(0, 1, 32)
    assert made.place(key(0, 3), 32, hashes) is None, "a hash that looks ahead, of other tokens"
    assert made.place(key(0, 5), 80, hashes) is None, "the prompt has no such hash yet"


def test_chunks_of_a_job_have_the_places_that_each_has_alone() -> None:
    """However the groups lie among each other, and whichever of them are missing."""
    hashes = [number.to_bytes(32, "big") for number in range(1, 17)]
    for made, step in (
        (chunks([full()]), 1),
        (chunks([full(), window(40)]), 1),
        (chunks([full(), window(40), state(32)]), 1),
        (chunks([full(16), window(100, 32)]), 1),
        (chunks([full()], per_chunk=4), 4),
    ):
        ends_of = range(step * HASH, 18 * HASH, step * HASH)
        whole = [(key(group, end // HASH), end) for group in range(4) for end in ends_of]
        foreign = [(key(0, 99), HASH), (key(0, 98), None), (key(1, 99), 2 * HASH)]
        found: list[Place] = []
        for seed in range(40):
            chance = random.Random(seed)
            asked = whole[chance.randrange(4) :: chance.choice([1, 1, 2])]
            for one in chance.sample(foreign, chance.randrange(4)):
                asked.insert(chance.randrange(len(asked)), one)
            if seed % 4 == 3:
                chance.shuffle(asked)
            # One key has one end.
            ends = dict(asked)
            context: Any = SimpleNamespace(get_offload_key_position=ends.get)
            most = chance.choice([12 * HASH, 1 << 40, 1 << 40])
            alone = [made.place(one, end, hashes) for one, end in ends.items()]
            wanted = {at: one for at, one in enumerate(alone) if one is not None and one.end <= most}
            runs = made.runs(list(ends), context, hashes, most)
            each = [
                (run.at + one, made.at(run.engine_group, run.number + one)) for run in runs for one in range(run.length)
            ]
            assert each == list(wanted.items())
            found += wanted.values()
        assert len(found) > 80


def test_keys_of_a_store_are_put_in_order() -> None:
    for specs in ([full()], [full(), window(40)]):
        made = chunks(specs)
        whole = {key(group, end): end * HASH for group in range(len(specs)) for end in range(1, 20)}
        shuffled = [*whole, foreign := key(0, 99)]
        random.Random(0).shuffle(shuffled)
        context: Any = SimpleNamespace(get_offload_key_position=whole.get)
        assert [shuffled[at] for at in made.in_order(shuffled, context)] == [foreign, *whole]


def test_groups_that_are_not_offloaded_are_left_out() -> None:
    made = chunks([state(), full(), state()], offloaded=[1, 2])
    assert [group.kind for group in made.registration()] == ["full", "state"]
    assert place_of(made, key(0), 32) is None
    assert place_of(made, key(1), 32) == Place(0, 1, 32)
    assert place_of(made, key(2), 32) == Place(1, 1, 32)


def test_a_hit_is_no_longer_than_vllms_memory() -> None:
    assert chunks([full()]).most_tokens(10) == 160
    assert chunks([full(), window(32)]).most_tokens(10) == 8 * 16, "two chunks are for the window"
    assert chunks([full(), full(), state()]).most_tokens(11) == 5 * 16
    assert chunks([full()]).most_tokens(0) == 16


def test_rows_are_blocks_in_ascending_order() -> None:
    addresses = np.array([100, 200, 300, 400, 500], np.int64)
    [first, second] = Chunks.blocks([KeyRun(0, 3, 0, 1), KeyRun(1, 7, 1, 2), KeyRun(0, 1, 4, 1)], addresses)
    assert (first.group, first.numbers.tolist(), first.addresses.tolist()) == (0, [1, 3], [500, 100])
    assert (second.group, second.numbers.tolist(), second.addresses.tolist()) == (1, [7, 8], [200, 300])
    assert Chunks.blocks([], addresses) == []


def test_a_group_that_is_not_known_turns_the_tier_off() -> None:
    class Other(FullAttentionSpec):
        pass

    groups = [
        KVCacheGroupSpec(["a"], full()),
        KVCacheGroupSpec(["b"], Other(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)),
    ]
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    assert why_unsupported(config, [0]) is None
    assert "group 1 is Other" in str(why_unsupported(config, [0, 1]))


# The canonical layout

HEADS = 4


class Ranks:
    """A model with four heads of KV on so many ranks."""

    def __init__(self, ranks: int, specs: Sequence[Any] = (), own: int = 0, **changes: Any) -> None:
        """``own``: heads of a rank."""
        own, self.ranks = own or max(1, HEADS // ranks), ranks
        self.vllm_config = fake_config.vllm_config(tensor_parallel_size=ranks)
        self.vllm_config.model_config.get_total_num_kv_heads = lambda: HEADS
        specs = [dataclasses.replace(spec, num_kv_heads=own) for spec in specs or [fake_config.attention()]]
        self.kv_cache_config = fake_config.kv_cache_config(specs, kv_tp_replicas=max(1, ranks // HEADS))
        page = 2 * specs[0].page_size_bytes
        fields = {
            "groups": [SimpleNamespace(group_id=index, tokens_per_block=HASH) for index in range(len(specs))],
            "cache": SimpleNamespace(tokens_per_hash=HASH, blocks_per_chunk=2),
            "parallel": SimpleNamespace(world_size=ranks, tp_size=ranks, is_parallelism_agnostic=True),
            "worker_kv_bytes_per_block": page,
            "canonical_layout": True,
            "replicated_layout": False,
            "kv_cache_layout": "LBHNC",
        }
        self.offloading = SimpleNamespace(**{**fields, **changes})
        self.shards = canonical_shards(self.vllm_config, self.kv_cache_config, self.offloading)
        self.chunks = Chunks(self.offloading, self.kv_cache_config, 2 * page * ranks, self.shards)
        naming = Naming(model_id="m")
        self.description = describe_tier(self.vllm_config, self.kv_cache_config, naming, self.offloading, self.chunks)


def test_the_canonical_layout_leaves_the_number_of_ranks_out_of_the_identity() -> None:
    one = Ranks(1)
    assert one.shards == 1
    for specs in ((), [fake_config.sliding()], [fake_config.attention(), fake_config.sliding()]):
        assert len({Ranks(ranks, specs).description for ranks in (1, 2, 4, 8)}) == 1, specs
    # Eight ranks have each head twice, and write it once.
    eight = Ranks(8)
    assert (eight.shards, eight.chunks.chunk_bytes) == (HEADS, one.chunks.chunk_bytes)
    assert eight.chunks.registration() == one.chunks.registration()


def test_latents_are_in_a_row_once_for_any_number_of_ranks() -> None:
    latents = MLAAttentionSpec(block_size=HASH, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    one, two = (Ranks(ranks, [latents], own=1) for ranks in (1, 2))
    assert (one.shards, two.shards, two.chunks.chunk_bytes) == (1, 1, one.chunks.chunk_bytes)
    assert one.description == two.description


@pytest.mark.parametrize(
    "changes",
    [
        {"canonical_layout": False},
        {"parallel": SimpleNamespace(world_size=2, tp_size=2, is_parallelism_agnostic=False)},
        {"parallel": SimpleNamespace(world_size=4, tp_size=2, is_parallelism_agnostic=True)},
        {"specs": [fake_config.attention(num_head_slots=1)]},
        {"specs": [fake_config.unknown()]},
    ],
    ids=["direct", "not certified", "pipeline", "other pages", "unknown"],
)
def test_rows_that_may_depend_on_the_ranks_are_shared_with_as_many_ranks_only(changes: dict[str, Any]) -> None:
    two = Ranks(2, **changes)
    assert (two.shards, two.chunks.chunk_bytes) == (0, two.chunks.row_bytes)
    assert two.description not in (Ranks(1, **changes).description, Ranks(1).description, Ranks(2).description)
    assert '"tensor":2' in two.description


def test_another_version_of_the_canonical_layout_is_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Ranks(1).description
    monkeypatch.setattr(canonical_mapping, "CANONICAL_FORMAT_VERSION", 99)
    assert Ranks(1).description != before


# Options

ENTRY = {"type": "UndercroftTier", "module_path": "undercroft.vllm_tier"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"world_size": 2, "nnodes": 2}, "over 2 nodes"),
        ({"world_size": 4, "nnodes": 4, "nnodes_within_dp": 2}, "over 2 nodes"),
        ({"world_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher"),
        ({"world_size": 1, "nnodes": 2}, None),
        ({"world_size": 2}, None),
    ],
)
def test_ranks_that_do_not_share_vllms_host_memory_turn_the_tier_off(
    changes: dict[str, Any], reason: str | None
) -> None:
    """Each host, or each rank of external_launcher, would load what lies in its own memory at the same place."""
    config = fake_config.vllm_config()
    for name, value in changes.items():
        setattr(config.parallel_config, name, value)
    kv_cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], full())])
    found = UndercroftTier._why_off(SimpleNamespace(), config, kv_cache, SimpleNamespace(groups=[]))
    assert found is None if reason is None else found is not None and reason in found


def job_of(number: int, is_load: bool = True) -> tuple[Job, Any]:
    job = Job((), is_load=is_load, ended=True)
    asked = SimpleNamespace(job_id=number, keys=[], req_context=SimpleNamespace(req_id="r"))
    return job, _Begun(asked, job, SimpleNamespace(request=SimpleNamespace(request_id="r")), [], [])


def test_only_the_schedulers_thread_polls_the_tier() -> None:
    """vLLM 0.33 polls tiers that say so from a thread of its own, too."""
    assert not getattr(UndercroftTier, "tolerates_off_thread_polling", False)


def test_an_error_at_the_end_of_a_job_loses_no_other_end() -> None:
    tier: Any = object.__new__(UndercroftTier)
    begun = [job_of(number) for number in (1, 2, 3)]
    answers = iter([None, ValueError("wrong"), None])

    def has_loaded(*_: Any, **__: Any) -> None:
        if (error := next(answers)) is not None:
            raise error

    tier._cache = SimpleNamespace(poll=lambda: [job for job, _ in begun])
    tier._jobs = {id(job): one for job, one in begun}
    tier._prompts, tier._ended, tier._log_once = SimpleNamespace(has_loaded=has_loaded), [], LogOnce()
    assert [(one.job_id, one.success) for one in tier.get_finished_jobs()] == [(1, True), (2, False), (3, True)]
    assert not tier._jobs


def test_a_partial_load_reports_its_chunks_to_vllm() -> None:
    tier: Any = object.__new__(UndercroftTier)
    keys, runs = [key(0, number) for number in range(3)], [KeyRun(0, 0, 0, 3)]
    job, begun = job_of(1)
    job.blocks, job.done = tuple(Chunks.blocks(runs, np.arange(3))), {0: frozenset({0, 1})}
    begun.job.keys = keys
    tier._prompts = None
    result = tier._counted(begun._replace(keys=keys, runs=runs))
    assert (result.success, result.successful_keys) == (False, (key(0, 0), key(0, 1)))


def failing(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug")


class Drained:
    """A cache whose `drain` fails after its copies have ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def drain(self) -> None:
        self.calls.append("drain")
        failing()

    def give_up(self, reason: str) -> None:
        self.calls.append(f"give up: {reason}")

    def poll(self) -> list[Job]:
        self.calls.append("poll")
        return [Job((), is_load=False)]


def test_after_an_error_while_jobs_are_drained_each_has_failed_and_none_saves_later() -> None:
    tier: Any = object.__new__(UndercroftTier)
    tier._cache, tier._log_once, tier._ended = Drained(), LogOnce(), []
    tier._jobs = {1: SimpleNamespace(job=SimpleNamespace(job_id=7)), 2: SimpleNamespace(job=SimpleNamespace(job_id=8))}
    tier.drain_jobs()
    assert tier._cache.calls == ["drain", "give up: retry"]
    assert not tier._jobs
    ended = tier.get_finished_jobs()
    assert [(one.job_id, one.success) for one in ended] == [(7, False), (8, False)]


class FailingPart:
    """A part of the tier all of whose methods fail. It has one request."""

    known: ClassVar[dict[str, Any]] = {"r": SimpleNamespace(step=0, is_pending=False, served={b"k": 0}, has_room=False)}
    step, more = 0, False

    def __getattr__(self, _: str) -> Any:
        return failing


@pytest.mark.parametrize(
    ("method", "given", "answer"),
    [
        ("on_new_request", 1, RequestOffloadingContext()),
        ("on_request_finished", 1, None),
        ("lookup", 2, LookupResult.MISS),
        ("submit_load", 1, None),
        ("submit_store", 1, None),
        ("get_finished_jobs", 0, []),
        ("has_pending_work", 0, False),
        ("drain_jobs", 0, None),
        ("serve_external_requests", 1, None),
        ("on_schedule_end", 1, None),
        ("take_events", 0, ()),
        ("get_stats", 0, None),
        ("touch", 2, None),
        ("shutdown", 0, None),
    ],
)
def test_an_error_in_a_call_of_vllm_is_a_miss_and_is_said_once(
    method: str, given: int, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tier: Any = object.__new__(UndercroftTier)
    part = FailingPart()
    tier._prompts = tier._cache = tier._stats = tier._events = tier._connector = tier._chunks = part
    tier._jobs, tier._ended, tier._lacking, tier._log_once = {}, [], deque(), LogOnce()
    request = SimpleNamespace(req_id="r", load_tier_filter=SimpleNamespace(allows=lambda *_: True))
    job = SimpleNamespace(job_id=3, req_context=request, is_promotion=True)
    arguments = [b"k", request] if given == 2 else [job if "submit" in method else request][:given]
    if method == "serve_external_requests":
        tier._lacking.append(SimpleNamespace(prompt=SimpleNamespace(request=None)))
    for _ in range(2):
        assert getattr(tier, method)(*arguments) == answer
    assert caplog.text.count("caught ") == (method not in ("has_pending_work", "touch"))
    assert [(one.job_id, one.success) for one in tier._ended] == [(3, False)] * 2 * ("submit" in method)


def connector(**tier: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [ENTRY | tier]},
    }


@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_each_option_has_an_effect_or_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [option] = [option for option in OPTIONS if option.name == name]
    if name in options._ALLOWED:
        assert name not in options._REFUSED
        return
    with pytest.raises(ConfigError, match=f"{name} = .* in secondary_tiers has no effect there: .*Leave it out"):
        options.parse(ENTRY | {name: option.default})
    monkeypatch.setenv(option.env, "1")
    with pytest.raises(ConfigError, match=f"{option.env} = '1' has no effect with secondary_tiers"):
        options.parse(ENTRY)


def test_the_document_names_each_option_that_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs/vllm-tier.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `") and "| refused" in line]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.rpartition("| refused")[0])}
    assert named == set(options._REFUSED)


def test_chunks_pass_through_a_small_memory_unless_configured_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.parse(ENTRY).host_memory.size == 2 << 30
    assert options.parse(ENTRY, 32 << 20).host_memory.size == 8 << 30
    assert options.parse(ENTRY | {"host_memory": "64MiB"}, 32 << 20).host_memory.size == 64 << 20
    assert options.parse(ENTRY | {"server": "unix:///run/s.sock"}).server == "unix:///run/s.sock"
    monkeypatch.setenv("UNDERCROFT_HOST_MEMORY", "1GiB")
    assert options.parse(ENTRY).host_memory.size == 1 << 30


def test_mistakes_end_the_start_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'disk_path'"):
        registration.check_options(connector(disk_paht="/x"), local=False)
    with pytest.raises(ConfigError, match="type = 'Undercroft' in secondary_tiers"):
        registration.check_options(connector(type="Undercroft"), local=False)
    plain = connector()
    plain["kv_connector_extra_config"]["spec_name"] = "CPUOffloadingSpec"
    with pytest.raises(ConfigError, match="TieringOffloadingSpec"):
        registration.check_options(plain, local=False)
    inside = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [connector(io_depth=0)]}}
    with pytest.raises(ConfigError, match="io_depth"):
        registration.check_options(inside, local=False)
    registration.check_options(connector(), local=False)
    other = {"type": "fs", "root_dir": "/x"}
    plain["kv_connector_extra_config"]["secondary_tiers"] = [other]
    registration.check_options(plain, local=False)


def test_check_config_takes_the_tiers_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    from undercroft.cli import main

    whole = connector(host_memory="64MiB", disk_path="/nonexistent/x", disk_capacity="1GiB") | {"kv_role": "kv_both"}
    main.main(["check-config", json.dumps(whole), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["host_memory"] == 64 << 20
    assert found["options"]["disk_capacity"] == "1GiB"


def test_options_are_read_without_vllm() -> None:
    program = "import sys; from undercroft.vllm_tier import options; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_the_engines_metrics_have_the_names_and_labels_of_the_connectors() -> None:
    from undercroft.vllm_tier import stats

    known = stats.definitions()
    assert known["vllm:undercroft_transfers"].labelnames == ("tier", "direction")
    assert "vllm:undercroft_lookup_seconds" not in known, "the connector's own figures"
    found = stats.of_engine({"counters": {"disk_reads": 3, "hook_errors": 1}, "gauges": {"disk_used_bytes": 5}})
    assert found is not None
    values = found.data["data"]
    assert values["vllm:undercroft_transfers"] == {("disk", "load"): 3}
    assert set(values) <= known.keys(), "vLLM's frontend fails at a metric that it does not know"
    assert stats.of_engine({}) is None
