"""Settings where vLLM computes: each has one fate, what has no equal is refused, and the page says so."""

from __future__ import annotations

import ast
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.configs.fields import setting_fields
from samovar.configs.settings import EngineSettings, Settings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import refuse_for_vllm, unused_settings
from samovar.replicas.model.vllm_settings import (
    IGNORED,
    MAPPED,
    OPTIONS,
    REFUSED,
    UNFIT_OPTIONS,
    UNTIERED_OPTIONS,
)
from tests.house import ROOT

PAGE = (ROOT / "docs/engines.md").read_text(encoding="utf-8")


def settings(**sections: dict[str, Any]) -> Settings:
    engine = {"kind": "vllm", **sections.pop("engine", {})}
    return Settings.model_validate({"engine": engine, **sections})


def with_options(**options: Any) -> Settings:
    return settings(engine={"vllm": {"options": options}})


def fates(name: str) -> list[str]:
    """What becomes of a setting of the section `engine`."""
    told = {"mapped": MAPPED, "ignored": IGNORED, "refused": [key.removeprefix("engine.") for key in REFUSED]}
    return [fate for fate, names in told.items() if name in names]


def test_each_setting_of_the_engine_has_one_fate() -> None:
    assert {name: fates(name) for name in EngineSettings.model_fields if len(fates(name)) != 1} == {}
    of_engine = {key.removeprefix("engine.") for key in REFUSED if key.startswith("engine.")}
    assert {*MAPPED, *IGNORED, *of_engine} - set(EngineSettings.model_fields) == set()
    assert [key for key in REFUSED if key not in setting_fields()] == []
    assert all(reason for reason in IGNORED.values())


def test_options_name_settings_that_there_are() -> None:
    known = setting_fields()
    assert {key for key in OPTIONS.values() if key.split(" ")[0] not in known} == set()
    assert not OPTIONS.keys() & UNFIT_OPTIONS.keys()


def test_defaults_are_served() -> None:
    refuse_for_vllm(settings())
    assert unused_settings(settings()) == []
    assert unused_settings(Settings()) == []


CHANGED: dict[str, Any] = {
    "engine.step": "lean",
    "engine.kv_dtype": "int8",
    "engine.kv_groups": 2,
    "engine.draft_tokens_max": 3,
    "engine.exact": True,
    "engine.preemption": "swap",
    "model.weights": "int8",
    "tiers.audit_share": 0.5,
    "tiers.swap_bytes_max": 1024,
    "telemetry.kv_events": "tcp://127.0.0.1:5557",
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_vllm_has_no_equal_for_is_refused_with_value_and_fix(key: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ModelRefused, match=re.escape(f"{key}={CHANGED[key]}: ")) as caught:
        refuse_for_vllm(settings(**{section: {name: CHANGED[key]}}))
    assert caught.value.fix == REFUSED[key].fix
    for fine in REFUSED[key].fine:
        refuse_for_vllm(settings(**{section: {name: fine}}))


def test_all_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(ModelRefused) as caught:
        refuse_for_vllm(settings(engine={"step": "lean", "exact": True}, model={"weights": "int8"}))
    assert caught.value.reason.count("; ") == 2
    assert caught.value.fix.count("leave it out") == 2, "each fix once"


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_a_setting_stands_for_is_refused(option: str) -> None:
    for spelled in (option, option.replace("_", "-")):
        with pytest.raises(
            ModelRefused, match=re.escape(f"options.{option}=1: {OPTIONS[option]} stands for")
        ):
            refuse_for_vllm(with_options(**{spelled: 1}))


@pytest.mark.parametrize("option", UNFIT_OPTIONS)
def test_an_option_that_the_front_rules_out_is_refused(option: str) -> None:
    with pytest.raises(ModelRefused, match=f"options.{option}=True: {UNFIT_OPTIONS[option]}"):
        refuse_for_vllm(with_options(**{option: True}))
    refuse_for_vllm(with_options(**{option: False}))


@pytest.mark.parametrize("option", UNTIERED_OPTIONS)
def test_a_part_of_a_blocks_tokens_is_refused_beside_tiers(option: str) -> None:
    with pytest.raises(ModelRefused, match=f"options.{option}=2: a rank would have a part"):
        refuse_for_vllm(with_options(**{option: 2}))
    refuse_for_vllm(with_options(**{option: 1}))
    engine = {"vllm": {"options": {option: 2}}}
    refuse_for_vllm(settings(engine=engine, tiers={"enabled": False}))


@pytest.mark.parametrize(
    ("dtype", "is_fine"),
    [("auto", True), ("bfloat16", True), ("float16", True), ("fp8", False), ("int8_per_token_head", False)],
)
def test_a_quantised_cache_is_refused_beside_tiers(dtype: str, is_fine: bool) -> None:
    engine = {"vllm": {"options": {"kv_cache_dtype": dtype}}}
    refuse_for_vllm(settings(engine=engine, tiers={"enabled": False}))
    if is_fine:
        refuse_for_vllm(settings(engine=engine))
        return
    with pytest.raises(ModelRefused, match=rf"kv_cache_dtype={dtype}.*--tiers\.enabled false"):
        refuse_for_vllm(settings(engine=engine))


def test_other_options_are_vllms_affair() -> None:
    refuse_for_vllm(
        with_options(quantization="fp8", enforce_eager=True, pipeline_parallel_size=2, spec_method="ngram")
    )


def test_ranks_of_vllm_need_no_groups_of_heads() -> None:
    refuse_for_vllm(settings(engine={"tensor_parallel": 4}))
    with pytest.raises(ValueError, match=r"Set engine\.kv_groups to 4"):
        Settings.model_validate({"engine": {"tensor_parallel": 4}})


def test_an_adapter_has_a_name_of_its_own() -> None:
    adapters = {"vllm": {"adapters": {"tuned": "/a"}}}
    refuse_for_vllm(settings(engine=adapters))
    with pytest.raises(ModelRefused, match="tuned is a name of the model"):
        refuse_for_vllm(settings(engine=adapters, model={"aliases": ["tuned"]}))


def test_what_changes_nothing_is_said() -> None:
    (told,) = unused_settings(settings(engine={"step_s_target": None}))
    why = IGNORED["step_s_target"]
    assert told == f"engine.step_s_target=None changes nothing with engine.kind=vllm: {why}"
    given = {"python": "/v/bin/python", "options": {"seed": 1}, "adapters": {"poet": "/a"}}
    told_of_ours = unused_settings(Settings.model_validate({"engine": {"vllm": given}}))
    assert {line.split(" ")[0] for line in told_of_ours} == {f"engine.vllm.{name}" for name in given}
    assert all("--engine vllm" in line for line in told_of_ours)


def test_the_page_has_every_row() -> None:
    keys = [*(f"engine.{name}" for name in (*MAPPED, *IGNORED)), *REFUSED, *UNTIERED_OPTIONS]
    missing = [key for key in (*keys, *OPTIONS, *UNFIT_OPTIONS) if f"`{key}`" not in PAGE]
    assert missing == []
    assert [reason for reason in {*IGNORED.values(), *UNFIT_OPTIONS.values()} if reason not in PAGE] == []
    assert [row.why for row in REFUSED.values() if row.why not in PAGE] == []


@pytest.mark.guarantee("G3")
def test_the_tiers_names_hold_how_vllm_quantises_weights_and_cache() -> None:
    """By the connector's own function, read from its source: its module imports vLLM."""
    source = (ROOT / "cache_tiers/vllm/connector.py").read_text(encoding="utf-8")
    wanted = [node for node in ast.parse(source).body if getattr(node, "name", "") == "config_text"]
    room: dict[str, Any] = {"json": json, "Any": Any}
    exec(compile(ast.Module(wanted, []), "connector.py", "exec"), room)

    def text(quantization: object = None, cache_dtype: str = "auto", stated: object = None) -> str:
        hf = SimpleNamespace(to_dict=lambda: {"quantization_config": stated})
        model = SimpleNamespace(hf_config=hf, dtype="bfloat16", quantization=quantization)
        cache = SimpleNamespace(cache_dtype=cache_dtype)
        ranks = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        of_vllm = SimpleNamespace(model_config=model, cache_config=cache, parallel_config=ranks)
        return str(room["config_text"](of_vllm))

    told = [text(), text("fp8"), text("awq"), text("fp8", "bfloat16"), text("fp8", stated={"bits": 8})]
    assert len(set(told)) == len(told)
    assert text("fp8") in told
