"""The alerts of deploy/ and the pages of metrics, judged by Prometheus's own promtool, where it is installed (Debian's
package prometheus)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from test_prometheus import prometheus
from test_serve_cli import Served
from undercroft.exporter import EngineCollector
from undercroft.metrics import DISK_LIMITS_S

RULES = Path(__file__).parents[2] / "deploy" / "prometheus-rules.yaml"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")

# Values a minute apart: "0x5" is five zeros more, "0+9x30" grows by 9 thirty times.
CASES: tuple[tuple[str, dict[str, str], str, bool], ...] = (
    # alert, series with their values, time of the evaluation, whether it fires
    ("UndercroftDiskDegraded", {"degraded_disks": "1x30"}, "10m", True),
    ("UndercroftDiskDegraded", {"degraded_disks": "1x30"}, "4m", False),
    ("UndercroftDiskDegraded", {"degraded_disks": "0x30"}, "10m", False),
    ("UndercroftChecksumFailures", {"checksum_failures_total": "0x9 1x20"}, "12m", True),
    ("UndercroftChecksumFailures", {"checksum_failures_total": "7x30"}, "12m", False),
    ("UndercroftDiskErrors", {'io_failures_total{direction="load"}': "0x9 3x20"}, "12m", True),
    ("UndercroftHookErrors", {"hook_errors_total": "0x9 1x20"}, "12m", True),
    ("UndercroftHostMemoryFull", {'refused_saves_total{reason="host_full"}': "0+9x90"}, "80m", True),
    ("UndercroftHostMemoryFull", {'refused_saves_total{reason="disk_behind"}': "0+9x90"}, "80m", False),
    (
        "UndercroftLookupsTimeOut",
        {'lookups_total{outcome="timed_out"}': "0+1x90", 'lookups_total{outcome="host"}': "0+9x90"},
        "60m",
        True,
    ),
    (
        "UndercroftLookupsTimeOut",
        {'lookups_total{outcome="timed_out"}': "0+1x90", 'lookups_total{outcome="host"}': "0+99x90"},
        "60m",
        False,
    ),
    (
        "UndercroftDiskSlow",
        {
            f'disk_operation_seconds_bucket{{disk="0",direction="load",le="{limit}"}}': f"0+{count}x90"
            for limit, count in (("0.1", 90), ("0.3", 95), ("1", 100), ("+Inf", 100))
        }
        | {'disk_info{disk="0",path="/mnt/nvme0"}': "1x90"},
        "60m",
        True,
    ),
    (
        "UndercroftDiskSlow",
        {
            f'disk_operation_seconds_bucket{{disk="0",direction="load",le="{limit}"}}': f"0+{count}x90"
            for limit, count in (("0.1", 100), ("0.3", 100), ("1", 100), ("+Inf", 100))
        }
        | {'disk_info{disk="0",path="/mnt/nvme0"}': "1x90"},
        "60m",
        False,
    ),
)


TTFT = "vllm:time_to_first_token_seconds_bucket"


def days(yesterday: int, today: int) -> str:
    """A counter that grows by so many in a minute of yesterday, and of today."""
    return f"0+{yesterday}x1440 {yesterday * 1440}+{today}x300"


def cached(yesterday: int, today: int, asked: int = 12_000) -> dict[str, str]:
    """Tokens a minute on the device, and as many loaded."""
    return {
        "asked_tokens_total": days(asked, asked),
        "device_tokens_total": days(yesterday, today),
        'hit_tokens_total{tier="disk"}': days(yesterday, today),
    }


def answered(within: float, today: float) -> dict[str, str]:
    """First tokens within so many seconds."""
    limits = (0.25, 0.5, 1.0, 2.0)
    return (
        {"asked_tokens_total": days(12_000, 12_000)}
        | {f'{TTFT}{{le="{limit}"}}': days(60 * (limit >= within), 60 * (limit >= today)) for limit in limits}
        | {f'{TTFT}{{le="+Inf"}}': days(60, 60)}
    )


CASES += (
    ("UndercroftFewerTokensCached", cached(3000, 1000), "26h", True),
    ("UndercroftFewerTokensCached", cached(3000, 1000), "24h20m", False),
    ("UndercroftFewerTokensCached", cached(3000, 2000), "26h", False),
    ("UndercroftFewerTokensCached", cached(1000, 3000), "26h", False),
    ("UndercroftFewerTokensCached", cached(300, 100, 1200), "26h", False),
    ("UndercroftFirstTokenSlower", answered(0.25, 2.0), "26h", True),
    ("UndercroftFirstTokenSlower", answered(0.25, 0.25), "26h", False),
    ("UndercroftFirstTokenSlower", answered(2.0, 0.25), "26h", False),
)


def promtool(tmp_path: Path, test: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps(test))
    return subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, timeout=60)


def test_promtool_takes_the_rules() -> None:
    assert PROMTOOL is not None
    ran = subprocess.run([PROMTOOL, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_promtool_takes_the_settings_of_the_scrapes() -> None:
    assert PROMTOOL is not None
    settings = str(RULES.with_name("prometheus.yml"))
    ran = subprocess.run([PROMTOOL, "check", "config", settings], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("alert", "series", "at", "fires"), CASES, ids=[f"{case[0]}-{case[3]}" for case in CASES])
def test_an_alert_fires_when_its_reason_is_there(
    alert: str, series: dict[str, str], at: str, fires: bool, tmp_path: Path
) -> None:
    def name(given: str) -> str:
        metric, _, labels = given.rstrip("}").partition("{")
        prefix = "" if metric.startswith("vllm:") else "vllm:undercroft_"
        return f"{prefix}{metric}{{" + ",".join(filter(None, ('instance="host"', labels))) + "}"

    test = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name(given), "values": values} for given, values in series.items()],
                "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []}],
            }
        ],
    }
    # Without an expected alert, promtool fails exactly if one fires.
    ran = promtool(tmp_path, test)
    assert ("got:" in ran.stdout + ran.stderr) == fires, ran.stdout + ran.stderr
    assert (ran.returncode != 0) == fires


@pytest.mark.parametrize("interval", ["15s", "1m"])
def test_an_order_is_marked_with_any_interval_of_the_scrapes(interval: str, tmp_path: Path) -> None:
    (marks,) = json.loads((RULES.parent / "grafana.json").read_text())["annotations"]["list"]
    expression = marks["expr"].replace("$instance", ".*")
    counter = 'vllm:undercroft_orders_total{instance="host",verb="clear"}'
    order = {
        "interval": interval,
        "input_series": [{"series": counter, "values": "0x40 1x80"}],
        "promql_expr_test": [{"expr": expression, "eval_time": at, "exp_samples": []} for at in ("10m20s", "41m30s")],
    }
    # Without an expected sample, promtool fails exactly if there is one.
    ran = promtool(tmp_path, {"rule_files": [], "tests": [order]})
    assert (ran.stdout + ran.stderr).count('{verb="clear"}') == 1, ran.stdout + ran.stderr


def test_promtool_finds_nothing_but_vllms_colon_in_the_names() -> None:
    assert PROMTOOL is not None
    vllms, servers = CollectorRegistry(), CollectorRegistry()
    prometheus(vllms).observe({"disks": ["/a"], "disk_times": {"0 load": [*DISK_LIMITS_S, 7, 0.5]}})
    servers.register(EngineCollector(Served()))
    for registry in (vllms, servers):
        page = generate_latest(registry)
        assert b"disk_operation_seconds_bucket" in page
        assert (b"tenant_bytes{" in page) == (registry is servers)
        ran = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, timeout=60)
        assert ran.stdout == b""
        lines = ran.stderr.decode().splitlines()
        assert [line for line in lines if "should not contain ':'" not in line] == []
