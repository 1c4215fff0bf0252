"""Messages about the differences of two descriptions."""

from __future__ import annotations

import json

from fake_config import attention, kv_cache_config, vllm_config
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


def test_another_block_size_is_named() -> None:
    texts = []
    for tokens in (16, 32):
        sizes = {"hash_block_size": tokens, "cache_hit_alignment_tokens": tokens}
        config = kv_cache_config([attention(block_size=tokens)], **sizes)
        texts.append(describe(vllm_config(), config, Naming(model_id="m")))
    assert "hash.block_tokens 16, here 32" in str(why_not_reused(texts[1], texts[:1]))


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
