"""The first question about a prefilled document on a second node: from S3 against computing it.

Two raylets on this machine, a replica and a tier actor on each, and a real S3 server (rclone). Each round
takes in a new document of `--words` words, waits until its KV is stored, and asks about it in a session that
lives on the node that has not computed it. Then the same question again under a `cache_salt` of its
own, for which every block is new. CPU-seconds are those of all processes of the service from the question to
its first token; the S3 server's are not among them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # see cluster/cli/main.py

import httpx
import psutil

from bench import _report as report
from samovar.configs.settings import Settings
from tests.support.services.guests import PROSE
from tests.support.services.rclone import s3_server
from tests.support.services.service import MODEL, for_served_dtype, free_port, until
from tests.support.services.two_node_service import ServiceHere
from tests.support.services.two_nodes import two_raylets

MEDIANS = ("ttft_s", "cpu_s", "compute", "s3")
AT_ONCE = 4
TRIES_MAX = 12
STORED_S = 180.0
RESCAN_S = 10.0
QUESTION = [{"role": "user", "content": "Where does the train go?"}]


def settings_of(folder: Path, s3: Any) -> Settings:
    """Two replicas, one a node; RAM and S3 behind their pools, as nodes without a disk of their own."""
    cache = Path(os.environ.get("SAMOVAR_MODEL__CACHE_DIR", Path.home() / ".cache" / "samovar"))
    return Settings.model_validate(
        {
            "server": {"port": free_port()},
            "engine": {"threads": 1, "device": "cpu", "pool_bytes_max": for_served_dtype(384 << 20)},
            "cluster": {"replicas": 2, "replicas_per_node_max": 1},
            "model": {"cache_dir": cache},
            "router": {"stall_s": 120.0},
            "knowledge": {"enabled": True, "dir": folder / "kb", "embedder": "none"},
            "documents": {"prefill": "auto", "prefill_stored_s": STORED_S},
            "tiers": {
                "nvme": {"bytes_max": 0},
                "cpu": {"bytes_max": 256 << 20},
                "s3": s3.model_copy(update={"rescan_s": RESCAN_S}),
                "audit_share": 0.0,
                # Two cores for all of it: what is late here is not what is measured.
                **{"lookup_s_max": 10.0, "lookup_share": 100.0, "lookup_idle_share": 1.0},
            },
        }
    )


def cpu_s() -> float:
    """Processor time of all processes of the service until now: of this one and all below, but S3's."""
    root, total = psutil.Process(), 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            if "rclone" not in process.name():
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def asked(http: httpx.Client, document: str, **more: Any) -> dict[str, Any]:
    """One question: TTFT, CPU-seconds until the first token, and where its prompt came from."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0, "stream": True}
    body |= {"documents": [document], "ignore_eos": True, **more}
    before_s, began_s = cpu_s(), time.monotonic()
    ttft_s, spent_s = 0.0, 0.0
    receipt: dict[str, Any] = {}
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))  # our own service's
            if not ttft_s and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                ttft_s, spent_s = time.monotonic() - began_s, cpu_s() - before_s
            receipt = chunk.get("receipt", receipt)
    return {"ttft_s": ttft_s, "cpu_s": spent_s, "receipt": receipt}


def taken_in(http: httpx.Client, words: int, seed: int) -> dict[str, Any]:
    """A new document, once its KV is stored."""
    text = f"{seed} " + " ".join(random.Random(seed).choices(PROSE.split(), k=words))
    made = http.post("/v1/documents", json={"text": text}).raise_for_status().json()

    def stored() -> dict[str, Any] | None:
        card: dict[str, Any] = http.get(f"/v1/documents/{made['id']}").raise_for_status().json()
        return None if card["prefill"]["state"] in ("none", "waiting", "running") else card

    card = until("the document is prefilled", stored, 2 * STORED_S)
    assert card is not None
    if card["prefill"]["state"] != "stored":
        raise RuntimeError(f"it is not stored: {card['prefill']}")
    return card


def until_listed(http: httpx.Client) -> None:
    """Wait until every node has looked through S3 since now: a node learns so of others' objects."""
    began_s = time.monotonic()

    def have_listed() -> bool:
        nodes = http.get("/cache/stats").raise_for_status().json()["nodes"]
        ago_s = [tier["listed_ago_s"] for node in nodes for tier in node["tiers"] if tier["name"] == "s3"]
        return len(ago_s) == 2 and max(ago_s) < time.monotonic() - began_s

    until("each node has looked through S3", have_listed, STORED_S)


def one_on_each(http: httpx.Client) -> list[str]:
    """Sessions that live on different replicas: their next prompts go there."""

    def home_of(session: str) -> str:
        messages = [{"role": "user", "content": f"{session} " * 20}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, "session_id": session}
        answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        return str(answer["receipt"]["replica"][0])

    found: dict[str, str] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:  # an idle service has no reason to use its second replica
        for _ in range(TRIES_MAX):
            sessions = [str(uuid.uuid4()) for _ in range(AT_ONCE)]
            found |= dict(zip(pool.map(home_of, sessions), sessions, strict=True))
            if len(found) == 2:
                return list(found.values())
    raise RuntimeError("all sessions live on one replica")


def one_round(http: httpx.Client, words: int, seed: int) -> list[dict[str, Any]]:
    """A document, its first question on the other node, and the same computed."""
    sessions = one_on_each(http)
    before_s = cpu_s()
    card = taken_in(http, words, seed)
    prefill_cpu_s = cpu_s() - before_s
    until_listed(http)
    for session in sessions:
        found = asked(http, card["id"], session_id=session)
        if found["receipt"]["tokens"]["gpu"] < card["tokens"]:
            break
    else:
        raise RuntimeError("no question was answered by the other node")
    computed = asked(http, card["id"], session_id=session, cache_salt=str(uuid.uuid4()))
    rows = []
    for name, one in (("from the tiers", found), ("computed", computed)):
        tokens = one["receipt"]["tokens"]
        rows.append(
            {
                "name": name,
                "round": seed,
                "ttft_s": one["ttft_s"],
                "cpu_s": one["cpu_s"],
                **{source: tokens[source] for source in ("compute", "cpu", "s3", "peer")},
                "load_ms": one["receipt"]["load_ms"],
                "decision": one["receipt"]["decision"],
                "prefill_s": card["prefill"]["seconds"],
                "prefill_cpu_s": prefill_cpu_s,
                "document_tokens": card["tokens"],
            }
        )
    return rows


def summed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians of both ways, and how many times quicker the first is."""
    made: list[dict[str, Any]] = []
    for name in ("from the tiers", "computed"):
        own = [row for row in rows if row["name"] == name]
        medians = {part: statistics.median(row[part] for row in own) for part in MEDIANS}
        made.append({"name": name, "rounds": len(own), **medians})
    first, second = made
    ratios = {part: second[part] / first[part] for part in ("ttft_s", "cpu_s")}
    ratio = {"name": "computed / from the tiers", "rounds": first["rounds"], **ratios}
    return [*made, {**ratio, "compute": "", "s3": ""}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=4000, help="of a document; about as many tokens")
    arguments = parser.parse_args()
    logging.getLogger("ray").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with s3_server(folder / "s3") as s3, two_raylets(object_store_bytes=640 << 20):
            service = ServiceHere(settings_of(folder, s3))
            service.start()
            try:
                with httpx.Client(base_url=service.url, timeout=300, trust_env=False) as http:
                    one_round(http, 200, 0)  # what is cold is warm, and prices are measured
                    for seed in range(1, arguments.rounds + 1):
                        rows += one_round(http, arguments.words, seed)
            finally:
                service.stop()
    shown = summed(rows)
    report.show("The first question about a prefilled document on a second node", shown)
    print(f"written to {report.write('documents', rows, medians=shown)}")


if __name__ == "__main__":
    main()
