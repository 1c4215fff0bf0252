"""Runs vLLM's own tests of KV connectors with undercroft's plug-in loaded: `make test-vllm-suite`.

The tests come from vLLM's source package of the installed version, and none is edited. They run twice: as they are,
since undercroft's patches must leave vLLM as its tests want it; and with undercroft's connector where a test leaves the
connector to the default of vLLM's `create_vllm_config`, and undercroft's tier where a test takes vLLM's example of one.
`tests/vllm_suite/left_out.json` names the tests that cannot hold, each with the reason. The package (45 MB) is fetched
once and kept under ~/.cache/undercroft.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import overlay

ROOT = Path(__file__).resolve().parents[1]
UNIT = "tests/v1/kv_connector/unit"
FILES = [
    f"{UNIT}/test_{name}.py"
    for name in (
        "config",
        "output_aggregator",
        "hma_auto_config",
        "kv_connector_lifecycle",
        "scheduler_kv_connector_override",
        "multi_connector",
        "kv_load_failure_recovery",
        "invalid_blocks_correctness",
        "error_propagation",
        "cache_pollution_prevention",
        "remote_prefill_lifecycle",
        "remote_decode_lifecycle",
    )
]
OFFLOAD = "tests/v1/kv_offload"
TIER = f"{OFFLOAD}/tiering/test_tiering_offloading.py"
"""Tests of tiers, with vLLM's example of one."""
OFFLOADING_FILES = [
    *(f"{UNIT}/offloading_connector/test_{name}.py" for name in ("config", "events", "metrics")),
    *(f"{OFFLOAD}/tiering/test_{name}.py" for name in ("factory", "backpressure", "metrics", "fs_tier")),
    *(f"{OFFLOAD}/cpu/test_{name}.py" for name in ("manager", "canonical_layout")),
]
"""Tests of vLLM's offloading that name neither a connector nor a tier that undercroft could replace, or look into the
files of vLLM's file tier. Left out are those that need a GPU, and those of the shared region, whose processes must
import vLLM within seconds."""
BUILD_NEEDS = (
    "setuptools",
    "wheel",
    "packaging",
    "setuptools_rust",
    "semantic_version",
    "setuptools_scm",
    "vcs_versioning",
)
"""For the metadata of the source package, which pip makes before it keeps the package."""
TEST_NEEDS = ("tblib", "pytest-asyncio")
"""Packages that vLLM's conftest imports."""
MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
"""The configuration of facebook/opt-125m, which the tests name and whose weights most of them do not need."""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("tests", nargs="*", help="tests instead of all, such as a file's name or a node id")
    arguments = parser.parse_args()
    suite = fetch(overlay.installed_version())
    left_out = json.loads((ROOT / "tests/vllm_suite/left_out.json").read_text(encoding="utf-8"))
    worst = 0
    for uses_undercroft, part in enumerate(("as they are", "with undercroft")):
        print(f"== vLLM's tests of connectors, {part}", flush=True)
        tests = arguments.tests or [*FILES, TIER, *(OFFLOADING_FILES if not uses_undercroft else ())]
        worst = max(worst, run(suite, tests, bool(uses_undercroft), left_out[part]))
    return worst


def fetch(version: str) -> Path:
    """The folder with vLLM's `tests`, made once."""
    return overlay.kept(f"vllm-tests-{version}", lambda scratch: _tests(version, scratch))


def _tests(version: str, scratch: Path) -> Path:
    new, needs = scratch / "suite", scratch / "needs"
    install(needs, BUILD_NEEDS)
    print(f"Downloading the source package of vllm {version} (45 MB), for its tests", file=sys.stderr)
    variables = {"PYTHONPATH": str(needs), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", "vllm", "--dest", str(scratch), f"vllm=={version}"]
    subprocess.run(command, check=True, env=os.environ | variables)
    with tarfile.open(scratch / f"vllm-{version}.tar.gz") as package:
        top = f"vllm-{version}/"
        members = [one for one in package.getmembers() if one.name.startswith(f"{top}tests/")]
        for one in members:
            one.name = one.name.removeprefix(top)
        package.extractall(new, members, filter="data")
    install(new / "needs", TEST_NEEDS)
    model = new / "facebook/opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return new


def install(target: Path, packages: tuple[str, ...]) -> None:
    """Packages in a folder of their own."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *packages]
    subprocess.run(command, check=True)


def run(suite: Path, tests: list[str], uses_undercroft: bool, left_out: dict[str, str]) -> int:
    """pytest's exit status; a test that is left out but passes fails the run."""
    plug_in = ROOT / "tests/vllm_suite"
    variables = {
        "PYTHONPATH": os.pathsep.join([str(suite / "needs"), str(plug_in), str(ROOT / "python")]),
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "SUITE_USES_UNDERCROFT": str(int(uses_undercroft)),
        "SUITE_LEFT_OUT": json.dumps(left_out),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-rxX", "-p", "no:cacheprovider", "-p", "undercroft_in_suite"]
    return subprocess.run([*command, *tests], cwd=suite, env=os.environ | variables).returncode


if __name__ == "__main__":
    sys.exit(main())
