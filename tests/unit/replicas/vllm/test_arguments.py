"""How vLLM is told the settings, and what is read where it does not start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.vllm.deployment import last_error
from samovar.replicas.vllm.source import AS_FITS, engine_arguments, process_environment

MODEL = Path("/models/tea")
TOLD = {"socket": "/run/tiers.sock", "replica": "/run/told.sock"}


def arguments(
    engine: dict[str, Any] | None = None,
    *,
    told: dict[str, str] | None = None,
    on_cpu: bool = False,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    settings = Settings.model_validate({"engine": {"kind": "vllm", **(engine or {})}, **sections})
    return engine_arguments(settings, MODEL, 4096, "float32", 1 << 20, told or {}, on_cpu=on_cpu)


def test_settings_become_arguments() -> None:
    given = arguments({"sequences_max": 9, "step_tokens_max": 64, "block_tokens": 16, "tensor_parallel": 2})
    assert (given["model"], given["dtype"], given["kv_cache_memory_bytes"]) == (
        "/models/tea",
        "float32",
        1 << 20,
    )
    assert (given["max_num_seqs"], given["max_num_batched_tokens"], given["block_size"]) == (9, 64, 16)
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")
    assert given["enable_prefix_caching"] is True
    assert arguments()["distributed_executor_backend"] == "uni"


def test_stages_of_a_pipeline_are_processes_as_well() -> None:
    given = arguments({"vllm": {"options": {"pipeline-parallel-size": 2}}})
    assert (given["pipeline_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")


def test_a_context_is_what_fits_unless_so_much_is_asked_for() -> None:
    assert arguments()["max_model_len"] == AS_FITS
    assert arguments(model={"context_tokens_max": 100_000})["max_model_len"] == 4096


@pytest.mark.parametrize(("tokens", "block"), [(16, 32), (64, 64)])
def test_blocks_on_a_cpu_are_as_large_as_vllm_takes_them(tokens: int, block: int) -> None:
    assert arguments({"block_tokens": tokens}, on_cpu=True)["block_size"] == block


def test_with_tiers_there_is_the_connector_and_a_failed_load_is_computed() -> None:
    assert "kv_transfer_config" not in arguments()
    given = arguments(told=TOLD)["kv_transfer_config"]
    assert given["kv_connector_extra_config"] == TOLD
    assert given["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize(("options", "is_served"), [({"enforce-eager": True}, False), ({}, True)])
def test_stages_on_cpus_are_refused_where_vllm_would_die_of_them(
    options: dict[str, Any], is_served: bool
) -> None:
    staged = {"vllm": {"options": {"pipeline_parallel_size": 2, **options}}}
    if is_served:
        assert arguments(staged, on_cpu=True)["pipeline_parallel_size"] == 2
        return
    with pytest.raises(ModelRefused, match="2 stages of a pipeline"):
        arguments(staged, on_cpu=True)
    assert arguments(staged)["enforce_eager"], "a GPU's worker has the tensors in any case"


def test_options_come_last_and_may_be_structures() -> None:
    options = {"quantization": "fp8", "hf-overrides": {"a": [1]}, "enforce-eager": True}
    given = arguments({"vllm": {"options": options}})
    assert not [name for name in given if "-" in name], "as its class takes them"
    assert (given["quantization"], given["hf_overrides"], given["enforce_eager"]) == (
        "fp8",
        {"a": [1]},
        True,
    )


def test_adapters_have_room_for_the_largest_rank(tmp_path: Path) -> None:
    for name, rank in (("a", 8), ("b", 24)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    adapters = {name: str(tmp_path / name) for name in "ab"}
    given = arguments({"vllm": {"adapters": adapters}})
    assert (given["enable_lora"], given["max_loras"], given["max_lora_rank"]) == (True, 2, 32)
    with pytest.raises(ModelRefused, match=r"adapter_config\.json"):
        arguments({"vllm": {"adapters": {"c": str(tmp_path / "c")}}})


def test_replicas_that_share_a_machine_are_not_bound_to_the_same_cores() -> None:
    assert process_environment(3)["OMP_NUM_THREADS"] == "3"
    assert process_environment(3)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in process_environment(None)
    assert process_environment(None)["VLLM_CONFIGURE_LOGGING"] == "0", "it would close Serve's log files"


def test_the_cause_is_the_last_error_that_a_log_has(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "x" * 100_000 + "\nValueError: the first\n(EngineCore pid=3) vllm.x.OddError: no room\nends\n"
    )
    assert last_error(log) == "OddError: no room"
    log.write_text("nothing of that kind\n")
    assert last_error(log) == ""
    assert last_error(tmp_path / "none") == ""
