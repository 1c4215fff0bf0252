"""The contract of SGLang's storage interface v1, with its real pools in all layouts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from host_pools import PAGE, PAGES, POOLS, after, content, fill, indices, keys, mha, opened, storage_config, wipe, wrong
from serve_process import ServeProcess
from served_client import until
from undercroft.embed import Cache, Group
from undercroft.errors import ConfigError
from undercroft.sglang_hicache import UndercroftHiCache
from undercroft.sglang_hicache import store as store_module


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> Any:
    """A host pool of each kind and layout."""
    return POOLS[request.param]()


def test_pages_come_back_from_memory_and_after_a_restart(pool: Any, tmp_path: Path) -> None:
    chain = keys("a", 16)
    store = opened(tmp_path, pool)
    assert store.batch_exists(chain, after()) == 0
    assert store.batch_set_v1(chain[:10], fill(pool, range(10), chain[:10]), after()) == [True] * 10
    assert store.batch_set_v1(chain[10:], fill(pool, range(10, 16), chain[10:]), after(chain[:10])) == [True] * 6
    for _ in ("from memory", "from disk"):
        assert store.batch_exists(chain, after()) == 16
        assert store.batch_exists(chain[10:], after(chain[:10])) == 6
        assert store.batch_exists([*chain[:4], *keys("b", 4)], after()) == 4
        assert store.batch_exists(keys("b", 4), after()) == 0
        assert store.batch_get_v1(chain, wipe(pool, range(20, 36)), after()) == [True] * 16
        assert wrong(pool, range(20, 36), chain) == []
        assert store.batch_get_v1(chain[10:], wipe(pool, range(40, 46)), after(chain[:10])) == [True] * 6
        assert wrong(pool, range(40, 46), chain[10:]) == []
        store.close()
        store = opened(tmp_path, pool)
    store.close()


def test_pages_beyond_the_last_one_that_is_kept_are_misses(pool: Any, tmp_path: Path) -> None:
    chain = keys("a", 8)
    store = opened(tmp_path, pool)
    store.batch_set_v1(chain[:5], fill(pool, range(5), chain[:5]), after())
    assert store.batch_get_v1(chain, wipe(pool, range(20, 28)), after()) == [True] * 5 + [False] * 3
    assert wrong(pool, range(20, 25), chain[:5]) == []
    store.close()


def test_pages_without_the_pages_before_them_are_not_kept(pool: Any, tmp_path: Path) -> None:
    chain = keys("a", 8)
    store = opened(tmp_path, pool)
    assert store.batch_set_v1(chain[4:], fill(pool, range(4), chain[4:]), after(chain[:4])) == [False] * 4
    assert store.batch_exists(chain, after()) == 0
    store.close()


def test_pages_whose_bytes_have_changed_on_disk_are_misses(tmp_path: Path) -> None:
    pool, chain = mha(), keys("a", 16)
    store = opened(tmp_path, pool)
    store.batch_set_v1(chain, fill(pool, range(16), chain), after())
    store.close()
    flip(largest(tmp_path), pool.get_data_page(0, flat=True), chain[7])
    store = opened(tmp_path, pool)
    got = store.batch_get_v1(chain, wipe(pool, range(20, 36)), after())
    assert got[:7] == [True] * 7
    assert got[7] is False
    assert wrong(pool, range(20, 36), chain, got) == []
    store.close()


def largest(folder: Path) -> Path:
    """The file with the payloads."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(file: Path, like: torch.Tensor, key: str) -> None:
    """Change a byte of a page's payload."""
    payload = content(key, like).view(torch.uint8).numpy().tobytes()
    at = file.read_bytes().find(payload[:256])
    assert at >= 0
    with file.open("r+b") as opened_file:
        opened_file.seek(at + 100)
        opened_file.write(bytes([payload[100] ^ 1]))


def test_hashes_of_a_prompt_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, numbers, made = opened(tmp_path, mha()), random.Random(3), []

    def fromhex(key: str) -> bytes:
        made.append(key)
        return bytes.fromhex(key)

    monkeypatch.setattr(store_module, "bytes", SimpleNamespace(fromhex=fromhex), raising=False)
    chain_of, prompts = store._stores["kv"]._chain, [keys(f"prompt {number}", 200) for number in range(3)]
    for prompt in prompts:
        chain_of(prompt[:100])
    for _ in range(200):
        prompt, end = numbers.choice(prompts), numbers.randrange(1, 200)
        assert chain_of(prompt[:end]) == [bytes.fromhex(key) for key in prompt[:end]]
    assert len(made) < 1_000
    mixed = [*prompts[0][:50], *prompts[1][50:60]]
    assert chain_of(mixed) == [bytes.fromhex(key) for key in mixed]
    store.close()


def test_without_prefixes_nothing_is_kept_and_the_log_names_the_remedy_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool, chain = mha(), keys("a", 4)
    store = opened(tmp_path, pool)
    for _ in range(3):
        assert store.batch_set_v1(chain, fill(pool, range(4), chain), HiCacheStorageExtraInfo()) == [False] * 4
        assert store.batch_get_v1(chain, wipe(pool, range(4)), HiCacheStorageExtraInfo()) == [False] * 4
        assert store.batch_exists(chain, HiCacheStorageExtraInfo()) == 0
    lines = [record.getMessage() for record in caplog.records if "passes no prefixes" in record.getMessage()]
    assert len(lines) == 1
    assert '"hicache_storage_pass_prefix_keys": true' in lines[0]
    store.close()


def test_an_empty_prefix_that_sglang_leaves_out_is_an_empty_prefix(tmp_path: Path) -> None:
    pool, chain = mha(), keys("a", 4)
    store = opened(tmp_path, pool)
    store.batch_set_v1(chain, fill(pool, range(4), chain), after())
    assert store.batch_get_v1(chain, wipe(pool, range(8, 12)), HiCacheStorageExtraInfo()) == [True] * 4
    assert wrong(pool, range(8, 12), chain) == []
    store.close()


def test_a_pool_whose_memory_cannot_be_used_ends_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The first pool of DeepSeek V4.
    nothing = LogicalHostPool(PAGES * PAGE, PAGE)
    pool, chain = mha(), keys("a", 4)
    for first, second in ((nothing, pool), (pool, nothing)):
        store = opened(tmp_path, first)
        store.register_mem_host_pool_v2(second, "swa")
        kept = store.batch_set_v1(chain, fill(pool, range(4), chain), after())
        assert kept == [first is pool] * 4
        store.close()
    assert caplog.text.count("whose memory it cannot use") == 2


def test_places_that_do_not_fit_the_keys_are_left_alone(tmp_path: Path) -> None:
    pool, chain = mha(), keys("a", 4)
    store = opened(tmp_path, pool)
    assert store.batch_set_v1(chain, indices(pool, range(3)), after()) == [False] * 4
    assert store.batch_exists(chain, after()) == 0
    store.close()


def test_clear_drops_everything_also_after_a_restart(tmp_path: Path) -> None:
    pool, chain = mha(), keys("a", 8)
    store = opened(tmp_path, pool)
    store.batch_set_v1(chain, fill(pool, range(8), chain), after())
    store.clear()
    assert store.batch_exists(chain, after()) == 0
    store.close()
    store = opened(tmp_path, pool)
    assert store.batch_exists(chain, after()) == 0
    store.clear()
    assert store.batch_set_v1(chain, fill(pool, range(8), chain), after()) == [True] * 8
    store.close()
    store = opened(tmp_path, pool)
    assert store.batch_exists(chain, after()) == 8, "pages that came after it are kept as before"
    store.close()


def test_after_a_clear_that_is_not_durable_pages_are_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool, chain = mha(), keys("a", 4)
    store, other = opened(tmp_path, pool), opened(tmp_path, pool)
    cache = store._stores["kv"].cache
    reset = cache.reset
    cache.reset = lambda timeout_s: not reset(timeout_s)
    store.clear()
    assert "not all pages are cleared durably" in caplog.text
    assert store.batch_set_v1(chain, fill(pool, range(4), chain), after()) == [True] * 4
    assert store.batch_exists(chain, after()) == 4
    assert other.batch_exists(chain, after()) == 0
    other.close()
    store.close()


def test_close_may_be_called_twice_and_calls_after_it_are_misses(tmp_path: Path) -> None:
    pool, chain = mha(), keys("a", 4)
    store = opened(tmp_path, pool)
    store.batch_set_v1(chain, fill(pool, range(4), chain), after())
    store.close()
    store.close()
    assert store.batch_exists(chain, after()) == 0
    assert store.batch_get_v1(chain, wipe(pool, range(4)), after()) == [False] * 4
    assert store.batch_set_v1(chain, indices(pool, range(4)), after()) == [False] * 4


def test_sglangs_metrics_count_the_pages_of_each_call(tmp_path: Path) -> None:
    pool, chain = mha(), keys("a", 6)
    store = opened(tmp_path, pool)
    store.batch_set_v1(chain[:4], fill(pool, range(4), chain[:4]), after())
    store.batch_get_v1(chain, wipe(pool, range(20, 26)), after())
    metrics = store.get_stats()
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([4], [4])
    assert min(metrics.backup_bandwidth + metrics.prefetch_bandwidth) > 0
    assert store.get_stats().backup_pgs == []
    store.close()


def test_sglangs_factory_and_failure_injector_work_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    pool = mha()
    store = StorageBackendFactory.create_backend("dynamic", storage_config(tmp_path), pool)
    store.register_mem_pool_host(pool)
    kept = 0
    for number in range(60):
        chain = keys(f"prompt {number % 20}", 4)
        store.batch_set_v1(chain, fill(pool, range(4), chain), after())
        places = [20, 21, 22, 23]
        got = store.batch_get_v1(chain, wipe(pool, places), after())
        kept += sum(got)
        assert wrong(pool, places, chain, got) == []
    assert kept > 60
    store._backend.close()


def test_ten_thousand_random_batches_agree_with_a_dictionary(tmp_path: Path) -> None:
    pool, numbers = mha(pages=PAGES), random.Random(5)
    prompts = [keys(f"prompt {number}", 24) for number in range(40)]
    held = [0] * len(prompts)
    """By prompt: its pages that are kept."""
    store = opened(tmp_path, pool, host_memory="64MiB")
    for _ in range(10_000):
        which = numbers.randrange(len(prompts))
        chain, first = prompts[which], numbers.randrange(20)
        end = min(24, first + 1 + numbers.randrange(6))
        piece, prefix = chain[first:end], after(chain[:first])
        if numbers.random() < 0.3:
            ok = store.batch_set_v1(piece, fill(pool, range(len(piece)), piece), prefix)
            assert ok == [first <= held[which]] * len(piece)
            held[which] = max(held[which], end) if first <= held[which] else held[which]
        elif numbers.random() < 0.5:
            assert store.batch_exists(piece, prefix) == max(0, min(held[which], end) - first)
        else:
            places = range(20, 20 + len(piece))
            got = store.batch_get_v1(piece, wipe(pool, places), prefix)
            assert got == [number < held[which] for number in range(first, end)]
            assert wrong(pool, places, piece, got) == []
    store.close()


def test_a_small_disk_forgets_and_never_gives_wrong_pages(tmp_path: Path) -> None:
    pool, numbers = mha(), random.Random(6)
    store = opened(tmp_path, pool, host_memory="16MiB", disk_capacity="32MiB")
    hits = 0
    for number in range(800):
        chain = keys(f"prompt {number}", 16)
        store.batch_set_v1(chain, fill(pool, range(16), chain), after())
        old = keys(f"prompt {max(0, number - numbers.randrange(800))}", 16)
        got = store.batch_get_v1(old, wipe(pool, range(20, 36)), after())
        hits += sum(got)
        assert wrong(pool, range(20, 36), old, got) == []
    assert hits > 1_000
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 48 << 20
    store.close()


SAVING = """
import sys
sys.path.insert(0, {folder!r})
from host_pools import *
pool = mha()
store = opened({disk!r}, pool)
number = 0
while True:
    chain = keys(f"prompt {{number}}", 16)
    store.batch_set_v1(chain, fill(pool, range(16), chain), after())
    number += 1
    print(number, flush=True)
"""


def test_a_killed_process_leaves_only_right_pages(tmp_path: Path) -> None:
    program = SAVING.format(folder=str(Path(__file__).parent), disk=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while int(child.stdout.readline() or "1000") < 200:
            pass
        child.kill()
    pool = mha()
    store = opened(tmp_path, pool)
    found = 0
    for number in range(220):
        chain = keys(f"prompt {number}", 16)
        count = store.batch_exists(chain, after())
        got = store.batch_get_v1(chain, wipe(pool, range(16)), after())
        assert sum(got) <= count
        found += sum(got)
        assert wrong(pool, range(16), chain, got) == []
    assert found > 200
    store.close()


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    program = SAVING.format(folder=str(Path(__file__).parent), disk=str(tmp_path)).replace(
        "while True:", "for _ in range(3):"
    )
    program += "\nsys.stdin.read()\nstore.close()\n"
    pool = mha()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        while int(child.stdout.readline() or "1000") < 3:
            pass
        store = opened(tmp_path, pool)
        chain = keys("prompt 2", 16)
        until("the pages are found", lambda: store.batch_exists(chain, after()) == 16)
        assert store.batch_get_v1(chain, wipe(pool, range(16)), after()) == [True] * 16
        assert wrong(pool, range(16), chain) == []
        child.stdin.close()
    store.close()


def test_a_program_with_another_identity_shares_the_directory(tmp_path: Path) -> None:
    pool, chain = mha(), keys("a", 4)
    store = opened(tmp_path, pool)
    store.batch_set_v1(chain, fill(pool, range(4), chain), after())
    options = {"host_memory": "16MiB", "disk_path": str(tmp_path), "disk_capacity": "256MiB"}
    with Cache.open(options, {"another": "engine"}, [Group((8192,))], PAGE) as other:
        assert other.exists([bytes.fromhex(key) for key in chain]) == 0
        assert store.batch_get_v1(chain, wipe(pool, range(4)), after()) == [True] * 4
    store.close()


def test_pages_lie_on_a_server(tmp_path: Path) -> None:
    pool, chain = mha(), keys("a", 8)
    with ServeProcess(tmp_path / "s") as server:
        for _ in range(2):
            store = opened("", pool, server=f"unix://{server.socket}")
            until(
                "the pages are kept",
                lambda store=store: all(store.batch_set_v1(chain, fill(pool, range(8), chain), after())),
            )
            assert store.batch_exists(chain, after()) == 8
            assert store.batch_get_v1(chain, wipe(pool, range(20, 28)), after()) == [True] * 8
            assert wrong(pool, range(20, 28), chain) == []
            store.close()
        store = opened("", pool, server=f"unix://{server.socket}")
        until("the pages are found", lambda: store.batch_exists(chain, after()) == 8)
        server.process.kill()
        server.process.wait()
        assert store.batch_get_v1(chain, wipe(pool, range(20, 28)), after()) == [False] * 8
        assert store.batch_set_v1(chain, fill(pool, range(8), chain), after()) == [False] * 8
        store.close()


def test_another_host_finds_pages_in_the_remote_store(tmp_path: Path) -> None:
    pool, chain = mha(heads=32), keys("a", 64)
    (tmp_path / "store").mkdir(mode=0o700)
    remote = {"remote": f"file://{tmp_path / 'store'}", "remote_object": "1MiB"}
    store = opened(tmp_path / "one", pool, **remote)
    assert store.batch_set_v1(chain, fill(pool, range(64), chain), after()) == [True] * 64
    other = opened(tmp_path / "two", pool, **remote)
    until("the other host finds the pages", lambda: other.batch_exists(chain, after()) == 64)
    assert other.batch_get_v1(chain, wipe(pool, range(64)), after()) == [True] * 64
    assert wrong(pool, range(64), chain) == []
    other.close()
    store.close()


def test_servers_of_two_hosts_share_pages_in_the_remote_store(tmp_path: Path) -> None:
    pool, chain = mha(heads=32), keys("a", 64)
    (tmp_path / "store").mkdir(mode=0o700)
    remote = ("--remote", f"file://{tmp_path / 'store'}", "--remote-object", "1MiB")
    for host in ("one", "two"):
        with ServeProcess(tmp_path / host, *remote) as server:
            store = opened("", pool, server=f"unix://{server.socket}")
            if host == "one":
                until(
                    "the pages are kept",
                    lambda store=store: all(store.batch_set_v1(chain, fill(pool, range(64), chain), after())),
                )
                # The server is killed at the end, and a file with a point before its name is not yet an object.
                until(
                    "the pages are in the remote store",
                    lambda: len([path for path in (tmp_path / "store").rglob("[!.]*-*") if path.is_file()]) == 8,
                )
            else:
                # A server tells of its remote store with its first session. From then on, questions wait for it.
                until("the server tells of its remote store", lambda store=store: store._stores["kv"]._has_remote())
                until("the pages are found", lambda store=store: store.batch_exists(chain, after()) == 64)
                assert store.batch_get_v1(chain, wipe(pool, range(64)), after()) == [True] * 64
                assert wrong(pool, range(64), chain) == []
            store.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"disk_capactiy": "1GiB"}, "disk_capacity"),
        ({"lookup": "blocking"}, "SGLang"),
        ({"pin_memory": True}, "SGLang pins"),
    ],
)
def test_wrong_options_are_named_at_the_start(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        UndercroftHiCache(storage_config(tmp_path, **options), {})


def test_nothing_of_vllm_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['vllm'] = None; import undercroft.sglang_hicache, json; "
        "print(json.dumps([name for name in sys.modules if name.startswith('vllm.')]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == []
