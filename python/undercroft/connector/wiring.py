"""Builds the scheduler's half: opens the engine, registers a session, and makes the parts that use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from undercroft import capacity, vllm_patches
from undercroft.connector.announcement import Announcement
from undercroft.connector.differences import ignored_options
from undercroft.connector.groups import GroupRegistration, Groups
from undercroft.connector.observe.events import Events, NoEvents, events_of
from undercroft.connector.observe.recording import Recorder
from undercroft.connector.observe.shadow import Shadow
from undercroft.connector.observe.stats import Counts, EngineStats
from undercroft.connector.ranks import Division, division
from undercroft.connector.remote_use import why_limited
from undercroft.connector.requests.explanations import Explanations
from undercroft.connector.requests.hints import RequestHints
from undercroft.connector.resets import Resets
from undercroft.connector.scheduler.scheduler import SchedulerConnector
from undercroft.connector.stages import shard_bytes, with_all_layers
from undercroft.engine import open_engine, start_line, whose
from undercroft.identity import start as identity
from undercroft.identity.adapters import ADAPTERS
from undercroft.identity.namespace import Naming, describe, random_seed, weight_version
from undercroft.identity.weights import Digests, digests_file
from undercroft.log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from undercroft._core import Engine, Session
    from undercroft.config import UndercroftConfig


@dataclass(frozen=True)
class Started:
    """The parts of a scheduler's half that has started. They use one session; whoever has them closes the engine."""

    engine: Engine
    scheduler: SchedulerConnector
    resets: Resets
    events: Events | NoEvents
    hints: RequestHints
    explanations: Explanations
    stats: EngineStats
    recorder: Recorder | None
    shadow: Shadow | None


def start_scheduler(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: UndercroftConfig,
    announcement: Announcement,
    *,
    counts: Counts,
    report: Callable[[str, Exception], None],
    needed_tokens: Callable[[Request], int],
) -> Started | None:
    """Open the engine and start the scheduler's half. None, with a warning, if the model's KV cannot be described.

    ``report`` takes a hook's name and an error in it. ``needed_tokens``: see `SchedulerConnector`. Raises the errors of
    `open_engine`, and ConfigError where block hashes are random but the cache is to be shared.
    """
    naming = Naming(config.namespace_salt, config.weights, config.model_id, Digests(digests_file(config.disk_path)))
    divided = division(vllm_config, kv_cache_config)
    # Before the engine takes memory and directories: a model that cannot be described needs none.
    try:
        whole = with_all_layers(kv_cache_config)
        description = describe(vllm_config, whole, naming, divided.common_shards, has_all_stages=True)
    except Exception as error:  # a weight file that cannot be read, or a setting that cannot be described
        logger.warning("undercroft is off, vLLM serves without it: %s.", error)
        return None
    ADAPTERS.weights = config.weights
    ADAPTERS.look_again()
    vllm_patches.recompute_failed_loads(vllm_config.kv_transfer_config)
    seed_reason = random_seed(vllm_config)
    groups = Groups.of(vllm_config, kv_cache_config)
    not_reused = identity.why_not_reused(description, config, naming.digests)
    identity.warn_of_names(description)
    vllm_patches.evict_uncomputed()
    ranks = vllm_patches.ranks_of(vllm_config)
    engine = open_engine(config, ranks=ranks)
    try:
        if seed_reason:
            identity.check_seed(seed_reason, config, is_shared=bool(config.server) or engine.is_shared)
        registration = groups.registration([size * divided.shards for size in shard_bytes(kv_cache_config)])
        session = engine.register(
            description, registration, groups.engine_block_size, groups.alignment, groups.dropped_tokens
        )
        scheduler = SchedulerConnector(
            session,
            groups,
            config,
            vllm_config.parallel_config.world_size,
            lambda: engine.arena,
            counts,
            report,
            needed_tokens,
        )
        scheduler.due_saves.saves_sessions = vllm_config.speculative_config is None
        at_version = partial(weight_version, description) if config.share_weight_versions else None
        resets = Resets(scheduler, config.reset_with_prefix_cache, at_version)
        events = events_of(vllm_config, session, groups, kv_cache_config)
        hints, explanations = _requests(
            config, session, groups, counts, scheduler, vllm_config.parallel_config.world_size
        )
        stats, recorder, shadow = _observers(vllm_config, config, engine, groups, registration)
        naming.digests.save()
        _say_how_it_runs(config, engine, session, groups, registration)
        _log_restrictions(config, engine, ranks, not_reused, divided)
        # Last: workers attach from here on.
        announcement.announce(engine.arena)
    except BaseException:
        engine.close()
        raise
    return Started(engine, scheduler, resets, events, hints, explanations, stats, recorder, shadow)


def _requests(
    config: UndercroftConfig,
    session: Session,
    groups: Groups,
    counts: Counts,
    scheduler: SchedulerConnector,
    world_size: int,
) -> tuple[RequestHints, Explanations]:
    """The parts for what requests ask for, and are told."""
    hints = RequestHints(
        session,
        groups,
        counts,
        scheduler.due_saves.complete_hashes,
        may_end=vllm_patches.problem(vllm_patches.HIT_THRESHOLD) is None,
        is_allowed="hints" in config.client_fields,
    )
    explanations = Explanations(
        session,
        config.log_requests,
        may_tell="explain" in config.client_fields,
        world_size=world_size,
    )
    scheduler.saves.wants = hints.wants
    return hints, explanations


def _observers(
    vllm_config: VllmConfig,
    config: UndercroftConfig,
    engine: Engine,
    groups: Groups,
    registration: list[GroupRegistration],
) -> tuple[EngineStats, Recorder | None, Shadow | None]:
    """The parts that only watch."""
    tokens_in = partial(capacity.tokens_in, groups=registration, interval=config.state_interval_tokens)
    recorder = None
    if config.record:
        parallel = vllm_config.parallel_config
        suffix = f".{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
        recorder = Recorder(Path(config.record + suffix), groups)
    shadow = Shadow(config.shadow, groups, tokens_in) if config.shadow else None
    return EngineStats(engine, tokens_in=tokens_in), recorder, shadow


def _say_how_it_runs(
    config: UndercroftConfig, engine: Engine, session: Session, groups: Groups, registration: list[GroupRegistration]
) -> None:
    tokens_in = partial(capacity.tokens_in, groups=registration, interval=config.state_interval_tokens)
    index_bytes = partial(capacity.index_bytes, groups=registration)
    logger.info(start_line(engine.info(), session.namespace, whose(engine, config), tokens_in, index_bytes))
    limited = why_limited(registration, groups.engine_block_size, groups.dropped_tokens)
    if config.remote and limited:
        logger.warning("undercroft: %s (docs/remote.md)", limited)


def _log_restrictions(
    config: UndercroftConfig, engine: Engine, ranks: int, not_reused: str | None, divided: Division
) -> None:
    if engine.is_shared and (ignored := ignored_options(config, engine.info(), ranks)):
        logger.warning("undercroft: the engine is shared, and its own options apply: %s", "; ".join(ignored))
    if not_reused:
        logger.info("undercroft: cache not reused: %s (docs/identity.md)", not_reused)
    if divided.reason:
        size = divided.shards * divided.replicas
        logger.info("undercroft: the cache serves tensor_parallel_size = %d only: %s", size, divided.reason)
