"""Try all clients against one service, print the table, and write `bench/out/clients.json`.

Each client is installed unmodified below `build/clients`, and one script of `scripts/` uses it. The service
is this tree's own with the default model, or a running one (`--url`); further flags are those of its
`samovar serve`. Exit code: 1 if a call failed that has
to work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import httpx
from rich.console import Console

from bench._report import OUT_DIR, machine
from tests.clients.clients import CLIENTS, Client
from tests.clients.environments import Environments, InstallError
from tests.clients.outcome import Outcome, is_failure, outcomes
from tests.clients.table import summary, table

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "clients"
CALL_S = 120
CLIENT_S = 900
WIDTH_IN_A_PIPE = 160
# vLLM takes a minute to compile what saves less than that here, and what memory there is for its pool.
OF_ENGINES = {
    "samovar": (),
    "vllm": (
        *("--engine.vllm.options", json.dumps({"enforce_eager": True})),
        *("--engine.pool-bytes-max", str(1 << 30)),
    ),
}
# Clients that would ask their makers' servers for something do without: a test talks to 127.0.0.1 only.
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "NO_PROXY": "127.0.0.1",
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-clients", description=(__doc__ or "").partition("\n")[0])
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--url", help="a running service, such as http://127.0.0.1:8000; default: one is started"
    )
    place.add_argument("--fake", action="store_true", help="the ingress over a fake replica, without a model")
    parser.add_argument("--key", default="none", help="API key of the service at --url")
    parser.add_argument(
        "--only", action="append", metavar="CLIENT", help="only this client; may be given again"
    )
    parser.add_argument("--build", type=Path, default=BUILD, help="where clients are installed")
    parser.add_argument("--engine", choices=list(OF_ENGINES), default="samovar", help="that computes")
    args, flags = parser.parse_known_args(argv)
    if flags and (args.url or args.fake):
        parser.error(f"{flags[0]}: neither with --url nor with --fake")
    args.build = args.build.resolve()
    names = [client.name for client in CLIENTS]
    if unknown := sorted({*(args.only or ())} - {*names}):
        parser.error(f"--only {unknown[0]}: no such client. There are: {', '.join(names)}")
    chosen = [client for client in CLIENTS if not args.only or client.name in args.only]
    environments = Environments(args.build)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_IN_A_PIPE)
    commands: dict[str, list[str] | InstallError] = {}
    for client in chosen:  # before the service starts, which takes this machine for itself
        console.print(f"installing {client.name} {environments.version(client)}", highlight=False)
        try:
            commands[client.name] = environments.command(client)
        except InstallError as error:
            commands[client.name] = error
    found: list[Outcome] = []
    with _service(args, flags) as url:
        model = _model(url, args.key)
        for client in chosen:
            console.print(f"trying {client.name} at {url}", highlight=False)
            found += _try(
                client, commands[client.name], _environment(args.build, client, url, model, args.key)
            )
    versions = {client.name: environments.version(client) for client in chosen}
    _write(found, versions, model=model, is_fake=args.fake)
    console.print(table(f"Clients against {model}", versions, found))
    for line in summary(found):
        console.print(line, highlight=False, markup=False)
    return int(is_failure(found))


def _try(client: Client, command: list[str] | InstallError, environment: Mapping[str, str]) -> list[Outcome]:
    """Run the client's script; its output stays in the client's home, below `build/clients/home`."""
    if isinstance(command, InstallError):
        return [Outcome(client.name, "install", (), False, str(command))]
    home = Path(environment["HOME"])
    with (home / "out.txt").open("w+") as out, (home / "err.txt").open("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, cwd=home, start_new_session=True
        )
        try:
            ending = f"its script ended with {process.wait(CLIENT_S)}"
        except subprocess.TimeoutExpired:
            ending = f"its script took longer than {CLIENT_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # and what it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        said = err.read().strip().splitlines()[-1:]
        return outcomes(client, out.read(), " ".join([ending, *said]))


def _environment(build: Path, client: Client, url: str, model: str, key: str) -> dict[str, str]:
    """The script's environment: a home of its own, and no key or setting of the person who runs this."""
    home = build / "home" / client.name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "CLIENT_URL": url,
        "CLIENT_MODEL": model,
        "CLIENT_KEY": key,
        "CLIENT_CALL_S": str(CALL_S),
        **OFFLINE,
    }


@contextlib.contextmanager
def _service(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[str]:
    """The service's URL, while it runs."""
    if args.url:
        yield args.url.rstrip("/").removesuffix("/v1")
    elif args.fake:
        command = [sys.executable, "-m", "tests.clients.fake_service"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().strip()
            finally:
                process.terminate()
    else:
        from tests.support.services.service import serving

        given = ("--engine", args.engine, *OF_ENGINES[args.engine], *flags)
        with serving(args.build / "service.txt", *given) as service:
            yield service.url


def _model(url: str, key: str) -> str:
    """The service's first model."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=30)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise SystemExit(f"{url}/v1/models: {error}") from error


def _write(found: Sequence[Outcome], versions: Mapping[str, str], *, model: str, is_fake: bool) -> None:
    OUT_DIR.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine(),
        "command": " ".join(["python -m tests.clients", *sys.argv[1:]]),
        "model": model,
        "is_fake": is_fake,
        "versions": dict(versions),
        "rows": [{**asdict(outcome), "verdict": outcome.verdict} for outcome in found],
    }
    (OUT_DIR / "clients.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
