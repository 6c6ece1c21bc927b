"""Three tenants' conversations under a real vLLM: what comes back, from where, and always the same text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree

from tests.support.services.rclone import s3_server
from tests.vllm.conftest import Truth
from tests.vllm.servers import BLOCK_TOKENS, OUTPUT_TOKENS, Answer, Tiers, Vllm, prompt

TENANTS = ("red", "green", "blue")
FIRST_TOKENS, TURN_TOKENS = 400, 70


def stored_tokens(ids: list[int]) -> int:
    """What is stored of a prompt and its answer: full blocks below the last token, which was not computed."""
    return (len(ids) + OUTPUT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass
class Talk:
    """One tenant's conversation."""

    tenant: str
    ids: list[int] = field(init=False)
    turns: int = 0

    def __post_init__(self) -> None:
        self.ids = prompt(self.tenant, FIRST_TOKENS)

    def next(self, vllm: Vllm, truth: Truth, tiers: Tiers) -> tuple[Answer, int]:
        """Ask the next turn; return the answer, and how many tokens were to be found."""
        known = stored_tokens(self.ids[: -TURN_TOKENS - OUTPUT_TOKENS]) if self.turns else 0
        answer = vllm.ask(self.ids, tenant=self.tenant, session=self.tenant)
        truth.check(self.ids, answer)
        until_stored(tiers, answer)
        self.turns += 1
        self.ids = self.ids + list(answer.token_ids) + prompt((self.tenant, self.turns), TURN_TOKENS)
        return answer, known


def until_stored(tiers: Tiers, answer: Answer) -> None:
    """Wait until a turn's blocks are in the tiers: the next one asks what is there."""
    if answer.receipt.get("stored_blocks"):
        tiers.until_settled()


def overrun(vllm: Vllm, tiers: Tiers) -> None:
    """Have vLLM's own pool forget all that was in it, by asking other things."""
    for number in range(3):
        until_stored(tiers, vllm.ask(prompt(("fill", number), 1500), tokens=1, tenant="fill"))


def test_conversations_come_back_over_restarts(vllm: Vllm, truth: Truth, tiers: Tiers) -> None:
    tiers.start()
    talks = [Talk(tenant) for tenant in TENANTS]
    for talk in talks:
        answer, _ = talk.next(vllm, truth, tiers)
        assert answer.by_tier == {}
    for talk in talks:
        answer, known = talk.next(vllm, truth, tiers)
        assert answer.hit_tokens == known

    def come_back(tier: str) -> None:
        for talk in talks:
            answer, known = talk.next(vllm, truth, tiers)
            assert answer.by_tier.keys() == {tier}
            assert answer.hit_tokens == known

    overrun(vllm, tiers)
    come_back("cpu")

    vllm.end()
    vllm.start()
    vllm.until_ready()
    come_back("cpu")

    tiers.end()
    tiers.start()
    vllm.forget()
    come_back("nvme")

    vllm.end()
    tiers.end()
    tiers.start()
    vllm.start()
    vllm.until_ready()
    come_back("nvme")
    counted = {line.split("{")[0]: line for line in vllm.metrics() if "by_source" in line and "disk" in line}
    assert counted, "vLLM's own metrics do not say what came from a disk"


def test_a_bucket_brings_it_back_to_a_machine_that_has_nothing(
    vllm: Vllm, truth: Truth, tiers: Tiers, tmp_path: Path
) -> None:
    with s3_server(tmp_path / "s3") as s3:
        assert s3.access_key_id is not None
        assert s3.secret_access_key is not None
        flags = {"tiers.s3.bucket": s3.bucket, "tiers.s3.endpoint": s3.endpoint, "tiers.s3.region": s3.region}
        env = {
            "SAMOVAR_TIERS__S3__ACCESS_KEY_ID": s3.access_key_id.get_secret_value(),
            "SAMOVAR_TIERS__S3__SECRET_ACCESS_KEY": s3.secret_access_key.get_secret_value(),
        }
        tiers.start(flags | {"tiers.nvme.bytes-max": 0}, env)
        talk = Talk("red")
        talk.next(vllm, truth, tiers)
        tiers.end()  # writes to the bucket
        rmtree(tiers.kv, ignore_errors=True)
        tiers.start(flags | {"tiers.nvme.bytes-max": 0}, env)
        tiers.until_held(1, "s3")
        vllm.forget()
        answer, known = talk.next(vllm, truth, tiers)
        assert answer.by_tier == {"s3": known}, answer.receipt
        assert answer.hit_tokens == known
        tiers.end()


def test_clearing_reaches_the_tiers(vllm: Vllm, truth: Truth, tiers: Tiers) -> None:
    tiers.start()
    ids = prompt("cleared", 300)
    first = vllm.ask(ids)
    until_stored(tiers, first)
    vllm.forget()
    again = vllm.ask(ids)
    assert again.by_tier == {"cpu": 288}
    vllm.forget(external=True)
    assert tiers.held("cpu") == 0
    cold = vllm.ask(ids)
    assert (cold.hit_tokens, cold.by_tier) == (0, {})
    for answer in (first, again, cold):
        truth.check(ids, answer)
