from __future__ import annotations

import importlib.util
import inspect
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from fake_config import kv_cache_config, unknown, vllm_config
from fake_core import FakeEngine
from fake_vllm import FakePool, Request, scheduler_output, worker_output
from undercroft import log, plugin, registration
from undercroft.compat import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from undercroft.config import ConfigError
from undercroft.connector import connector as module
from undercroft.connector import wiring
from undercroft.connector.connector import UndercroftConnector
from undercroft.connector.groups import GroupRegistration
from undercroft.connector.metadata import UndercroftMetadata
from undercroft.engine import start_line


@pytest.fixture
def engine(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(wiring, "open_engine", lambda config, ranks: engine)
    return engine


def make(config=None, kv_config=None):
    return UndercroftConnector(config or vllm_config(), KVConnectorRole.SCHEDULER, kv_config or kv_cache_config())


def request(request_id="a", tokens=40):
    made = Request(request_id, list(range(tokens)))
    made.sampling_params = SimpleNamespace(extra_args=None)
    made.kv_transfer_params = None
    return made


def test_every_hook_of_vllm_has_our_signature():
    for name in KVConnectorBase_V1.__abstractmethods__ | SupportsHMA.__abstractmethods__:
        assert not getattr(getattr(UndercroftConnector, name), "__isabstractmethod__", False)
    for name, base in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction):
        ours = inspect.getattr_static(UndercroftConnector, name)
        if name.startswith("_") or ours is base or not inspect.isfunction(ours):
            continue
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(base).parameters), name


def test_prefill_hit_and_finish(engine):
    connector = make()
    pool = FakePool()
    connector.bind_gpu_block_pool(pool)
    first = request()
    connector.on_new_request(first)
    assert connector.get_num_new_matched_tokens(first, 0) == (0, False)
    tables = {"a": (pool.allocate(3),)}
    meta = connector.build_connector_meta(scheduler_output({"a": 40}, tables))
    assert len(meta.saves) == 1
    connector.update_connector_output(worker_output(meta))
    assert connector.request_finished_all_groups(first, tables["a"]) == (False, None)
    stats = connector.get_kv_connector_stats()
    assert stats.data["counters"]["saved_blocks"] == 2
    assert "io_engine" not in stats.data, "there is no disk tier"
    assert connector.requires_kv_delivery is False
    connector.shutdown()
    assert engine.closed


def test_failure_policy_becomes_recompute(engine):
    config = vllm_config()
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    make(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


CALLS = {
    "on_new_request": (request(),),
    "get_num_new_matched_tokens": (request(), 0),
    "update_state_after_alloc": (request(), None, 16),
    "get_loaded_kv_cache_group_ids": (request(),),
    "get_external_cache_hit_sources": (request(), 16),
    "build_connector_meta": (None,),
    "update_connector_output": (None,),
    "request_finished": (request(), []),
    "request_finished_all_groups": (request(), ([],)),
    "has_pending_block_frees": (),
    "has_pending_push_work": (),
    "reset_cache": (),
    "bind_gpu_block_pool": (None,),
    "get_kv_connector_stats": (),
    "shutdown": (),
}
ANSWERS = {
    "get_num_new_matched_tokens": (0, False),
    "get_loaded_kv_cache_group_ids": (),
    "get_external_cache_hit_sources": {},
    "build_connector_meta": UndercroftMetadata(),
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "has_pending_block_frees": False,
    "has_pending_push_work": False,
    "reset_cache": False,
}


class Broken:
    def __getattr__(self, name):
        raise RuntimeError(f"broken {name}")


@pytest.mark.parametrize("hook", CALLS)
def test_no_error_leaves_a_hook(engine, hook, caplog):
    connector = make()
    connector._scheduler = connector._resets = connector._engine_stats = connector._engine = Broken()
    for _ in range(3):
        assert getattr(connector, hook)(*CALLS[hook]) == ANSWERS.get(hook)
    assert connector._counts.collect()["counters"]["hook_errors"] == 3


@pytest.mark.parametrize("observer", ["_recorder", "_explanations", "_shadow", "_threshold", "_events", "_hints"])
def test_a_broken_observer_keeps_no_load_and_no_end_from_the_scheduler(engine, observer):
    connector = make()
    seen = []
    connector._scheduler = SimpleNamespace(
        get_num_new_matched_tokens=lambda *_: (16, True),
        update_state_after_alloc=lambda *_: seen.append("load"),
        request_finished=lambda *_: seen.append("end"),
    )
    setattr(connector, observer, Broken())
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), None, 16)
    assert connector.request_finished_all_groups(request(), ([],)) == (False, None)
    assert seen == ["load", "end"]
    assert connector._counts.collect()["counters"]["hook_errors"] >= 1


@pytest.mark.parametrize(
    "hook",
    ["start_load_kv", "wait_for_save", "get_transfer_results", "build_connector_worker_meta"],
)
def test_no_error_leaves_a_worker_hook(engine, hook):
    connector = make()
    connector._worker = Broken()
    connector.bind_connector_metadata(UndercroftMetadata(saves=[object()]))
    arguments = {"start_load_kv": (None,), "get_transfer_results": (set(),)}
    answer = getattr(connector, hook)(*arguments.get(hook, ()))
    if hook == "get_transfer_results":
        assert not answer.finished_recving
    else:
        assert answer is None
    assert connector._counts.collect()["counters"]["hook_errors"] == 1


def test_errors_are_logged_once_per_kind(engine, monkeypatch):
    logged = []
    monkeypatch.setattr(log.logger, "log", lambda level, message, *args, **kwargs: logged.append(args))
    connector = make()
    connector._scheduler = Broken()
    for _ in range(5):
        connector.on_new_request(request())
        connector.has_pending_push_work()
    assert [args[1] for args in logged] == ["on_new_request", "has_pending_push_work"]


@pytest.mark.parametrize(("extra", "layout"), [({}, None), ({"kv_layout": "cross_layer"}, "BLHNC")])
def test_a_layout_is_asked_for_only_if_configured(extra, layout):
    assert UndercroftConnector.get_required_kvcache_layout(vllm_config(extra=extra)) == layout


def test_bad_configuration_refuses_the_start(engine):
    with pytest.raises(ConfigError, match="did you mean 'host_memory'"):
        make(vllm_config(extra={"host_memmory": "1GiB"}))


def test_failed_registration_closes_the_engine(engine, monkeypatch):
    def register(*_):
        raise ValueError("does not fit")

    monkeypatch.setattr(engine, "register", register)
    with pytest.raises(ValueError, match="does not fit"):
        make()
    assert engine.closed


def test_unsupported_model_runs_without_us(monkeypatch):
    def never(config):
        raise AssertionError("no engine is needed")

    monkeypatch.setattr(wiring, "open_engine", never)
    connector = make(kv_config=kv_cache_config([unknown()]))
    one = request()
    connector.on_new_request(one)
    assert connector.get_num_new_matched_tokens(one, 0) == (0, False)
    assert connector.build_connector_meta(scheduler_output({}, {})) == UndercroftMetadata()
    assert connector.request_finished_all_groups(one, ([],)) == (False, None)
    assert connector.reset_cache() is True
    assert connector.get_kv_connector_stats() is None
    connector.shutdown()


def test_payloads_hold_the_shards_of_all_ranks(engine, monkeypatch):
    registered = []
    register = engine.register
    monkeypatch.setattr(engine, "register", lambda *args: registered.append(args) or register(*args))
    make(vllm_config(tensor_parallel_size=2))
    (_, groups, hash_block_size, alignment, _) = registered[0]
    page = kv_cache_config().kv_cache_groups[0].kv_cache_spec.page_size_bytes
    assert groups == [GroupRegistration("full", 16, 2 * 2 * page, 0)]
    assert (hash_block_size, alignment) == (16, 16)


def test_threshold_gives_requests_back(engine):
    connector = make(vllm_config(extra={"cache_hit_threshold": 0.5}))
    one = request()
    assert connector.get_num_new_matched_tokens(one, 0) == (None, False)
    (rejection,) = connector.take_threshold_rejects()
    assert rejection.request_id == "a"
    assert connector.get_num_new_matched_tokens(one, 32) == (0, False)
    assert connector.take_threshold_rejects() == []
    assert connector.get_kv_connector_stats().data["counters"]["rejected_global"] == 1


def test_start_line():
    info = {
        "host_memory": 16 << 30,
        "huge_pages": True,
        "disks": [{"path": "/cache", "capacity": 1 << 40, "o_direct": False, "blocks_recovered": 12, "health": "good"}],
        "io_engine": "io_uring",
        "registered_buffers": True,
    }
    assert start_line(info, "0123456789abcdef") == (
        "undercroft: host memory 16 GiB in huge pages; "
        "disk /cache 1 TiB, buffered (no O_DIRECT here), 12 blocks recovered; "
        "IO engine io_uring; namespace 0123456789ab"
    )
    in_tokens = start_line(info, "ab", tokens_in=lambda size: size >> 20)
    assert "host memory 16 GiB (16,384 tokens) in huge pages; disk /cache 1 TiB (1,048,576 tokens), " in in_tokens
    index = start_line(info, "ab", tokens_in=lambda size: size >> 20, index_bytes=lambda tokens: tokens * 7)
    assert "; index up to 7.109 MiB; IO engine" in index
    memory_only = start_line({"host_memory": 1 << 30, "disks": [], "io_engine": "thread_pool"}, "ab")
    assert memory_only == "undercroft: host memory 1 GiB; no disk tier; namespace ab"
    assert "io_uring without registered buffers (RLIMIT_MEMLOCK" in start_line(info | {"registered_buffers": False}, "")
    refused = {"io_engine": "thread_pool", "io_fallback": "io_uring refused: no", "registered_buffers": False}
    assert "thread_pool (io_uring refused: no);" in start_line(info | refused, "")


def test_plugin_registers_once():
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("UndercroftConnector") is UndercroftConnector


def test_child_of_a_multi_connector_is_found(engine):
    connector = make()
    assert registration.ours_in(connector) == [connector]
    inner = SimpleNamespace(_connectors=[SimpleNamespace(), connector])
    assert registration.ours_in(SimpleNamespace(_connectors=[SimpleNamespace(), inner])) == [connector]
    assert registration.ours_in(SimpleNamespace(_connectors=[])) == []
    assert registration.ours_in(None) == []


def test_it_is_known_by_its_name_also_where_no_plugin_was_loaded(monkeypatch):
    """vLLM's frontend looks the children of a MultiConnector up by name."""
    monkeypatch.delitem(KVConnectorFactory._registry, registration.CONNECTOR, raising=False)
    spec = importlib.util.spec_from_file_location("found_by_its_path", module.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert KVConnectorFactory.get_connector_class_by_name(registration.CONNECTOR) is UndercroftConnector


def test_counts_are_reported_once_a_second_while_requests_run_and_at_once_after_the_last(engine, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    connector = make()
    running = request()
    connector.on_new_request(running)

    def counted():
        connector._counts.add("hook_errors")
        stats = connector.get_kv_connector_stats()
        return stats and stats.data["counters"]["hook_errors"]

    assert [counted(), counted(), counted()] == [1, None, None]
    clock.now += 1.5
    assert [counted(), counted()] == [3, None]
    connector.request_finished_all_groups(running, ([],))
    assert counted() == 2


def test_an_error_in_a_worker_that_rests_is_reported(engine):
    connector = make()
    connector._scheduler = connector._engine_stats = None
    connector._worker = SimpleNamespace(rest=SimpleNamespace(message=UndercroftMetadata()))
    assert connector.get_kv_connector_stats() is None
    connector._worker.get_kv_connector_stats = lambda: None
    connector._report("start_load_kv", ValueError("broken"))
    assert connector.get_kv_connector_stats().data["counters"] == {"hook_errors": 1}
