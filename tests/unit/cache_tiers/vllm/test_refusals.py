"""What the connector refuses at the start: each by name, with the fix."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.cache_tiers.vllm.messages import ConnectorOptions
from samovar.cache_tiers.vllm.refusals import (
    TESTED,
    UNFIT,
    check_config,
    check_media_names,
    check_ranks,
    check_version,
    counts_media,
)


def spec_of(name: str, tokens_per_state: int = 1) -> Any:
    """One of vLLM's kinds of KV layers."""
    return type(name, (), {"tokens_per_state": tokens_per_state})()


def group(name: str, tokens_per_state: int = 1) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec_of(name, tokens_per_state))


def several(*names: str) -> SimpleNamespace:
    """A group whose layers are of one type for vLLM, each with a kind of its own."""
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(kv_cache_specs={one: spec_of(one) for one in names}))


def configured(**changed: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    """vLLM's configuration as it is served; `changed`: one of its values by name."""
    values = {"kv_load_failure_policy": "recompute", "kv_role": "kv_both", "cache_dtype": "auto"}
    values |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    values |= {"kv_cache_groups": [group("FullAttentionSpec")]} | changed
    all_in_one = SimpleNamespace(**values)
    config = SimpleNamespace(
        kv_transfer_config=all_in_one, cache_config=all_in_one, parallel_config=all_in_one
    )
    return config, all_in_one


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"cache_dtype": "bfloat16"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 3},
        {"kv_cache_groups": [group("MLAAttentionSpec")]},
        {"kv_cache_groups": [several("FullAttentionSpec", "FullAttentionSpec")]},
    ],
)
def test_what_is_served_is_not_refused(changed: dict[str, Any]) -> None:
    check_config(*configured(**changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_load_failure_policy": "fail"}, "'fail': set it to 'recompute'"),
        ({"kv_role": "kv_producer"}, "needs 'kv_both'"),
        ({"cache_dtype": "fp8_e4m3"}, "use 'auto'"),
        ({"cache_dtype": "nvfp4"}, "kv_cache_dtype nvfp4"),
        ({"cache_dtype": "int8_per_token_head"}, "its scales or tables lie outside"),
        ({"cache_dtype": "turboquant_k8v4"}, "leave the connector out"),
        ({"nnodes": 2}, "nnodes is 2: set it to 1"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"prefill_context_parallel_size": 4}, "prefill_context_parallel_size is 4"),
        ({"kv_cache_groups": [1, 2]}, "2 groups"),
        ({"kv_cache_groups": []}, "0 groups"),
        ({"kv_cache_groups": [group("MambaSpec", -1)]}, "of kind MambaSpec"),
        ({"kv_cache_groups": [group("SlidingWindowSpec")]}, "of kind SlidingWindowSpec"),
        ({"kv_cache_groups": [group("SinkFullAttentionSpec")]}, "of kind SinkFullAttentionSpec"),
        ({"kv_cache_groups": [group("MLAAttentionSpec", 4)]}, "whose pages have all of a block"),
        ({"kv_cache_groups": [several("FullAttentionSpec", "MambaSpec")]}, "of kind MambaSpec"),
    ],
)
def test_what_has_no_namespace_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_config(*configured(**changed))


@pytest.mark.parametrize(
    ("cache_gb", "caches_prefixes", "counts"), [(0, False, True), (4, False, False), (0, True, False)]
)
def test_images_that_are_counted_are_refused(cache_gb: float, caches_prefixes: bool, counts: bool) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
    )
    assert counts_media(config) == counts
    if counts:
        with pytest.raises(ValueError, match="leave one of the two out"):
            check_media_names(config)
    else:
        check_media_names(config)
    config.model_config.multimodal_config = None  # a model of text alone
    check_media_names(config)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc2"])
def test_patches_of_a_tested_minor_are_served(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.3.2", "1.0", "dev", ""])
def test_another_minor_is_refused_and_the_tested_ones_named(version: str) -> None:
    with pytest.raises(ValueError, match=f"tested with vLLM {', '.join(TESTED)}, not"):
        check_version(version)


def test_a_minor_that_cannot_be_served_is_refused_with_the_reason() -> None:
    assert not TESTED.keys() & UNFIT.keys()
    with pytest.raises(ValueError, match="num_in_flight_tokens"):
        check_version("0.22.0")


def test_a_minor_that_was_only_read_is_served_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_version("0.32.0")
    assert caplog.messages == []
    check_version("0.33.1")
    assert "of vLLM 0.33 the contract was read" in caplog.text


def workers(tp: int, pp: int) -> dict[tuple[int, int], SimpleNamespace]:
    ranks = [(one, other) for one in range(pp) for other in range(tp)]
    return {
        rank: SimpleNamespace(rank=at, machine="here", layout=f"layout {at}") for at, rank in enumerate(ranks)
    }


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_ranks_are_taken_in_order(tp: int, pp: int) -> None:
    told = workers(tp, pp)
    backwards = dict(reversed(told.items()))
    assert check_ranks(backwards, tp, pp, "here") == [f"layout {at}" for at in range(tp * pp)]


def test_a_rank_that_is_not_there_or_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="not 1 by 3"):
        check_ranks(workers(2, 1), 3, 1, "here")
    told = workers(2, 1)
    told[0, 1].machine = "there"
    with pytest.raises(ValueError, match="rank 0, 1 runs on another machine"):
        check_ranks(told, 2, 1, "here")
    told = workers(2, 1)
    told[0, 1].rank = 0
    with pytest.raises(ValueError, match="takes itself for number 0"):
        check_ranks(told, 2, 1, "here")


def test_options_are_read(tmp_path: Path) -> None:
    extra = {"socket": str(tmp_path / "s"), "tenant": "team", "trusts_clients": True, "load_s_max": 3}
    assert ConnectorOptions.of(extra) == ConnectorOptions(tmp_path / "s", "team", True, load_s_max=3)
    assert ConnectorOptions.of({"socket": "~/s"}).socket == Path("~/s").expanduser()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "socket is missing"),
        ({"socket": ""}, "socket is missing"),
        ({"socket": 3}, "socket is 3: give a str"),
        ({"socket": "s", "tenant": None}, "tenant is None: give a str"),
        ({"socket": "s", "trusts_clients": "yes"}, "give a bool"),
        ({"socket": "s", "load_s_max": 0}, "load_s_max is 0: seconds"),
        ({"socket": "s", "load_s_max": True}, "load_s_max is True: seconds"),
        ({"socket": "s", "lookup_s_max": float("nan")}, "seconds"),
        ({"socket": "s", "lookup_s_max": "1"}, "seconds"),
        ({"socket": "s", "chunk_size": 256}, "chunk_size is not known; there are socket"),
    ],
)
def test_options_that_are_wrong_are_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ConnectorOptions.of(extra)
