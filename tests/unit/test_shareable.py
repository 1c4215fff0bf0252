"""The key of a block holds each of a request's inputs to the model, or the block is not cached.

The rows of the table in docs/identity.md name these tests.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from undercroft import vllm_patches
from undercroft.connector.groups import Groups
from undercroft.connector.scheduler.shareable import Shareable
from undercroft.vllm_patches import MARK
from undercroft.vllm_patches.inputs import _marked, _names

BLOCK, BLOCKS = 16, 4
TOKENS = BLOCK * BLOCKS
FULL = Groups(BLOCK, BLOCK, ("full",), (BLOCK,), (0,), 0)
HASH = get_hash_fn_by_name("sha256")
ROWS = torch.arange(TOKENS * 8, dtype=torch.int16).reshape(TOKENS, 8)
EMBEDDINGS = ROWS.view(torch.float16)
IDENTITY = Path(__file__).parents[2] / "docs" / "identity.md"
BY_CONTENT = {"extra_args": {MARK: b"content"}}


@pytest.fixture(autouse=True)
def patched() -> None:
    kv_cache_utils.init_none_hash(HASH)
    assert vllm_patches.tell_embeddings_apart()


def image(name: str = "one", offset: int = 2 * BLOCK + 3, mm_hash: str | None = None) -> Any:
    place = PlaceholderRange(offset=offset, length=8)
    return MultiModalFeatureSpec(None, "image", name, place, mm_hash or name)


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A request of four blocks; ``fields``: arguments of vLLM's class."""
    return Request(
        "one",
        fields.pop("tokens", [7] * TOKENS),
        SamplingParams(max_tokens=1, **(sampling or {})) if "pooling" not in fields else None,
        fields.pop("pooling", None),
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, HASH),
        **fields,
    )


def embedded(mask: list[bool] | None = None, rows: torch.Tensor = EMBEDDINGS) -> Any:
    tokens = None if mask is None else [0] * TOKENS
    return request(tokens=tokens, prompt_embeds=rows, prompt_is_token_ids=mask)


def mask(*positions: int) -> list[bool]:
    return [position in positions for position in range(TOKENS)]


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    "tokens": (request, lambda: request(tokens=[7] * (TOKENS - 1) + [8]), 3),
    "a salt": (request, lambda: request(cache_salt="tenant"), 0),
    "an adapter": (request, lambda: request(lora_request=LoRARequest("adapter", 1, "/adapter")), 0),
    "an image": (request, lambda: request(mm_features=[image()]), 2),
    "another image": (
        lambda: request(mm_features=[image()]),
        lambda: request(mm_features=[image("two")]),
        2,
    ),
    "an image at another place": (
        lambda: request(mm_features=[image()]),
        lambda: request(mm_features=[image(offset=2 * BLOCK + 4)]),
        2,
    ),
    "embeddings": (request, embedded, 0),
    "other embeddings": (embedded, lambda: embedded(rows=(ROWS + (ROWS >= 3 * BLOCK * 8)).view(torch.float16)), 3),
    "embeddings of another type": (embedded, lambda: embedded(rows=ROWS.view(torch.bfloat16)), 0),
    "a token among embeddings": (lambda: embedded(mask()), lambda: embedded(mask(2 * BLOCK + 5)), 2),
    "a token at another place": (lambda: embedded(mask(BLOCK)), lambda: embedded(mask(BLOCK + 1)), 1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_input_is_another_key(other: str) -> None:
    """From the block on that it concerns; the blocks before it are shared."""
    one, two, block = OTHERS[other]
    mine, theirs = one().block_hashes, two().block_hashes
    assert len(mine) == len(theirs) == BLOCKS
    assert mine[:block] == theirs[:block]
    assert not set(mine[block:]) & set(theirs[block:])


def test_the_same_input_is_the_same_key() -> None:
    assert embedded().block_hashes == embedded(mask()).block_hashes, "no token among the embeddings"
    for one, two, _ in OTHERS.values():
        assert one().block_hashes == one().block_hashes and two().block_hashes == two().block_hashes


def share(asked: Any, **options: Any) -> int:
    return Shareable(FULL, **{"unique_uuids": False, **options}).tokens(asked)


def test_requests_whose_inputs_are_in_the_key_are_cached_whole() -> None:
    for one in (request(), embedded(mask(3)), request(pooling=PoolingParams(task="embed"))):
        assert share(one) == TOKENS
    assert share(request(BY_CONTENT, mm_features=[image()])) == TOKENS


def test_token_types_are_in_no_key() -> None:
    """The model adds them to the embeddings. Arguments of the pooling that undercroft does not know may do the like."""
    typed = PoolingParams(task="classify", extra_kwargs={"compressed_token_type_ids": 9})
    assert share(request(pooling=typed)) == 0
    marked = PoolingParams(task="embed", extra_kwargs={MARK: b"content"})
    assert share(request(pooling=marked, mm_features=[image()])) == TOKENS


def test_embeddings_are_not_cached_without_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_patches, "tell_embeddings_apart", lambda: False)
    assert (share(embedded()), share(request())) == (0, TOKENS)


@pytest.mark.parametrize("forged", [None, {MARK: "content"}, {MARK: True}, {MARK: 1}])
def test_media_with_a_name_from_a_client_are_not_cached(forged: dict[str, Any] | None) -> None:
    """Nor with a mark that a client can send. The text before the first medium is cached."""
    named = request({"extra_args": forged}, mm_features=[image(), image("two", 50)])
    assert share(named) == 2 * BLOCK + 3
    assert share(named, unique_uuids=True) == TOKENS
    ahead = Groups(BLOCK, BLOCK, ("full",), (BLOCK,), (0,), 0, lookahead_tokens=2)
    assert Shareable(ahead, unique_uuids=False).tokens(named) == 2 * BLOCK + 1


def test_a_client_cannot_name_its_picture_like_another() -> None:
    """vLLM's caches of processed and encoded pictures would give the wrong picture to the requests with the right one.

    Those have the name by the content. They are not cached from then on.
    """
    one = Shareable(FULL, unique_uuids=False)
    honest = request(BY_CONTENT, mm_features=[image("adapter:hash", mm_hash="hash")])
    assert one.tokens(honest) == TOKENS
    one.tokens(request(mm_features=[image("other")]))
    assert one.tokens(honest) == TOKENS
    one.tokens(request(mm_features=[image("hash")]))
    assert one.tokens(honest) == 2 * BLOCK + 3


def test_names_from_clients_are_forgotten_only_after_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undercroft.connector.scheduler.shareable._CLAIMS_MAX", 3)
    one = Shareable(FULL, unique_uuids=False)
    for name in "abcd":
        one.tokens(request(mm_features=[image(name)]))
    cached = [one.tokens(request(BY_CONTENT, mm_features=[image(name)])) == TOKENS for name in "abcd"]
    assert cached == [True, False, False, False]


def test_the_mark_of_a_sessions_last_turn_does_not_speak_for_its_media() -> None:
    assert share(request(BY_CONTENT, mm_features=[image()], resumable=True)) == 2 * BLOCK + 3


def test_the_frontend_alone_sets_the_mark() -> None:
    forged = SamplingParams(extra_args={MARK: b"content", "mine": 1})
    assert _marked(forged, by_content=False).extra_args == {"mine": 1}
    assert forged.extra_args == {MARK: b"content", "mine": 1}, "the caller's own object"
    assert _marked(SamplingParams(), by_content=True).extra_args == {MARK: b"content"}
    assert _marked(PoolingParams(), by_content=True).extra_kwargs == {MARK: b"content"}
    plain = SamplingParams(extra_args={"mine": 1})
    assert _marked(plain, by_content=False) is plain


def test_the_mark_reaches_the_engines_process() -> None:
    engine_request = EngineCoreRequest(
        request_id="one",
        prompt_token_ids=[7] * TOKENS,
        mm_features=None,
        sampling_params=SamplingParams(**BY_CONTENT),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    sent = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(engine_request))
    assert vllm_patches.are_named_by_content(sent)


@pytest.mark.parametrize(
    ("uuids", "named"),
    [
        (None, False),
        ({}, False),
        ({"image": None}, False),
        ({"image": [None, None]}, False),
        ({"image": [None, "a"]}, True),
        ({"image": "a"}, True),
        ({"video": None, "image": ["a"]}, True),
    ],
)
def test_names_from_clients_are_recognised(uuids: Any, named: bool) -> None:
    assert _names(uuids) == named


def test_states_behind_a_named_medium_are_not_saved() -> None:
    one = Shareable(FULL, unique_uuids=False)
    offered = [(0, 5, BLOCK), (0, 6, 2 * BLOCK), (0, 7, 3 * BLOCK)]
    named, own = request(mm_features=[image()]), request()
    assert [state.boundary for state in one.states(named, offered)] == [BLOCK, 2 * BLOCK]
    assert len(one.states(own, offered)) == 3
    assert (one.limit(named), one.limit(own)) == (2 * BLOCK, TOKENS)


def positions(media: list[Any]) -> torch.Tensor:
    """The position ids of an ERNIE 4.5 VL model, which has M-RoPE: three numbers for each token."""
    from vllm.model_executor.models.ernie45_vl import Ernie4_5_VLMoeForConditionalGeneration as ErnieVL

    model: Any = SimpleNamespace(config=SimpleNamespace(spatial_conv_size=1, temporal_conv_size=1))
    model.iter_mm_grid_thw = lambda found: ErnieVL.iter_mm_grid_thw(model, found)
    return ErnieVL.get_mrope_input_positions(model, [7] * TOKENS, media)[0]


def test_positions_of_images_follow_from_the_key() -> None:
    """An image's grid decides the positions from the image on: the digest of its content covers it."""
    first = image("one", BLOCK)
    first.data = {"image_grid_thw": SimpleNamespace(data=torch.tensor([1, 2, 4]))}
    later = [image(name, 2 * BLOCK + 3) for name in ("wide", "high")]
    for one, grid in zip(later, ([1, 2, 4], [1, 4, 2]), strict=True):
        one.data = {"image_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
    found = [positions([first, one]) for one in later]
    same = int((found[0] == found[1]).all(dim=0).logical_not().nonzero()[0])
    assert same > 2 * BLOCK + 3 and not torch.equal(found[0], found[1])
    assert positions([])[0].tolist() != found[0][0].tolist()
    keys = [request(BY_CONTENT, mm_features=[first, one]).block_hashes for one in later]
    assert [one == other for one, other in zip(*keys, strict=True)] == [True, True, False, False]


KNOWN = {
    NewRequestData: "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids num_computed_tokens "
    "lora_request prompt_embeds prompt_is_token_ids prefill_token_ids replay_start",
    MultiModalFeatureSpec: "data modality identifier mm_position mm_hash",
    PlaceholderRange: "offset length is_embed",
    PoolingParams: "use_activation dimensions step_tag_id returned_token_ids task requires_token_ids "
    "skip_reading_prefix_cache late_interaction_params extra_kwargs output_kind late_chunking_params",
    LoRARequest: "lora_name lora_int_id lora_path base_model_name load_inplace is_3d_lora_weight",
}
"""The fields through which a request reaches the workers. docs/identity.md says where the key holds each."""


@pytest.mark.parametrize("kind", KNOWN)
def test_vllm_has_no_other_input(kind: Any) -> None:
    found = getattr(kind, "__struct_fields__", None) or [field.name for field in dataclasses.fields(kind)]
    assert set(found) <= set(KNOWN[kind].split()), "a new input: does the block's hash hold it?"


def test_each_row_of_the_table_names_a_test() -> None:
    text = IDENTITY.read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\|$", text.partition("## A request's inputs")[2].partition("\n## ")[0], re.MULTILINE)[2:]
    assert len(rows) >= 12
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])
        assert named, f"no test: {row}"
        for name in named:
            assert any(f"def {name}(" in text for text in sources()), name


def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(IDENTITY.parents[1].glob("tests/*/test_*.py"))]
