"""A scheduler of toy size around the real KV block pool: requests, block tables, steps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm.v1.request import RequestStatus

from undercroft.connector.metadata import UndercroftMetadata, UndercroftWorkerMetadata

BLOCK = 16


def chain(tokens, block=BLOCK):
    """Chained hashes of the full blocks of a token list."""
    hashes, parent = [], b""
    for start in range(0, len(tokens) - block + 1, block):
        parent = hashlib.sha256(parent + repr(tokens[start : start + block]).encode()).digest()
        hashes.append(parent)
    return hashes


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: dict | None = None
    mm_features: list = field(default_factory=list)
    prompt_embeds: object = None
    sampling_params: object = None
    pooling_params: object = None
    status: RequestStatus = RequestStatus.FINISHED_ABORTED

    def __post_init__(self):
        self.num_prompt_tokens = len(self.tokens)
        self.block_hashes = chain(self.tokens)

    @property
    def output_token_ids(self):
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_tokens(self):
        return len(self.tokens)

    def append(self, *tokens):
        self.tokens.extend(tokens)
        self.block_hashes = chain(self.tokens)


class FakeBlock:
    def __init__(self, block_id):
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = block_id == 0


class FakePool:
    """Reference counts as vLLM's BlockPool keeps them."""

    def __init__(self, size=256):
        self.blocks = [FakeBlock(index) for index in range(size)]
        self.freed = []
        self.next = 1

    def allocate(self, count):
        blocks = self.blocks[self.next : self.next + count]
        self.next += count
        self.touch(blocks)
        return [block.block_id for block in blocks]

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.freed.append(block.block_id)

    def free_ids(self, ids):
        self.free_blocks([self.blocks[block_id] for block_id in ids])

    def reset_prefix_cache(self):
        return all(block.ref_cnt == 0 for block in self.blocks)


class Blocks:
    def __init__(self, tables):
        self.tables = tuple(tables)

    def get_block_ids(self):
        return self.tables


def scheduler_output(scheduled, tables):
    """The parts of SchedulerOutput that are read: tokens per request, and the requests' block tables."""
    return SimpleNamespace(
        num_scheduled_tokens=dict(scheduled),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )


def worker_output(meta: UndercroftMetadata, ranks=1, failed_saves=(), failed_loads=(), invalid_blocks=()):
    """The answer to a step's metadata of workers that do everything at once."""
    answer = UndercroftWorkerMetadata({job.transfer_id: ranks for job in meta.saves}, set(failed_saves))
    received = {job.request_id for job in meta.loads} | set(meta.failed_loads)
    return SimpleNamespace(
        finished_recving=received,
        failed_recving=set(failed_loads) | set(meta.failed_loads),
        invalid_block_ids=set(invalid_blocks),
        kv_connector_worker_meta=answer if answer.saves_ended else None,
    )
