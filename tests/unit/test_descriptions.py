"""What people are told of two descriptions."""

from __future__ import annotations

import json

from undercroft.descriptions import differences, parsed, summary, why_not_reused


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
