"""pytest's plug-in for vLLM's own tests: loads undercroft as vLLM does, and puts its connector in the default's place.

`tools/vllm_suite.py` starts it. No test of vLLM is edited.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

IS_USED = bool(int(os.environ["SUITE_USES_UNDERCROFT"]))
"""Whether undercroft's connector takes the place of vLLM's, or only its plug-in is loaded."""
LEFT_OUT: dict[str, str] = json.loads(os.environ["SUITE_LEFT_OUT"])
"""Test (a file's name, and the test's) -> why it cannot hold."""
OURS = {
    "kv_connector": "UndercroftConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_memory": "16MiB"},
}
BESIDE_REMOTE = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [OURS, {"kv_connector": "NixlConnector", "kv_role": "kv_both"}]},
}
REMOTE_FILES = ("test_remote_prefill_lifecycle", "test_remote_decode_lifecycle")
"""Files whose requests name blocks of another vLLM, which NIXL brings: undercroft stands beside it."""
ANSWERED = ("test_async_load", "test_deferred_lookup")
"""Tests of these files that answer in the connector's place which tokens it has."""
TIER_FILE = "test_tiering_offloading"
"""Tests of tiers of vLLM's offloading, in which undercroft's takes the place of the example."""
KEEPS_GROUPS_APART = "SimpleCPUOffloadConnector"
"""The connector that vLLM's tests name where one is wanted that works with several groups of layers."""


def pytest_configure() -> None:
    """Load vLLM's plug-ins in this process, as each of vLLM's processes does."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if "UndercroftConnector" not in KVConnectorFactory._registry:
        raise pytest.UsageError("vLLM has not loaded undercroft's plug-in: run `make build`, and unset VLLM_PLUGINS")


@pytest.fixture(autouse=True)
def _close_tiers() -> Iterator[None]:
    """End the engines of undercroft's tiers, which vLLM's tests leave behind."""
    yield
    tiers = sys.modules.get("tier_in_suite")
    while tiers is not None and tiers.OPEN:
        tiers.OPEN.pop().close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that cannot hold, and change the connectors of all."""
    if IS_USED:
        _change_default()
        for item in items:
            for value in getattr(getattr(item, "callspec", None), "params", {}).values():
                _change_name(value)
    found = {_name(item): item for item in items}
    files = {name.partition("::")[0] for name in found}
    for name, reason in LEFT_OUT.items():
        if name in found:
            found[name].add_marker(pytest.mark.xfail(reason=reason, strict=True))
        elif name.partition("::")[0] in files and not _only_some(items):
            raise pytest.UsageError(f"left_out.json names {name}, which does not exist: take it out")


def _name(item: pytest.Item) -> str:
    path, _, name = item.nodeid.partition("::")
    return f"{path.rpartition('/')[2]}::{name}"


def _only_some(items: list[pytest.Item]) -> bool:
    """Whether single tests were asked for."""
    config = items[0].config
    return bool(config.option.keyword) or any("::" in argument for argument in config.args)


def _change_name(value: Any) -> None:
    """Let a ``KVTransferConfig`` that is a test's parameter name undercroft, also among the children of others."""
    from vllm.config import KVTransferConfig

    if isinstance(value, KVTransferConfig):
        for child in value.kv_connector_extra_config.get("connectors", ()):
            if child["kv_connector"] == KEEPS_GROUPS_APART:
                child |= OURS
        if value.kv_connector == KEEPS_GROUPS_APART:
            value.kv_connector = OURS["kv_connector"]
            value.kv_connector_extra_config = OURS["kv_connector_extra_config"]


def _change_default() -> None:
    """Let vLLM's tests take undercroft's connector where they name none in `create_vllm_config`, and undercroft's tier
    where they take the example of one."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").endswith(TIER_FILE):
            from tier_in_suite import TierInSuite

            module.ExampleSecondaryTierManager = TierInSuite  # type: ignore[attr-defined]
    utils: Any = importlib.import_module("tests.v1.kv_connector.unit.utils")
    utils.Scheduler, utils.AsyncScheduler = map(_with_tensors, (utils.Scheduler, utils.AsyncScheduler))
    original = utils.create_vllm_config
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("create_vllm_config") is original:
            is_remote = module.__name__.rpartition(".")[2] in REMOTE_FILES
            module.create_vllm_config = _naming(original, is_remote)  # type: ignore[attr-defined]


def _naming(original: Callable[..., Any], is_remote: bool) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        if "kv_connector" in signature.bind(*args, **kwargs).arguments:
            return original(*args, **kwargs)
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2]
        connector = BESIDE_REMOTE if is_remote and not test.startswith(ANSWERED) else OURS
        return original(*args, **copy.deepcopy(connector), **kwargs)

    return create


def _with_tensors(make: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler whose configuration gives each layer its pages, as vLLM does. The tests leave them out, and
    undercroft takes the sizes of blocks from them."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    @functools.wraps(make, updated=())
    def made(*args: Any, kv_cache_config: Any, **kwargs: Any) -> Any:
        for group in kv_cache_config.kv_cache_groups if not kv_cache_config.kv_cache_tensors else ():
            page = group.kv_cache_spec.page_size_bytes
            size = page * kv_cache_config.num_blocks
            kv_cache_config.kv_cache_tensors += [
                KVCacheTensor(size, [layer], layer_stride=size, block_stride=page) for layer in group.layer_names
            ]
        return make(*args, kv_cache_config=kv_cache_config, **kwargs)

    return made
