"""Further models at one address: how they are given, what each inherits, and what is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from samovar.configs.cluster import ClusterSettings
from samovar.configs.fields import merged, public_tree, secret_tree, setting_fields
from samovar.configs.loader import ConfigError, load, split_key
from samovar.configs.settings import OF_EACH_MODEL, Settings

SMALL: dict[str, Any] = {"model": {"path": "/small"}}


def settings(models: dict[str, Any], **sections: Any) -> Settings:
    return Settings.model_validate({"models": models, **sections})


def said(models: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        settings(models, **sections)
    return str(refused.value)


class TestWhereTheyAreGiven:
    def test_a_file_a_variable_and_flags_go_over_each_other_key_by_key(self, tmp_path: Path) -> None:
        file = tmp_path / "s.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    "models": {
                        "big.one": {
                            "model": {"path": "/a", "dtype": "float32"},
                            "engine": {"threads": 3, "kind": "vllm", "vllm": {"options": {"a": 1}}},
                        }
                    }
                }
            )
        )
        env = {"SAMOVAR_MODELS": json.dumps({"big.one": {"engine": {"threads": 4}}, "b": SMALL})}
        flags = ["--models.big.one.engine.threads", "5", "--models.b.replicas=2", "--models.c-2.model", "/c"]
        loaded = load(file, env, flags)
        big, b, c = (loaded.settings.of_models()[name] for name in ("big.one", "b", "c-2"))
        assert (big.model.path, big.model.dtype, big.engine.threads) == (Path("/a"), "float32", 5)
        assert (big.engine.kind, big.engine.vllm.options) == ("vllm", {"a": 1})
        assert (b.cluster.replicas, c.model.path) == (2, Path("/c"))
        assert (loaded.source["models"], loaded.source["engine.threads"]) == ("flag", "default")

    def test_flags_have_the_short_names_too(self) -> None:
        flags = ["--models.a.model", "/a", "--models.a.engine", "vllm", "--models.a.replicas", "3"]
        own = load(None, {}, flags).settings.of_models()["a"]
        assert (own.model.path, own.engine.kind, own.cluster.replicas) == (Path("/a"), "vllm", 3)

    def test_what_is_wrong_is_told_with_its_line(self, tmp_path: Path) -> None:
        file = tmp_path / "s.yaml"
        lines = ["models:", "  a:", "    model: {path: /x}", "    engin: 3", "    engine:", "      threds: 3"]
        file.write_text("\n".join([*lines, "  b:"]))
        with pytest.raises(ConfigError) as refused:
            load(file, {}, [])
        problems = {one.key: one for one in refused.value.problems}
        assert set(problems) == {"models.a.engin", "models.a.engine.threds", "models.b"}
        assert problems["models.a.engine.threds"].origin == f"{file}, line 6"
        assert "engine.threads" in problems["models.a.engine.threds"].fix

    @pytest.mark.parametrize(
        "flags",
        [
            ["--models.a.enging.threads", "3"],
            ["--models.a", "3"],
            ["--models..model", "/x"],
            ["--models", "3"],
            ["--models", '{"a": 3}'],
            ["--models", '{"a": {}}'],
            ["--models.a b.model", "/x"],
            ["--models.a.model", "/x", "--models.a.engine.threads", "0"],
            ["--models.a.model", ""],
        ],
    )
    def test_what_is_no_setting_of_a_model_is_refused(self, flags: list[str]) -> None:
        with pytest.raises(ConfigError):
            load(None, {}, flags)

    def test_a_bad_value_names_its_key_and_flag(self) -> None:
        flags = ["--models.a.model", "/x", "--models.a.engine.threads", "0"]
        with pytest.raises(ConfigError, match=r"from flag --models.a.engine.threads\)\n.*models.a.eng"):
            load(None, {}, flags)

    def test_a_key_is_split_one_way_only(self) -> None:
        known = setting_fields()
        assert split_key("models.a.b.engine.threads") == ("a.b", "engine.threads")
        assert split_key("engine.threads") == ("", "engine.threads")
        for key in known:
            tails = [key[at + 1 :] for at, char in enumerate(key) if char == "."]
            assert not [tail for tail in tails if tail in known], f"{key} ends like another setting"

    def test_they_survive_being_sent_without_secrets(self) -> None:
        given = settings({"a": SMALL}, auth={"server_secret": "s" * 16})
        assert merged(json.loads(json.dumps(public_tree(given))), secret_tree(given)) == given


class TestWhatEachHas:
    def test_the_first_is_as_if_it_were_alone_and_the_others_differ_in_what_is_given(self) -> None:
        common = {"engine": {"sequences_max": 16}, "model": {"path": "/first", "aliases": ["a"]}}
        models = settings({"small": SMALL}, **common).of_models()
        alone = Settings.model_validate(common)
        assert models[""].model_dump() == alone.model_dump()
        small = models["small"]
        assert (small.engine.sequences_max, small.model.path) == (16, Path("/small"))
        assert (small.model.served_name, small.model.aliases, small.models) == ("small", (), {})
        assert alone.of_models() == {"": alone}

    def test_adapters_and_names_are_not_inherited_and_options_are(self) -> None:
        vllm = {"kind": "vllm", "vllm": {"options": {"enforce_eager": True}, "adapters": {"t": "/t"}}}
        models = settings({"small": SMALL}, engine=vllm).of_models()
        assert models["small"].engine.vllm.adapters == {}
        assert models["small"].engine.vllm.options == {"enforce_eager": True}
        assert models["small"].engine.kind == "vllm"

    def test_they_share_a_node_and_another_number_of_others_is_no_other_setting(self) -> None:
        models = settings({"a": SMALL | {"cluster": {"replicas": 2}}}, cluster={"replicas": 3}).of_models()
        assert [one.cluster.sharing_node(8) for one in models.values()] == [5, 5]
        more = settings({"a": SMALL | {"cluster": {"replicas": 4}}}, cluster={"replicas": 3}).of_models()
        assert more[""].cluster.sharing_node(8) == 7
        assert more[""].model_dump_json() == models[""].model_dump_json()
        assert copy.deepcopy(models[""]).cluster.sharing_node(8) == 5
        assert ClusterSettings(replica_cpus=4).beside(9).sharing_node(8) == 2, "Ray counts them"
        assert ClusterSettings(replicas=3, replicas_per_node_max=1).beside(2).sharing_node(8) == 3

    def test_tiers_listen_for_vllm_whoever_starts_them(self) -> None:
        models = settings({"a": SMALL | {"engine": {"kind": "vllm"}}}).of_models()
        assert models[""].tiers.socket == models["a"].tiers.socket == models[""].vllm_socket
        assert settings({"a": SMALL}).of_models()[""].tiers.socket is None


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({}, "models.a.model.path is missing"),
            ({"engine": {"threads": 1}}, "models.a.model.path is missing"),
            ({**SMALL, "limits": {"n_max": 1}}, "models.a.limits is no setting of one model"),
            ({**SMALL, "engine": {"thread": 1}}, "models.a.engine.thread is no setting of one model"),
            ({**SMALL, "cluster": {"ray_address": "auto"}}, "models.a.cluster.ray_address is no setting"),
            ({"model": {"path": "/x", "cache_dir": "/y"}}, "models.a.model.cache_dir is no setting of one"),
            ({**SMALL, "engine": {"threads": 0}}, "models.a.engine.threads is refused: Input should be"),
            ({**SMALL, "engine": 3}, "models.a.engine is refused"),
            (
                {**SMALL, "engine": {"sequences_max": 2}},
                "engine.sequences_max=2 is smaller than limits",
            ),
        ],
    )
    def test_a_setting_is_named(self, given: dict[str, Any], words: str) -> None:
        assert words in said({"a": given})

    @pytest.mark.parametrize(
        "sections",
        [{"knowledge": {"enabled": True}}, {"compaction": {"enabled": True}}, {"server": {"record": "/r"}}],
    )
    def test_what_serves_one_model_is_refused_beside_others(self, sections: dict[str, Any]) -> None:
        ((section, own),) = sections.items()
        assert f"{section}.{next(iter(own))} and models are both set" in said({"a": SMALL}, **sections)

    @pytest.mark.parametrize(
        ("models", "sections"),
        [
            ({"a": SMALL}, {"model": {"served_name": "a"}}),
            ({"a": SMALL}, {"model": {"aliases": ["a"]}}),
            ({"a": SMALL, "b": {"model": {"path": "/b", "aliases": ["a"]}}}, {}),
            ({"a": SMALL}, {"engine": {"kind": "vllm", "vllm": {"adapters": {"a": "/t"}}}}),
        ],
    )
    def test_a_name_is_of_one_model(self, models: dict[str, Any], sections: dict[str, Any]) -> None:
        assert "'a' is a name of" in said(models, **sections)

    def test_the_keys_of_one_model_are_settings(self) -> None:
        for section, keys in OF_EACH_MODEL.items():
            assert keys <= set(type(getattr(Settings(), section)).model_fields)
