"""`samovar deploy`: what it sends, in which order, what it refuses. The real thing: tests/infra."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import HTTPOptionsSchema
from rich.console import Console
from typer.testing import CliRunner

from samovar.cluster.cli.main import app
from samovar.cluster.deploy import deploy as deploying
from samovar.cluster.deploy.builders import AppArgs, read_secrets, secrets_digest
from samovar.cluster.deploy.deploy import (
    Deployed,
    ServeApi,
    ServeRest,
    applications,
    deployed_of,
    nodes_table,
    of_others,
    refuse_other_address,
    refuse_unfit,
    serve_config,
    stale_tiers,
    url_of,
)
from samovar.cluster.serve import rollout
from samovar.cluster.serve.environment import ray_environment
from samovar.cluster.serve.preflight import StartFailed
from samovar.cluster.serve.ray_cluster import asks_for_token, refuse_open_cluster
from samovar.cluster.serve.rollout import (
    FRONT_APP,
    MODEL_APP_PREFIX,
    Patience,
    exchange,
    steps,
)
from samovar.configs.fields import merged, public_tree, secret_tree
from samovar.configs.settings import EngineSettings, ServerSettings, Settings
from samovar.router.proxy import are_proxies_guarded, proxy_environment
from tests.house import ROOT

TERRAFORM = ROOT / "terraform"
KEY, SECRET = "a-key-of-team-one", "a-secret-of-the-server"
SECRETS = {"auth": {"api_keys": {"team": KEY}, "server_secret": SECRET}}
OLD, NEW = f"{MODEL_APP_PREFIX}old", f"{MODEL_APP_PREFIX}new"


def settings_of(**cluster: Any) -> Settings:
    return Settings.model_validate(
        {"server": {"host": "0.0.0.0"}, "cluster": {"ray_address": "auto", **cluster}, **SECRETS}
    )


def apps(*names: str, mark: str = "") -> dict[str, dict[str, Any]]:
    return {name: {"name": name, "mark": mark} for name in names}


class TestSplit:
    def test_the_parts_are_the_whole(self) -> None:
        settings = settings_of(replicas=3)
        assert secret_tree(settings) == SECRETS
        assert merged(json.loads(json.dumps(public_tree(settings))), SECRETS) == settings

    def test_no_secret_is_in_the_public_part(self) -> None:
        text = json.dumps(public_tree(settings_of()))
        assert KEY not in text
        assert SECRET not in text
        assert "api_keys" not in text


class TestSteps:
    def test_the_first_time_all_come_at_once(self) -> None:
        assert steps({}, apps(NEW, FRONT_APP)) == [apps(NEW, FRONT_APP)]

    def test_the_same_model_is_changed_in_place_before_the_ingress(self) -> None:
        now, wanted = apps(OLD, FRONT_APP), apps(OLD, FRONT_APP, mark="2")
        assert steps(now, wanted) == [{**now, OLD: wanted[OLD]}, wanted]

    def test_what_is_as_it_was_is_sent_once(self) -> None:
        assert steps(apps(OLD, FRONT_APP), apps(OLD, FRONT_APP)) == [apps(OLD, FRONT_APP)]

    def test_another_model_comes_up_beside_the_old_one(self) -> None:
        now, wanted = apps(OLD, FRONT_APP, mark="1"), apps(NEW, FRONT_APP, mark="2")
        first, second, last = steps(now, wanted)
        assert (set(first), first[FRONT_APP]["mark"]) == ({OLD, NEW, FRONT_APP}, "1")
        assert (set(second), second[FRONT_APP]["mark"]) == ({OLD, NEW, FRONT_APP}, "2")
        assert last == wanted

    def test_what_others_deployed_is_left_alone(self) -> None:
        theirs = apps("their-app")
        now = {**theirs, **apps(OLD, FRONT_APP)}
        assert of_others(now) == theirs
        sent = steps(now, {**of_others(now), **apps(NEW, FRONT_APP, mark="2")})
        assert [set(step) - {"their-app"} for step in sent] == [
            *[{OLD, NEW, FRONT_APP}] * 2,
            {NEW, FRONT_APP},
        ]
        assert all(step["their-app"] == theirs["their-app"] for step in sent)


class TestApplications:
    def made(self, settings: Settings) -> dict[str, Any]:
        return applications(settings, NEW, Path("~/samovar/secrets.yaml"), "0" * 64)

    def test_no_secret_is_sent(self) -> None:
        text = json.dumps(serve_config(settings_of(), self.made(settings_of())))
        assert KEY not in text
        assert SECRET not in text

    @pytest.mark.parametrize("share", [{"replicas_per_node_max": 1}, {"replica_cpus": 2}])
    def test_another_number_of_replicas_changes_no_argument(self, share: dict[str, Any]) -> None:
        one, two = (self.made(settings_of(replicas=n, **share)) for n in (1, 2))
        assert one[NEW]["args"] == two[NEW]["args"]
        assert two[NEW]["deployments"] == [{"name": "Replica", "num_replicas": 2}]
        assert two[FRONT_APP]["deployments"] == [{"name": "Ingress", "user_config": {"replicas": 2}}]

    def test_how_it_was_launched_is_no_argument(self) -> None:
        assert "launch" not in self.made(settings_of())[NEW]["args"]["settings"]

    def test_f33_ingresses_know_from_ray_alone_whether_proxies_are_guarded(self) -> None:
        """Proxies have what Ray was started with, and no application's environment."""
        for made in self.made(settings_of()).values():
            told = made["runtime_env"]["env_vars"]
            assert told["RAY_AUTH_MODE"] == "token"
            assert not are_proxies_guarded(told)
            assert not told.keys() & proxy_environment(settings_of()).keys()
        assert are_proxies_guarded(ray_environment(settings_of()))

    def test_autoscaling_decides_the_number_itself(self) -> None:
        settings = settings_of(autoscaling={"enabled": True, "replicas_min": 2})
        made = self.made(settings)
        assert made[NEW]["deployments"] == [{"name": "Replica"}]
        assert made[FRONT_APP]["deployments"][0]["user_config"] == {"replicas": 2}

    def test_with_autoscaling_the_settings_say_how_many_come_first(self) -> None:
        scaling = {"enabled": True, "replicas_max": 8}
        made = self.made(settings_of(replicas=5, replicas_per_node_max=1, autoscaling=scaling))
        args = AppArgs.model_validate(made[NEW]["args"])
        assert merged(args.settings, SECRETS).cluster.replicas_first == 5

    def test_the_builder_understands_it(self) -> None:
        args = AppArgs.model_validate(json.loads(json.dumps(self.made(settings_of())[NEW]["args"])))
        assert merged(args.settings, SECRETS).server.host == "0.0.0.0"

    def test_proxies_on_every_node_listen_where_the_settings_say(self) -> None:
        config = serve_config(settings_of(), {})
        assert config["proxy_location"] == "EveryNode"
        assert config["http_options"] == {"host": "0.0.0.0", "port": 8000, "keep_alive_timeout_s": 4010}
        assert HTTPOptionsSchema.model_validate(config["http_options"]).keep_alive_timeout_s == 4010

    def test_an_idle_connection_is_kept_longer_than_the_load_balancer_keeps_it(self) -> None:
        """Else it sends a request on a connection that is being closed, and its client gets a 502."""
        text = (TERRAFORM / "modules/edge/variables.tf").read_text()
        (most,) = re.findall(r"var\.idle_timeout_s <= ([0-9]+)", text)
        assert serve_config(settings_of(), {})["http_options"]["keep_alive_timeout_s"] > int(most)

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"port": 9000}, r"server\.port=9000 would not be used: .* with 8000\..*samovar down"),
            ({"host": "10.0.0.9"}, r"server\.host=10\.0\.0\.9 .* with 0\.0\.0\.0"),
            (
                {"tls_certificate": "/c.pem", "tls_key": "/k.pem"},
                r"server\.tls_certificate=/c\.pem .* with None",
            ),
        ],
    )
    def test_proxies_that_listen_otherwise_are_not_waited_for(
        self, changed: dict[str, Any], said: str
    ) -> None:
        settings = settings_of()
        runs = {"host": "0.0.0.0", "port": 8000, "keep_alive_timeout_s": 90, "ssl_keyfile": None}
        refuse_other_address(None, settings.server)
        refuse_other_address({"host": "0.0.0.0"}, settings.server)  # the port is Serve's own then
        with pytest.raises(StartFailed, match=r"server\.host=0\.0\.0\.0 .* with 127\.0\.0\.1"):
            refuse_other_address({}, settings.server)
        refuse_other_address(runs, settings.server)  # of a version with another time of idle connections
        server = ServerSettings.model_validate(settings.server.model_dump() | changed)
        with pytest.raises(StartFailed, match=said):
            refuse_other_address(runs, server)

    def test_a_private_cluster_is_no_place_to_deploy_to(self) -> None:
        with pytest.raises(StartFailed, match="ray_address is `local`"):
            refuse_unfit(Settings())

    def test_the_head_does_not_guess_what_workers_have(self) -> None:
        with pytest.raises(StartFailed, match=r"engine\.device"):
            refuse_unfit(settings_of())


class TestSecretsFile:
    def test_open_to_others_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "secrets.yaml"
        path.write_text(yaml.safe_dump(SECRETS))
        path.chmod(0o640)
        with pytest.raises(StartFailed, match="chmod 600"):
            read_secrets(path)

    @pytest.mark.parametrize("text", ["- a list", "key: [unclosed", "just-a-secret-word"])
    def test_something_else_is_refused_without_quoting_it(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "secrets.yaml"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(StartFailed) as refused:
            read_secrets(path)
        assert text not in str(refused.value)

    def test_missing_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StartFailed, match=r"none\.yaml"):
            read_secrets(tmp_path / "none.yaml")

    def test_the_digest_tells_files_apart(self) -> None:
        other = {"auth": {**SECRETS["auth"], "api_keys": {"team": KEY + "!"}}}
        assert secrets_digest(SECRETS, SECRET) == secrets_digest(dict(SECRETS), SECRET)
        assert secrets_digest(other, SECRET) != secrets_digest(SECRETS, SECRET)

    def test_the_builders_arguments_take_nothing_else(self) -> None:
        with pytest.raises(ValidationError):
            AppArgs.model_validate(
                {"settings": {}, "secrets_file": "x", "secrets_digest": "short", "model_app": "m"}
            )


@pytest.mark.guarantee("F37")
class TestAnOpenCluster:
    @pytest.mark.parametrize("address", ["10.0.0.5:6379", "127.0.0.1:6379", "[::1]:6379", "localhost:6379"])
    def test_without_a_token_it_is_refused_wherever_it_listens(self, address: str) -> None:
        with pytest.raises(StartFailed, match="RAY_AUTH_MODE=token") as refused:
            refuse_open_cluster(address, asks_for_token=False)
        assert address in str(refused.value)
        assert "node-ip-address" not in str(refused.value), "that leaves replicas' ports open"
        refuse_open_cluster(address, asks_for_token=True)

    @pytest.mark.parametrize(("status", "expected"), [(401, True), (403, True), (200, False), (500, False)])
    def test_a_stranger_at_the_dashboard(self, status: int, expected: bool) -> None:
        client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(status)))
        assert asks_for_token("http://127.0.0.1:8265", client) is expected

    @pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_MODE"])
    def test_deploy_refuses_whatever_the_shell_says(
        self, monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        monkeypatch.setenv(variable, "x" * 32)
        monkeypatch.setattr(deploying, "require_token", lambda: None)  # of this process, once and for all
        monkeypatch.setattr(deploying, "asks_for_token", lambda dashboard, client: False)
        settings = settings_of().model_copy(update={"engine": EngineSettings(device="cpu")})
        with pytest.raises(StartFailed, match="requires no token"):
            deploying.deploy(settings, Path("none"), Console(file=io.StringIO()))

    def test_no_dashboard_is_said_so(self) -> None:
        def nobody(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused", request=request)

        client = httpx.Client(transport=httpx.MockTransport(nobody))
        with pytest.raises(StartFailed, match=r"--cluster\.dashboard"):
            asks_for_token("http://127.0.0.1:8265", client)


class FakeServe(ServeApi):
    """Serve that answers `status` for what it was sent last."""

    def __init__(self, *status: str) -> None:
        self.sent: list[set[str]] = []
        self._status = list(status)

    def deploy(self, config: dict[str, Any]) -> None:
        self.sent.append({one["name"] for one in config["applications"]})

    def deployed(self) -> Deployed:
        status = self._status.pop(0) if len(self._status) > 1 else self._status[0]
        why = dict.fromkeys(self.sent[-1], "why")
        return Deployed({}, dict.fromkeys(self.sent[-1], status), why, {}, {}, {}, {})


class TestRollout:
    def exchange(self, api: ServeApi, new: str = NEW) -> list[str]:
        said: list[str] = []
        patience = Patience(60.0, "launch.up_timeout_s", said.append)
        now, wanted = apps(OLD, FRONT_APP), apps(new, FRONT_APP, mark="2")
        exchange(now, wanted, ServeRest(api, settings_of()), patience.wait)
        return said

    def test_each_step_waits_for_the_one_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rollout, "POLL_S", 0.001)
        api = FakeServe("DEPLOYING", "RUNNING")
        (said,) = self.exchange(api)
        assert api.sent == [{OLD, NEW, FRONT_APP}, {OLD, NEW, FRONT_APP}, {NEW, FRONT_APP}]
        assert said.startswith(f"{NEW} is DEPLOYING; ")
        assert said.endswith("0 model replicas run on 0 nodes")

    def test_what_was_there_comes_back_when_the_new_does_not_start(self) -> None:
        api = FakeServe("DEPLOY_FAILED")
        with pytest.raises(StartFailed, match="why"):
            self.exchange(api)
        assert api.sent == [{OLD, NEW, FRONT_APP}, {OLD, FRONT_APP}]

    @pytest.mark.parametrize(
        ("mark", "late", "sent"),
        [("", NEW, [{OLD, NEW, FRONT_APP}, {NEW, FRONT_APP}]), ("2", FRONT_APP, [{NEW, FRONT_APP}])],
    )
    def test_an_exchange_that_its_deployer_left_is_gone_on_with_once_what_it_began_runs(
        self, monkeypatch: pytest.MonkeyPatch, mark: str, late: str, sent: list[set[str]]
    ) -> None:
        """Found by the world, seed 88001056000025: an ingress was sent to a model that was not up yet.

        And where the ingress was being replaced, the model that the old one still asked was taken away.
        """
        monkeypatch.setattr(rollout, "POLL_S", 0.001)

        class Left(FakeServe):
            def deployed(self) -> Deployed:
                status = dict.fromkeys((NEW, OLD, FRONT_APP), "RUNNING")
                if not self.sent and late not in seen:
                    seen.append(late)
                    status[late] = "DEPLOYING"
                return Deployed({}, status, dict.fromkeys(status, "why"), {}, {}, {}, {})

            def deploy(self, config: dict[str, Any]) -> None:
                assert seen, f"{late} does not run yet"
                super().deploy(config)

        seen: list[str] = []
        api, patience = Left("RUNNING"), Patience(60.0, "launch.up_timeout_s")
        wanted = apps(NEW, FRONT_APP, mark="2")
        now = apps(OLD) | {NEW: wanted[NEW], FRONT_APP: apps(FRONT_APP, mark=mark)[FRONT_APP]}
        exchange(now, wanted, ServeRest(api, settings_of()), patience.wait)
        assert api.sent == sent

    def test_another_application_that_does_not_run_stops_nothing(self) -> None:
        class Others(FakeServe):
            def deployed(self) -> Deployed:
                status = {OLD: "RUNNING", FRONT_APP: "RUNNING", "theirs": "DEPLOY_FAILED"}
                return Deployed({}, status, dict.fromkeys(status, "why"), {}, {}, {}, {})

        now = apps(OLD, FRONT_APP, "theirs")
        api, patience = Others("RUNNING"), Patience(60.0, "launch.up_timeout_s")
        exchange(now, dict(now), ServeRest(api, settings_of()), patience.wait)
        assert api.sent == [{OLD, FRONT_APP, "theirs"}]

    def test_an_ingress_that_is_broken_is_replaced_after_its_model(self) -> None:
        class Broken(FakeServe):
            def deployed(self) -> Deployed:
                status = {OLD: "RUNNING", FRONT_APP: "UNHEALTHY" if len(self.sent) == 1 else "RUNNING"}
                return Deployed({}, status, dict.fromkeys(status, "why"), {}, {}, {}, {})

        assert self.exchange(Broken("RUNNING"), new=OLD) == []


def deployed_with(tiers: dict[str, Any]) -> dict[str, Any]:
    settings = Settings.model_validate(
        {"cluster": {"ray_address": "auto"}, "tiers": tiers, "server": {"host": "0.0.0.0"}, **SECRETS}
    )
    return dict(applications(settings, NEW, Path("~/samovar/secrets.yaml"), "0" * 64))


def test_what_the_tiers_will_not_hear_of_is_said() -> None:
    """They outlive a deployment: what they were made with counts."""
    before = deployed_with({"cpu": {"bytes_max": 2**30}})
    assert stale_tiers({}, before) == ""
    assert stale_tiers(before, before) == ""
    assert stale_tiers({FRONT_APP: {"name": FRONT_APP}}, before) == "", "of a version that says it elsewhere"
    after = deployed_with({"tenant_shares": {"kitchen": 0.3}, "profiles": {"of_tenant": {"kitchen": "code"}}})
    for one, other in ((before, after), (after, before)):
        assert "tiers.profiles.of_tenant, tiers.tenant_shares" in stale_tiers(one, other)
    after = deployed_with({"cpu": {"bytes_max": 2**31}, "nvme": {"direct_io": False}})
    said = stale_tiers(before, after)
    assert "tiers.cpu.bytes_max, tiers.nvme.direct_io" in said
    assert "samovar down" in said


def test_encryption_at_rest_does_not_seem_to_be_in_use() -> None:
    plain, one, other = ({}, *({"encryption_key_file": name} for name in ("/keys/one", "/keys/other")))
    for before, after in ((plain, one), (one, other), (one, plain)):
        with pytest.raises(StartFailed, match=r"tiers\.encryption_key_file=\S+ would not be used"):
            stale_tiers(deployed_with(before), deployed_with(after))
    assert stale_tiers(deployed_with(one), deployed_with(one)) == ""


def test_what_serve_says_is_read() -> None:
    replica = {"state": "RUNNING", "node_id": "n1"}
    details = {
        "proxies": {"n1": {"status": "HEALTHY", "node_ip": "10.0.0.1"}},
        "applications": {
            NEW: {
                "status": "RUNNING",
                "message": "",
                "deployed_app_config": {"name": NEW},
                "deployments": {"Replica": {"replicas": [replica, {"state": "STARTING", "node_id": "n2"}]}},
            },
            OLD: {"status": "DELETING", "deployed_app_config": {"name": OLD}, "deployments": {}},
        },
    }
    found = deployed_of(details)
    assert set(found.applications) == {NEW}
    assert found.replicas["Replica"] == ["n1"]
    assert found.addresses == {"n1": "10.0.0.1"}
    table = nodes_table({"n1": "10.0.0.1", "n2": "10.0.0.2"}, found)
    assert [list(column.cells) for column in table.columns][2] == ["1", "0"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://10.0.0.7:8000"),
        ("::", "http://10.0.0.7:8000"),
        ("10.9.9.9", "http://10.9.9.9:8000"),
    ],
)
def test_the_ready_line_names_an_address_that_others_reach(host: str, url: str) -> None:
    settings = settings_of()
    settings = settings.model_copy(update={"server": settings.server.model_copy(update={"host": host})})
    deployed = Deployed({}, {}, {}, {"Ingress": ["n1"]}, {}, {}, {})
    assert url_of(settings, {"n1": "10.0.0.7"}, deployed) == url


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.yaml"
    secrets.write_text(yaml.safe_dump(SECRETS))
    secrets.chmod(0o600)
    asked = ["deploy", "--secrets", str(secrets), "--server.host", "127.0.0.1"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    assert "ray_address is `local`" in result.output
