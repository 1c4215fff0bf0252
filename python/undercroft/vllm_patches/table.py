"""The table of everything that undercroft changes in vLLM, and the guard around each change.

If vLLM lacks a name, has another signature, or an exception occurs, vLLM is not changed and goes on. One log line names
the feature that is lost.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

from undercroft.log import LogOnce

_P = ParamSpec("_P")
_MARK = "_undercroft"
"""Attribute of every function that replaces a function of vLLM."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Places in vLLM that are changed together for one purpose: all of them, or none."""

    name: str
    places: tuple[str, ...]
    """Functions that are wrapped and attributes that are set."""
    where: str
    """The processes or objects of vLLM that are changed."""
    why: str
    versions: str
    """The first and the last version of vLLM to which the patch applies."""
    without: str
    """The feature that is lost if the patch cannot be applied."""


HIT_THRESHOLD = Patch(
    "hit_threshold",
    (
        "Scheduler.update_from_output",
        "InputProcessor.__init__",
        "InputProcessor.process_inputs",
        "OutputProcessor.process_outputs",
        "RequestState.__class__",
        "Scheduler._undercroft_take_threshold_rejects",
        "InputProcessor._undercroft_threshold",
        "CompletionRequest.to_sampling_params",
        "ChatCompletionRequest.to_sampling_params",
    ),
    "the classes, in every process",
    "vLLM cannot reject a request because too little of it is cached. The scheduler ends the rejected requests, and "
    "the frontend reads the request parameter and reports the finish reason.",
    "0.31 to 0.33",
    "Requests are never rejected. The start is refused if `cache_hit_threshold` is configured.",
)
THRESHOLD_ENDPOINTS = Patch(
    "threshold_endpoints",
    (
        "BeamSearchOfflineMixin.beam_search",
        "BeamSearchOnlineMixin.beam_search",
        "OutputProcessor.add_request",
        "RequestState._undercroft_exchange",
        "app.init_entrypoints_middleware",
        "FastAPI.openapi",
        "CompletionRequest.field_names",
        "ChatCompletionRequest.field_names",
    ),
    "the classes and the module, in frontends whose engines use undercroft; the application of the HTTP server",
    "The answers of some endpoints, and beam search, have no place for the finish reason of a rejected request. The "
    "wrappers exempt such requests. Other requests are answered with an error if `cache_hit_threshold_answer` says so. "
    "The OpenAPI document names the request parameters.",
    "0.32 to 0.33",
    "Requests to every endpoint can be rejected: a beam search fails, and other answers are empty without a reason. "
    'The answer to a rejected request is the finish reason, even with `cache_hit_threshold_answer` "error".',
)
MULTI_CONNECTOR_POLICY = Patch(
    "multi_connector_policy",
    ("Scheduler._handle_failed_recving",),
    "the class, in every process",
    "As a child of MultiConnector, undercroft cannot set the load failure policy for itself. Its own failed loads are "
    "recomputed, and those of the other children are treated as configured.",
    "0.31 to 0.33",
    'A failed load fails its request, unless `kv_load_failure_policy` is set to "recompute" for MultiConnector.',
)
MULTI_CONNECTOR_HITS = Patch(
    "multi_connector_hits",
    ("MultiConnector.get_num_new_matched_tokens", "MultiConnector._undercroft_judge"),
    "the class, in every process",
    "The hit threshold must count the tokens that the other children of MultiConnector can load, and undercroft must "
    "not load these. A child sees neither its siblings nor their answers.",
    "0.31 to 0.33",
    "Inside MultiConnector, the hit threshold counts the device's and undercroft's hits only.",
)
LOAD_FAILURE_POLICY = Patch(
    "load_failure_policy",
    ("KVTransferConfig.kv_load_failure_policy",),
    "the configuration of the connector",
    "A failed load must be recomputed like a miss; vLLM's default fails the request.",
    "0.31 to 0.33",
    'A failed load fails its request, unless `kv_load_failure_policy` is set to "recompute".',
)
ADAPTER_WEIGHTS = Patch(
    "adapter_weights",
    ("kv_cache_utils._gen_lora_extra_hash_keys", "EngineCore.add_lora", "Request._undercroft_adapter"),
    "the module and the class, in engines with LoRA",
    "vLLM's block hashes hold the name and path of a LoRA adapter, not its weights. A cache that outlives the process "
    "must tell apart other weights under the same name.",
    "0.31 to 0.33",
    "undercroft is off in engines with LoRA.",
)
EMBEDDINGS = Patch(
    "embeddings",
    ("kv_cache_utils._gen_prompt_embeds_extra_hash_keys",),
    "the module, in engines",
    "vLLM's block hashes hold the bytes of embeddings, not their type, nor the positions of a mixed prompt that have "
    "tokens instead. The wrapper adds both.",
    "0.31 to 0.33",
    "Requests with embeddings are neither looked up nor saved.",
)
MEDIA = Patch(
    "media",
    (
        "BaseRenderer._process_multimodal",
        "hasher._get_image_id_bytes",
        "InputProcessor.process_inputs",
        "MultiModalInput.undercroft_media",
        "SamplingParams.extra_args",
        "PoolingParams.extra_kwargs",
    ),
    "the classes and the module, in every process; prompts and requests with media, where engines use undercroft",
    "A block hash holds the name of an image, audio or video. A client may choose the name, and the scheduler cannot "
    "see who has. The wrappers mark the requests whose media vLLM has named by their content.",
    "0.31 to 0.33",
    "Of requests with media only the tokens before the first medium are looked up and saved, unless "
    "`unique_media_uuids` is set.",
)
LOOKAHEAD_HASHES = Patch(
    "lookahead_hashes",
    ("VllmConfig.num_hash_lookahead_tokens",),
    "the class, in every process",
    "With some drafts a block's hash also covers the next tokens, so that a hit need not end a block earlier. vLLM "
    "switches these hashes off beside any connector. The wrapper leaves them on for models without states if "
    "undercroft is the only connector.",
    "0.33",
    "With an EAGLE or MTP draft, hits end a block earlier than in vLLM alone.",
)
LOCAL_HITS = Patch(
    "local_hits",
    ("KVCacheManager.get_computed_blocks_for_connector",),
    "the instance of a hybrid model's scheduler",
    "vLLM offers a local hit of full attention alone and does not ask again where undercroft cannot complete it with a "
    "state. The wrapper asks undercroft first.",
    "0.31 to 0.33",
    "A hybrid model uses only local hits that all of its KV cache groups hold.",
)
PREFIX_CACHE_RESET = Patch(
    "prefix_cache_reset",
    ("BlockPool.reset_prefix_cache",),
    "the instance of undercroft's scheduler",
    "vLLM refuses a reset while blocks are referenced, and asks the connector only afterwards. The wrapper first "
    "releases the blocks that are being saved and, until the end of the call, those that are being loaded. Routers "
    "understand the event of the reset as a reset of all tiers: the wrapper sends them the blocks of the tiers again.",
    "0.31 to 0.33",
    "A reset of vLLM's prefix cache is refused while saves or loads run, and routers forget the tiers with it.",
)
RESERVATIONS = Patch(
    "reservations",
    ("Scheduler._update_waiting_for_remote_kv",),
    "the class, in processes with a scheduler of undercroft",
    "vLLM keeps blocks reserved for a request whose load failed, although the request waits without blocks, and may "
    "then never admit another load. It also leaves the request among those that hold blocks, in front of them. The "
    "wrapper ends the reservation. It also lets vLLM treat a load that a reset has overtaken as a failed one.",
    "0.31 to 0.33",
    "With windows and little free device memory, a failed load can stop all requests. A reset is refused while loads "
    "run.",
)
PREEMPTIONS = Patch(
    "preemptions",
    ("Scheduler._preempt_request",),
    "the class, in processes with a scheduler of undercroft",
    "With priorities, vLLM may preempt a request that the same step has scheduled already. Its blocks of this step "
    "stay in vLLM's prefix cache, although no step computes them. The wrapper evicts them.",
    "0.31 to 0.33",
    "A later request that finds such a block computes from wrong values, and undercroft saves them.",
)
LOADED_REQUESTS = Patch(
    "loaded_requests",
    ("Request.num_computed_tokens",),
    "requests that wait after a load and have not run, where they alone hold device blocks or no step runs a token",
    "vLLM refuses a reset of its prefix cache while such a request holds blocks; without the load it would hold none. "
    "A session with streaming input in front of it may wait for these blocks. undercroft frees the blocks, and vLLM "
    "looks the request up again.",
    "0.31 to 0.33",
    "A reset is refused, and a pause that clears the caches fails, while such a request waits. With little free device "
    "memory, sessions with streaming input and loads can stop all requests.",
)
WEIGHT_CHANGES = Patch(
    "weight_changes",
    (
        "Scheduler.reset_prefix_cache",
        "EngineCore.sleep",
        "EngineCore.collective_rpc",
        "EngineCore.set_weight_version",
        "EngineCore.__init__",
        "model.load_weights",
    ),
    "the classes, in every process; models in the scheduler's process",
    "vLLM tells a connector neither of weight updates nor of a reset of its own prefix cache only, and resets it at "
    "each sleep. The wrappers tell undercroft of all three, and of the names of weights.",
    "0.31 to 0.33",
    "Blocks of updated weights are shared until a reset with the connector. A reset without it never empties the "
    "cache; each sleep does. `reset_with_prefix_cache` has no effect.",
)
WORKER_SLEEP = Patch(
    "worker_sleep",
    ("Worker.sleep", "Worker.wake_up", "Worker.discard"),
    "the class, in workers",
    "vLLM takes the device's memory away without a word to the connector. The wrapper ends all copies first.",
    "0.31 to 0.32",
    "An engine in the caller's own process may go to sleep while copies run, and the device then fails.",
)
WORKER_CHECKPOINT = Patch(
    "worker_checkpoint",
    ("Worker.checkpoint_prepare",),
    "the class, in workers",
    "vLLM prepares itself for a tool that suspends the device, and tells no connector. The wrapper ends all copies and "
    "unpins the arena first; the next load or save pins it again.",
    "0.32 to 0.33",
    "The arena stays pinned during a checkpoint, which may fail for that reason.",
)
RANKS = Patch(
    "ranks",
    ("EngineArgs.create_engine_config", "ParallelConfig._undercroft_ranks"),
    "the class, in every process; the attribute in vLLMs with data parallelism",
    "vLLM hides from each rank of a model without experts how many ranks there are. They have one host memory.",
    "0.31 to 0.33",
    "Without a disk, each data-parallel rank of a model without experts takes all of `host_memory`.",
)
STAGES = Patch(
    "stages",
    ("core.get_kv_cache_configs", "KVCacheConfig._undercroft_stages"),
    "the module, in every process; the attribute in vLLMs with pipeline parallelism",
    "vLLM shows the scheduler the layers of the first pipeline stage, and each worker those of its own. A payload has "
    "the layers of all stages.",
    "0.31 to 0.33",
    "undercroft is off with pipeline parallelism.",
)
SHARED_PREFIX = Patch(
    "shared_prefix",
    ("Request.shared_prefix_boundary",),
    "requests to models with states",
    "vLLM ends a step at this boundary, so that the state of a prefix shared with other prompts comes to exist and can "
    "be saved.",
    "0.31 to 0.33",
    "The state where prompts part is saved only if a step happens to end there.",
)
CONFIGURATION = Patch(
    "configuration",
    ("EngineArgs.create_engine_config",),
    "the class, in the processes that make a configuration",
    "vLLM reads the connector's options when it makes the connector, after it has loaded the model. The wrapper checks "
    "them first.",
    "0.31 to 0.33",
    "A mistake in undercroft's options is found only after the model has been loaded.",
)
OFFLOADING_TIERS = Patch(
    "offloading_tiers",
    (
        "KVConnectorFactory.create_connector",
        "OffloadingConnector.on_new_request",
        "OffloadingConnector.get_num_new_matched_tokens",
        "OffloadingConnector.build_connector_meta",
        "OffloadingConnector.get_kv_connector_stats",
        "OffloadingConnector.reset_cache",
    ),
    "the class, in every process; connectors of vLLM's offloading that have a tier of undercroft",
    "vLLM shows a tier of its offloading neither its configuration, on which the cache's identity depends, nor prompts "
    "before their first lookup, nor steps and resets. The wrappers show them to undercroft's tier.",
    "0.32 to 0.33",
    "undercroft does not start as a tier of vLLM's offloading.",
)

PATCHES = (
    HIT_THRESHOLD,
    THRESHOLD_ENDPOINTS,
    MULTI_CONNECTOR_POLICY,
    MULTI_CONNECTOR_HITS,
    LOAD_FAILURE_POLICY,
    ADAPTER_WEIGHTS,
    EMBEDDINGS,
    MEDIA,
    LOOKAHEAD_HASHES,
    LOCAL_HITS,
    PREFIX_CACHE_RESET,
    RESERVATIONS,
    PREEMPTIONS,
    LOADED_REQUESTS,
    WEIGHT_CHANGES,
    WORKER_SLEEP,
    WORKER_CHECKPOINT,
    RANKS,
    STAGES,
    SHARED_PREFIX,
    CONFIGURATION,
    OFFLOADING_TIERS,
)

_log_once = LogOnce()
_problems: dict[str, str] = {patch.name: "vLLM was not changed in this process" for patch in PATCHES}


def problem(patch: Patch) -> str | None:
    """The reason why a patch is not applied in this process; None if it is."""
    return _problems.get(patch.name)


def guarded(patch: Patch) -> Callable[[Callable[_P, None]], Callable[_P, bool]]:
    """Decorator of a function that applies ``patch``. It then raises nothing and returns whether vLLM was changed."""

    def wrap(apply: Callable[_P, None]) -> Callable[_P, bool]:
        @functools.wraps(apply)
        def applied(*args: _P.args, **kwargs: _P.kwargs) -> bool:
            try:
                apply(*args, **kwargs)
            except Exception as error:  # Unknown internals can fail in any way.
                failed(patch, error)
                return False
            _problems.pop(patch.name, None)
            return True

        return applied

    return wrap


def failed(patch: Patch, error: Exception) -> None:
    """Note that a patch could not be applied or did not work, and log the first error of each patch."""
    _problems[patch.name] = f"this version of vLLM has other internals than expected ({type(error).__name__}: {error})"
    _log_once(
        logging.WARNING,
        patch.name,
        "undercroft: the change to vLLM at %s failed (%s: %s). vLLM continues without it. %s",
        ", ".join(patch.places),
        type(error).__name__,
        error,
        patch.without,
    )


def replace(*places: tuple[Any, str, Callable[[Any], Callable[..., Any]]], again: bool = False) -> None:
    """Replace functions of vLLM, each given as (owner, name, wrapper of the original), all of them or none.

    A function with the same wrapper is not wrapped again, unless ``again``.
    """
    ready = []
    for owner, name, wrap in places:
        original = getattr(owner, name)
        wrapper = f"{wrap.__module__}.{wrap.__qualname__}"
        wrappers: frozenset[str] = getattr(original, _MARK, frozenset())
        if again or wrapper not in wrappers:
            replacement = functools.wraps(original)(wrap(original))
            setattr(replacement, _MARK, wrappers | {wrapper})
            ready.append((owner, name, original, replacement))
    replaced = []
    try:
        for owner, name, original, replacement in ready:
            setattr(owner, name, replacement)
            replaced.append((owner, name, original))
    except Exception:  # Compiled classes refuse new attributes.
        for owner, name, original in replaced:
            setattr(owner, name, original)
        raise


def patch_table() -> str:
    """The table as Markdown, for docs/internals."""
    lines = [
        "| changed in vLLM | where | why | versions | without the change |",
        "| --- | --- | --- | --- | --- |",
    ]
    for patch in PATCHES:
        places = ", ".join(f"`{place}`" for place in patch.places)
        lines.append(f"| {places} | {patch.where} | {patch.why} | {patch.versions} | {patch.without} |")
    return "\n".join(lines) + "\n"
