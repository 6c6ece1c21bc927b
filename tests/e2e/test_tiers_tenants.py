"""Tenants of one service: some leave, some flood, some want to be forgotten. And a lost disk."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from samovar.cache_tiers.blocks.extent import ExtentHeader, session_of, tenant_tag
from tests.support.services.guests import Conversation, Reply
from tests.support.services.service import MODEL, free_port, until
from tests.support.services.tier_service import (
    ADMIN_KEY,
    MIB,
    TierService,
    flag,
    records,
    s3_env,
    s3_flags,
    s3_server,
    tier_service,
)

pytestmark = pytest.mark.timeout(900)

KEYS = {name: f"key-of-tenant-{name}" for name in ("alice", "bob", "carol")}
BOBS_SHARE = 0.25
TIER_BYTES = 64 * MIB
CUTS = 100
FLOOD = 24
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[TierService]:
    with s3_server(folder / "bucket", free_port()) as demo:
        flags = {
            **s3_flags(demo),
            "tiers.cpu.bytes-max": TIER_BYTES,
            "tiers.nvme.bytes-max": TIER_BYTES,
            "tiers.s3.bytes-max": TIER_BYTES,
            "tiers.tenant-share": 1.0,  # with several keys it is half by default: here only bob has a quota
            "tiers.tenant-shares": flag({"bob": BOBS_SHARE}),
            "tiers.breaker-open-s": 0.5,
        }
        env = {
            **s3_env(demo),
            "SAMOVAR_AUTH__API_KEYS": flag(KEYS),
            "SAMOVAR_AUTH__ADMIN_KEY": ADMIN_KEY,
        }
        with tier_service(folder, flags, env=env, key=ADMIN_KEY) as service:
            yield service
            service.check_books()


def talks(tenant: str, seeds: Sequence[int], turn_words: int = 90) -> list[Conversation]:
    return [Conversation(seed, turn_words=turn_words, key=KEYS[tenant]) for seed in seeds]


def all_at_once(service: TierService, conversations: Sequence[Conversation], **ask: object) -> list[Reply]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda conversation: service.turn(conversation, **ask), conversations))


def cached_share(service: TierService, conversations: Sequence[Conversation]) -> float:
    """Of the next turns, which are asked for and forgotten again.."""
    service.calm(conversations[0].key)
    replies = [
        service.ask(conversation.next_messages(), session=conversation.session, key=conversation.key)
        for conversation in conversations
    ]
    print(*(reply.receipt for reply in replies), service.stats(), sep="\n")
    return sum(reply.cached for reply in replies) / sum(reply.prompt_tokens for reply in replies)


# -- F23 -----------------------------------------------------------------------------------


def leave(service: TierService, seed: int, events: int) -> Conversation:
    """Ask, read so many events of the stream (none: hang up at once, in the queue perhaps), and go."""
    (conversation,) = talks("alice", [seed], turn_words=30 + seed % 60)
    body = {
        "model": MODEL,
        "messages": conversation.next_messages(),
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "session_id": conversation.session,
    }
    headers = {"authorization": f"Bearer {conversation.key}"}
    client = httpx.Client(base_url=service.url, headers=headers, timeout=120)
    with client, client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code in (200, 429)
        seen = 0
        for line in answer.iter_lines() if events else ():
            seen += line.startswith("data: ")
            if seen >= events:
                break
    return conversation


@pytest.mark.slow  # the gate has it in tests/api/test_disconnects.py
def test_f23_clients_that_leave_leave_nothing_behind(service: TierService) -> None:
    rng = random.Random(23)
    plans = [(1000 + number, rng.choice((0, 0, 1, 2, 3, 5, 8))) for number in range(CUTS)]
    with ThreadPoolExecutor(24) as pool:
        left = list(pool.map(lambda plan: leave(service, *plan), plans))
    until("nobody is served", lambda: service.total("samovar_replica_running") == 0, 20)
    service.check_books()
    records(service.nvme_dir)  # verifies each
    for conversation in rng.sample(left, 4):
        reply = service.turn(conversation)
        messages = conversation.messages[:-1]
        assert reply.text == service.uncached(messages, key=conversation.key).text


# -- F35 -----------------------------------------------------------------------------------


def nvme_bytes(service: TierService, tenant: str) -> int:
    """What a tenant has in files."""
    tag = tenant_tag(service.secret, tenant)
    found = records(service.nvme_dir).items()
    return sum(path.stat().st_size for path, header in found if header.tenant == tag)


@pytest.mark.slow  # the gate has it in process: tests/faults/test_catalog_races.py
def test_f35_a_flood_under_a_quota_does_not_wash_others_away(service: TierService) -> None:
    hers = talks("alice", range(3501, 3505))
    all_at_once(service, hers)
    service.settle()
    service.overrun(KEYS["alice"])
    before = cached_share(service, hers)
    assert before > 0.5
    all_at_once(service, talks("bob", range(3600, 3600 + FLOOD), turn_words=150), max_tokens=1)
    service.settle()
    assert cached_share(service, hers) >= 0.9 * before
    assert 0 < nvme_bytes(service, "bob") <= BOBS_SHARE * TIER_BYTES
    # The same of somebody without a quota takes more: it was the quota that held.
    all_at_once(service, talks("carol", range(3700, 3700 + FLOOD), turn_words=150), max_tokens=1)
    service.settle()
    assert nvme_bytes(service, "carol") > BOBS_SHARE * TIER_BYTES


# -- F36 -----------------------------------------------------------------------------------


def lying_about(service: TierService, folder: Path, tenant: str) -> list[ExtentHeader]:
    """Headers of all records of a tenant in files and in the bucket; fails when a folder of its is left."""
    tag = tenant_tag(service.secret, tenant)
    found = {**records(service.nvme_dir), **records(folder / "bucket")}
    return [header for path, header in found.items() if header.tenant == tag or tag.hex() in str(path)]


def delete(service: TierService, path: str, tenant: str) -> None:
    """Asked again until it says that all is gone, as its error says."""
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}

    def is_done() -> bool:
        answer = httpx.delete(f"{service.url}{path}", headers=headers, timeout=120)
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "clear_incomplete", answer.text
        return answer.status_code == 200

    until(f"DELETE {path} is complete", is_done, 60)


def test_f36_a_deleted_session_is_gone_while_it_is_being_moved(service: TierService, folder: Path) -> None:
    gone, stays = talks("alice", [3801, 3802])
    for _ in range(2):
        all_at_once(service, [stays, gone], cache_profile="documents")
    delete(service, f"/v1/sessions/{gone.session}", "alice")
    service.settle()
    service.calm(KEYS["alice"])
    sessions = [session_of(header.session) for header in lying_about(service, folder, "alice")]
    assert not service.session_tags(gone, "alice") & set(sessions)
    assert service.session_tags(stays, "alice") & set(sessions)
    reply = service.turn(gone)
    assert reply.cached == 0, reply.receipt
    assert service.turn(stays).cached > 0


def test_f36_all_of_a_tenant_is_gone_while_it_is_being_moved(service: TierService, folder: Path) -> None:
    (his,) = talks("bob", [3951])
    told, telling = talks("alice", range(3901, 3905)), talks("alice", range(3905, 3909))
    started = threading.Semaphore(0)

    def long_turn(conversation: Conversation) -> None:
        started.release()
        service.turn(conversation, max_tokens=100, ignore_eos=True, cache_profile="documents")

    tokens = "samovar_replica_generated_tokens_total"  # what runs could be over between two looks
    before = service.total(tokens)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(long_turn, conversation) for conversation in telling]
        for _ in telling:
            started.acquire()
        until("they are answered", lambda: service.total(tokens) > before)
        service.turn(his)
        until("his is on disk", lambda: service.on_disk(his, "bob") > 0)
        all_at_once(service, told, cache_profile="documents")
        delete(service, "/v1/cache", "alice")
        for future in running:
            future.result()
    delete(service, "/v1/cache", "alice")  # whoever still waited in the queue then
    service.settle()
    assert lying_about(service, folder, "alice") == []
    assert service.on_disk(his, "bob") > 0
    for conversation in told:
        reply = service.ask(conversation.messages[:-1], session=conversation.session, key=conversation.key)
        assert reply.cached == 0, reply.receipt


# -- F07, the last one: the disk is not what it was afterwards ------------------------------


def test_f07_a_directory_that_is_removed_costs_what_was_in_it(service: TierService) -> None:
    service.settle()
    hers = talks("alice", range(701, 707))
    all_at_once(service, hers[:3])
    service.settle()
    failed = service.tier("nvme")["write_errors"]
    shutil.rmtree(service.nvme_dir)
    all_at_once(service, hers)
    # Not the breaker: fewer failures than open it are followed by a probe, which makes the directory anew.
    until("it is noticed", lambda: service.tier("nvme")["write_errors"] > failed, 60)
    for conversation in hers:
        messages = conversation.messages[:-1]
        assert service.uncached(messages, key=conversation.key).text == conversation.messages[-1]["content"]
    until("it is used again", lambda: service.tier_up("nvme"), 60)
    (late,) = talks("alice", [709])
    service.turn(late)
    until("what is told now is on disk", lambda: service.on_disk(late, "alice") > 0)
