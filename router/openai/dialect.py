"""The wire formats of the routes that generate: how each reads a request and writes an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from pydantic import BaseModel

from samovar.router.openai.answers import AnswerHead, AnswerShape, ChatShape, CompletionShape, Json
from samovar.router.openai.errors import ApiError, InvalidValue
from samovar.router.openai.parse import ParsedChat, ParsedCompletion, ParsedRequest, RequestParser
from samovar.router.openai.schema import NOT_PASSED, ChatBody


class Dialect(ABC):
    """How one route reads requests and writes answers. `id_prefix`: what its answers' ids begin with.

    `is_kept`: an answer that the client names can be had again, from one of its events on.
    """

    id_prefix: str
    is_kept = False

    @abstractmethod
    async def parse(self, body: bytes, tenant: str) -> ParsedChat | ParsedCompletion:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""

    @abstractmethod
    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> AnswerShape:
        """Return the shape of one answer; `session`: the session's tag."""

    async def over(self) -> None:
        """Share what shapes have kept of their answers, before the last bytes of one are sent."""
        return

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error with the names that this route's fields have."""
        return error


class ChatDialect(Dialect):
    """OpenAI's /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    is_kept = True

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser

    async def parse(self, body: bytes, tenant: str) -> ParsedChat:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""
        return self._parser.chat(body)

    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> AnswerShape:
        """Return the shape of one answer."""
        return ChatShape(head)


class CompletionDialect(Dialect):
    """OpenAI's /v1/completions."""

    id_prefix = "cmpl-"
    is_kept = True

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser

    async def parse(self, body: bytes, tenant: str) -> ParsedCompletion:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""
        return self._parser.completion(body)

    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> AnswerShape:
        """Return the shape of one answer."""
        return CompletionShape(head)


def with_passed(asked: BaseModel, said: Json, but: Collection[str] = ()) -> Json:
    """Return a chat's fields of another API's body: those that it says in its own way, `said`, and the rest.

    `but`: names of a chat's fields that mean something else there. Raises `InvalidValue` for a field that is
    there both ways.
    """
    passed = ChatBody.model_fields.keys() - NOT_PASSED - set(but)
    given = {name: value for name in sorted(passed) if (value := getattr(asked, name, None)) is not None}
    for name in given.keys() & said.keys():
        raise InvalidValue(name, f"{name} is there in two ways, as another field says the same. Give one.")
    return given | said


def names_here(names: Mapping[str, str], asked: BaseModel) -> dict[str, str]:
    """Return the client's names of a chat's fields, without those that it called as a chat does."""
    return {
        place: name for place, name in names.items() if getattr(asked, place.partition(".")[0], None) is None
    }


def rename(error: ApiError, places: Mapping[str, str]) -> ApiError:
    """Give an error about a translated field the name that the client used, in its message too.

    `places`: see `place_here`.
    """
    param = error.param
    if param is not None and (here := place_here(param, places)) != param:
        error.param = here
        error.message = error.message.replace(param, here)
    return error


def place_here(param: str, places: Mapping[str, str]) -> str:
    """Return the client's name of a translated field.

    `places`: of translated fields, the client's; the longest that fits counts, with what follows it.
    """
    fitting = (place for place in places if param == place or param.startswith((f"{place}.", f"{place}[")))
    place = max(fitting, key=len, default=None)
    return param if place is None else places[place] + param[len(place) :]
