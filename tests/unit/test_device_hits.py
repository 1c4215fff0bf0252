"""How much of a prompt the device holds, which guides early reads from disk."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from undercroft import compat


@pytest.mark.parametrize("drafts", [False, True])
def test_few_probes_find_the_end_of_the_device_blocks_of_a_long_prompt(drafts):
    block, blocks, probes = 16, 8192, 0
    manager = FullAttentionManager.__new__(FullAttentionManager)
    manager.block_size, manager.use_eagle = block, drafts

    def get_cached_block(block_hash, group_ids):
        nonlocal probes
        probes += 1
        return [block_hash] if block_hash < held else None

    pool = SimpleNamespace(get_cached_block=get_cached_block)
    coordinator = SimpleNamespace(single_type_managers=[manager], block_pool=pool)
    vllm = SimpleNamespace(enable_caching=True, coordinator=coordinator)
    request = SimpleNamespace(block_hashes=range(blocks), num_tokens=blocks * block)
    for held in (0, 1, 2, 100, blocks - 1, blocks):
        probes = 0
        # The last token is computed in any case, and with drafts a block more.
        whole = min(held, blocks - 1)
        assert compat.device_hit_tokens(vllm, request) == max(0, whole - drafts) * block
        assert probes <= 14
