"""Where settings come from, which one wins, and what a person is told who got one wrong."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from samovar.configs.fields import env_name, fixed_keys, flag_name, former_keys, merged, setting_fields
from samovar.configs.loader import ConfigError, LoadedSettings, did_you_mean, load, preset_names
from samovar.configs.settings import GRAPH_ROWS_MAX, EngineSettings, Settings

SECRET = "hush-hush-hush-hush"


def written(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def value_of(loaded: LoadedSettings, key: str) -> object:
    return value_of_settings(loaded.settings, key)


def value_of_settings(settings: Settings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def complaint(config: Path | str | None = None, env: dict[str, str] | None = None, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, env or {}, flags)
    return str(caught.value)


def test_without_anything_the_defaults_hold() -> None:
    loaded = load(None, {}, [])
    assert loaded.settings == Settings()
    assert set(loaded.source) == set(setting_fields())
    assert set(loaded.source.values()) == {"default"}


def test_flags_beat_the_environment_beats_the_file_beats_the_defaults(tmp_path: Path) -> None:
    path = written(
        tmp_path, "server: {port: 1001}\nengine: {queue_max: 11, sequences_max: 12, step_tokens_max: 101}"
    )
    env = {"SAMOVAR_ENGINE__QUEUE_MAX": "21", "SAMOVAR_ENGINE__SEQUENCES_MAX": "22", "PATH": "/bin"}
    loaded = load(path, env, ["--engine.queue-max", "31"])
    engine = loaded.settings.engine
    assert (engine.queue_max, engine.sequences_max, engine.step_tokens_max) == (31, 22, 101)
    assert loaded.settings.server.port == 1001
    assert loaded.source["engine.queue_max"] == "flag"
    assert loaded.source["engine.sequences_max"] == "env"
    assert loaded.source["engine.step_tokens_max"] == "file"
    assert loaded.source["engine.device"] == "default"
    assert loaded.origin["engine.step_tokens_max"] == f"{path}, line 2"


# Values that differ from the default, where "one less" would not do.
SPECIAL: dict[str, object] = {
    "server.host": "::1",
    "server.allowed_hosts": ("samovar.example",),
    "model.aliases": ("gpt-4o", "tea/pot"),
    "server.cors_origins": ("https://app.example",),
    "model.context_tokens_max": 512,
    "engine.threads": 7,
    "engine.pool_memory_fraction": 0.5,
    "engine.pool_bytes_max": 2**21,
    "server.ingress_replicas": 3,
    "cluster.replicas": 3,
    "cluster.object_store_bytes": 2**28,
    "cluster.replicas_per_node_max": 2,
    "engine.tensor_parallel": 1,  # more needs engine.kv_groups as well
    **{f"tiers.profiles.{name}.write_behind": ("s3",) for name in ("chat", "documents", "code", "batch")},
    "tiers.profiles.of_tenant": {"team": "code"},
    "tiers.tenant_share": 0.25,
    "tiers.tenant_shares": {"team": 0.5},
    "limits.tenant_share": 0.25,
    "limits.tenant_weights": {"team": 2.0},
    "limits.tenant_priorities": {"team": -5},
    "knowledge.always_of": ("team",),
    "knowledge.loop.auto_of": ("team",),
    "knowledge.loop.confirming_tools": {"run_tests": "^ok"},
    "compaction.of_tenant": {"team": "retrieve"},
    "router.session_ids": ("x-my-chat", "metadata.Chat", "user"),
    "router.prefix.volatile_lines": ("current time",),
    "tiers.node.spot_notice_url": "http://127.0.0.1:8111",
    "cluster.replica_resources": {"kv_nvme": 1.0},
    "cluster.ray_address": "auto",
    "cluster.dashboard": "http://head:8265",
    "telemetry.otlp_endpoint": "http://127.0.0.1:4318/v1/traces",
    "telemetry.kv_events": "tcp://127.0.0.1:5557",
    "launch.rack.workers": ("10.0.0.2", "10.0.0.3"),
    "launch.rack.workers_min": 1,
    "launch.ssh.proxy_by_id": False,  # needs another one
    "launch.image": f"registry.example/samovar@sha256:{'0' * 64}",
    "launch.setup_commands": ("pip install samovar",),
    "launch.object_store_bytes": 2**28,
    "tiers.cpu.bytes_max": 2**28,
    "engine.graph_rows_max": 16,
    "tiers.more.medium": "package.module:function",
    "tiers.more.options": {"path": "/x"},
    "engine.vllm.options": {"quantization": "fp8"},
    "engine.vllm.adapters": {"tuned": Path("/x")},
    "models": {"small": {"model": {"path": "/x"}}},
    "auth.oidc.issuer": "https://login.example",
    "auth.oidc.admin_if": {"groups": "samovar-admins"},
}


NUMBERS = [
    key
    for key, value in SPECIAL.items()
    if isinstance(value, dict) and any(isinstance(one, int | float) for one in value.values())
]
"""Settings that are numbers by name."""


@pytest.mark.parametrize("value", ["-1e12", "1e12", "NaN"])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_by_name_have_bounds_like_all_others(key: str, value: str) -> None:
    (name,) = SPECIAL[key]  # type: ignore[misc]
    with pytest.raises(ConfigError, match=re.escape(key)):
        load(None, {}, [f"--{key}", f'{{"{name}": {value}}}'])


def test_a_tenants_share_is_a_share_and_a_tenants_name_can_be_one() -> None:
    assert "tiers.tenant_shares" in NUMBERS
    for given in ('{"kitchen": 30}', '{"kitchen": 0}', '{"The Kitchen": 0.3}'):
        with pytest.raises(ConfigError, match=r"tiers\.tenant_shares"):
            load(None, {}, ["--tiers.tenant-shares", given])


def another(key: str) -> object:
    """A value of this setting that is good and not the default."""
    field, default = setting_fields()[key], value_of(load(None, {}, []), key)
    if key in SPECIAL:
        return SPECIAL[key]
    if field.choices:
        return next((choice for choice in field.choices if choice != default), default)
    if field.kind is bool:
        return not default
    if isinstance(default, float):
        return default * 0.75 + 0.2
    if isinstance(default, int):
        return default - 1 if default > 1 else default + 1
    return Path("/x") if field.kind is Path else "word"


@pytest.mark.parametrize("key", [field.key for field in setting_fields().values() if not field.secret])
def test_every_setting_can_be_given_by_flag_and_by_variable(key: str) -> None:
    field, wanted = setting_fields()[key], another(key)
    text = json.dumps(wanted, default=str) if field.structured else str(wanted)
    by_env = load(None, {field.env: text}, [])
    by_flag = load(None, {}, [field.flag, text])
    by_equals = load(None, {}, [f"--{key}={text}"])
    assert by_env.settings == by_flag.settings == by_equals.settings
    assert (by_env.source[key], by_flag.source[key]) == ("env", "flag")
    assert value_of(by_env, key) == wanted


RENAMED = [(former, key) for former, key in former_keys().items() if key in setting_fields()]


def in_yaml(key: str, value: object) -> str:
    for name in reversed(key.split(".")):
        value = {name: value}
    return json.dumps(value)


@pytest.mark.parametrize(("former", "key"), RENAMED)
def test_a_former_name_still_works_and_each_source_warns_of_it(
    former: str, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = another(key)
    text = json.dumps(wanted) if setting_fields()[key].structured else str(wanted)
    path = written(tmp_path, in_yaml(former, wanted))
    sources: list[tuple[Path | None, dict[str, str], list[str], str, str, str]] = [
        (path, {}, [], former, key, f"{path}, line 1"),
        (None, {env_name(former): text}, [], env_name(former), env_name(key), f"variable {env_name(former)}"),
        (None, {}, [flag_name(former), text], flag_name(former), flag_name(key), f"flag {flag_name(former)}"),
    ]
    for config, env, flags, old, new, origin in sources:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loaded = load(config, env, flags)
        assert value_of(loaded, key) == wanted
        (warning,) = caplog.messages
        assert f"{old}  (from {origin})" in warning
        assert f"this setting is now called {new};" in warning
    assert value_of_settings(merged(json.loads(in_yaml(former, wanted)), {}), key) == wanted


def test_there_are_no_more_settings_than_there_were() -> None:
    """A new one is for a machine, a workload or a rule; an inner number of an algorithm is a constant.

    The last one that came: `cluster.tls_dir`, for which `tiers.faults.kill_starts` became a constant.
    """
    assert len(setting_fields()) <= 379


@pytest.mark.parametrize(("key", "value"), fixed_keys().items())
def test_what_was_a_setting_is_not_used_and_each_source_says_so(
    key: str, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, in_yaml(key, 7))
    sources: list[tuple[Path | None, dict[str, str], list[str]]] = [
        (path, {}, []),
        (None, {env_name(key): "7"}, []),
        (None, {}, [flag_name(key), "7"]),
    ]
    for config, env, flags in sources:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loaded = load(config, env, flags)
        assert loaded.settings == Settings()
        (warning,) = caplog.messages
        assert f"no setting any more, and always {value}" in warning
    assert merged(json.loads(in_yaml(key, 7)), {}) == Settings(), "a tree saved before"


@pytest.mark.parametrize(("former", "key"), RENAMED)
def test_a_source_with_both_names_is_refused(former: str, key: str, tmp_path: Path) -> None:
    wanted = another(key)
    text = json.dumps(wanted) if setting_fields()[key].structured else str(wanted)
    both = in_yaml(former, wanted)
    for old, new in zip(former.split("."), key.split("."), strict=True):
        if old != new:  # from here on they differ: a setting, or a section that has another name
            rest = json.loads(in_yaml(key, wanted))
            for name in key.split(".")[: key.split(".").index(new)]:
                rest = rest[name]
            both = both.replace(f'"{old}":', f'{json.dumps(rest)[1:-1]}, "{old}":')
            break
    for problem in (
        complaint(written(tmp_path, both)),
        complaint(None, {env_name(former): text, env_name(key): text}),
        complaint(None, {}, flag_name(former), text, flag_name(key), text),
        complaint(None, {}, flag_name(key), text, flag_name(former), text),
    ):
        assert "this is the former name of" in problem
    with pytest.raises(ValidationError, match="is the former name of"):
        merged(json.loads(both), {})


def test_a_higher_source_overrides_a_former_name_below_it(tmp_path: Path) -> None:
    path = written(tmp_path, "router: {leave_home_s: 3}")
    loaded = load(path, {"SAMOVAR_ROUTER__AFFINITY_PENALTY_S": "2"}, [])
    assert loaded.settings.router.affinity_penalty_s == 2


def test_secrets_can_be_given_by_flag_and_by_variable() -> None:
    keys = json.dumps({"team": SECRET})
    for env, flags in (
        ({"SAMOVAR_AUTH__API_KEYS": keys, "SAMOVAR_AUTH__SERVER_SECRET": SECRET}, []),
        ({}, ["--auth.api-keys", keys, f"--auth.server-secret={SECRET}"]),
    ):
        auth = load(None, env, flags).settings.auth
        assert auth.api_keys["team"][0].get_secret_value() == SECRET
        assert auth.server_secret is not None
        assert auth.server_secret.get_secret_value() == SECRET


def test_nothing_overrides_a_value_where_the_setting_may_be_empty(tmp_path: Path) -> None:
    path = written(tmp_path, "engine: {threads: 3}")
    assert load(path, {"SAMOVAR_ENGINE__THREADS": ""}, []).settings.engine.threads is None
    assert load(path, {}, ["--engine.threads=null"]).settings.engine.threads is None
    assert "server.port" in complaint(None, {"SAMOVAR_SERVER__PORT": ""})


def test_short_flags_are_the_long_ones() -> None:
    loaded = load(None, {}, ["--port=9001", "--host", "localhost", "--replicas", "2", "--model", "/m"])
    settings = loaded.settings
    assert (settings.server.port, settings.server.host) == (9001, "localhost")
    assert (settings.cluster.replicas, settings.model.path) == (2, Path("/m"))
    assert loaded.origin["server.port"] == "flag --port"


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_holds_only_what_differs_from_the_defaults(name: str) -> None:
    loaded = load(name, {}, [])
    given = [key for key, source in loaded.source.items() if source == "file"]
    default = load(None, {}, [])
    assert given
    assert [key for key in given if value_of(loaded, key) == value_of(default, key)] == []


def slow_paths(settings: Settings) -> list[str]:
    """What keeps steps off the quick paths that there are."""
    engine, tiers = settings.engine, settings.tiers
    paths = {
        "decodes of all sequences as graphs": engine.graph_rows == engine.sequences_max,
        "chunks as graphs": engine.graph_rows > 0 and engine.step_tokens_max >= GRAPH_ROWS_MAX,
        "room for chunks beside all decodes": engine.step_tokens_max >= 2 * engine.sequences_max,
        "streams keep their pace": engine.step_stretch is not None,
        "reuse": engine.prefix_reuse and tiers.enabled,
        "swap": engine.preemption != "drop" and tiers.swap_bytes_max > 0,
        "measured": not engine.fast_start,
    }
    return [path for path, is_reached in paths.items() if not is_reached]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_reaches_every_quick_path(name: str) -> None:
    assert slow_paths(load(name, {}, []).settings) == []


def test_a_preset_off_a_quick_path_is_found() -> None:
    """As two of them were: 128 sequences, and graphs of 64."""
    slow = load(
        "local-gpu", {}, ["--engine.graph-rows-max", "64", "--engine.step-tokens-max", "256"]
    ).settings
    assert slow_paths(slow) == ["decodes of all sequences as graphs", "chunks as graphs"]
    assert slow.engine.graph_rows == 64


@pytest.mark.parametrize(("given", "sequences", "rows"), [(None, 128, 128), (None, 2000, 512), (300, 32, 32)])
def test_decodes_are_graphs_of_all_sequences_that_may_run(
    given: int | None, sequences: int, rows: int
) -> None:
    assert EngineSettings(graph_rows_max=given, sequences_max=sequences).graph_rows == rows


def test_the_presets_are_there() -> None:
    assert preset_names() == ["aws", "local-cpu", "local-gpu", "rack"]


def test_every_problem_is_reported_at_once_with_key_value_place_and_fix(tmp_path: Path) -> None:
    path = written(tmp_path, "server:\n  port: 99999\nengine:\n  block_tokens: 17\n  treads: 2\n")
    text = complaint(path, {"SAMOVAR_ENGINE__QUEUE_MAX": "many"}, "--engine.exact", "maybe")
    assert f"server.port = 99999  (from {path}, line 2)" in text
    assert "1 to 65535" in text
    assert f"engine.block_tokens = 17  (from {path}, line 4)" in text
    assert "16, 32, 64, 128" in text
    assert "Did you mean engine.threads?" in text
    assert "engine.queue_max = 'many'  (from variable SAMOVAR_ENGINE__QUEUE_MAX)" in text
    assert "engine.exact = 'maybe'  (from flag --engine.exact)" in text


def test_an_unknown_variable_is_named_with_a_suggestion() -> None:
    text = complaint(None, {"SAMOVAR_ENGINE_THREADS": "3"})
    assert "SAMOVAR_ENGINE_THREADS" in text
    assert "Did you mean SAMOVAR_ENGINE__THREADS?" in text


def test_the_clients_key_and_the_proxys_variables_are_no_settings() -> None:
    load(None, {"SAMOVAR_API_KEY": "x", "SAMOVAR_PROXY_PORT": "1"}, [])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--engine.blok-tokens", "32"], "Did you mean --engine.block-tokens?"),
        (["--block-tokens", "32"], "Did you mean --engine.block-tokens?"),
        (["--engine.threads"], "a value is missing"),
        (["--engine.threads", "--engine.exact=true"], "a value is missing"),
        (["engine.threads=3"], "'engine.threads=3'"),
        (["--auth.api-keys", "{broken"], "this is not JSON"),
        (["--auth.api-keys", '{"a": 1, "a": 2}'], "given twice"),
    ],
)
def test_a_bad_flag_is_explained(flags: list[str], said: str) -> None:
    assert said in complaint(None, {}, *flags)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["X-Chat Id"],
            "no place of a session id. Give the name of a header, a field of the body (session_id,",
        ),
        (["metadata."], "no place of a session id"),
        (["x-session-id", "Authorization"], "authorization holds a credential"),
        (["x"] * 17, "16"),
        ("x-session-id", "router.session_ids"),
    ],
)
def test_a_bad_place_of_session_ids_is_explained(names: object, said: str) -> None:
    assert said in complaint(None, {}, "--router.session-ids", json.dumps(names))


def test_headers_of_session_ids_are_compared_in_lower_case() -> None:
    flags = ["--router.session-ids", '["X-My-Chat", "prompt_cache_key", "metadata.Chat"]']
    assert load(None, {}, flags).settings.router.session_ids == (
        "x-my-chat",
        "prompt_cache_key",
        "metadata.Chat",
    )


def test_a_missing_file_is_named_with_the_presets() -> None:
    text = complaint("local-cpuu")
    assert "local-cpuu" in text
    assert "Did you mean the preset local-cpu?" in text


@pytest.mark.parametrize(
    ("yaml_text", "said"),
    [
        ("server:\n\tport: 1\n", "line 2"),
        ("server: [1, 2\n", "not YAML"),
        ("- 1\n", "holds a list, not sections"),
        ("limits: 7\n", "this is a section, but the file gives a number"),
        ("server:\n  port: 1\n  port: 2\n", "given twice, first in line 2"),
        ("server: {port: yes}\n", "true/false"),
        ("engine: {pool_memory_fraction: .nan}\n", "engine.pool_memory_fraction = nan"),
        ("block_tokens: 16\n", "Did you mean engine.block_tokens?"),
        ("--- 1\n--- 2\n", "not YAML"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, yaml_text: str, said: str) -> None:
    path = written(tmp_path, yaml_text)
    text = complaint(path)
    assert said in text
    assert str(path) in text


def test_a_file_that_is_no_text_or_a_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in complaint(path)
    assert str(tmp_path) in complaint(tmp_path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "engine:\n", "engine: {}\n"])
def test_an_empty_file_or_section_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load(written(tmp_path, text), {}, []).settings == Settings()


@pytest.mark.parametrize(
    "text",
    [
        "auth: {api_keys: {team: %s}}",
        "auth: {api_keys: {%s: team}}",
        "auth: {api_keys: %s}",
        "auth: {server_secret: [%s]}",
        "auth: {server_secret: *%s}",
        "auth: {server_secret: !%s x}",
        "auth: {api_keys: {%s: a, %s: b}}",
        "auth: %s",
        "auth: {server_secret: '%s",
    ],
)
def test_a_secret_in_a_bad_file_is_never_shown(tmp_path: Path, text: str) -> None:
    short = "hushHUSH"  # too short, and refused as a tenant's name, so that every form is an error
    assert short not in complaint(written(tmp_path, text.replace("%s", short)))


def test_a_secret_in_a_bad_variable_or_flag_is_never_shown() -> None:
    for text in ("hushHUSH", '{"team": "hushHUSH"}', '{"team": hushHUSH}', '{"hushHUSH": "x"}'):
        assert "hushHUSH" not in complaint(None, {"SAMOVAR_AUTH__API_KEYS": text})
        assert "hushHUSH" not in complaint(None, {}, "--auth.api-keys", text)
    assert "hushHUSH" not in complaint(None, {"SAMOVAR_AUTH__SERVER_SECRET": "hushHUSH"})
    assert "hushHUSH" not in complaint(None, {}, "--auth.api_keys", '{"a":', "hushHUSH}")


@pytest.mark.parametrize(
    "key",
    ["hush hush hush hush", "hush-hush-hush-h\u00fcsh", "hush-hush-hush-hush\n", "<16 characters or more>"],
)
def test_a_key_that_no_client_could_send_is_refused_without_showing_it(key: str, tmp_path: Path) -> None:
    keys = json.dumps({"team": key})
    for text in (
        complaint(None, {"SAMOVAR_AUTH__API_KEYS": keys}),
        complaint(None, {}, "--auth.api-keys", keys),
        complaint(written(tmp_path, f"auth: {{api_keys: {keys}}}")),
    ):
        assert "auth.api_keys" in text
        assert "the value of entry 1 is refused: a key may hold visible ASCII characters only" in text
        assert key.strip() not in text
        assert "hush" not in text


def test_the_servers_own_secret_is_sent_by_nobody_and_may_hold_blanks() -> None:
    secret = load(None, {"SAMOVAR_AUTH__SERVER_SECRET": "four words of salt"}, []).settings.auth.server_secret
    assert secret is not None
    assert secret.get_secret_value() == "four words of salt"


def test_one_ingress_writes_a_recording_and_the_knowledge_base() -> None:
    two = {"SAMOVAR_SERVER__INGRESS_REPLICAS": "2"}
    assert load(None, two, []).settings.server.ingress_replicas == 2
    assert "server.record" in complaint(None, {**two, "SAMOVAR_SERVER__RECORD": "/tmp/turns"})
    assert "knowledge.enabled" in complaint(None, {**two, "SAMOVAR_KNOWLEDGE__ENABLED": "true"})


def test_the_number_of_ingresses_may_be_auto() -> None:
    assert (
        load(None, {"SAMOVAR_SERVER__INGRESS_REPLICAS": "auto"}, []).settings.server.ingress_replicas is None
    )
    assert "1 to 64" in complaint(None, {"SAMOVAR_SERVER__INGRESS_REPLICAS": "0"})


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "a\x9bb", "a\u202eb", "a\u2028b"])
def test_a_served_name_cannot_steer_a_terminal(name: str) -> None:
    text = complaint(None, {"SAMOVAR_MODEL__SERVED_NAME": name})
    assert "model.served_name" in text
    assert "printable" in text
    assert name not in text
    assert (
        load(None, {}, ["--model.served-name", "org/M\u00fc 1"]).settings.model.served_name == "org/M\u00fc 1"
    )
    assert "at most 256" in complaint(None, {"SAMOVAR_MODEL__SERVED_NAME": "x" * 257})


@pytest.mark.parametrize("host", ["LOCALHOST", "Localhost", "localhost", "127.9.9.9", "::1"])
def test_loopback_is_known_however_it_is_written(host: str) -> None:
    assert load(None, {}, ["--host", host]).settings.server.is_loopback


@pytest.mark.parametrize(
    ("yaml_text", "line"),
    [
        ("server: &a\n  x: *a\n", 2),
        ("&a server: &b\n  port: *b\n", 2),
        ("&a\nserver: *a\n", 2),
        ("auth:\n  api_keys: &a\n    hushHUSH: *a\n", 3),
    ],
)
def test_an_anchor_that_contains_itself_is_named(tmp_path: Path, yaml_text: str, line: int) -> None:
    text = complaint(written(tmp_path, yaml_text))
    assert f"line {line})\n    an anchor contains itself" in text
    assert "hushHUSH" not in text


def test_aliases_cannot_make_a_small_file_endless(tmp_path: Path) -> None:
    doubled = "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 60))
    text = complaint(written(tmp_path, "a0: &a0 {x: 1}\n" + doubled))
    assert text.count("there is no such setting") == 60


def test_what_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    deep = "[" * 100_000
    assert "nested too deeply" in complaint(None, {"SAMOVAR_AUTH__API_KEYS": deep})
    assert "nested too deeply" in complaint(None, {}, "--auth.api-keys", deep)
    assert "nested too deeply" in complaint(written(tmp_path, deep))


def test_the_home_of_nobody_is_a_missing_file() -> None:
    text = complaint("~nosuchuser/x.yaml")
    assert "~nosuchuser/x.yaml" in text
    assert "the file cannot be read: Could not determine home directory." in text


def test_two_tenants_with_one_key_are_refused_without_showing_it() -> None:
    keys = json.dumps({"red": SECRET, "blue": SECRET})
    text = complaint(None, {"SAMOVAR_AUTH__API_KEYS": keys})
    assert "red and blue have the same API key" in text
    assert "SAMOVAR_AUTH__API_KEYS" in text
    assert SECRET not in text


def test_rules_over_several_values_name_where_the_values_came_from() -> None:
    text = complaint(None, {}, "--host", "0.0.0.0")
    assert "0.0.0.0 is not a loopback address" in text
    assert "flag --host" in text
    assert "--engine.sequences-max" in complaint(None, {}, "--engine.sequences-max", "600")


def test_did_you_mean_finds_a_leaf_in_the_wrong_section() -> None:
    assert (
        did_you_mean("server.block_tokens", ["engine.block_tokens", "server.port"]) == "engine.block_tokens"
    )
    assert did_you_mean("engine.blok_tokens", ["engine.block_tokens", "server.port"]) == "engine.block_tokens"
    assert did_you_mean("qqqq", ["engine.block_tokens"]) is None
