"""/v1/messages as a dialect of the one way to generate, and the list of models for Anthropic's SDKs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from samovar.router.anthropic.answers import MessagesShape
from samovar.router.anthropic.request import FIELDS, MessagesParser, ParsedMessages
from samovar.router.openai import AnswerHead, ApiError, Dialect, Json, ParsedRequest, rename


class MessagesDialect(Dialect):
    """Anthropic's /v1/messages; `decode`: the text of tokens."""

    id_prefix = "msg_"

    def __init__(self, parser: MessagesParser, decode: Callable[[Sequence[int]], str]) -> None:
        self._parser = parser
        self._decode = decode

    async def parse(self, body: bytes, tenant: str) -> ParsedMessages:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""
        return self._parser.messages(body)

    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> MessagesShape:
        """Return the shape of one answer."""
        assert isinstance(request, ParsedMessages)
        return MessagesShape(head, request, self._decode)

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error with the names that the fields have here."""
        return rename(error, FIELDS)


def models_page(cards: Sequence[Json]) -> Json:
    """Return the list of models with what Anthropic's list has besides OpenAI's fields."""
    data = [
        {
            **card,
            "type": "model",
            "display_name": card["id"],
            "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        }
        for card in cards
    ]
    ids = [card["id"] for card in cards]
    return {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
