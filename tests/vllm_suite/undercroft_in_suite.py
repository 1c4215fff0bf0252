"""pytest's plug-in for vLLM's own tests: loads undercroft as vLLM does.

`tools/vllm_suite.py` starts it. No test of vLLM is edited.
"""

from __future__ import annotations

import json
import os

import pytest

LEFT_OUT: dict[str, str] = json.loads(os.environ["SUITE_LEFT_OUT"])
"""Test (a file's name, and the test's) -> why it cannot hold."""


def pytest_configure() -> None:
    """Load vLLM's plug-ins in this process, as each of vLLM's processes does."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if "UndercroftConnector" not in KVConnectorFactory._registry:
        raise pytest.UsageError("vLLM has not loaded undercroft's plug-in: run `make build`, and unset VLLM_PLUGINS")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that cannot hold."""
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
