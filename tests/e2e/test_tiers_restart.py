"""Conversations outlive the service: SIGTERM, SIGKILL, another secret, other weights, a slow disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.configs.settings import ModelSettings
from samovar.replicas.model.store import ensure_model
from tests.support.services.guests import Conversation, Reply
from tests.support.services.service import MODEL, until
from tests.support.services.tier_service import HASTY, TierService, flag, records, tier_service

pytestmark = pytest.mark.timeout(900)

OTHER_SECRET = "another-secret-for-tests"
DELAY_S = 3.0
DELAY_RATE = 0.5
QUIET_SEED = 20669
"""The first 9 calls, with which the tier is measured and looked through, come quickly; of the next 40, 26 do
not (`FaultyTier` draws seven numbers a call, and the first is the delay's)."""

SLACK_S = 1.0


def same_as_uncached(service: TierService, conversation: Conversation, reply: Reply) -> None:
    """`reply` is the last one in the conversation."""
    asked = conversation.messages[:-1]
    assert service.uncached(asked).text == reply.text


class Told:
    """Two conversations, each of two turns: `flushed` was in RAM only when the service was stopped."""

    def __init__(self) -> None:
        self.flushed = Conversation(1)
        self.killed = Conversation(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    """Told to two services, one stopped, one killed, over the same files."""
    told = Told()
    with tier_service(folder, {"tiers.profiles.chat.write_behind": flag([])}) as service:
        for _ in range(2):
            service.turn(told.flushed)
        service.settle()
        assert service.tier("nvme")["extents"] == 0, "it should be in main memory only"
    assert service.on_disk(told.flushed) > 100, "a stop writes main memory down"
    with tier_service(folder) as service:
        reply = service.turn(told.flushed)
        check_hit(reply, "nvme")
        same_as_uncached(service, told.flushed, reply)
        for _ in range(2):
            service.turn(told.killed)
        until("it is written behind", lambda: service.on_disk(told.killed) > 100)
        service.kill()
    return told


def check_hit(reply: Reply, tier: str) -> None:
    """Most of the prompt came from that tier, and nothing from elsewhere."""
    assert reply.by_tier[tier] > reply.prompt_tokens // 2, reply.receipt
    assert reply.cached == reply.by_tier[tier]
    assert reply.receipt["decision"] in ("load", "meet")


@pytest.mark.slow
def test_g2_another_secret_finds_nothing(folder: Path, told: Told) -> None:
    """Before the test that finds it all: nothing is missing because it is gone."""
    with tier_service(folder, secret=OTHER_SECRET) as service:
        assert service.tier("nvme")["extents"] >= 4
        for conversation in (told.flushed, told.killed):
            reply = service.ask(conversation.next_messages(), session=conversation.session)
            assert reply.cached == 0
            assert reply.receipt["decision"] == "none"


@pytest.mark.slow  # two services; the gate kills nodes in process: tests/faults/test_node_crashes.py
def test_g4_sigkill_after_the_write_behind_loses_nothing(folder: Path, told: Told) -> None:
    with tier_service(folder) as service:
        for conversation in (told.flushed, told.killed):
            reply = service.turn(conversation)
            check_hit(reply, "nvme")
            same_as_uncached(service, conversation, reply)
        service.check_books()
        records(folder)


@pytest.fixture(scope="module")
def slow_and_retrained(folder: Path, told: Told) -> Iterator[TierService]:
    """The same model name over the same files, with one weight changed. Its disk is slow half the time."""
    model = folder / MODEL
    shutil.copytree(ensure_model(ModelSettings()), model)
    weights = load_file(model / "model.safetensors")
    name = next(name for name, tensor in weights.items() if "mlp.down_proj" in name)
    weights[name] = weights[name] + torch.full_like(weights[name], 0.01)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    flags = {
        **HASTY,
        "model.path": model,
        "tiers.cpu.bytes-max": 0,
        "tiers.faults.nvme.delay-s": DELAY_S,
        "tiers.faults.nvme.delay-rate": DELAY_RATE,
        "tiers.faults.nvme.seed": QUIET_SEED,
    }
    with tier_service(folder, flags) as service:
        yield service


@pytest.mark.slow  # a service more; the gate has tests/faults/test_f13_namespaces.py
def test_f13_other_weights_under_the_same_name_find_nothing(
    told: Told, slow_and_retrained: TierService
) -> None:
    service = slow_and_retrained
    assert service.tier("nvme")["extents"] >= 4
    for conversation in (told.flushed, told.killed):
        messages = conversation.next_messages()
        reply = service.ask(messages, session=conversation.session)
        assert reply.cached == 0
        assert reply.receipt["decision"] == "none"
        assert service.uncached(messages).text == reply.text


@pytest.mark.slow
def test_f08_a_disk_that_takes_seconds_does_not_hold_answers_up(slow_and_retrained: TierService) -> None:
    service = slow_and_retrained
    conversations = [Conversation(seed, turn_words=90) for seed in range(10, 16)]
    for conversation in conversations:
        service.turn(conversation)
    until("all is on disk", lambda: all(map(service.on_disk, conversations)), 120)
    service.overrun()
    returned, computed = [], []
    for conversation in conversations:
        reply = service.turn(conversation)
        reference = service.uncached(conversation.messages[:-1])
        assert reference.text == reply.text
        returned.append(reply)
        computed.append(reference.ttft_s)
    late = [reply for reply in returned if reply.receipt["decision"] in ("hedge", "recompute")]
    assert late, f"no fault struck: {[dict(reply.receipt) for reply in returned]}"
    bound_s = 2 * median(computed) + SLACK_S
    assert bound_s < DELAY_S, "this machine is so busy that the test could not tell"
    assert all(reply.ttft_s < bound_s for reply in returned), [reply.ttft_s for reply in returned]
    service.check_books()
