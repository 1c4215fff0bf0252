"""The patches about inputs of a model that vLLM's block hashes do not determine: embeddings, and media with a name."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

from undercroft.vllm_patches.checks import takes
from undercroft.vllm_patches.frontend import OURS, Frontend
from undercroft.vllm_patches.table import EMBEDDINGS, MEDIA, guarded, replace

MARK = "undercroft_media"
"""Name of the mark, in a prompt with media and in the parameters of its request."""
_BY_CONTENT = b"content"
"""The mark's value in a request. JSON has no bytes, so no client can send this value."""


class _Rendering(threading.local):
    """The prompt that this thread prepares."""

    has_image_id = False
    """Whether an image of the prompt has an identifier of its own, which vLLM hashes instead of the picture."""


_rendering = _Rendering()


@guarded(EMBEDDINGS)
def tell_embeddings_apart() -> None:
    """Add the type of the embeddings, and the positions that have tokens instead, to the block hashes."""
    from vllm.v1.core import kv_cache_utils

    takes(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", "request", "start_token_idx", "end_token_idx")

    def wrap(original: Callable[[Any, int, int], list[Any]]) -> Callable[[Any, int, int], list[Any]]:
        def keys(request: Any, start_token_idx: int, end_token_idx: int) -> list[Any]:
            found = original(request, start_token_idx, end_token_idx)
            if request.prompt_embeds is None:
                return found
            are_tokens = bytes((request.prompt_is_token_ids or [])[start_token_idx:end_token_idx])
            dtype = str(request.prompt_embeds.dtype)
            return [*found, ("prompt_embeds_use", (dtype, are_tokens if any(are_tokens) else b""))]

        return keys

    replace((kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", wrap))


@guarded(MEDIA)
def mark_media() -> None:
    """Mark each request whose media vLLM itself has named, by their content. Patches each process once.

    A client may give names of its own (``multi_modal_uuids``, ``uuid`` in a chat, the hashes of media that are
    prepared elsewhere). Such a request gets no mark.
    """
    from vllm.multimodal import hasher
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor

    takes(BaseRenderer, "_process_multimodal", "mm_uuids")
    takes(hasher, "_get_image_id_bytes")
    takes(InputProcessor, "process_inputs", "request_id", "prompt", "params")

    def wrap_render(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def process_multimodal(self: Any, *args: Any, **kwargs: Any) -> Any:
            # vLLM hashes the images within this call, and an image with an identifier sets the flag again.
            _rendering.has_image_id = False
            prompt = original(self, *args, **kwargs)
            if Frontend.active:
                given = signature.bind(self, *args, **kwargs).arguments.get("mm_uuids")
                if not _rendering.has_image_id and not _names(given):
                    prompt[MARK] = True
            return prompt

        return process_multimodal

    def wrap_image_id(original: Callable[[Any], bytes | None]) -> Callable[[Any], bytes | None]:
        def get_image_id_bytes(image: Any) -> bytes | None:
            found = original(image)
            # vLLM hashes this id in the place of the image's bytes.
            _rendering.has_image_id |= found is not None
            return found

        return get_image_id_bytes

    def wrap_process(original: Callable[..., Any]) -> Callable[..., Any]:
        def process_inputs(processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            if processor.__dict__.get(OURS):
                params = _marked(params, by_content=isinstance(prompt, dict) and prompt.get(MARK) is True)
            return original(processor, request_id, prompt, params, *args, **kwargs)

        return process_inputs

    replace(
        (BaseRenderer, "_process_multimodal", wrap_render),
        (hasher, "_get_image_id_bytes", wrap_image_id),
        (InputProcessor, "process_inputs", wrap_process),
    )


def are_named_by_content(request: Any) -> bool:
    """Whether the request has the mark of `mark_media`."""
    given = _arguments(request.sampling_params or request.pooling_params)[1]
    return bool(given and given.get(MARK) == _BY_CONTENT)


def _names(given: Any) -> bool:
    """Whether ``multi_modal_uuids`` have a name for some item."""
    for names in (given or {}).values():
        if isinstance(names, str) or any(name is not None for name in names or ()):
            return True
    return False


def _arguments(params: Any) -> tuple[str, dict[str, Any] | None]:
    """The field of a request's parameters for further arguments, which vLLM passes on to the scheduler."""
    name = "extra_args" if hasattr(params, "extra_args") else "extra_kwargs"
    return name, getattr(params, name, None)


def _marked(params: Any, *, by_content: bool) -> Any:
    name, given = _arguments(params)
    if not by_content and MARK not in (given or {}):
        return params
    params = copy.copy(params)
    rest = {key: value for key, value in (given or {}).items() if key != MARK}
    setattr(params, name, {**rest, MARK: _BY_CONTENT} if by_content else rest)
    return params
