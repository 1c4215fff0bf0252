"""Payloads of one group are evicted while another's stay: a hit ends where vLLM's own managers say, or nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from connector_engine import core
from hybrid_engine import HOST, MODELS, Crowd, Model, ask
from real_engine import Engine
from undercroft.connector.scheduler.offers import Offer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.usefixtures("least_recent")]

BLOCKS = 5


def held(running: Engine, hashes: list[bytes]) -> set[tuple[int, int]]:
    """The (group, block) of a prompt that host memory holds: all but those that the engine would have saved now."""
    half = running.connector._scheduler
    session, groups = half._session, half._groups
    offers = [Offer(index, 0, BLOCKS) for index, of in enumerate(groups.engine_groups) if of.kind != "full"]
    grant = session.begin_save("probe", hashes, BLOCKS * groups.engine_block_size, offers)
    assert not grant.refused
    missing = {
        (groups.engine_groups[extent.group].group, extent.first_block + at)
        for extent in grant.extents
        for at in np.flatnonzero(np.frombuffer(extent.offsets, dtype="<i8") >= 0).tolist()
    }
    if grant.extents:
        session.end_transfer(grant.transfer_id, False)
    session.finish_request("probe")
    return {(group, block) for group in groups.loaded for block in range(BLOCKS)} - missing


def longest_hit(running: Engine, hashes: list[bytes], here: set[tuple[int, int]], tokens: int) -> int:
    """Tokens of ``tokens`` that vLLM would hit if its own block pool held ``here``."""
    manager = running.scheduler.kv_cache_manager
    pool, block = manager.block_pool, {one: index for index, one in enumerate(hashes)}

    def get_cached_block(block_hash: Any, group_ids: list[int]) -> list[Any] | None:
        found = all((group, block[block_hash]) in here for group in group_ids)
        return [pool.blocks[1]] * len(group_ids) if found else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "get_cached_block", get_cached_block)
        return manager.coordinator.find_longest_cache_hit(hashes, tokens - 1)[1]


@pytest.mark.parametrize("name", MODELS)
def test_a_hit_depends_on_the_blocks_left_of_each_group(name: str, request: pytest.FixtureRequest) -> None:
    model = Model(name, request.getfixturevalue(name), *MODELS[name])
    running = model.start({"host_memory": HOST})
    try:
        hashes: list[bytes] = []
        arrived = running.connector.on_new_request

        def listening(one: Any) -> None:
            hashes[:] = max(hashes, list(one.block_hashes[:BLOCKS]), key=len)
            arrived(one)

        running.connector.on_new_request = listening
        cold = {}
        for count in range(BLOCKS, 0, -1):
            cold[count] = ask(running, model.ids(count))
            assert running.reset_device_cache(connector=True)
        assert {answer.cached for answer in cold.values()} == {0}

        seen = set()
        crowd = Crowd(running)
        for more in (0, 2, 5, 9, 14, 20):
            for count in range(BLOCKS, 0, -1):
                ask(running, model.ids(count), 1)
            evictions = core(running).stats()["host_evictions"]
            while core(running).stats()["host_evictions"] == evictions:
                crowd.save(1)
            crowd.save(more)
            crowd.leave()
            for count in range(BLOCKS, 0, -1):
                here = held(running, hashes)
                ids = model.ids(count)
                expected = longest_hit(running, hashes, here, len(ids))
                answer = ask(running, ids)
                assert answer.cached == expected, (more, count, sorted(here))
                assert model.same(answer, cold[count]), (more, count, sorted(here))
                ground = all((1 - model.optional_group, block) in here for block in range(count))
                seen.add((ground, (expected > 0) + (expected == count * model.block)))
        # All blocks of attention were there, and the other group had a hit's blocks nowhere, further up, or at the end.
        assert {(True, 1), (True, 2)} <= seen, seen
    finally:
        running.close()
