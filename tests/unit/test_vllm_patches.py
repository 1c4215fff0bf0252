"""vLLM is changed in one place, and an installed undercroft stops no vLLM: a patch that does not fit is logged and left
out."""

from __future__ import annotations

import ast
import asyncio
import importlib
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.launchers import app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.multimodal import hasher
from vllm.renderers.base import BaseRenderer
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu_worker import Worker

import undercroft
from fake_config import kv_cache_config, vllm_config
from test_imports import run_time_nodes
from undercroft import log, plugin, vllm_patches
from undercroft.compat import KVConnectorRole
from undercroft.connector.connector import UndercroftConnector
from undercroft.errors import ConfigError, StoreError
from undercroft.vllm_patches import PATCHES, exempt, table
from undercroft.vllm_patches.weights import HARMLESS

PACKAGE = Path(undercroft.__file__).parent
OFFLOAD = "vllm.v1.kv_offload.base"
OFFLOADING_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
MAY_IMPORT_VLLM = {
    "registration.py": {("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory")},
    "vllm_tier/events.py": {(OFFLOAD, one) for one in ("Locality", "Medium", "OffloadKey", "OffloadingEvent")},
    "vllm_tier/identity.py": {(f"{OFFLOADING_CONNECTOR}.canonical_mapping", "canonical_format_id")},
    "vllm_tier/prompts.py": {(OFFLOAD, "LookupResult")},
    "vllm_tier/stats.py": {
        (f"{OFFLOADING_CONNECTOR}.metrics", "OffloadingConnectorStats"),
        *((OFFLOAD, f"Offloading{name}Metadata") for name in ("Counter", "Gauge", "Metric")),
    },
    "vllm_tier/tier.py": {
        *((OFFLOAD, one) for one in ("LookupResult", "Medium", "OffloadKey", "ReqContext", "RequestOffloadingContext")),
        *(("vllm.v1.kv_offload.tiering.base", name) for name in ("JobResult", "SecondaryTierManager")),
    },
    "identity/schemes.py": {
        ("vllm", "envs"),
        ("vllm.config", "set_current_vllm_config"),
        ("vllm.platforms", "current_platform"),
        ("vllm.utils.hashing", "get_hash_fn_by_name"),
        ("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa"),
        ("vllm.v1.attention.selector", "get_attn_backend"),
        ("vllm.v1.kv_cache_interface", "AttentionSpec"),
        ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"),
    },
}
"""The imports from vLLM that other files than compat.py and vllm_patches/ may make: its public interfaces, and in
schemes.py the names that tell how a version makes hashes and lays out pages."""

CLASS_PLACES: list[tuple[Any, str]] = [
    (Scheduler, "update_from_output"),
    (InputProcessor, "__init__"),
    (InputProcessor, "process_inputs"),
    (OutputProcessor, "process_outputs"),
    (CompletionRequest, "to_sampling_params"),
    (ChatCompletionRequest, "to_sampling_params"),
    (Scheduler, "_handle_failed_recving"),
    (Scheduler, "_update_waiting_for_remote_kv"),
    (Scheduler, "_preempt_request"),
    (MultiConnector, "get_num_new_matched_tokens"),
    (kv_cache_utils, "_gen_lora_extra_hash_keys"),
    (EngineCore, "add_lora"),
    (EngineArgs, "create_engine_config"),
    (Scheduler, "reset_prefix_cache"),
    (EngineCore, "sleep"),
    (EngineCore, "collective_rpc"),
    (EngineCore, "set_weight_version"),
    (EngineCore, "__init__"),
    (Worker, "sleep"),
    (Worker, "wake_up"),
    (Worker, "discard"),
    (Worker, "checkpoint_prepare"),
    (BeamSearchOfflineMixin, "beam_search"),
    (BeamSearchOnlineMixin, "beam_search"),
    (OutputProcessor, "add_request"),
    (app, "init_entrypoints_middleware"),
    (kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys"),
    (BaseRenderer, "_process_multimodal"),
    (hasher, "_get_image_id_bytes"),
    (KVConnectorFactory, "create_connector"),
    (core, "get_kv_cache_configs"),
]
BY_NAME = {patch.name.upper(): patch for patch in PATCHES}


def package_files() -> dict[str, ast.Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def vllm_imports(node: ast.AST) -> set[tuple[str, str]]:
    """Names of vLLM that are imported at run time below a node, as (module, name)."""
    found = set()
    for child in run_time_nodes(node):
        if isinstance(child, ast.ImportFrom) and (child.module or "").partition(".")[0] == "vllm":
            found |= {(child.module or "", alias.name) for alias in child.names}
        elif isinstance(child, ast.Import):
            found |= {(alias.name, "") for alias in child.names if alias.name.partition(".")[0] == "vllm"}
    return found


def names_of_patches() -> dict[tuple[str, str], set[str]]:
    """For each name of vLLM that a patch imports, the patches that are lost without it."""
    needed: dict[tuple[str, str], set[str]] = {}
    for path, tree in package_files().items():
        if not path.startswith("vllm_patches/"):
            continue
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            guards = [ast.unparse(decorator) for decorator in function.decorator_list]
            # The checks of the hit threshold are functions of their own.
            patches = {guard[len("guarded(") : -1] for guard in guards if guard.startswith("guarded(")}
            for name in vllm_imports(function):
                needed.setdefault(name, set()).update(patches or {"HIT_THRESHOLD"})
    assert len(needed) > 15, "no imports found: have the patches moved?"
    return needed


NEEDED = names_of_patches()
OTHERS = sorted(
    {
        name
        for path, tree in package_files().items()
        if path in ("compat.py", "registration.py", "plugin.py", "log.py")
        for name in vllm_imports(tree)
    }
    - NEEDED.keys()
)


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM as it is without undercroft; afterwards as it was before the test."""
    for owner, name in CLASS_PLACES:
        function = getattr(owner, name)
        while hasattr(function, "_undercroft"):
            function = function.__wrapped__
        monkeypatch.setattr(owner, name, function)
    monkeypatch.setattr(table, "_problems", {patch.name: "not yet" for patch in PATCHES})
    monkeypatch.setattr(table, "_log_once", log.LogOnce())
    monkeypatch.setattr(log.logger, "propagate", True)
    yield


def apply_all() -> None:
    """Apply every patch of classes and modules, as the plugin, a connector with LoRA and a frontend do."""
    plugin.register()
    vllm_patches.tell_adapters_apart(lambda _: "key", lambda _: None)
    vllm_patches.tell_embeddings_apart()
    vllm_patches.exempt_requests()
    vllm_patches.end_copies_before_sleep(lambda _: ())
    vllm_patches.leave_device_before_checkpoint(lambda _: ())
    vllm_patches.end_reservations()
    vllm_patches.evict_uncomputed()


def is_patched(owner: Any, name: str) -> bool:
    return hasattr(getattr(owner, name), "_undercroft")


def remove(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    place = importlib.import_module(module)
    if name in vars(place):
        monkeypatch.delattr(place, name)
    else:
        lazy = place.__getattr__

        def missing(asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return lazy(asked)

        monkeypatch.setattr(place, "__getattr__", missing)
    if f"{module}.{name}" in sys.modules:
        monkeypatch.setitem(sys.modules, f"{module}.{name}", None)


@pytest.mark.usefixtures("unpatched")
def test_every_place_is_patched_once() -> None:
    apply_all()
    functions = [getattr(owner, name) for owner, name in CLASS_PLACES]
    assert all(is_patched(owner, name) for owner, name in CLASS_PLACES)
    for function in functions:
        wrappers, depth = function._undercroft, 0
        while hasattr(function, "_undercroft"):
            function, depth = function.__wrapped__, depth + 1
        assert depth == len(wrappers), "a wrapper is there twice"
    apply_all()
    assert [getattr(owner, name) for owner, name in CLASS_PLACES] == functions
    for name in ("HIT_THRESHOLD", "MULTI_CONNECTOR_POLICY", "ADAPTER_WEIGHTS", "CONFIGURATION"):
        assert vllm_patches.problem(BY_NAME[name]) is None


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("missing", ["name", "module"])
@pytest.mark.parametrize(("module", "name"), sorted(NEEDED))
def test_a_patch_whose_name_vllm_lacks_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: str, name: str, missing: str
) -> None:
    if missing == "name":
        remove(monkeypatch, module, name)
    else:
        monkeypatch.setitem(sys.modules, module, None)
    for _ in range(2):
        apply_all()
    lost = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for patch in map(BY_NAME.__getitem__, NEEDED[module, name]):
        assert vllm_patches.problem(patch) is not None
        assert len([message for message in lost if patch.without in message]) == 1
    if missing == "name":
        expected = {BY_NAME[patch].name for patch in NEEDED[module, name]}
        applied = {BY_NAME[patch].name for patches in NEEDED.values() for patch in patches} - expected
        assert all(table.problem(patch) is None for patch in PATCHES if patch.name in applied)


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize(("module", "name"), OTHERS)
def test_no_other_name_stops_a_vllm_with_the_plugin(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    remove(monkeypatch, module, name)
    apply_all()


def test_importing_and_registering_the_plugin_needs_no_vllm_at_all() -> None:
    program = """
import sys
sys.modules["vllm"] = None
from undercroft import plugin, vllm_patches
plugin.register()
print(sum(vllm_patches.problem(patch) is not None for patch in vllm_patches.PATCHES))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) == len(PATCHES)


class Refusing(type):
    """A class that takes no new attributes, like a compiled one."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"cannot set {name!r}")


CHANGES = {
    "another signature": (OutputProcessor, "process_outputs", lambda self, batch: None, "HIT_THRESHOLD"),
    "no method": (Scheduler, "finish_requests", None, "HIT_THRESHOLD"),
    "no attribute": (Scheduler, "__init__", lambda self: None, "MULTI_CONNECTOR_POLICY"),
    "no level": (EngineCore, "sleep", lambda self: None, "WEIGHT_CHANGES"),
    "another hash": (kv_cache_utils, "_gen_lora_extra_hash_keys", lambda one, other: [], "ADAPTER_WEIGHTS"),
    "another loading": (EngineCore, "add_lora", lambda self, name: True, "ADAPTER_WEIGHTS"),
    "no function": (kv_cache_utils, "_gen_lora_extra_hash_keys", None, "ADAPTER_WEIGHTS"),
    "a compiled class": (
        importlib.import_module("vllm.v1.engine.core"),
        "EngineCore",
        Refusing("EngineCore", (), {"add_lora": lambda self, lora_request: True}),
        "ADAPTER_WEIGHTS",
    ),
}


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("change", CHANGES)
def test_a_vllm_with_other_internals_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    owner, name, instead, patch = CHANGES[change]
    monkeypatch.setattr(owner, name, instead)
    apply_all()
    assert vllm_patches.problem(BY_NAME[patch]) is not None
    assert getattr(owner, name) is instead
    together = {
        # Another patch changes process_inputs, too.
        "HIT_THRESHOLD": CLASS_PLACES[:2] + CLASS_PLACES[3:6],
        "MULTI_CONNECTOR_POLICY": [(Scheduler, "_handle_failed_recving")],
        "WEIGHT_CHANGES": [(Scheduler, "reset_prefix_cache"), (EngineCore, "collective_rpc")],
        "ADAPTER_WEIGHTS": [(kv_cache_utils, "_gen_lora_extra_hash_keys"), (EngineCore, "add_lora")],
    }
    assert not any(is_patched(*place) for place in together[patch] if getattr(*place) is not None)


def test_objects_without_the_names_are_left_as_they_are() -> None:
    class Frozen:
        kv_load_failure_policy = "fail"
        __slots__ = ()

    assert vllm_patches.recompute_failed_loads(Frozen()) is False  # type: ignore[arg-type]
    assert vllm_patches.reconcile_local_hits(SimpleNamespace(), lambda *_: True) is False  # type: ignore[arg-type]
    assert vllm_patches.before_prefix_cache_reset(SimpleNamespace(), lambda: None) is False  # type: ignore[arg-type]
    assert vllm_patches.after_prefix_cache_reset(SimpleNamespace(), lambda: None) is False  # type: ignore[arg-type]
    assert vllm_patches.end_step_at(SimpleNamespace(), 16) is False  # type: ignore[arg-type]
    loaded: Any = SimpleNamespace(request=SimpleNamespace(request_id="r", status=RequestStatus.WAITING_FOR_REMOTE_KVS))
    assert vllm_patches.free_loaded(SimpleNamespace(), [loaded], alone=True) is False  # type: ignore[arg-type]
    for name in ("LOAD_FAILURE_POLICY", "LOADED_REQUESTS", "LOCAL_HITS", "PREFIX_CACHE_RESET", "SHARED_PREFIX"):
        assert "has other internals" in str(vllm_patches.problem(BY_NAME[name]))


def fail(*_: object) -> Any:
    raise RuntimeError("ours")


@pytest.mark.usefixtures("unpatched")
def test_an_error_of_ours_reaches_no_caller_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler: Any = object.__new__(Scheduler)
    scheduler.connector, scheduler.recompute_kv_load_failures, scheduler.requests = object(), False, {}
    assert vllm_patches.recompute_own_failed_loads(fail)
    assert scheduler._handle_failed_recving({"r"}) == set()

    multi: Any = object.__new__(MultiConnector)
    multi._connectors = []
    assert vllm_patches.judge_all_hits(fail)
    assert multi.get_num_new_matched_tokens(object(), 0) == (0, False)

    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda request: [("lora", "name")])
    monkeypatch.setattr(EngineCore, "add_lora", lambda self, lora_request: True)
    assert vllm_patches.tell_adapters_apart(fail, fail)
    keys = [kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace()) for _ in range(2)]
    assert keys[0][0] == keys[1][0] == ("lora", "name")
    assert keys[0][1] != keys[1][1], "without a key of the weights, nobody may find the blocks"
    assert EngineCore.add_lora(None, object()) is True

    pool = SimpleNamespace(reset_prefix_cache=lambda: True)
    assert vllm_patches.before_prefix_cache_reset(pool, fail)
    assert vllm_patches.after_prefix_cache_reset(pool, fail)
    assert pool.reset_prefix_cache() is True

    hit = ("blocks", 32, 0, True)
    manager = SimpleNamespace(get_computed_blocks_for_connector=lambda request: hit, get_computed_blocks=fail)
    assert vllm_patches.reconcile_local_hits(manager, fail)
    assert manager.get_computed_blocks_for_connector(object()) == hit

    monkeypatch.setattr(KVConnectorFactory, "create_connector", lambda config, role, kv_cache_config: "made")
    assert vllm_patches.show_to_tiers(fail)
    assert KVConnectorFactory.create_connector(config=None, role=None, kv_cache_config=None) == "made"
    assert vllm_patches.configuration_of_tier() is None

    monkeypatch.setattr(app, "init_entrypoints_middleware", lambda args, app: None)
    assert vllm_patches.exempt_requests()
    app.init_entrypoints_middleware(None, object())

    monkeypatch.setattr(InputProcessor, "__init__", lambda self, vllm_config: None)
    assert vllm_patches.reject_requests()
    InputProcessor(SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="nobody's")))


@pytest.mark.usefixtures("unpatched")
def test_vllm_does_not_call_the_field_of_a_request_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr("vllm.entrypoints.serve.engine.protocol.logger.debug", lambda _, fields: ignored.append(fields))
    assert vllm_patches.exempt_requests()
    CompletionRequest.model_validate({"prompt": "p", "cache_hit_threshold": 0.5, "max_tokens": 1})
    ChatCompletionRequest.model_validate({"messages": [], "cache_hit_threshold": 0.5})
    assert ignored == []
    CompletionRequest.model_validate({"prompt": "p", "cache_hit_treshold": 0.5})
    assert ignored == [{"cache_hit_treshold"}]


@pytest.mark.usefixtures("unpatched")
def test_only_a_beam_search_itself_is_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    async def search(self: Any) -> Any:
        for _ in range(2):
            seen.append(exempt.is_exempt())
            yield len(seen)

    monkeypatch.setattr(BeamSearchOnlineMixin, "beam_search", search)
    assert vllm_patches.exempt_requests()

    async def walk() -> None:
        async for _ in BeamSearchOnlineMixin.beam_search(None):  # type: ignore[arg-type, call-arg]
            seen.append(exempt.is_exempt())

    asyncio.run(walk())
    assert seen == [True, False, True, False]


OURS = "UndercroftConnector"


def made_with(monkeypatch: pytest.MonkeyPatch, transfer: Any, **fields: Any) -> Any:
    """The answer of ``create_engine_config`` of a vLLM with the plugin."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self, usage_context=None: "made")
    plugin.register()
    args = SimpleNamespace(kv_transfer_config=transfer, **fields)
    return EngineArgs.create_engine_config(args, usage_context=None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("options", [{"host_memroy": "1GiB"}, {"host_memory": "1024TiB"}, {"io_depth": 0}])
@pytest.mark.parametrize("inside", [False, True])
def test_options_are_checked_before_vllm_makes_its_configuration(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], inside: bool
) -> None:
    transfer: Any = KVTransferConfig(kv_connector=OURS, kv_role="kv_both", kv_connector_extra_config=options)
    if inside:
        children = [{"kv_connector": OURS, "kv_role": "kv_both", "kv_connector_extra_config": options}]
        extra = {"connectors": children}
        transfer = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match=next(iter(options))):
        made_with(monkeypatch, transfer)


@pytest.mark.usefixtures("unpatched")
def test_a_directory_that_the_engine_would_refuse_ends_the_start_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "letters.txt").touch()
    extra = {"host_memory": "64MiB", "disk_path": str(tmp_path), "disk_capacity": "64MiB"}
    transfer = KVTransferConfig(kv_connector=OURS, kv_role="kv_both", kv_connector_extra_config=extra)
    with pytest.raises(StoreError, match=r"letters\.txt"):
        made_with(monkeypatch, transfer)
    assert made_with(monkeypatch, transfer, data_parallel_size_local=0) == "made", "the engines are on other machines"
    (tmp_path / "letters.txt").unlink()
    assert made_with(monkeypatch, transfer) == "made"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unpatched")
def test_the_check_lets_every_other_vllm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    other = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config={"a": 1})
    ours = KVTransferConfig(kv_connector=OURS, kv_role="kv_both", kv_connector_extra_config={"host_memory": "64MiB"})
    huge = KVTransferConfig(kv_connector=OURS, kv_role="kv_both", kv_connector_extra_config={"host_memory": "1024TiB"})
    for transfer in (None, other, ours, object(), {"kv_connector_extra_config": 3}):
        assert made_with(monkeypatch, transfer) == "made"
    assert made_with(monkeypatch, huge, data_parallel_size_local=0) == "made", "the engines are on other machines"


def test_the_check_imports_nothing_where_no_configuration_is_made() -> None:
    program = """
import sys
from undercroft import vllm_patches
vllm_patches.check_configuration(print)
sys.exit(any(name.partition(".")[0] == "vllm" for name in sys.modules))
"""
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)


@pytest.mark.usefixtures("unpatched")
def test_an_independent_rank_knows_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: EngineArgs) -> Any:
        parallel = ParallelConfig(data_parallel_size=4, data_parallel_size_local=2)
        return SimpleNamespace(parallel_config=parallel)

    monkeypatch.setattr(EngineArgs, "create_engine_config", create)
    assert vllm_patches.count_ranks()
    config = pickle.loads(pickle.dumps(EngineArgs.create_engine_config(object.__new__(EngineArgs))))
    config.parallel_config.reconfigure_for_independent_dp_rank()
    assert config.parallel_config.data_parallel_size_local == 1
    assert vllm_patches.ranks_of(config) == 2
    assert vllm_patches.ranks_of(SimpleNamespace(parallel_config=ParallelConfig())) == 1  # type: ignore[arg-type]


@pytest.mark.usefixtures("unpatched")
def test_a_request_keeps_the_key_of_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda request: request.found)
    keys = iter(["first", "second"])
    assert vllm_patches.tell_adapters_apart(lambda request: next(keys), lambda _: None)
    request = SimpleNamespace(found=["lora"])
    for _ in range(3):
        assert kv_cache_utils._gen_lora_extra_hash_keys(request) == ["lora", ("lora_weights", "first")]
    assert kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(found=[])) == []


@pytest.mark.usefixtures("unpatched")
def test_a_vllm_with_indistinguishable_adapters_runs_without_undercroft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undercroft.connector.wiring.open_engine", fail)
    monkeypatch.delattr(EngineCore, "add_lora")
    config = vllm_config()
    config.lora_config = SimpleNamespace()
    connector = UndercroftConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
    assert connector._scheduler is None


def test_calls_that_leave_the_weights_are_methods_of_vllms_workers() -> None:
    assert [name for name in sorted(HARMLESS) if not hasattr(Worker, name)] == []


def test_the_places_of_instances_exist() -> None:
    """The other places of the table are in `CLASS_PLACES`, or attributes that are set."""
    assert callable(KVCacheManager.get_computed_blocks_for_connector)
    assert callable(BlockPool.reset_prefix_cache)
    places = {place for patch in PATCHES for place in patch.places}
    wrapped = {f"{owner.__name__.rpartition('.')[2]}.{name}" for owner, name in CLASS_PLACES}
    wrapped |= {"KVCacheManager.get_computed_blocks_for_connector", "BlockPool.reset_prefix_cache"}
    wrapped |= {place for place in vllm_patches.OFFLOADING_TIERS.places if place.startswith("OffloadingConnector.")}
    set_on_objects = {
        "KVTransferConfig.kv_load_failure_policy",
        "Request.shared_prefix_boundary",
        "Request.num_computed_tokens",
        "Request._undercroft_adapter",
        "RequestState.__class__",
        "RequestState._undercroft_exchange",
        "MultiConnector._undercroft_judge",
        "ParallelConfig._undercroft_ranks",
        "KVCacheConfig._undercroft_stages",
        "Scheduler._undercroft_take_threshold_rejects",
        "InputProcessor._undercroft_threshold",
        "MultiModalInput.undercroft_media",
        "VllmConfig.num_hash_lookahead_tokens",
        "SamplingParams.extra_args",
        "PoolingParams.extra_kwargs",
        "FastAPI.openapi",
        "model.load_weights",
        "CompletionRequest.field_names",
        "ChatCompletionRequest.field_names",
    }
    assert places == wrapped | set_on_objects


def test_only_compat_and_the_patches_import_vllm() -> None:
    importing = {path: vllm_imports(tree) for path, tree in package_files().items()}
    assert importing["compat.py"], "the walk finds no import: is the check broken?"
    wrong = {
        path: names - MAY_IMPORT_VLLM.get(path, set())
        for path, names in importing.items()
        if path != "compat.py" and not path.startswith("vllm_patches/")
    }
    assert {path: names for path, names in wrong.items() if names} == {}


def test_only_the_patches_change_objects_of_vllm() -> None:
    wrong = []
    for path, tree in package_files().items():
        if path.startswith(("vllm_patches/", "sglang_hicache/weight_updates.py", "sglang_hicache/prefixes.py")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                wrong.append(f"{path}:{node.lineno} {ast.unparse(node)}")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                base = ast.unparse(target.value) if isinstance(target, ast.Attribute | ast.Subscript) else ""
                changed = ast.unparse(target) if target is not None and base else ""
                words = set(base.replace("_", ".").split("."))
                if "__dict__" in base or changed.endswith("__class__") or words & {"request", "config", "vllm", "pool"}:
                    wrong.append(f"{path}:{node.lineno} {changed} = ...")
    assert not wrong, f"vLLM is changed in vllm_patches/ only: {wrong}"
