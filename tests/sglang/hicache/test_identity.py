"""Pages are found only where their bytes are right: other models, formats, ranks and weights are others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import sglang
import torch
from sglang.srt import environ
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.server_args import ServerArgs

from host_pools import after, fill, indices, keys, mha, mla, opened, wipe, wrong
from served_client import until
from undercroft.sglang_hicache import UndercroftHiCache, backend, identity, weight_updates

CHAIN = keys("a", 4)


def kept(store: UndercroftHiCache, pool: Any) -> None:
    """Keep the pages of `CHAIN`, until they are found."""
    assert store.batch_set_v1(CHAIN, fill(pool, range(4), CHAIN), after()) == [True] * 4
    until("the pages are found", lambda: store.batch_exists(CHAIN, after()) == 4)


def model(folder: Path, seed: int) -> str:
    """A model's files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    torch.manual_seed(seed)
    torch.save({"weight": torch.randn(64, 64)}, folder / "pytorch_model.bin")
    return str(folder)


def serving(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Let this process be a server that was started with the back end and these arguments."""
    monkeypatch.setattr(backend, "_arguments", lambda: ServerArgs(**{"hicache_storage_backend": "dynamic"} | arguments))


@pytest.mark.parametrize(
    "other",
    [
        lambda: (mha(), {"model": "other"}),
        lambda: (mha(), {"namespace_salt": "other"}),
        lambda: (mha("layer_first"), {}),
        lambda: (mha("page_first_direct"), {}),
        lambda: (mha(heads=1), {}),
        lambda: (mha(dtype=torch.float16), {}),
        lambda: (mha(), {"tp_rank": 1, "tp_size": 2}),
        lambda: (mha(), {"pp_rank": 1, "pp_size": 2}),
        lambda: (mha(), {"attn_cp_rank": 1, "attn_cp_size": 2}),
        lambda: (mla(), {}),
    ],
)
def test_others_never_meet(other: Any, tmp_path: Path) -> None:
    pool = mha()
    store = opened(tmp_path, pool)
    kept(store, pool)
    their_pool, changed = other()
    theirs = opened(tmp_path, their_pool, **changed)
    assert theirs.batch_exists(CHAIN, after()) == 0
    assert theirs.batch_get_v1(CHAIN, wipe(their_pool, range(4)), after()) == [False] * 4
    theirs.close()
    store.close()


@pytest.mark.parametrize(
    "variable",
    [
        "SGLANG_DSV4_KV_LAYOUT",
        "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
        "SGLANG_HIP_DSV41_INDEX_K_PAGE8",
        "SGLANG_USE_HND_KVCACHE",
        "SGLANG_AITER_KV_CACHE_LAYOUT",
    ],
)
def test_a_layout_that_a_variable_chooses_is_another_cache(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert variable in Path(environ.__file__).read_text(encoding="utf-8"), "SGLang has no such variable"
    pool = mha()
    store = opened(tmp_path, pool)
    kept(store, pool)
    monkeypatch.setenv(variable, "other")
    theirs = opened(tmp_path, pool)
    assert theirs.batch_exists(CHAIN, after()) == 0
    theirs.close()
    store.close()


def test_the_layout_of_sglangs_unified_keys_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its keys name ranges of layers and heads, whatever rank has them. SGLang 0.5.23 has no argument that chooses
    them yet, no part that makes them, and no layout of pages for back ends."""
    assert not [name for name in ServerArgs.__struct_fields__ if "key_scheme" in name or "head_group" in name]
    sources = [*Path(environ.__file__).parent.rglob("*.py")]
    users = [path.name for path in sources if "hicache_key_scheme" in path.read_text(encoding="utf-8")]
    assert len(sources) > 1_000
    assert users == [], "SGLang uses its unified keys now: support them"
    for rank in range(2):
        pool = mha("page_unified")
        store = opened(tmp_path, pool, tp_rank=rank, tp_size=2)
        assert store.batch_set_v1(CHAIN, indices(pool, range(4)), after()) == [False] * 4
        assert store.batch_exists(CHAIN, after()) == 0
        store.close()
    assert caplog.text.count("whose memory it cannot use") == 2


def test_heads_that_lie_in_other_groups_are_another_cache(tmp_path: Path) -> None:
    pool = mha()
    store = opened(tmp_path, pool)
    kept(store, pool)
    pool.head_group_num = 2
    theirs = opened(tmp_path, pool)
    assert theirs.batch_exists(CHAIN, after()) == 0
    theirs.close()
    store.close()


def test_variables_that_change_no_bytes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_KV_CANARY_RING_CAPACITY", "7")
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    assert identity._variables() == {}


def test_another_release_of_sglang_is_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha()
    store = opened(tmp_path, pool)
    kept(store, pool)
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    theirs = opened(tmp_path, pool)
    assert theirs.batch_exists(CHAIN, after()) == 0
    theirs.close()
    store.close()


@pytest.mark.parametrize("name", ["kt_weight_path", "uno_lora_path"])
def test_further_weights_count_by_content(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, base = mha(), model(tmp_path / "base", 0)
    weights, disk = tmp_path / "more", tmp_path / "disk"
    serving(monkeypatch, model_path=base, **{name: model(weights, 1)})
    store = opened(disk, pool)
    kept(store, pool)
    shutil.rmtree(weights)
    model(weights, 2)
    theirs = opened(disk, pool)
    assert theirs.batch_exists(CHAIN, after()) == 0, "the same path, other weights"
    theirs.close()
    store.close()


def test_ranks_share_the_one_copy_of_latent_attention(tmp_path: Path) -> None:
    pool = mla()
    writer = opened(tmp_path, pool, is_mla_model=True, tp_rank=0, tp_size=2)
    reader = opened(tmp_path, pool, is_mla_model=True, tp_rank=1, tp_size=2)
    kept(writer, pool)
    assert reader.batch_get_v1(CHAIN, wipe(pool, range(8, 12)), after()) == [True] * 4
    assert wrong(pool, range(8, 12), CHAIN) == []
    reader.close()
    writer.close()


def test_weights_count_by_content_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha()
    first, copy, other = (model(tmp_path / name, seed) for name, seed in (("m", 1), ("copy", 1), ("other", 2)))
    serving(monkeypatch, model_path=first)
    store = opened(tmp_path / "c", pool, model_id="")
    kept(store, pool)
    store.close()
    for path, hits in ((copy, 4), (other, 0)):
        serving(monkeypatch, model_path=path)
        again = opened(tmp_path / "c", pool, model_id="")
        assert again.batch_exists(CHAIN, after()) == hits, path
        again.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 7}'},
        {"context_length": 77},
        {"dtype": "float16"},
        {"mamba_ssm_dtype": "bfloat16"},
    ],
)
def test_arguments_that_decide_kv_count(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, path = mha(), model(tmp_path / "m", 1)
    serving(monkeypatch, model_path=path)
    store = opened(tmp_path / "c", pool, model_id="")
    kept(store, pool)
    serving(monkeypatch, model_path=path, max_running_requests=7)
    same = opened(tmp_path / "c", pool, model_id="")
    assert same.batch_exists(CHAIN, after()) == 4
    serving(monkeypatch, model_path=path, **changed)
    other = opened(tmp_path / "c", pool, model_id="")
    assert other.batch_exists(CHAIN, after()) == 0
    for one in (other, same, store):
        one.close()


@pytest.mark.parametrize(
    "form",
    [
        lambda path: [path],
        lambda path: [f"name={path}"],
        lambda path: [{"lora_name": "name", "lora_path": path}],
        lambda path: {"name": path},
    ],
)
@pytest.mark.parametrize("model_id", ["", "named"])
def test_an_adapter_counts_by_content(
    model_id: str, form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, base, adapter = mha(), model(tmp_path / "m", 1), tmp_path / "adapter"
    found = []
    for seed in (5, 5, 6):
        shutil.rmtree(adapter, ignore_errors=True)
        serving(monkeypatch, model_path=base, lora_paths=form(model(adapter, seed)))
        store = opened(tmp_path / "c", pool, model_id=model_id)
        found.append(store.batch_exists(CHAIN, after()))
        kept(store, pool)
        store.close()
    assert found == [0, 4, 0]


def test_a_draft_model_counts_beside_a_name_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, base, found = mha(), model(tmp_path / "m", 1), []
    for number, seed in enumerate((5, 5, 6)):
        draft = model(tmp_path / f"draft {number}", seed)
        serving(monkeypatch, model_path=base, speculative_draft_model_path=draft)
        store = opened(tmp_path / "c", pool, model_id="named")
        found.append(store.batch_exists(CHAIN, after()))
        kept(store, pool)
        store.close()
    assert found == [0, 4, 0]


def test_layouts_that_a_variable_chooses_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha()
    store = opened(tmp_path, pool)
    kept(store, pool)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    other = opened(tmp_path, pool)
    assert other.batch_exists(CHAIN, after()) == 0
    other.close()
    store.close()


def test_names_of_images_that_clients_choose_switch_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving(monkeypatch, model_path="m", trust_mm_content_hashes=True)
    pool = mha()
    store = opened(tmp_path, pool)
    assert store.batch_set_v1(CHAIN, fill(pool, range(4), CHAIN), after()) == [False] * 4
    assert "clients name their images" in caplog.text
    store.close()


def test_sglang_has_the_flags_and_settings_that_are_named() -> None:
    fields = set(ServerArgs.__struct_fields__)
    document = Path(__file__).parents[3].joinpath("docs", "sglang.md").read_text(encoding="utf-8")
    flags = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", document)}
    assert flags <= fields
    assert {name for names in identity._SETTINGS.values() for name in names} <= fields
    assert set(identity._FILES) | set(identity._OTHER_WEIGHTS) <= fields


class Updater(WeightUpdater):
    """SGLang's updater without a model."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("method", weight_updates._METHODS)
def test_from_a_change_of_weights_on_nothing_is_kept_or_loaded(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_updates, "_process", weight_updates._Process())
    pool, later = mha(), keys("later", 4)
    store, theirs = opened(tmp_path, pool), opened(tmp_path, pool)
    kept(store, pool)
    weight_updates._process.watchers.discard(theirs)
    for _ in range(2):
        with pytest.raises((TypeError, AttributeError)):
            getattr(Updater(), method)()
        assert store.batch_exists(CHAIN, after()) == 0
        assert store.batch_get_v1(CHAIN, wipe(pool, range(4)), after()) == [False] * 4
        assert store.batch_set_v1(later, fill(pool, range(4), later), after()) == [False] * 4
    assert caplog.text.count("SGLang changes its weights") == 1
    # The other back end may still be connecting to the engine of the first, and finds nothing until then.
    until("the other finds them", lambda: theirs.batch_exists(CHAIN, after()) == 4)
    assert theirs.batch_exists(later, after()) == 0
    store.close()
    attached_again = opened(tmp_path, pool)
    assert attached_again.batch_exists(CHAIN, after()) == 0
    assert "has changed its weights since it started" in caplog.text
    attached_again.close()
    theirs.close()
    monkeypatch.setattr(weight_updates, "_process", weight_updates._Process())
    after_a_restart = opened(tmp_path, pool)
    assert after_a_restart.batch_exists(CHAIN, after()) == 4
    after_a_restart.close()


def test_saves_that_run_when_the_weights_change_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "_process", weight_updates._Process())
    pool = mha()
    store = opened(tmp_path, pool)
    given_up: list[str] = []
    monkeypatch.setattr(store._stores["kv"].cache, "give_up", given_up.append)
    with pytest.raises(TypeError):
        Updater().update_weights_from_disk()
    assert given_up == ["weights"]
    store.close()


@pytest.mark.parametrize(("backend_at_the_start", "is_off"), [("dynamic", False), (None, True)])
def test_a_server_that_ran_without_it_is_served_without_it(
    backend_at_the_start: str | None, is_off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_watched = type("WeightUpdater", (), dict.fromkeys(weight_updates._METHODS, lambda _: None))
    monkeypatch.setattr("sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater", never_watched)
    serving(monkeypatch, model_path="m", hicache_storage_backend=backend_at_the_start)
    pool = mha()
    store = opened(tmp_path, pool)
    assert store.batch_set_v1(CHAIN, fill(pool, range(4), CHAIN), after()) == [not is_off] * 4
    store.close()


def test_an_sglang_that_changes_weights_elsewhere_is_served_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_updates, "_METHODS", ("update_weights_by_telepathy",))
    pool = mha()
    store = opened(tmp_path, pool)
    assert store.batch_set_v1(CHAIN, fill(pool, range(4), CHAIN), after()) == [False] * 4
    assert "changes weights where undercroft cannot see it" in caplog.text
    store.close()
