"""vLLM's own scheduler over a model that shows each wrong block: the KV of a token is a hash of all tokens up to it.

The scheduler, its KV cache manager, and both halves of the connector are real. The model runs no layer. A step writes
the hash of each scheduled token into the token's place in the device pages, and checks all earlier places first. So no
page can hold other KV than its tokens', and the schedulers can be driven into states that a real model reaches rarely.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

BLOCK = 16
VOCABULARY = 50
MASK = (1 << 63) - 1


def chain(previous: int, token: int) -> int:
    """The KV of a token after the tokens with the KV ``previous``."""
    return (previous * 0x5851F42D4C957F2D + (token + 1) * 0x14057B7EF767814F) & MASK


def next_token(kv: int) -> int:
    """The token that the model generates after the tokens with this KV."""
    return (kv >> 17) % VOCABULARY


def kv_of(tokens: Sequence[int]) -> list[int]:
    """The KV of each token."""
    return list(itertools.accumulate(tokens, chain, initial=7))[1:]


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that the model generates after a prompt."""
    tokens = list(prompt)
    kv = kv_of(tokens)[-1]
    for _ in range(count):
        tokens.append(next_token(kv))
        kv = chain(kv, tokens[-1])
    return tokens[len(prompt) :]


class SlowCopier:
    """A copier whose jobs run in random later calls of ``poll``, each as late as a real device may run it.

    ``faults``: the probabilities that a job does not run yet ("delay"), that a load fails ("load"), and that a call is
    refused ("submit").
    """

    def __init__(self, inner: Any, chance: random.Random, faults: Mapping[str, float]) -> None:
        self._inner = inner
        self._chance = chance
        self._faults = faults
        self._waiting: deque[tuple[bool, Any]] = deque()

    def _happens(self, fault: str) -> bool:
        return self._chance.random() < self._faults.get(fault, 0.0)

    def submit(self, to_arena: bool, jobs: Sequence[Any]) -> list[int]:
        """See `DeviceCopier`."""
        if self._happens("submit"):
            raise RuntimeError("refused")
        self._waiting.extend((to_arena, job) for job in jobs)
        return [0 for _ in jobs]

    def poll(self) -> list[Any]:
        """See `DeviceCopier`."""
        from undercroft.device.api import Ended

        failed = []
        while self._waiting and not self._happens("delay"):
            to_arena, job = self._waiting.popleft()
            if not to_arena and self._happens("load"):
                failed.append(Ended(job.ticket, False, 0.0))
            else:
                self._inner.submit(to_arena, [job])
        self._inner.drain()
        return [*self._inner.poll(), *failed]

    def drain(self) -> None:
        """See `DeviceCopier`."""
        while self._waiting:
            to_arena, job = self._waiting.popleft()
            self._inner.submit(to_arena, [job])
        self._inner.drain()

    def close(self) -> None:
        """See `DeviceCopier`."""
        self.drain()
        self._inner.close()


@dataclass
class _Running:
    """A request as the model runner knows it."""

    tokens: list[int]
    computed: int


@dataclass
class _Step:
    """A scheduled step, with what the runner gets beside it: block tables, and the tokens of requests that begin."""

    output: Any
    tables: dict[str, tuple[list[int], ...]]
    begins: dict[str, tuple[list[int], int]]


@dataclass
class Vllm:
    """One vLLM. ``drafts``: draft tokens of each step. ``ahead``: steps that are scheduled before the oldest ends."""

    scheduler: Any
    workers: list[Any]
    pages: list[dict[str, list[torch.Tensor]]]
    """For each rank, the parts of each layer's cache, as (block, 0, slot, value)."""
    kv_cache_config: Any
    hasher: Any
    chance: random.Random
    faults: dict[str, float]
    drafts: int = 0
    ahead: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    in_flight: deque[_Step] = field(default_factory=deque)
    running: dict[str, _Running] = field(default_factory=dict)
    aggregator: Any = None
    failed_blocks: set[int] = field(default_factory=set)
    """Device blocks whose load failed in this step, which computes with them all the same."""

    def add(self, name: str, prompt: Sequence[int], count: int, **more: Any) -> Any:
        """A request arrives."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        extra = more.pop("extra_args", None)
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0, extra_args=extra)
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher, **more)
        self.scheduler.add_request(request)
        self.outputs.setdefault(name, [])
        return request

    def abort(self, name: str) -> None:
        """The client of a request goes away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished.setdefault(name, "abort")

    def step(self) -> None:
        """Schedule a step, and end the oldest one if enough steps are in flight."""
        self._schedule()
        while len(self.in_flight) > self.ahead:
            self._end(self.in_flight.popleft())

    def drain(self) -> None:
        """End all steps in flight."""
        while self.in_flight:
            self._end(self.in_flight.popleft())

    def run(self, limit: int = 5_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        else:
            raise AssertionError(f"not idle after {limit} steps: {self.scheduler.requests}")
        self.drain()

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        manager, requests = self.scheduler.kv_cache_manager, self.scheduler.requests
        cached = output.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        begins |= {
            name: computed
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            # Without steps in flight vLLM knows all tokens, and may set back what is computed.
            if name in cached.resumed_req_ids or not (self.ahead or self.drafts)
        }
        self.in_flight.append(
            _Step(
                output,
                {name: manager.get_block_ids(name) for name in output.num_scheduled_tokens},
                {name: (list(requests[name].all_token_ids), computed) for name, computed in begins.items()},
            )
        )

    def _end(self, step: _Step) -> None:
        output = self._execute(step)
        for of_client in self.scheduler.update_from_output(step.output, output).values():
            for one in of_client.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
                if one.prefill_stats is not None:
                    self.cached[one.request_id] = one.prefill_stats.num_external_cached_tokens
        if self.drafts and not self.ahead:
            self._offer_drafts()

    def _offer_drafts(self) -> None:
        from vllm.v1.outputs import DraftTokenIds

        names = [request.request_id for request in self.scheduler.running if not request.is_prefill_chunk]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[1] * self.drafts for _ in names]))

    def _execute(self, step: _Step) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        scheduled = step.output.num_scheduled_tokens
        metadata = pickle.dumps(step.output.kv_connector_metadata)
        self.failed_blocks.clear()
        for worker in self.workers:
            bound = pickle.loads(metadata)
            worker.bind_connector_metadata(bound)
            if step.output.has_sync_kv_loads:
                worker.start_load_kv(None)
        sampled = [self._compute(name, count, step) for name, count in scheduled.items()]
        names = list(scheduled)
        results = []
        for worker in self.workers:
            if not step.output.has_sync_kv_loads:
                worker.start_load_kv(None)
            worker.wait_for_save()
            ended = worker.get_transfer_results(step.output.finished_req_ids)
            told = KVConnectorOutput(
                finished_sending=ended.finished_sending,
                finished_recving=ended.finished_recving,
                failed_recving=ended.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_stats=worker.get_kv_connector_stats(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
            results.append(
                ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=told)
            )
        return self.aggregator.aggregate(pickle.loads(pickle.dumps(results)))

    def _compute(self, name: str, count: int, step: _Step) -> list[int]:
        """Run ``count`` tokens of a request: check the KV before them, write theirs, return what is generated."""
        if name in step.begins:
            tokens, computed = step.begins[name]
            self.running[name] = _Running(tokens, computed)
        one = self.running[name]
        known, begin = len(one.tokens), one.computed
        true_kv = kv_of(one.tokens)
        if not self.failed_blocks.isdisjoint(step.tables[name][0]):
            # vLLM discards what this step computes, and computes it again.
            self._write(begin, [1] * (begin + count), step.tables[name])
            return [0] if begin + count >= known else []
        self._check(name, true_kv[:begin], step.tables[name])
        new = one.tokens[begin : begin + count]
        extra = count - len(new)
        accepted = 0
        generated: list[int] = []
        kv = true_kv[: begin + len(new)]
        if begin + count >= known:
            generated = continuation(one.tokens, extra + 1)
            accepted = self.chance.randint(0, extra)
            wrong = kv_of([*one.tokens, *generated[:accepted], *[VOCABULARY + 1] * (extra - accepted)])
            kv = wrong[: begin + count]
            generated = generated[: accepted + 1]
        self._write(begin, kv, step.tables[name])
        one.tokens += generated
        one.computed = begin + len(new) + accepted
        return generated

    def _groups(self) -> Iterator[tuple[int, Any, torch.Tensor, int]]:
        for index, group in enumerate(self.kv_cache_config.kv_cache_groups):
            for pages in self.pages:
                parts = [part for layer in group.layer_names for part in pages[layer]]
                yield from ((index, group.kv_cache_spec, part, salt) for salt, part in enumerate(parts))

    def _check(self, name: str, kv: Sequence[int], tables: tuple[list[int], ...]) -> None:
        for index, spec, pages, salt in self._groups():
            begin = _first_needed(spec, len(kv))
            blocks, slots = _places(spec, begin, len(kv), tables[index])
            assert (blocks > 0).all(), f"{name}: null blocks at {begin}..{len(kv)} of group {index}"
            held = pages[blocks, 0, slots, 0]
            wanted = torch.tensor(kv[begin:], dtype=torch.int64) + salt
            wrong = torch.nonzero(held != wanted).flatten().tolist()
            assert not wrong, f"{name}: wrong KV of group {index} at {[begin + at for at in wrong]} of {len(kv)}"

    def _write(self, begin: int, kv: Sequence[int], tables: tuple[list[int], ...]) -> None:
        for index, spec, pages, salt in self._groups():
            first = len(kv) - 1 if _is_state(spec) else begin
            blocks, slots = _places(spec, first, len(kv), tables[index])
            pages[blocks, 0, slots, 0] = torch.tensor(kv[first:], dtype=torch.int64) + salt

    def blocks_in_use(self) -> int:
        """Device blocks that are referenced."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def close(self) -> None:
        """Stop both halves."""
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def _places(spec: Any, begin: int, end: int, table: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    positions = np.arange(begin, end)
    blocks = np.array(table)[positions // spec.block_size]
    return blocks, np.zeros_like(blocks) if _is_state(spec) else positions % spec.block_size


def _is_state(spec: Any) -> bool:
    return hasattr(spec, "mamba_cache_mode")


def _parts(cache: Any) -> list[torch.Tensor]:
    """The parts of a layer's cache, as (block, 0, slot, value). A state has one slot."""
    if isinstance(cache, torch.Tensor):
        return [cache.view(torch.int64)]
    return [part.view(torch.int64)[:, None, None, :] for part in cache]


def _first_needed(spec: Any, computed: int) -> int:
    """The first token whose KV the next token needs."""
    if _is_state(spec):
        return max(0, computed - 1)
    window, chunk = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
    if window is not None:
        return max(0, computed - window + 1)
    return 0 if chunk is None else computed // chunk * chunk


def groups_of(kinds: str, head_size: int = 8) -> list[Any]:
    """KV cache groups of two layers each.

    "f": full attention, "F": with blocks of twice the tokens, "w": a window of 40 tokens, "c": chunks of 48 tokens,
    "s": states. A state is the KV of the last token before it.
    """
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    fields: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": head_size, "dtype": torch.float32}
    specs = {
        "f": lambda: FullAttentionSpec(**fields),
        "F": lambda: FullAttentionSpec(**fields | {"block_size": 2 * BLOCK, "head_size": head_size // 2}),
        "w": lambda: SlidingWindowSpec(**fields, sliding_window=40),
        "c": lambda: ChunkedLocalAttentionSpec(**fields, attention_chunk_size=48),
        "s": lambda: MambaSpec(
            block_size=BLOCK,
            shapes=((8,), (4,)),
            dtypes=(torch.float32, torch.float32),
            page_size_padded=SlidingWindowSpec(**fields, sliding_window=40).page_size_bytes,
            mamba_cache_mode="align",
        ),
    }
    return [KVCacheGroupSpec([f"{at}.{layer}" for layer in range(2)], specs[kind]()) for at, kind in enumerate(kinds)]


@contextlib.contextmanager
def vllm(
    model: Path,
    undercroft: Mapping[str, Any],
    chance: random.Random,
    *,
    kinds: str = "f",
    head_size: int = 8,
    blocks: int = 40,
    ranks: int = 1,
    drafts: int = 0,
    ahead: int = 0,
    faults: dict[str, float] | None = None,
    connectors: Sequence[Mapping[str, Any]] = (),
    siblings_first: bool = False,
    policy: str = "fail",
    **engine_args: Any,
) -> Iterator[Vllm]:
    """Start one. ``faults``: probabilities of `SlowCopier`. ``connectors``: further children of a MultiConnector."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    from kv_caches import allocate, plan, scheduler_config
    from undercroft.connector.worker import worker as worker_module

    faults = {} if faults is None else faults
    own = {"kv_connector": "UndercroftConnector", "kv_connector_extra_config": dict(undercroft)}
    if connectors:
        ours, others = [{**own, "kv_role": "kv_both"}], [*map(dict, connectors)]
        children = others + ours if siblings_first else ours + others
        own = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
    if drafts:
        engine_args["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 2,
        }
    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        kv_transfer_config=KVTransferConfig(**own, kv_role="kv_both", kv_load_failure_policy=policy),
        **{"max_model_len": 1024, "max_num_seqs": 6, "max_num_batched_tokens": 96, **engine_args},
    )
    config = args.create_engine_config()
    config.cache_config.block_size = BLOCK
    if "s" in kinds:
        config.cache_config.mamba_cache_mode = "align"
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = bool(ahead)
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    of_workers = plan("LBHNC", groups_of(kinds, head_size), blocks)
    of_scheduler = scheduler_config(of_workers)
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(of_scheduler, config)
    for one in (of_workers, of_scheduler):
        one.hash_block_size, one.cache_hit_alignment_tokens = hash_block, scheduler_block
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    make_copier = worker_module.make_copier
    worker_module.make_copier = lambda *args: SlowCopier(make_copier(*args), chance, faults)  # type: ignore[assignment]
    workers, pages = [], []
    one = None
    try:
        for rank in range(ranks):
            config.parallel_config.rank = rank
            caches = allocate(of_workers)
            pages.append({name: _parts(cache) for name, cache in caches.items()})
            workers.append(KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, of_workers))
            workers[-1].register_kv_caches(caches)
        config.parallel_config.rank = 0
        kind = AsyncScheduler if ahead else Scheduler
        scheduler = kind(
            vllm_config=config,
            kv_cache_config=of_scheduler,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=True,
        )
        hasher = get_request_block_hasher(hash_block, hash_function)
        one = Vllm(scheduler, workers, pages, of_workers, hasher, chance, faults, drafts, ahead)
        one.aggregator = KVOutputAggregator.from_connector(scheduler.connector, ranks)
        yield one
    finally:
        if one is not None:
            one.close()
        worker_module.make_copier = make_copier
