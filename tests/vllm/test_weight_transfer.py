"""Weights that a trainer hands over through vLLM's weight transfer: nobody else finds what vLLM saves after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from connector_engine import LONG, OTHER, TOKENS, References, core, settled
from real_engine import NOT_PLANNED, Engine
from threshold_http import start_server, the_choice, wait_until_on_disk
from weight_files import KIND, InProcess, changed_weights, send

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Make = Callable[..., Engine]
HIT = 896
"""Tokens of the whole blocks of `LONG`."""
SHARED = 640
"""Tokens of the whole blocks that `LONG` and `OTHER` share."""
BACKWARDS = LONG[::-1]


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"host_memory": "64MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB", **more}


@pytest.fixture(scope="module")
def before(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (OTHER, TOKENS), (BACKWARDS, TOKENS))


@pytest.fixture(scope="module")
def after(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, References]:
    """A file of other weights, and the tokens of a vLLM without any cache that has started with them."""
    directory = tmp_path_factory.mktemp("changed")
    for file in llama.iterdir():
        if file.name != "model.safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    weights = changed_weights(llama, directory / "model.safetensors")
    return weights, References(directory, (LONG, TOKENS), (BACKWARDS, TOKENS))


def trained(engine: Make, model: Path, options: dict[str, Any], **more: Any) -> Engine:
    """An engine to which a trainer can send weights."""
    return engine(model, options, weight_transfer_config={"backend": KIND}, **more)


def stop(one: Engine) -> None:
    """Stop an engine whose blocks are written."""
    settled(one, reset=False)
    core(one).flush(30.0)
    one.close()


def test_no_restart_finds_blocks_of_transferred_weights(
    engine: Make, llama: Path, tmp_path: Path, before: References, after: tuple[Path, References]
) -> None:
    weights, changed = after
    one = trained(engine, llama, options(tmp_path))
    assert one.generate(OTHER, TOKENS).tokens == before(OTHER)
    settled(one, reset=False)
    one.core.pause_scheduler("keep", False)
    send(InProcess(one.llm), weights)
    one.core.resume_scheduler()
    answer = one.generate(BACKWARDS, TOKENS)
    assert (answer.cached, answer.tokens) == (0, changed(BACKWARDS))
    # vLLM itself keeps the device's blocks of the old weights.
    assert one.generate(LONG, TOKENS).cached == SHARED
    settled(one)
    # The documented reset after an update.
    for cached in (0, HIT):
        answer = one.generate(LONG, TOKENS)
        assert (answer.cached, answer.tokens) == (cached, changed(LONG)), "its own hits go on"
        settled(one)
    stop(one)
    # Without a trainer: the way of a transfer is no part of the namespace.
    two = engine(llama, options(tmp_path))
    for ids, cached in ((BACKWARDS, 0), (LONG, SHARED), (OTHER, 1152)):
        answer = two.generate(ids, TOKENS)
        assert (answer.cached, answer.tokens) == (cached, before(ids))
        settled(two)


def test_no_restart_finds_blocks_of_a_draft_model_that_was_transferred(
    engine: Make, llama: Path, tmp_path: Path, before: References, after: tuple[Path, References]
) -> None:
    """The draft model's KV lies in the same blocks as the model's."""
    speculative = {"method": "draft_model", "model": str(llama), "num_speculative_tokens": 2}
    one = trained(engine, llama, options(tmp_path), speculative_config=speculative)
    assert one.generate(OTHER, TOKENS).tokens == before(OTHER)
    settled(one, reset=False)
    of_worker = one.core.model_executor.driver_worker.worker
    models = of_worker.get_model(), of_worker.get_draft_model()
    norms = [dict(model.named_parameters())["model.layers.0.input_layernorm.weight"].clone() for model in models]
    send(InProcess(one.llm), after[0], draft=True)
    changed = [
        not dict(model.named_parameters())["model.layers.0.input_layernorm.weight"].equal(norm)
        for model, norm in zip(models, norms, strict=True)
    ]
    assert changed == [False, True]
    assert one.generate(BACKWARDS, TOKENS).tokens == before(BACKWARDS), "drafts decide no token"
    stop(one)
    two = trained(engine, llama, options(tmp_path), speculative_config=speculative)
    for ids, cached in ((BACKWARDS, 0), (OTHER, 1152)):
        answer = two.generate(ids, TOKENS)
        assert (answer.cached, answer.tokens) == (cached, before(ids))
        settled(two)


def test_versions_of_transferred_weights_are_cached_by_name(
    engine: Make, llama: Path, tmp_path: Path, before: References, after: tuple[Path, References]
) -> None:
    weights, changed = after
    shared = options(tmp_path, share_weight_versions=True)
    for cached in (0, HIT):
        one = trained(engine, llama, shared)
        base = one.generate(LONG, TOKENS)
        assert (base.cached, base.tokens) == (cached, before(LONG))
        settled(one, reset=False)
        one.core.pause_scheduler(clear_cache=True)
        send(InProcess(one.llm), weights)
        one.llm.update_weight_version("step 1")
        one.core.resume_scheduler()
        answer = one.generate(LONG, TOKENS)
        assert (answer.cached, answer.tokens) == (cached, changed(LONG))
        stop(one)


@pytest.mark.server
@pytest.mark.slow
def test_a_transfer_over_http_parts_from_the_others(
    engine: Make, llama_with_tokenizer: Path, tmp_path: Path, before: References, after: tuple[Path, References]
) -> None:
    weights, changed = after
    arguments = ("--num-gpu-blocks-override", "64", "--worker-extension-cls", "weight_files.Extension")
    arguments += ("--weight-transfer-config", f'{{"backend": "{KIND}"}}')
    given = options(tmp_path, **NOT_PLANNED)
    with start_server(llama_with_tokenizer, tmp_path / "log", given, *arguments) as client:

        def ask(ids: list[int]) -> tuple[int, list[int]]:
            answer = client.complete(ids, TOKENS)
            client.wait_until_idle()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], the_choice(answer)["token_ids"]

        assert ask(OTHER) == (0, before(OTHER))
        assert client.http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).status_code == 200
        send(HTTPVLLMWeightSyncClient(client.server.url), weights)
        assert client.http.post("/resume").status_code == 200
        assert ask(BACKWARDS) == (0, changed(BACKWARDS))
        wait_until_on_disk(tmp_path / "cache", 9)
    two = engine(llama_with_tokenizer, given, max_model_len=2048)
    for ids, cached in ((BACKWARDS, 0), (OTHER, 1152)):
        answer = two.generate(ids, TOKENS)
        assert (answer.cached, answer.tokens) == (cached, before(ids))
        settled(two)
