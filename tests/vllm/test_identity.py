"""Which blocks are found: those of the same model wherever it is, and none whose KV would be another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_checks import BLOCK, nothing_left
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
MEMORY = {"host_memory": "64MiB"}
IDS = prompt(7 * BLOCK + 1)
HIT = 7 * BLOCK


def disk(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB", **options}


def life(engine: Make, model: Path, options: dict[str, Any] | None, **arguments: Any) -> tuple[int, list[int]]:
    """One life of a vLLM: tokens of the prompt that it finds in the cache, and its answer."""
    one = engine(model, options, blocks=64, **arguments)
    answer = one.generate(IDS, 12)
    if options is not None:
        nothing_left(one)
    one.close()
    return answer.cached, answer.tokens


def changed(model: Path, copy: Path) -> Path:
    """A copy with one weight changed, in the middle of the file."""
    shutil.copytree(model, copy)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    return copy


def test_copies_share_and_a_changed_weight_does_not(engine: Make, llama: Path, tmp_path: Path) -> None:
    options = disk(tmp_path)
    assert life(engine, llama, options)[0] == 0
    # Copied without its times, as an image or a download has it.
    shutil.copytree(llama, tmp_path / "copy", copy_function=shutil.copyfile)
    assert life(engine, tmp_path / "copy", options)[0] == HIT
    (tmp_path / "copy").rename(tmp_path / "moved")
    assert life(engine, tmp_path / "moved", options)[0] == HIT
    assert life(engine, changed(llama, tmp_path / "changed"), options)[0] == 0
    assert life(engine, changed(llama, tmp_path / "full"), {**options, "weights": "full"})[0] == 0


def test_a_start_says_why_the_cache_is_cold(
    engine: Make, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from undercroft.log import logger

    said: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *values: said.append(text % values if values else text))
    lines = []
    for model, dtype in (
        (llama, "float32"),
        (llama, "float32"),
        (changed(llama, tmp_path / "changed"), "float32"),
        (llama, "bfloat16"),
    ):
        engine(model, disk(tmp_path), blocks=64, dtype=dtype).close()
        lines.append([line for line in said if "cache not reused" in line])
        said.clear()
    assert lines[:2] == [[], []]
    assert lines[2] == ["undercroft: cache not reused: model.weights differs (model.safetensors) (docs/identity.md)"]
    [line] = lines[3]
    assert "model.dtype torch.float32, here torch.bfloat16" in line


def test_the_operator_may_vouch_for_weights(engine: Make, llama: Path, tmp_path: Path) -> None:
    options = disk(tmp_path, model_id="the same, believe me")
    assert life(engine, llama, options)[0] == 0
    assert life(engine, changed(llama, tmp_path / "changed"), options)[0] == HIT
    assert life(engine, llama, disk(tmp_path, model_id="another"))[0] == 0


def test_rotary_factors_that_depend_on_the_length_are_kept_apart(engine: Make, phi3: Path, tmp_path: Path) -> None:
    """Phi-3 has other rotary factors as soon as max_model_len exceeds the length that it was trained with."""
    expected = {n: life(engine, phi3, None, max_model_len=n, enable_prefix_caching=False)[1] for n in (1024, 4096)}
    assert expected[1024] != expected[4096]
    options = disk(tmp_path)
    assert life(engine, phi3, options, max_model_len=1024) == (0, expected[1024])
    assert life(engine, phi3, options, max_model_len=4096) == (0, expected[4096])
    assert life(engine, phi3, options, max_model_len=4096) == (HIT, expected[4096])


def test_a_length_that_changes_nothing_keeps_the_cache(engine: Make, llama: Path, tmp_path: Path) -> None:
    assert life(engine, llama, disk(tmp_path), max_model_len=1024)[0] == 0
    assert life(engine, llama, disk(tmp_path), max_model_len=4096)[0] == HIT


def is_off(one: Engine) -> bool:
    return one.connector is not None and one.connector._scheduler is None and one.connector._engine is None


def test_off_without_vllms_prefix_caching(engine: Make, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = engine(llama, MEMORY, blocks=64, enable_prefix_caching=False)
    assert is_off(one)
    assert [record.message for record in caplog.records if "prefix caching is off" in record.message]
    first, second = one.generate(IDS, 8), one.generate(IDS, 8)
    assert (first.cached, second.cached, first.tokens) == (0, 0, second.tokens)


def test_off_where_attention_is_not_causal(engine: Make, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV of a prefix depends on later tokens, as with vLLM's attention for prefix language models."""
    import vllm.model_executor.models.llama as modeling
    from vllm.model_executor.layers.attention import PrefillPrefixLMAttention

    monkeypatch.setattr(modeling, "Attention", PrefillPrefixLMAttention)
    shared = prompt(4 * BLOCK)
    prompts = [shared + prompt(200, seed) for seed in (3, 5)]
    plain = engine(llama, blocks=64)
    expected = [plain.generate(ids, 12).tokens for ids in prompts]
    plain.close()
    one = engine(llama, MEMORY, blocks=64)
    assert is_off(one)
    for ids, tokens in zip(prompts, expected, strict=True):
        answer = one.generate(ids, 12)
        one.idle_steps()
        assert (answer.cached, answer.tokens) == (0, tokens)


@pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
def test_off_where_pooling_needs_the_whole_prompt(engine: Make, llama_with_tokenizer: Path, pooling: str) -> None:
    """A prompt of which a part is loaded would end the engine."""
    from vllm.config import PoolerConfig

    pooler = PoolerConfig(seq_pooling_type=pooling)
    # Pooling asks for a tokenizer even where prompts are tokens.
    arguments = {"skip_tokenizer_init": False, "runner": "pooling", "convert": "embed", "pooler_config": pooler}
    one = engine(llama_with_tokenizer, MEMORY, blocks=64, max_model_len=2048, **arguments)
    assert is_off(one)
    seen = []
    for _ in range(3):
        [output] = one.llm.encode([{"prompt_token_ids": IDS}], pooling_task="embed", use_tqdm=False)
        one.idle_steps()
        seen.append(output.outputs.data)
    assert all(torch.equal(seen[0], other) for other in seen[1:])


def image_hashes(pixel: float) -> list[bytes]:
    """Block hashes of the first request of a server, with an image, as vLLM makes them without both its caches."""
    import vllm.renderers.base as renderers
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    [renderer] = [kind for kind in vars(renderers).values() if "_process_mm_uuids" in getattr(kind, "__dict__", {})]
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False))
    stub = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)),
        config=config,
        _validate_mm_uuids=lambda *_: None,
    )
    name = f"renderer0-mm-{renderers.AtomicCounter().inc(1)}"
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    identifiers = renderer._process_mm_uuids(stub, {"image": [torch.full((3, 8, 8), pixel)]}, items, {}, name)
    [identifier] = identifiers["image"]
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=4, length=576),
        mm_hash=identifier,
    )
    init_none_hash(sha256)
    request = Request(
        request_id="x",
        prompt_token_ids=[1, 2, 3, 4] + [999] * 576 + [5, 6, 7] * 20,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[feature],
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    return list(request.block_hashes)


def test_undercroft_is_off_where_a_counter_distinguishes_images() -> None:
    """Two lives of such a server give two images the same block hashes: undercroft must not look for them."""
    from fake_config import kv_cache_config, vllm_config
    from undercroft.connector.groups import why_unsupported

    hashes = image_hashes(0), image_hashes(1)
    assert len(hashes[0]) == 5
    assert hashes[0] == hashes[1], "vLLM tells them apart now: may undercroft stay on?"
    config = vllm_config()
    config.cache_config.enable_prefix_caching = False
    assert "prefix caching is off" in (why_unsupported(config, kv_cache_config()) or "")


def test_pages_of_different_instruction_sets_are_kept_apart(
    engine: Make, llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    one = engine(llama, MEMORY, blocks=64, dtype="bfloat16")
    spec = one.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    config, kv_cache_config = one.core.vllm_config, one.scheduler.kv_cache_config
    key, value = (torch.randn(BLOCK, 2, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (1, 2))
    pages: dict[str, torch.Tensor] = {}
    here = ("amx", "vec") if "amx_bf16" in Path("/proc/cpuinfo").read_text() else ("vec",)
    for isa in here:
        page = torch.zeros(2, 2, 256, 64, dtype=torch.bfloat16)
        ops.cpu_attn_reshape_and_cache(key, value, *page.chunk(2, dim=2), torch.arange(BLOCK), isa)
        pages[isa] = page
    assert "amx" not in pages or not torch.equal(pages["amx"], pages["vec"])

    from undercroft.identity.namespace import describe

    descriptions = {}
    for isa in ("amx", "vec", "vec16"):
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_args, isa=isa: isa)
        descriptions[isa] = describe(config, kv_cache_config)
        assert f"CPU_ATTN/{isa}" in descriptions[isa]
    assert len(set(descriptions.values())) == 3
    assert spec.block_size == BLOCK


def test_the_description_of_a_real_model_is_short_and_knows_every_setting(engine: Make, llama: Path) -> None:
    import json

    from undercroft.identity.namespace import describe

    one = engine(llama, MEMORY, blocks=64)
    text = describe(one.core.vllm_config, one.scheduler.kv_cache_config)
    found = json.loads(text)
    assert set(found) == {
        *("format", "salt", "model", "cache_dtype", "attention", "layout", "pages", "hash", "parallel", "groups")
    }
    assert found["attention"]["backends"][0].startswith("CPU_ATTN/")
    assert set(found["model"]) == {"architectures", "config", "dtype", "runner", "load_format", "weights"}
    assert str(llama) not in text
    assert len(text) < 2000
