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


def promtool(tmp_path: Path, test: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps(test))
    return subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, timeout=60)


def test_promtool_takes_the_rules() -> None:
    assert PROMTOOL is not None
    ran = subprocess.run([PROMTOOL, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("alert", "series", "at", "fires"), CASES, ids=[f"{case[0]}-{case[3]}" for case in CASES])
def test_an_alert_fires_when_its_reason_is_there(
    alert: str, series: dict[str, str], at: str, fires: bool, tmp_path: Path
) -> None:
    def name(given: str) -> str:
        metric, _, labels = given.rstrip("}").partition("{")
        return f"vllm:undercroft_{metric}{{" + ",".join(filter(None, ('instance="host"', labels))) + "}"

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


def test_promtool_finds_nothing_but_vllms_colon_in_the_names() -> None:
    assert PROMTOOL is not None
    vllms, servers = CollectorRegistry(), CollectorRegistry()
    prometheus(vllms).observe({"disks": ["/a"], "disk_times": {"0 load": [*DISK_LIMITS_S, 7, 0.5]}})
    servers.register(EngineCollector(Served()))
    for registry in (vllms, servers):
        page = generate_latest(registry)
        assert b"disk_operation_seconds_bucket" in page
        ran = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, timeout=60)
        assert ran.stdout == b""
        lines = ran.stderr.decode().splitlines()
        assert [line for line in lines if "should not contain ':'" not in line] == []
