"""Messages about the differences of two descriptions."""

from __future__ import annotations

import json

import pytest
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from fake_config import attention, kv_cache_config, sliding, vllm_config
from undercroft.descriptions import differences, found_now, parsed, summary, why_not_reused
from undercroft.identity.namespace import Naming, describe


def described(**changes) -> str:
    model = {"architectures": ["Llama"], "config": "c", "weights": "12345678abc", "dtype": "torch.bfloat16"}
    model |= changes.pop("model", {})
    return json.dumps(
        {"model": model, "hash": {"scheme": 1, "block_tokens": 16}, "pages": 2, "parallel": {"tensor": 2}} | changes
    )


def test_columns() -> None:
    assert summary(parsed(described())) == ("Llama 12345678", "bfloat16", "2", "16", "hashes 1, pages 2")
    assert summary({}) == ("? ?", "?", "?", "?", "hashes ?, pages ?")


def test_differences_name_fields_and_values() -> None:
    other = described(pages="vllm 0.99", model={"weights": "other"}, salt="x" * 100)
    assert differences(parsed(described()), parsed(other)) == [
        "model.weights differs",
        "pages 2, here vllm 0.99",
        f"salt not set, here {'x' * 57}...",
    ]


def test_nearest_identity_of_the_same_model_is_named() -> None:
    ours = described()
    near, far = described(pages=3), described(pages=3, cache_dtype="fp8")
    stranger = described(model={"config": "d", "weights": "other"})
    assert why_not_reused(ours, [far, near, stranger]) == "pages 3, here 2"
    assert why_not_reused(ours, [far, near, ours]) is None
    assert why_not_reused(ours, [stranger, "no object", "[]"]) is None
    assert why_not_reused(ours, []) is None


def with_blocks(*sizes: int, unit: int) -> str:
    """The description of a model with full attention and perhaps windows, whose blocks have so many tokens."""
    specs = [kind(block_size=tokens) for kind, tokens in zip((attention, sliding, sliding), sizes, strict=False)]
    config = kv_cache_config(specs, hash_block_size=unit, cache_hit_alignment_tokens=unit)
    return describe(vllm_config(), config, Naming(model_id="m"))


def test_another_block_size_is_named() -> None:
    reason = why_not_reused(with_blocks(32, unit=32), [with_blocks(16, unit=16)])
    assert reason == (
        "groups.specs.block_size 16, here 32; groups.specs.page_bytes 8192, here 16384; hash.block_tokens 16, here 32"
    )


def test_other_blocks_with_the_same_hashes_are_named_once_for_all_groups() -> None:
    reason = why_not_reused(with_blocks(16, 64, 64, unit=16), [with_blocks(16, 32, 32, unit=16)])
    assert reason == "groups.specs.block_size 32, here 64; groups.specs.page_bytes 16384, here 32768"


@pytest.mark.parametrize("unit", [16, 32])
def test_vllm_has_no_hash_finer_than_the_blocks_of_a_single_group(unit: int) -> None:
    """Where it had one, vLLMs with blocks of other sizes could share payloads: docs/internals/decisions.md."""
    config = vllm_config()
    config.cache_config.block_size, config.cache_config.prefix_match_unit = 32, unit
    one = kv_cache_config([attention(block_size=32)])
    if unit == 32:
        assert resolve_kv_cache_block_sizes(one, config) == (32, 32)
    else:
        with pytest.raises(ValueError, match="with a single KV cache group"):
            resolve_kv_cache_block_sizes(one, config)


def test_files_that_differ_are_named_as_far_as_they_are_known() -> None:
    other = described(model={"weights": "other"})
    names = [f"model-{part}.safetensors" for part in range(1, 6)]
    assert why_not_reused(other, [described()], lambda *_: names[:1]) == "model.weights differs (model-1.safetensors)"
    [text] = differences(parsed(described()), parsed(other), lambda *_: names)
    assert text.endswith("(model-1.safetensors, model-2.safetensors, model-3.safetensors and 2 more)")


def test_found_now_names_the_part_that_differs() -> None:
    ours = parsed(described())
    assert found_now(ours, "0.32", None) == found_now(ours, "0.33", frozenset(["12345678abc"])) == "yes"
    assert found_now(ours, "0.32", frozenset(["other"])) == "no: weights"
    assert found_now(ours, "9.9", None) == "no: block hashes"
    assert found_now(ours, None, None) == found_now({"model": "x"}, "0.32", None) == "?"
    packed = parsed(described(pages="vllm 0.32"))
    assert (found_now(packed, "0.32", None), found_now(packed, "0.33", None)) == ("yes", "no: pages")
    assert found_now(parsed(described(format=1)), "0.32", None) == "no: format"
    whole = parsed(described(model={"weights": "full:1"}))
    assert found_now(whole, "0.32", frozenset(["other"])) == "?"
