"""A real Prometheus reads a real `undercroft serve`, with the rules and the queries of deploy/."""

from __future__ import annotations

import re
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import dashboard
import pytest

from serve_process import ServeProcess
from served_client import Peer, prompt, until
from undercroft import _core

DEPLOY = Path(__file__).parents[2] / "deploy"
pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
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
        with dashboard.prometheus(place, config) as address:
            until("a scrape", lambda: _value(address, "up") == 1)
            client.save(prompt("a"))
            assert client.load(prompt("a")) > 0
            until("counters that grow", lambda: (_value(address, LOOKUPS) or 0) > 0)
            yield address
        client.close()


def _value(address: str, query: str) -> float | None:
    """The value of the first series; None if there is none."""
    found = dashboard.ask(address, "query", query=query)["result"]
    return float(found[0]["value"][1]) if found else None


def test_every_rule_is_evaluated_without_an_error_and_no_alert_is_active(prometheus: str) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in dashboard.ask(prometheus, "rules")["groups"] for rule in group["rules"]]

    until("an evaluation of each rule", lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert len(rules()) > 10
    assert {rule["name"]: rule.get("lastError", "") for rule in rules() if rule["health"] != "ok"} == {}
    assert {rule["name"]: rule["alerts"] for rule in rules() if rule.get("alerts")} == {}


def test_the_queries_of_the_dashboard_find_their_series(prometheus: str) -> None:
    # Series of a scheduler are only on vLLM's own page.
    names = set(dashboard.ask(prometheus, "label/__name__/values"))
    expressions = [target["expr"] for panel in dashboard.DASHBOARD["panels"] for target in panel.get("targets", ())]
    ours = [one for one in expressions if set(re.findall(r"vllm:\w+", one)) <= names]
    assert len(ours) > 15, names
    for expression in ours:
        # This Prometheus has no yesterday.
        query = re.sub(r"\$\{?instance\}?", ".*", expression.replace(" offset 1d", ""))
        query = query.replace("$__rate_interval", "1m")
        assert dashboard.ask(prometheus, "query", query=query)["result"], expression


def test_the_dashboard_finds_its_instances(prometheus: str) -> None:
    (variable,) = [one for one in dashboard.DASHBOARD["templating"]["list"] if one["name"] == "instance"]
    metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()
    assert len(dashboard.ask(prometheus, f"label/{label}/values", **{"match[]": metric})) == 1


def test_the_picture_of_the_dashboard_is_drawn_from_its_file_and_its_queries() -> None:
    drawn = dashboard.picture(dashboard.samples())
    ElementTree.fromstring(drawn)
    kept = dashboard.PICTURE.read_text(encoding="utf-8")
    number = r"(?<![\w#])\d+\.\d+"
    assert re.split(number, kept) == re.split(number, drawn), "run: python tools/dashboard.py"
    # Another version of Prometheus may compute a rate a little differently.
    places = zip(re.findall(number, kept), re.findall(number, drawn), strict=True)
    assert max(abs(float(one) - float(other)) for one, other in places) < 3, "run: python tools/dashboard.py"


@pytest.mark.parametrize("name", ["device_tokens_total", "time_to_first_token_seconds_bucket", "orders_total"])
def test_a_query_that_finds_nothing_is_not_drawn(name: str) -> None:
    without = [line for line in dashboard.samples().splitlines() if name not in line]
    with pytest.raises(ValueError, match=rf"no samples for .*{name}"):
        dashboard.picture("\n".join(without) + "\n")
