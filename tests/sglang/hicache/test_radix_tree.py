"""Prompts through SGLang's real radix tree and cache controller: the device, SGLang's host memory, and undercroft."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import unified_radix_cache

from driver import DEVICE_PAGES, Driver, copy_without_kernels, driver
from host_pools import PAGE
from undercroft.sglang_hicache import prefixes

pytestmark = pytest.mark.usefixtures("server", "copies")

MODES = [("page_first_direct", "write_through"), ("layer_first", "write_through"), ("layer_first", "write_back")]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies without SGLang's kernels."""
    copy_without_kernels(monkeypatch)


def prompt(name: int, pages: int) -> list[int]:
    """The tokens of a prompt."""
    return random.Random(name).choices(range(50_000), k=pages * PAGE)


def evict(one: Driver) -> None:
    """Fill the device and SGLang's host memory with other prompts."""
    for number in range(8):
        one.serve(prompt(1_000 + number, DEVICE_PAGES // 2))
        # SGLang keeps in its memory what is not written back yet.
        one.settle()


@pytest.mark.parametrize(("layout", "policy"), MODES)
def test_a_prompt_comes_back_from_each_level_and_after_a_restart(
    layout: str, policy: str, rank: Any, tmp_path: Path
) -> None:
    tokens = prompt(1, 10)
    with driver(rank, tmp_path, layout=layout, policy=policy) as one:
        assert one.serve(tokens).computed == len(tokens)
        assert one.serve(tokens).device == len(tokens)
        evict(one)
        assert one.serve(tokens).storage == len(tokens)
        longer = [*tokens, *prompt(2, 4)]
        assert vars(one.serve(longer)) == {"device": len(tokens), "host": 0, "storage": 0, "computed": 4 * PAGE}
        evict(one)
        one.forget()
        assert one.serve(longer).storage == len(longer)
    with driver(rank, tmp_path, layout=layout, policy=policy) as one:
        assert one.serve(longer[: 6 * PAGE]).storage == 6 * PAGE
        # The pages before are in SGLang's memory: only the others are fetched.
        assert vars(one.serve(longer)) == {"device": 6 * PAGE, "host": 0, "storage": 8 * PAGE, "computed": 0}
        assert one.serve(prompt(3, 4)).computed == 4 * PAGE
        one.settle()
        one.forget()
        assert one.tree.clear_storage_backend()
        assert one.serve(longer).computed == len(longer)


@pytest.mark.parametrize(("layout", "policy"), MODES)
def test_random_chats_find_right_kv_on_each_level(layout: str, policy: str, rank: Any, tmp_path: Path) -> None:
    numbers = random.Random(7)
    chats = [prompt(number % 3, 3) + prompt(100 + number, 3) for number in range(40)]
    found = {"device": 0, "host": 0, "storage": 0, "computed": 0}
    for _ in range(2):
        with driver(rank, tmp_path, layout=layout, policy=policy, disk_capacity="64MiB") as one:
            for turn in range(100):
                which = numbers.randrange(len(chats))
                if len(chats[which]) < 12 * PAGE and numbers.random() < 0.4:
                    chats[which] = chats[which] + prompt(1_000 * turn + which, 2)
                served = one.serve(chats[which])
                found = {level: found[level] + getattr(served, level) for level in found}
                one.tree.sanity_check()
            one.settle()
    assert min(found.values()) > 20 * PAGE, found


def test_chats_survive_failures_that_sglang_injects(rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    numbers, storage = random.Random(8), 0
    # SGLang writes a prefix once. Pages behind one whose write failed are refused, so there are many prefixes.
    chats = [prompt(number % 10, 3) + prompt(100 + number, 5) for number in range(40)]
    with driver(rank, tmp_path, layout="page_first_direct", policy="write_through") as one:
        # SGLang does not seed its failures: more prompts follow until enough pages came.
        served = 0
        while served < 200 or storage <= 20 * PAGE:
            storage += one.serve(numbers.choice(chats)).storage
            served += 1
            assert served < 2_000, f"{storage // PAGE} pages came"
        one.tree.sanity_check()
        one.settle()


@pytest.mark.parametrize(("passed", "own"), [(["a"], ["b", "c"]), (["a", "b", "c"], ["b", "c"]), ([], ["a"]), ([], [])])
def test_the_prefix_of_a_prefetch_ends_with_the_pages_of_its_node(
    passed: list[str], own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tree:
        tree_core = SimpleNamespace(get_hash_values=lambda _: own)

        def get_prefix_hash_values(self, _: int) -> list[str]:
            return passed

    monkeypatch.setattr(unified_radix_cache, "UnifiedRadixCache", Tree)
    for _ in range(2):
        assert prefixes.complete() is None
        assert Tree().get_prefix_hash_values(7) == ["a", "b", "c"][: len({*passed, *own})]


def test_an_sglang_with_another_tree_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(unified_radix_cache.UnifiedRadixCache, "get_prefix_hash_values")
    assert "get_prefix_hash_values" in str(prefixes.complete())
