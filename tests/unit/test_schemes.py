"""The installed vLLM hashes and lays out pages as the table of releases says."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheLayout, compute_layout_strides
from vllm.v1.request import Request

from fake_config import attention, sliding
from undercroft import compat
from undercroft.identity import schemes

HASHES = {1: "3274417d2adc41f4"}
"""By the number of the scheme: the digest of the block hashes of `requests`."""
PAGES = {2: "b552969b912a3deb"}
"""By the number of the scheme: the strides of pages."""


def requests():
    """Requests without adapters: undercroft adds a key to the hashes of requests with one."""
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="sky", mm_position=PlaceholderRange(offset=20, length=30), mm_hash="sky"
    )
    tokens = list(range(100, 164))
    yield {"prompt_token_ids": tokens}
    yield {"prompt_token_ids": tokens, "cache_salt": "salt"}
    yield {"prompt_token_ids": tokens, "mm_features": [image]}


def test_block_hashes_are_of_the_scheme(monkeypatch):
    function = get_hash_fn_by_name("sha256_cbor")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    kv_cache_utils.init_none_hash(function)
    hasher = kv_cache_utils.get_request_block_hasher(16, function)
    hashes = []
    for index, arguments in enumerate(requests()):
        request = Request(
            request_id=str(index),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=hasher,
            **arguments,
        )
        assert len(request.block_hashes) == 4
        hashes += [bytes(block).hex() for block in request.block_hashes]
    assert len(set(hashes)) >= 10
    assert hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16] == HASHES[schemes.hash_scheme()]


def test_pages_are_of_the_scheme():
    strides = {
        f"{type(spec).__name__} {layout.name}": list(compute_layout_strides(spec, 8, 4, layout))
        for spec in (attention(), attention(dtype=torch.float32, block_size=32), sliding())
        for layout in KVCacheLayout
    }
    number = schemes.RELEASES[compat.vllm_release()].page
    assert hashlib.sha256(json.dumps(strides, sort_keys=True).encode()).hexdigest()[:16] == PAGES[number]


def test_installed_release_is_known():
    assert schemes.is_known_release()


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_sample_depends_on_the_algorithm_only(algorithm):
    assert schemes.serialized_sample(algorithm) == schemes.serialized_sample(algorithm)
    assert schemes.serialized_sample("sha256") != schemes.serialized_sample("sha256_cbor")


def test_backend_that_vllm_cannot_resolve_here_is_that_of_the_machine():
    config = SimpleNamespace(attention_config=SimpleNamespace(backend="FLASHINFER"))
    assert schemes._backend(config, attention()) == f"FLASHINFER on {schemes._machine()}"
