"""Sessions as real clients make them: side requests under a conversation's id do not cost it its blocks."""

from __future__ import annotations

from pathlib import Path

from tests.support.services.guests import Conversation
from tests.support.services.service import for_served_dtype
from tests.support.services.tier_service import MIB, TierService, tier_service

TOKENS = 4
SIDES = ("title", "tags", "follow-up questions")


def side_requests(service: TierService, talk: Conversation) -> None:
    """What Open WebUI asks after an answer: one message that quotes the conversation, under its id."""
    quoted = "\n".join(f"{message['role']}: {message['content'][:120]}" for message in talk.messages)
    for what in SIDES:
        content = f"### Task:\nSuggest {what} for this conversation.\n<chat_history>\n{quoted}"
        service.ask([{"role": "user", "content": content}], session=talk.session, max_tokens=TOKENS)


def test_with_side_requests_younger_conversations_keep_what_older_ones_would(tmp_path: Path) -> None:
    flags = {
        "tiers.cpu.bytes-max": for_served_dtype(96 * MIB),
        "tiers.nvme.bytes-max": 0,
    }
    with tier_service(tmp_path, flags) as service:
        older = [Conversation(seed) for seed in (2101, 2102, 2103)]
        younger = [Conversation(seed) for seed in (2104, 2105, 2106)]
        for talk in (*older, *younger):
            for _ in range(2):
                service.turn(talk, max_tokens=TOKENS)
                if talk in younger:
                    side_requests(service, talk)
        for seed in range(2201, 2218):
            service.turn(Conversation(seed, turn_words=80), max_tokens=TOKENS)
        service.settle()

        def kept(talks: list[Conversation]) -> list[float]:
            replies = [service.turn(talk, max_tokens=TOKENS) for talk in talks]
            return [reply.cached / reply.prompt_tokens for reply in replies]

        with service.http() as client:
            session = client.get(f"/v1/sessions/{younger[0].session}").raise_for_status().json()
        of_younger, of_older = kept(younger), kept(older)
        assert sum(of_younger) >= sum(of_older), f"kept of prompts: {of_younger} after {of_older}"
        assert min(of_younger) > 0.5, f"kept of prompts: {of_younger}"
        lineages = session["lineages"]
        assert [row["turns"] for row in lineages if row["is_main"]] == [2]
        assert len(lineages) == 1 + 2 * len(SIDES)
        assert session["tokens"] > max(row["tokens"] for row in lineages if not row["is_main"])
        service.check_books()
