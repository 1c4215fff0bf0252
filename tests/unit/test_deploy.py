"""The examples in deploy/ name options, flags and metrics that exist, and are of the forms that their programs read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dashboard
import kubernetes_validate
import promql_parser
import pytest
import yaml

from undercroft.cli.check_config import read_config
from undercroft.cli.main import build_parser
from undercroft.config import OPTIONS, UndercroftConfig
from undercroft.exporter import HEALTH_TIMEOUT_S
from undercroft.metrics import INFO_METRICS, METRICS, PREFIX, SERVER_METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
MANIFESTS = [one for path in sorted(DEPLOY.rglob("kubernetes*.yaml")) for one in yaml.safe_load_all(path.read_text())]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}


VLLMS = {"vllm:time_to_first_token_seconds_bucket": {"le"}}
"""Series of vLLM itself, and their labels; tests/vllm/test_prompt_token_counts.py looks for them in a vLLM."""


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def series() -> dict[str, dict[str, set[str]]]:
    """Name of each series -> its labels and their values; none known for those that vLLM and Prometheus add."""
    found: dict[str, dict[str, set[str]]] = {}
    for metric in (*METRICS, *SERVER_METRICS, *INFO_METRICS):
        labels = {
            label: {values[index] for values in metric.sources.values()} for index, label in enumerate(metric.labels)
        }
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[metric.kind]
        for ending in endings:
            found[f"{PREFIX}{metric.name}{ending}"] = labels
    found |= {name: {label: set() for label in labels} for name, labels in VLLMS.items()}
    return found | {name: {} for name in RECORDED}


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The series that a PromQL expression selects, each with its matchers. Raises ValueError if it is none."""
    text = expression.replace("$__rate_interval", "5m")
    shown = promql_parser.parse(text).prettify()
    for name, matchers in re.findall(r"([a-zA-Z_][\w:]*:[\w:]*)(\{[^}]*\})?", shown):
        yield name, dict(re.findall(r'(\w+)=~?"([^"]*)"', matchers))


def check(expression: str) -> None:
    known = series()
    chosen = list(selectors(expression))
    assert chosen, expression
    for name, matchers in chosen:
        assert name in known, f"{expression}: there is no series {name}"
        for label, value in matchers.items():
            if label == "instance":
                continue
            assert label in known[name], f"{expression}: {name} has no label {label}"
            assert set(value.split("|")) <= known[name][label], f"{expression}: {label} is never {value}"
    for labels in re.findall(r"(?:by|without|on|group_left) \(([^)]*)\)", expression):
        wanted = {label.strip() for label in labels.split(",")} - {"instance", "engine", "le", ""}
        assert any(wanted <= known[name].keys() for name, _ in chosen), f"{expression}: {labels}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_ask_for_series_that_exist(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    if "alert" in rule:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert re.fullmatch(r"\d+m", rule.get("for", "1m"))
    else:
        assert set(rule) == {"record", "expr"}


def test_every_failure_has_an_alert() -> None:
    asked = {name for rule in rules() for name, _ in selectors(rule["expr"])}
    failures = {name for name in series() if re.search(r"fail|errors|degraded|malformed", name)}
    assert failures <= asked


def test_the_dashboard_asks_for_series_that_exist() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(panels) > 10
    asked = [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]
    asked += [(one["expr"], one["titleFormat"]) for one in DASHBOARD["annotations"]["list"]]
    assert "orders_total" in asked[-1][0], "orders are marked in all panels"
    for expression, legend in asked:
        check(expression)
        assert set(re.findall(r"{{(\w+)}}", legend)) <= set(
            re.findall(r"\w+", " ".join(re.findall(r"(?:by|group_left) \(([^)]*)\)", expression)))
        )
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD["panels"])))
    assert used == variables


def test_the_picture_of_the_dashboard_is_that_of_this_file() -> None:
    kept = dashboard.PICTURE.read_text(encoding="utf-8")
    assert f'data-digest="{dashboard.DIGEST}"' in kept, "run: python tools/dashboard.py"
    assert [panel["title"] for panel in dashboard.PANELS if f">{panel['title']}</text>" not in kept] == []


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_manifests_are_of_kubernetes_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def containers() -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Each container of the examples: its name, environment, and the arguments that vLLM is given."""
    for manifest in MANIFESTS:
        spec = manifest.get("spec", {}).get("template", {}).get("spec", {})
        for one in spec.get("containers", []):
            mounted = {mount["name"] for mount in one["volumeMounts"]}
            claims = manifest["spec"].get("volumeClaimTemplates", [])
            assert mounted <= {volume["name"] for volume in spec["volumes"]} | {c["metadata"]["name"] for c in claims}
            environment = {env["name"]: env.get("value") or f"from {env['valueFrom']}" for env in one["env"]}
            yield one["name"], environment, one.get("args", [])
    for name, service in COMPOSE["services"].items():
        seed = {"PYTHONHASHSEED": f"from {service['env_file']}"} if "env_file" in service else {}
        yield name, service["environment"] | seed, service.get("command", [])


def test_containers_are_configured_as_vllm_and_serve_take_it() -> None:
    seen = set()
    for name, environment, arguments in containers():
        ours = {key: value for key, value in environment.items() if key.startswith("UNDERCROFT_")}
        assert ours.keys() <= {option.env for option in OPTIONS}
        UndercroftConfig.parse({}, ours)
        if name.startswith("vllm"):
            _, extra = read_config(arguments[arguments.index("--kv-transfer-config") + 1])
            parsed = UndercroftConfig.parse(extra, {})
            alone = name == "vllm-volume"
            assert parsed.server == ("" if alone else "unix:///run/undercroft/serve.sock")
            assert parsed.disk_path == (("/cache/undercroft",) if alone else ())
            # Whoever knows the seed and has the files can tell whether a guessed prompt is there.
            assert re.match("from .*(seed.env|undercroft-hash-seed)", environment["PYTHONHASHSEED"])
            # The images run `vllm serve`, which takes the model first.
            assert not arguments[0].startswith("-")
        seen.add(name)
    assert seen == {"undercroft", "vllm", "vllm-0", "vllm-1", "vllm-volume", "vllm-prefill", "vllm-decode"}


def dockerfile(name: str, instruction: str) -> list[str]:
    """The JSON arguments of an instruction."""
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    (found,) = re.findall(rf"^{instruction}.*?(\[.*\])$", text, re.MULTILINE)
    return json.loads(found)


def test_images_and_probes_call_commands_that_exist() -> None:
    commands = [dockerfile("Dockerfile.serve", "ENTRYPOINT"), dockerfile("Dockerfile.serve", "HEALTHCHECK")]
    (daemon,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "DaemonSet"]
    (server,) = daemon["spec"]["template"]["spec"]["containers"]
    (metrics,) = [port["containerPort"] for port in server["ports"] if port["name"] == "metrics"]
    for probe in (server["startupProbe"], server["livenessProbe"]):
        assert probe["httpGet"] == {"path": "/health", "port": "metrics"}
        assert probe["timeoutSeconds"] > HEALTH_TIMEOUT_S
    assert build_parser("serve").parse_args(commands[0][1:]).metrics == ("0.0.0.0", metrics)
    unit = (DEPLOY / "undercroft.service").read_text()
    commands.append(unit_command())
    for command in commands:
        assert command[0] == "undercroft"
        args = build_parser(command[1]).parse_args(command[1:])
        assert args.socket == "/run/undercroft/serve.sock"
    environment = dict(re.findall(r"^Environment=(\w+)=(\S+)$", unit, re.MULTILINE))
    assert UndercroftConfig.parse({}, environment).disk_path == ("/var/cache/undercroft",)


@pytest.mark.parametrize(
    "expression",
    [
        "vllm:undercroft_none > 0",
        "rate(vllm:undercroft_lookups_total[5m]",
        'vllm:undercroft_blocks{tier="tape"}',
        'vllm:undercroft_sessions{tier="host"}',
        "sum by (reason) (vllm:undercroft_blocks)",
    ],
)
def test_a_mistake_in_an_expression_is_found(expression: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(expression)


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Kind and template of each manifest that makes pods."""
    return [(one["kind"], one["spec"]["template"]) for one in MANIFESTS if "template" in one.get("spec", {})]


@pytest.mark.parametrize(("kind", "pod"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_pods_have_no_more_rights_than_they_need(kind: str, pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    for one in (*spec.get("initContainers", []), *spec["containers"]):
        context = spec.get("securityContext", {}) | one["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        if one["name"] == "directories":
            assert set(context["capabilities"]["add"]) == {"CHOWN", "FOWNER"}
        else:
            assert context["runAsNonRoot"] and context["runAsUser"] and "add" not in context["capabilities"]


@pytest.mark.parametrize(("kind", "pod"), pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_pod_says_where_its_metrics_are(kind: str, pod: dict[str, Any]) -> None:
    annotations = pod["metadata"]["annotations"]
    ports = {str(port["containerPort"]) for one in pod["spec"]["containers"] for port in one["ports"]}
    assert annotations["prometheus.io/scrape"] == "true"
    assert {annotations["prometheus.io/port"]} == ports
    assert annotations.get("prometheus.io/path", "/metrics") == "/metrics"


def test_prometheus_reads_every_server_of_compose_and_of_systemd() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    read = {target for job in jobs for one in job["static_configs"] for target in one["targets"]}
    services = COMPOSE["services"].values()
    assert read == {port.rpartition(":")[0] for service in services for port in service["ports"]}
    assert build_parser("serve").parse_args(unit_command()[1:]).metrics in {
        (host, int(port)) for host, _, port in (target.partition(":") for target in read)
    }


def unit_command() -> list[str]:
    """The command of the systemd unit."""
    unit = (DEPLOY / "undercroft.service").read_text()
    return re.search(r"^ExecStart=\S*/(undercroft .*)$", unit, re.MULTILINE)[1].split()


def test_a_network_policy_guards_every_pod() -> None:
    policies = [one["spec"] for one in MANIFESTS if one["kind"] == "NetworkPolicy"]
    for _, pod in pods():
        ports = [port for one in lasting(pod["spec"]) for port in one["ports"]]
        numbers = {port["name"]: port["containerPort"] for port in ports if "name" in port}
        (guard,) = [
            one for one in policies if one["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ]
        assert all(rule["from"] and rule["ports"] for rule in guard["ingress"])
        allowed = {numbers.get(port["port"], port["port"]) for rule in guard["ingress"] for port in rule["ports"]}
        assert allowed == {port["containerPort"] for port in ports}


def lasting(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The containers that run as long as the pod, sidecars among them."""
    return spec["containers"] + [one for one in spec.get("initContainers", []) if one.get("restartPolicy") == "Always"]


def test_llm_ds_sidecar_stands_before_a_decode_instance_that_allows_thresholds() -> None:
    deployments = {one["metadata"]["name"]: one["spec"]["template"] for one in MANIFESTS if one["kind"] == "Deployment"}
    for role in ("prefill", "decode"):
        pod = deployments[f"vllm-{role}"]
        (vllm,) = pod["spec"]["containers"]
        _, extra = read_config(vllm["args"][-1])
        config = UndercroftConfig.parse(extra, {})
        # A threshold of the configuration would reject requests that do not pass the sidecar.
        assert ("threshold" in config.client_fields, config.cache_hit_threshold) == (True, 0)
        assert pod["metadata"]["labels"]["llm-d.ai/role"] == role
    decode = deployments["vllm-decode"]["spec"]
    (sidecar,) = decode["initContainers"]
    flags = dict(argument.removeprefix("--").split("=") for argument in sidecar["args"])
    assert flags["kv-connector"] == "shared-storage"
    assert int(flags["port"]) == sidecar["ports"][0]["containerPort"]
    assert f"--port={flags['model-server-port']}" in decode["containers"][0]["args"]
    assert int(flags["model-server-port"]) == decode["containers"][0]["ports"][0]["containerPort"]


def test_the_endpoint_picker_gives_each_request_a_prefill_instance() -> None:
    picker = yaml.safe_load((DEPLOY / "llm-d/endpoint-picker.yaml").read_text())
    plugins = {plugin["type"]: plugin.get("parameters") for plugin in picker["plugins"]}
    assert plugins["disagg-profile-handler"] == {"deciders": {"prefill": "always-disagg-pd-decider"}}
    assert "always-disagg-pd-decider" in plugins
    assert [profile["name"] for profile in picker["schedulingProfiles"]] == ["prefill", "decode"]
    for profile in picker["schedulingProfiles"]:
        used = {one["pluginRef"] for one in profile["plugins"]}
        assert used <= plugins.keys() and f"{profile['name']}-filter" in used


def test_containers_of_compose_have_no_more_rights_than_they_need() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["user"] == "1000:1000"
        assert service["ulimits"]["core"] == 0
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_no_image_runs_as_root() -> None:
    for path in DEPLOY.glob("Dockerfile.*"):
        users = re.findall(r"^USER (\S+)", path.read_text(), re.MULTILINE)
        assert users and users[-1] not in ("root", "0"), path.name


def test_the_image_of_the_server_installs_only_files_of_known_hashes() -> None:
    lines = (DEPLOY / "serve-requirements.txt").read_text().replace("\\\n", " ").splitlines()
    pinned = [line.split() for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for _, *hashes in pinned for one in hashes)
    assert all(hashes for _, *hashes in pinned)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", one)[0] for one in project["dependencies"]}
    assert {one.split("==")[0] for one, *_ in pinned} == needed
    installs = re.findall(r"pip install .*", (DEPLOY / "Dockerfile.serve").read_text())
    assert len(installs) == 2
    assert "--require-hashes" in installs[0] and "--no-index --no-deps" in installs[1]


def test_systemd_judges_the_unit_as_well_guarded() -> None:
    unit = DEPLOY / "undercroft.service"
    options = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
    assert (options["LimitCORE"], options["UMask"], options["CapabilityBoundingSet"]) == ("0", "0077", "")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("without systemd-analyze")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    (level,) = re.findall(r"exposure level for \S+: (\d+\.\d)", said)
    assert float(level) <= 2.5, said
