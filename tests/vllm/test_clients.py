"""Clients that others wrote, against a server with undercroft and one without: `make test-clients`.

Each client asks the server without undercroft, then the other one cold, and again after its device's cache was emptied,
so that undercroft loads the prompts. No request fails, and all three answers and their usage are equal. Those of
guidellm, which does not ask at temperature 0, are only counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from threshold_http import Client, start_server
from undercroft.demo.server import Server

CLIENTS = os.environ.get("UNDERCROFT_TEST_CLIENTS", "")
"""A directory with an environment for each client."""
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not CLIENTS, reason="needs UNDERCROFT_TEST_CLIENTS, see `make test-clients`"),
]
PATIENCE_S = 600
FAILURES = ("hook_errors", "load_failures", "save_failures", "checksum_failures", "host_checksum_failures")
PROMPT = "The keeper of the old mill counts his barrels on day {0} of every month, and writes them down. " * 8


@dataclass(frozen=True, slots=True)
class Servers:
    """The same model twice."""

    plain: Client
    cached: Client
    model: Path


@pytest.fixture(scope="module")
def servers(llama_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    place = tmp_path_factory.mktemp("clients")
    with ExitStack() as stack:
        options = {"host_memory": "256MiB", "disk_path": str(place / "disk"), "disk_capacity": "256MiB"}
        # All hits are wanted, however small the model.
        options |= {"min_load_tokens": 1, "promotion_wait": "best_effort"}
        cached = stack.enter_context(start_server(llama_with_tokenizer, place / "cached.log", options))
        arguments = ["--model", str(llama_with_tokenizer), "--served-model-name", "m", "--dtype", "float32"]
        arguments += ["--max-model-len", "2048", "--enforce-eager", "--enable-prompt-tokens-details"]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": ""}
        server = stack.enter_context(Server(arguments, environment, place / "plain.log"))
        server.wait_until_ready(lambda elapsed: None)
        plain = Client(server)
        yield Servers(plain, cached, llama_with_tokenizer)
        plain.http.close()


def run(*command: object, place: Path | None = None) -> str:
    """What a client prints; it has neither the network nor this environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(one) for one in command], cwd=place, env=kept | offline, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def three_times(servers: Servers, ask: Callable[[Client], Any]) -> tuple[Any, Any, Any]:
    """The answers without undercroft, with it, and with all prompts loaded by it."""
    servers.plain.reset_device()
    servers.cached.reset()
    found = (ask(servers.plain), ask(servers.cached))
    servers.cached.reset_device()
    before = loaded(servers.cached)
    warm = ask(servers.cached)
    assert loaded(servers.cached) > before, "undercroft loaded nothing"
    assert {name: servers.cached.metric(f"vllm:undercroft_{name}_total") for name in FAILURES} == dict.fromkeys(
        FAILURES, 0
    )
    return *found, warm


def loaded(client: Client) -> float:
    return client.metric("vllm:undercroft_hit_tokens_total")


@pytest.mark.parametrize("client", ["openai", "litellm", "langchain"])
def test_a_library_gets_the_same_answers_and_the_right_usage(servers: Servers, client: str) -> None:
    program = Path(__file__).parent / "clients/sdk.py"

    def ask(server: Client) -> dict[str, Any]:
        return json.loads(run(f"{CLIENTS}/sdk/bin/python", program, client, server.server.url).splitlines()[-1])

    plain, cold, warm = three_times(servers, ask)
    for name, expected in plain.items():
        for found in (cold[name], warm[name]):
            assert (found["text"], found["usage"]) == (expected["text"], expected["usage"]), name
            assert found["text"] and found["usage"][1] > 0
            assert found["cached"] <= found["usage"][0]
        # vLLM itself counts the cached tokens of one prompt of several.
        assert warm[name]["cached"] > 0.5 * warm[name]["usage"][0] or name == "several prompts", name


def test_vllms_benchmark_fails_no_request(servers: Servers, tmp_path: Path) -> None:
    vllm = Path(sys.executable).parent / "vllm"
    runs = 0

    def ask(server: Client) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        shape = {"prefix-len": 512, "suffix-len": 64, "num-prefixes": 3, "output-len": 8}
        arguments = [f"--prefix-repetition-{name}={value}" for name, value in shape.items()]
        arguments += ["--num-prompts=12", "--max-concurrency=4", "--seed=0", "--temperature=0", "--disable-tqdm"]
        arguments += [f"--base-url={server.server.url}", f"--model={servers.model}", "--served-model-name=m"]
        arguments += ["--save-result", "--save-detailed", f"--result-dir={tmp_path}", f"--result-filename={runs}.json"]
        run(sys.executable, vllm, "bench", "serve", "--dataset-name=prefix_repetition", *arguments)
        return json.loads((tmp_path / f"{runs}.json").read_text())

    plain, *with_undercroft = three_times(servers, ask)
    for found in with_undercroft:
        assert found["completed"] == 12
        assert [error for error in found["errors"] if error] == []
        for name in ("generated_texts", "total_input_tokens", "total_output_tokens", "input_lens"):
            assert found[name] == plain[name], name


def test_guidellm_fails_no_request(servers: Servers, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}. {PROMPT.format(number)}", "output_tokens_count": 8} for number in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    runs = 0

    def ask(server: Client) -> dict[str, str]:
        nonlocal runs
        runs += 1
        report = tmp_path / f"{runs}.json"
        backend = f"kind=openai_http,target={server.server.url},model=m,request_format=/v1/completions"
        run(
            f"{CLIENTS}/guidellm/bin/guidellm",
            "run",
            *("--backend", backend, "--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={len(rows)}"),
            *("--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}"),
            *("--tokenizer", f"kind=hf_auto,model={servers.model}"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
            place=tmp_path,
        )
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        requests = benchmark["requests"]
        assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (len(rows), [], [])
        return {json.dumps(one["request_args"], sort_keys=True): one["output"] for one in requests["successful"]}

    three_times(servers, ask)


def test_lm_eval_computes_the_same_scores(servers: Servers, tmp_path: Path) -> None:
    questions = [
        {"question": PROMPT.format(number), "choices": [" yes", " no", " never"], "answer": number % 3}
        for number in range(6)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in questions))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choices = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    writing = {
        "output_type": "generate_until",
        # Another beginning: what the first task computes stays on the device.
        "doc_to_text": "Go on. {{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    for name, task in (("choosing", choices), ("writing", writing)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
    runs = 0

    def ask(server: Client) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        out = tmp_path / f"run{runs}"
        url = f"{server.server.url}/v1/completions"
        model = f"model=m,base_url={url},tokenizer={servers.model},num_concurrent=2,max_retries=1,max_length=2048"
        run(
            f"{CLIENTS}/lmeval/bin/lm_eval",
            *("run", "--model", "local-completions", "--model_args", model, "--tasks", "choosing,writing"),
            *("--include_path", tmp_path, "--output_path", out, "--log_samples"),
        )
        samples = {}
        for path in out.rglob("samples_*.jsonl"):
            name = path.name.split("_")[1]
            samples[name] = [
                (one["doc_id"], one["resps"], one.get("acc", one.get("exact_match")))
                for one in map(json.loads, path.read_text().splitlines())
            ]
        assert {name: len(found) for name, found in samples.items()} == {"choosing": 6, "writing": 6}
        return samples

    plain, cold, warm = three_times(servers, ask)
    assert cold == warm == plain
