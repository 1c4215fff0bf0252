"""A real Prometheus reads a real `undercroft serve`, with the rules and the queries of deploy/."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_process import ServeProcess
from served_client import Peer, prompt, until
from undercroft import _core

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's package prometheus")
LOOKUPS = "vllm:undercroft_served_lookups_total"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address; it has read the metrics of a server that has saved and found blocks."""
    place = tmp_path_factory.mktemp("p")
    disk = ["--disk-path", str(place / "disk"), "--disk-capacity", "64MiB"]
    with ServeProcess(place / "run" / "serve.sock", *disk, "--metrics", "0") as server:
        target = urllib.parse.urlsplit(server.printed[1].split()[-1]).netloc
        options = {"server": f"unix://{server.socket}", "server_timeout_ms": 30_000, "min_load_tokens": 0}
        client = Peer(_core.Engine(options))
        until("the server", client.is_up)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "prometheus-rules.yaml")],
            "scrape_configs": [{"job_name": "undercroft", "static_configs": [{"targets": [target]}]}],
        }
        (place / "prometheus.yml").write_text(json.dumps(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = {"config.file": place / "prometheus.yml", "storage.tsdb.path": place / "db"}
        flags = [f"--{name}={value}" for name, value in {**arguments, "web.listen-address": address}.items()]
        with subprocess.Popen([str(PROMETHEUS), *flags], stderr=subprocess.DEVNULL, cwd=place) as process:
            try:
                until("a scrape", lambda: _value(address, "up") == 1)
                client.save(prompt("a"))
                assert client.load(prompt("a")) > 0
                until("counters that grow", lambda: (_value(address, LOOKUPS) or 0) > 0)
                yield address
            finally:
                process.kill()
        client.close()


def _ask(address: str, path: str, **query: str) -> Any:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None


def _value(address: str, query: str) -> float | None:
    """The value of the first series; None if there is none, or Prometheus is not ready."""
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=10):
            found = _ask(address, "query", query=query)["result"]
    except OSError:
        return None
    return float(found[0]["value"][1]) if found else None


def test_every_rule_is_evaluated_without_an_error_and_no_alert_is_active(prometheus: str) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in _ask(prometheus, "rules")["groups"] for rule in group["rules"]]

    until("an evaluation of each rule", lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert len(rules()) > 10
    assert {rule["name"]: rule.get("lastError", "") for rule in rules() if rule["health"] != "ok"} == {}
    assert {rule["name"]: rule["alerts"] for rule in rules() if rule.get("alerts")} == {}


def test_the_queries_of_the_dashboard_find_their_series(prometheus: str) -> None:
    # Series of a scheduler are only on vLLM's own page.
    names = set(_ask(prometheus, "label/__name__/values"))
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    ours = [one for one in expressions if set(re.findall(r"vllm:\w+", one)) <= names]
    assert len(ours) > 15, names
    for expression in ours:
        # This Prometheus has no yesterday.
        query = re.sub(r"\$\{?instance\}?", ".*", expression.replace(" offset 1d", ""))
        query = query.replace("$__rate_interval", "1m")
        assert _ask(prometheus, "query", query=query)["result"], expression


def test_the_dashboard_finds_its_instances(prometheus: str) -> None:
    (variable,) = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "instance"]
    metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()
    assert len(_ask(prometheus, f"label/{label}/values", **{"match[]": metric})) == 1
