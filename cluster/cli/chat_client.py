"""Speaks HTTP for `samovar chat`, by the `openai` client: which models there are, and an answer's stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai

from samovar.cluster.cli.conversation import ChatError, error_code, error_message, printable
from samovar.configs.json_text import parse_json
from samovar.configs.settings import ServerSettings

CONNECT_S = 5.0
SILENCE_S = 120.0  # a live server sends a comment at least every few seconds


# All that a request may carry: openai adds headers that its own variables name (`OPENAI_ORG_ID`,
# `OPENAI_CUSTOM_HEADERS`), which are meant for another server than this one, and describes this machine.
SENT_HEADERS = {"accept", "accept-encoding", "authorization", "connection", "content-length", "content-type"}
SENT_HEADERS |= {"host", "user-agent", "x-session-id"}


class ChatClient:
    """Makes the two HTTP calls that a chat needs. Blocking; for one thread. Close it when done."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is the server's root, with or without `/v1`. Raises `ChatError` if it is no HTTP URL."""
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"--url {url} is not a URL. Write it like http://127.0.0.1:8000")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ChatError("the API key in SAMOVAR_API_KEY holds characters that no HTTP header can carry")
        self._auth = {"Authorization": f"Bearer {api_key}" if api_key else openai.omit}
        # A proxy from the environment cannot reach this machine's loopback address.
        self.trusts_env = not ServerSettings(host=parts.hostname).is_loopback
        self._openai = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="-",  # not sent, but without one openai takes OPENAI_API_KEY
            timeout=openai.Timeout(SILENCE_S, connect=CONNECT_S),
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                trust_env=self.trusts_env,
                follow_redirects=False,
                event_hooks={"request": [_keep_sent_headers]},
            ),
        )

    def close(self) -> None:
        self._openai.close()

    def first_model(self) -> str:
        """Return the id of the first served model. Raises `ChatError`."""
        return self.models()[0]

    def models(self) -> list[str]:
        """Return the ids of the served models, one at least. Raises `ChatError`."""
        with self._explained():
            try:
                found = [model.id for model in self._openai.models.list(extra_headers=self._auth).data]
                return [str(found[0]), *map(str, found[1:])]
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ChatError(f"{self.url} does not list any model: is it an OpenAI endpoint?") from error

    def stream(self, body: dict[str, Any], session_id: str) -> Iterator[dict[str, Any]]:
        """Yield each chunk of the answer as it arrives. Raises `ChatError`."""
        headers = {**self._auth, "X-Session-Id": session_id}
        with self._explained(), self._openai.chat.completions.create(**body, extra_headers=headers) as answer:
            for chunk in answer:
                if not isinstance(chunk, openai.BaseModel):
                    said = str(chunk)[:80]
                    raise ChatError(f"the server sent an event that is not a JSON object: {said!r}")
                yield chunk.to_dict(warnings=False)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except openai.APIStatusError as error:
            raise ChatError(_refusal(error)) from error
        except openai.APITimeoutError as error:
            reason = type(error.__cause__).__name__
            raise ChatError(f"{self.url} did not answer in time ({reason})") from error
        except openai.APIConnectionError as error:
            if type(error.__cause__).__name__ != "ConnectError":  # of httpx or httpx2, as openai has it
                raise ChatError(f"the connection to {self.url} broke: {error.__cause__}") from error
            raise ChatError(
                f"nothing answers at {self.url} ({error.__cause__}). "
                "Start it with `samovar serve`, or name another address with --url"
            ) from error
        except openai.APIError as error:  # an error event inside the stream
            raise ChatError(error_message({"error": error.body}) or "the server reported an error") from error
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            said = getattr(error, "doc", "")[:80]
            raise ChatError(f"the server sent something that is not JSON: {said!r}") from error


def _keep_sent_headers(request: Any) -> None:
    for name in set(request.headers) - SENT_HEADERS:
        del request.headers[name]


def _refusal(error: openai.APIStatusError) -> str:
    """Return what the server said against the request, and what to do about it."""
    try:
        body = parse_json(error.response.text)
    except ValueError:
        body = None
    said, code = error_message(body), error_code(body)
    said = (said or printable(error.response.reason_phrase) or "no reason given").rstrip(".")
    hints = {
        401: ". Put the API key into SAMOVAR_API_KEY",
        403: ". Put the API key into SAMOVAR_API_KEY",
        429: ". It is busy, try again in a moment",
        503: ". It is still loading or about to stop, try again in a moment",
    }
    hint = hints.get(error.status_code, "")
    if code == "context_length_exceeded":
        hint = ". Begin another conversation with /new, or start with a smaller --max-tokens"
    return f"the server refused ({error.status_code}): {said}{hint}"
