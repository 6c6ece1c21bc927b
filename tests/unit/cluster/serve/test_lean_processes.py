"""What keeps running beside the replicas has no torch: only a replica and its ranks compute.

Each test runs what one of the service's processes runs at its start, in a process where torch, and mostly
transformers too, cannot be imported.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import apart, inspect_model
from samovar.replicas.model.apart import ENTRY
from samovar.router.ingress.app import open_prompts
from samovar.router.openai import RequestParser
from tests.house import ROOT
from tests.support.engines.tiny_models import make_tiny_model

BLOCK = """
import importlib.abc, json, sys
from pathlib import Path

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

BLOCKED = sys.argv[1].split(",")
sys.meta_path.insert(0, Blocked())
"""

DRIVER = """
import ray.cloudpickle
import samovar.cluster.cli.main, samovar.cluster.serve.app, samovar.cluster.deploy.deploy
from samovar.cluster.serve import environment, graph, preflight
from samovar.configs.settings import Settings
from samovar.replicas.model import check_heads, ensure_model, inspect_model

settings = Settings.model_validate_json(sys.argv[2])
preflight.first_look(settings)
model_dir = ensure_model(settings.model)
spec = inspect_model(model_dir, settings.inspected_dir)
check_heads(spec, 1)
preflight.check_gpus(settings)
environment.required_environment(settings)
for target in graph.run_targets(settings, str(model_dir), "app", 1).values():
    deployment = target.target._bound_deployment
    ray.cloudpickle.dumps((deployment._replica_config, deployment.func_or_class, deployment.init_args))
print(spec.fingerprint.hex())
"""

INGRESS = """
import asyncio
from samovar.configs.settings import Settings
from samovar.replicas.messages import Grammar
from samovar.replicas.model import leave_torch_out
from samovar.router.ingress.app import Ingress, open_prompts
from samovar.router.openai import RequestParser

settings = Settings.model_validate_json(sys.argv[2])
leave_torch_out()
spec, prompts = open_prompts(settings, sys.argv[3])
parser = RequestParser(settings.limits, spec.context_tokens_max, spec.generation)

async def use():
    await prompts.check_grammar(Grammar("json_schema", '{"type": "object"}', "response_format"))
    return await prompts.chat("", parser.chat(sys.argv[4].encode()))

prompt = asyncio.run(use())
prompts.template.form.template(reads_calls=True)
print(json.dumps([prompt.token_ids, prompt.rendered, prompts.vocabulary.config()]))
prompts.close()
"""

OTHERS = """
import samovar.router.proxy.proxy_guard, samovar.router.routing.request_router  # Serve's proxy
import samovar.cluster.serve.autoscale, samovar.replicas.serving.deployment  # Serve's controller
import samovar.cache_tiers.actors.tier, samovar.cache_tiers.sessions.actor  # of a node, of the cluster
import samovar.cache_tiers.node, samovar.cache_tiers.transport, samovar.replicas.messages
"""

CHAT = {
    "model": "served",
    "messages": [
        {"role": "system", "content": "Du bist kurz."},
        {"role": "user", "content": "größer, 12 cups of tea  and 茶"},
        {"role": "assistant", "content": "Yes\n"},
        {"role": "user", "content": "<|im_start|>?"},
    ],
}
BODY = json.dumps(CHAT)


def run(code: str, blocked: str, *args: str) -> str:
    command = [sys.executable, "-c", BLOCK + code, blocked, *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def settings_of(cache: Path, model: Path) -> Settings:
    given = {"model": {"cache_dir": str(cache), "path": str(model)}, "server": {"port": 1}}
    return Settings.model_validate(given)


def test_the_driver_runs_without_torch_and_transformers_from_the_first_start_on(
    tiny_llama: Path, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, tiny_llama).model_dump_json()
    told = [run(DRIVER, "torch,transformers", settings) for _ in range(2)]
    assert {text.split()[-1] for text in told} == {inspect_model(tiny_llama).fingerprint.hex()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_an_ingress_without_torch_makes_the_same_prompts(family: Any, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", family)
    settings = settings_of(tmp_path, model)
    spec, prompts = open_prompts(settings, str(model))
    request = RequestParser(settings.limits, spec.context_tokens_max, spec.generation).chat(BODY.encode())
    here = asyncio.run(prompts.chat("", request))
    shown = [here.token_ids, here.rendered, prompts.vocabulary.config()]
    prompts.close()
    told = run(INGRESS, "torch", settings.model_dump_json(), str(model), BODY)
    assert json.loads(told.splitlines()[-1]) == json.loads(json.dumps(shown))


def test_proxy_controller_and_actors_import_neither_torch_nor_transformers() -> None:
    run(OTHERS, "torch,transformers")


def test_what_is_asked_apart_is_refused_as_it_is_here(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": "two"}))
    (tmp_path / "bad.gguf").write_bytes(b"no GGUF")
    code = """
from samovar.configs.settings import ModelSettings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import ensure_model, inspect_model
told = []
for refused in (
    lambda: inspect_model(Path(sys.argv[2])),
    lambda: ensure_model(ModelSettings(path=Path(sys.argv[3]), cache_dir=Path(sys.argv[4])))
):
    try:
        refused()
    except ModelRefused as error:
        told.append([error.reason, error.fix])
print(json.dumps(told))
"""
    apart = json.loads(run(code, "torch,transformers", str(model), str(tmp_path / "bad.gguf"), str(tmp_path)))
    with pytest.raises(ModelRefused) as config_refused:
        inspect_model(model)
    assert apart[0] == [config_refused.value.reason, config_refused.value.fix]
    assert "bad.gguf" in apart[1][0]


def test_a_helper_process_ends_with_the_one_that_asked(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", ENTRY, "config", str(tiny_llama)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_helper_process_prints_nothing_of_its_own(tiny_llama: Path) -> None:
    """No warning that a module is there twice, and no thread that Python finds in a buffer when it ends."""
    code = (
        "import sys\nfrom samovar.replicas.model import apart\nprint(apart.run_apart('config', sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tiny_llama)]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)
    assert done.stderr == ""


def test_a_helper_process_has_ended_by_itself_when_its_answer_is_used(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int | None] = []

    class Watched(subprocess.Popen[bytes]):
        def __exit__(self, *raised: object) -> None:
            ended.append(self.returncode)  # before its input is closed
            super().__exit__(*raised)  # type: ignore[arg-type]

    monkeypatch.setattr(subprocess, "Popen", Watched)
    assert apart.run_apart("config", str(tiny_llama))
    assert ended == [0]
