"""vLLM's contract for connectors: it fails when what we build on has moved.

Of each minor the source is read, and the connector run by hand with its classes (`inside.py`). Where one has
moved look at what has, and at `refusals.TESTED`. `TESTS_VLLM_SOURCES`: a folder with a folder for each minor
that holds its package `vllm` (`make vllm-sources`), besides the environment that serves.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from samovar.cache_tiers.vllm import refusals
from tests.support.pages import ROOT

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
OURS = "cache_tiers/vllm/connector.py"

Methods = dict[str, tuple[str, ...]]

ABSTRACT = {"start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"}
ABSTRACT |= {"get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"}
OF_ONE = {"_SchedulerCalls", "_WorkerCalls", "SamovarConnector"}
"""The classes that make up ours."""
LEFT = {
    *("role", "bind_connector_metadata", "clear_connector_metadata", "has_connector_metadata"),
    *("bind_kv_cache_manager", "bind_gpu_block_pool", "get_loaded_kv_cache_group_ids"),
    *("supports_divergent_local_hybrid_hits", "requires_kv_delivery", "get_mem_pool_context"),
    *("set_host_xfer_buffer_ops", "finish_forward", "reset_capture_state", "handle_preemptions"),
    *("get_transfer_results", "get_kv_connector_kv_cache_events"),
    *("register_finished_partial_tail", "set_xfer_handshake_metadata"),
    *("get_required_kvcache_layout", "requires_piecewise_for_cudagraph", "get_finished_count"),
}
"""Methods of the base that we leave as they are. A new one asks for a decision."""
ABSENT = {
    "0.29": {
        *("bind_kv_cache_manager", "finish_forward", "get_external_cache_hit_sources"),
        *("get_loaded_kv_cache_group_ids", "get_mem_pool_context", "get_transfer_results"),
        *("has_pending_block_frees", "register_finished_partial_tail", "reset_capture_state"),
        "supports_sleep_mode",
    },
    "0.32": {"supports_sleep_mode"},
}
"""Methods that a minor does not know: that it does not call them costs no more than what they add."""
NEW = {"0.33": {"restore_kv_caches", "unregister_kv_caches"}}  # of sleep mode, which we refuse
"""Methods that only a minor has, and that we leave as they are."""
READ = {
    "v1/request.py": {
        *("request_id", "status", "prompt_token_ids", "prompt_embeds", "all_token_ids", "num_tokens"),
        *("num_computed_tokens", "num_in_flight_tokens", "kv_transfer_params", "session_id"),
        *("lora_request", "cache_salt", "mm_features", "block_hashes"),
    },
    "v1/outputs.py": {
        *("finished_sending", "finished_recving", "invalid_block_ids", "kv_connector_worker_meta"),
        "kv_connector_stats",
    },
    "v1/core/sched/output.py": {
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        *("req_ids", "req_id", "num_computed_tokens"),
    },
    "v1/metrics/cache_hit_source.py": {"HOST", "DISK", "P2P", "EXTERNAL_UNSPECIFIED"},
    "lora/request.py": {"lora_name", "lora_path", "lora_int_id", "adapter_id"},
    "config/kv_events.py": {"enable_kv_cache_events"},
    "config/kv_transfer.py": {"kv_load_failure_policy", "kv_role", "kv_connector_extra_config"},
    "config/cache.py": {"block_size", "cache_dtype"},
    "config/parallel.py": {
        *("tensor_parallel_size", "pipeline_parallel_size", "nnodes"),
        *("prefill_context_parallel_size", "decode_context_parallel_size"),
    },
    "config/model.py": {"model", "hf_config", "dtype", "quantization", "revision"},
    "v1/kv_cache_interface.py": {
        *("num_blocks", "kv_cache_groups", "kv_cache_spec", "kv_cache_specs", "tokens_per_state"),
        *refusals.SPECS,
    },
    # A step may still write pages of requests that are over: it keeps them from us until then.
    "v1/core/sched/scheduler.py": {"defer_block_free"},
    "config/load.py": {"download_dir"},
}
"""What we read of vLLM's objects: such names are there, as attributes, fields or methods."""
UNREAD = {"0.29": {"v1/metrics/cache_hit_source.py"}}
"""Files that a minor has not, nor calls what reads them."""


def packages() -> Iterator[Path]:
    """The package `vllm` of the environment, and of each source."""
    yield from Path(os.environ.get("TESTS_VLLM", "")).resolve().glob("lib/python3*/site-packages/vllm")
    yield from sorted(Path(os.environ.get("TESTS_VLLM_SOURCES", "/dev/null")).glob("*/vllm"))


def version_of(package: Path) -> str:
    (name,) = {one.stem.split("-")[1].split("+")[0] for one in package.parent.glob("vllm-*.dist-info")}
    return name


def minor_of(package: Path) -> str:
    return ".".join(version_of(package).split(".")[:2])


def is_fit(package: Path) -> bool:
    return minor_of(package) not in refusals.UNFIT


@pytest.fixture(params=[one for one in packages() if is_fit(one)], ids=minor_of)
def package(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


def class_of(path: Path, name: str) -> ast.ClassDef:
    return next(
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )


def methods_of(path: Path, name: str) -> Methods:
    """Public methods -> their arguments after `self`."""
    body = class_of(path, name).body
    found = {
        node.name: tuple(arg.arg for arg in (*node.args.posonlyargs, *node.args.args))[1:]
        for node in body
        if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__")
    }
    for node in body:  # one method under two names
        match node:
            case ast.Assign([ast.Name(other)], ast.Name(one)) if one in found:
                found[other] = found[one]
    return found


def ours_of() -> Methods:
    found: Methods = {}
    for name in OF_ONE:
        found |= methods_of(ROOT / OURS, name)
    return found


def moved(base: Methods, ours: Methods, minor: str = "") -> dict[str, object]:
    """What is no longer as we build on it, in words."""
    known = ours.keys() | LEFT | NEW.get(minor, set())
    absent = ABSENT.get(minor, set())
    return {
        **dict.fromkeys(known - base.keys() - absent, "is not in vLLM's class"),
        **dict.fromkeys(absent & base.keys(), "is in vLLM's class"),
        **dict.fromkeys(base.keys() - known, "is new"),
        **{name: (base[name], ours[name]) for name in base.keys() & ours.keys() if base[name] != ours[name]},
    }


def test_the_base_class_is_as_we_know_it(package: Path) -> None:
    base, ours = methods_of(package / BASE, "KVConnectorBase_V1"), ours_of()
    assert moved(base, ours, minor_of(package)) == {}
    abstract = {
        node.name
        for node in class_of(package / BASE, "KVConnectorBase_V1").body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in node.decorator_list)
    }
    assert abstract == ABSTRACT
    assert abstract <= ours.keys()


def test_a_contract_that_moves_is_seen() -> None:
    ours: Methods = {"reset_cache": (), "request_finished": ("request", "block_ids")}
    base = dict.fromkeys(LEFT, ()) | ours
    assert moved(base, ours) == {}
    assert moved(base | {"request_finished": ("request",)}, ours).keys() == {"request_finished"}
    assert moved(base | {"on_sleep": ()}, ours) == {"on_sleep": "is new"}
    assert moved({**dict.fromkeys(LEFT, ())}, ours).keys() == ours.keys()


def test_what_we_read_is_there(package: Path) -> None:
    read = READ.keys() - UNREAD.get(minor_of(package), set())
    missing = {path: READ[path] - names_in(package / path) for path in read}
    assert {path: names for path, names in missing.items() if names} == {}


def names_in(path: Path) -> set[str]:
    """Attributes that are set, fields, methods and classes in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_the_extra_keys_are_asked_for_as_they_are_given(package: Path) -> None:
    tree = ast.parse((package / "v1/core/kv_cache_utils.py").read_text())
    (found,) = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "generate_block_hash_extra_keys"
    ]
    assert [arg.arg for arg in found.args.args] == [
        *("request", "start_token_idx", "end_token_idx", "start_mm_idx")
    ]


def test_this_minor_is_one_of_the_tested(package: Path) -> None:
    refusals.check_version(version_of(package))


@pytest.mark.parametrize("unfit", [one for one in packages() if not is_fit(one)], ids=minor_of)
def test_what_cannot_be_met_is_not_there(unfit: Path) -> None:
    assert "num_in_flight_tokens" not in names_in(unfit / "v1/request.py")


def test_the_connector_runs_with_its_classes(package: Path, bin_dir: Path, folder: Path) -> None:
    """Two ranks store and load; events, counters, a clear, a node that is gone."""
    place = folder / f"inside-{minor_of(package)}"
    place.mkdir()
    env = os.environ | {"HOME": str(place), "PYTHONPATH": f"{package.parent}{os.pathsep}{ROOT}"}
    words = [str(bin_dir / "python"), "-m", "tests.vllm.inside", str(place)]
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert f"vLLM {version_of(package)}: as it should be" in done.stdout, done.stderr[-4000:]
