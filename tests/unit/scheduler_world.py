"""The scheduler's half over the fake engine, for its tests."""

from __future__ import annotations

from fake_core import SLOT, FakeEngine
from fake_vllm import BLOCK, Blocks, FakePool, scheduler_output, worker_output
from undercroft.config import UndercroftConfig
from undercroft.connector.groups import Groups
from undercroft.connector.observe.stats import Counts
from undercroft.connector.scheduler.scheduler import SchedulerConnector

FULL = Groups(BLOCK, BLOCK, ("full",), (BLOCK,), (0,), 0)


class World:
    """A connector over the fake engine, with the pool and the errors it reported."""

    def __init__(self, groups=FULL, ranks=1, capacity=10_000, **options):
        self.engine = FakeEngine(capacity)
        registration = groups.registration([SLOT] * len(groups.kinds))
        self.session = self.engine.register(
            "{}", registration, groups.engine_block_size, groups.alignment, groups.dropped_tokens
        )
        config = UndercroftConfig.parse({"min_load_tokens": 0, **options}, {})
        self.errors = []
        self.counts = Counts()
        self.ranks = ranks
        self.connector = SchedulerConnector(
            self.session,
            groups,
            config,
            ranks,
            lambda: self.engine.arena,
            self.counts,
            lambda hook, error: self.errors.append((hook, error)),
        )
        self.pool = FakePool()
        self.connector.bind_gpu_block_pool(self.pool)
        self.tables = {}

    def step(self, scheduled=()):
        """One step: the metadata for it; counts tokens as computed afterwards."""
        counts = {request.request_id: tokens for request, tokens in scheduled}
        meta = self.connector.build_connector_meta(scheduler_output(counts, self.tables))
        for request, tokens in scheduled:
            request.num_computed_tokens += tokens
        return meta

    def answer(self, meta, **kwargs):
        self.connector.update_connector_output(worker_output(meta, self.ranks, **kwargs))

    def admit(self, request, external=0):
        count = -(-request.num_tokens // BLOCK)
        self.tables[request.request_id] = (self.pool.allocate(count),)
        self.connector.update_state_after_alloc(request, Blocks(self.tables[request.request_id]), external)

    def prefill(self, request):
        """A whole request without hits: arrival, prefill, saves acknowledged."""
        self.connector.on_new_request(request)
        assert self.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        self.admit(request)
        meta = self.step([(request, request.num_tokens)])
        self.answer(meta)
        return meta

    def finish(self, request):
        tables = self.tables.pop(request.request_id, ([],))
        self.connector.request_finished(request, tables)
        self.pool.free_ids(tables[0])


def tokens(n, seed=0):
    return [seed * 1000 + i for i in range(n)]
