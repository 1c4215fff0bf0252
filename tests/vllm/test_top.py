"""`undercroft top` reads the page of metrics of a real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_checks import BLOCK
from real_engine import prompt
from threshold_http import Client, start_server
from undercroft.view.hosts import Host
from undercroft.view.readings import COMPUTED
from undercroft.view.tables import tables

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    place = tmp_path_factory.mktemp("top")
    options = {"host_memory": "128MiB", "min_load_tokens": 1, "disk_path": str(place / "d"), "disk_capacity": "64MiB"}
    with start_server(llama_with_tokenizer, place / "server.log", options) as client:
        yield client


def test_the_sources_of_prompt_tokens_waits_and_disks_of_a_real_vllm_are_shown(client: Client) -> None:
    host = Host(client.server.url)
    host.read()
    ids = prompt(6 * BLOCK + 1)
    for reset in (lambda: None, lambda: None, client.reset_device):
        reset()
        client.complete(ids, 1)
    client.wait_until_idle()
    host.read()
    (engine,) = host.engines(patience_s=60)
    assert engine.now is not None and engine.before is not None, engine.trouble
    found = {source: count for source, count in engine.now.tokens.items() if count}
    # Computed, found on the device, and loaded from host memory; the last token of each is computed.
    assert found == {"device": 6 * BLOCK, "host": 6 * BLOCK, COMPUTED: 6 * BLOCK + 3}
    assert engine.now.times["first token"].at_most[-1] == 3
    assert engine.now.stats["host_capacity_bytes"] == 128 << 20
    assert [disk.path for disk in engine.now.disks] == [str(client.server.log.parent / "d")]
    shown = {table.title: table.rows for table in tables([engine])}
    assert shown["Prompt tokens by source"][0][2:] == ("33 %", "33 %", "0 %", "0 %", "0 %", "33 %")
    assert shown["Engines"][0][1] == "answers"
    assert "Trouble" not in shown
