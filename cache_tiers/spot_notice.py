"""Spot notices of a cloud machine: what the instance metadata say, and asking them again and again.

AWS tells two minutes ahead that it takes a spot machine back. The poller hands that on once, to whoever
drains nodes, and knows nothing of Ray. Whatever the metadata answer, or do not, is logged and never fatal.
A recommendation to rebalance is no notice.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from configs.json_text import parse_json
from configs.tier_settings import NodeSettings

logger = logging.getLogger("samovar.tiers")

NOTICE_S = 120.0
"""AWS gives so much time; assumed where the clocks of machine and notice cannot both be right."""
NOTICE_S_MAX = 600.0
ANSWER_BYTES_MAX = 4096
TOKEN_S = 21600
TOKEN_PATH = "/latest/api/token"
NOTICE_PATH = "/latest/meta-data/spot/instance-action"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
UNAUTHORIZED, NOT_FOUND, OK = 401, 404, 200

Ask = Callable[[str, str, dict[str, str]], tuple[int, bytes]]
"""(method, path, headers) -> (status, body). Raises `OSError`."""


class NoticeUnclear(Exception):
    """An answer that is neither a notice nor the lack of one."""


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """`action`: terminate, stop or hibernate; the blocks are gone after each. `left_s`: until then."""

    action: str
    left_s: float


def read_notice(body: bytes, now_unix_s: float) -> SpotNotice:
    """The notice in an answer, such as `{"action": "terminate", "time": "2026-01-31T09:26:35Z"}`.

    A time that has passed, or is far off, is a clock's fault: `NOTICE_S` then. Raises `NoticeUnclear`.
    """
    try:
        said = parse_json(body)
        action, at = str(said["action"]), datetime.fromisoformat(said["time"])
        at_unix_s = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise NoticeUnclear(f"{type(error).__name__} in {body[:200]!r}") from error
    left_s = at_unix_s - now_unix_s
    if not 0 < left_s <= NOTICE_S_MAX:
        logger.warning("a spot notice for %.0f s from now: taking it for %.0f s", left_s, NOTICE_S)
        left_s = NOTICE_S
    return SpotNotice(action, left_s)


class SpotMetadata:
    """The metadata service, version 2: a token first. `ask`: see `Ask`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._token = ""

    def notice(self, now_unix_s: float) -> SpotNotice | None:
        """None: no notice. Raises `OSError`, `NoticeUnclear`."""
        if not self._token:
            status, body = self._ask("PUT", TOKEN_PATH, {TTL_HEADER: str(TOKEN_S)})
            token = body.decode("ascii", errors="replace")
            if status != OK or not (token.isascii() and token.isprintable() and token):
                raise NoticeUnclear(f"no token: HTTP {status}")
            self._token = token
        status, body = self._ask("GET", NOTICE_PATH, {TOKEN_HEADER: self._token})
        if status == UNAUTHORIZED:
            self._token = ""  # out of date: a new one next time
        if status == NOT_FOUND:
            return None
        if status != OK:
            raise NoticeUnclear(f"HTTP {status}")
        return read_notice(body, now_unix_s)


class SpotWatch:
    """Asks in a thread of its own, until `drain` has taken a notice.

    `drain(left_s)`: tell the cluster that this node goes within so many seconds; False or an exception: it
    did not listen, and is told again.
    """

    def __init__(self, settings: NodeSettings, drain: Callable[[float], bool]) -> None:
        self._poll_s = settings.spot_poll_s
        self._metadata = SpotMetadata(http_ask(settings.spot_notice_url, settings.spot_answer_s_max))
        self._drain = drain
        self._ends_s: float | None = None
        self._trouble = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spot-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            try:
                if self._look():
                    return
            except Exception:  # GCS away, or nobody expected it: the next look may go better
                logger.exception("a look for a spot notice failed")

    def _look(self) -> bool:
        """Whether a notice has been handed on."""
        if self._ends_s is None:
            notice = self._asked()
            if notice is None:
                return False
            logger.warning("spot notice: %s in %.0f s", notice.action, notice.left_s)
            self._ends_s = time.monotonic() + notice.left_s
        return self._drain(max(0.0, self._ends_s - time.monotonic()))

    def _asked(self) -> SpotNotice | None:
        try:
            notice = self._metadata.notice(time.time())
        except (OSError, NoticeUnclear) as error:
            self._say(f"{type(error).__name__}: {error}")
            return None
        self._say("")
        return notice

    def _say(self, trouble: str) -> None:
        """Once, and not every few seconds."""
        if trouble and not self._trouble:
            logger.warning("no word from the instance metadata, spot notices would be missed: %s", trouble)
        elif self._trouble and not trouble:
            logger.info("the instance metadata answer again")
        self._trouble = trouble


def http_ask(url: str, answer_s_max: float) -> Ask:
    """`Ask` over HTTP, past all proxies: they could not reach a link-local address."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        request = urllib.request.Request(url + path, method=method, headers=headers)
        try:
            with opener.open(request, timeout=answer_s_max) as reply:
                return int(reply.status), reply.read(ANSWER_BYTES_MAX)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(ANSWER_BYTES_MAX)
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP: {type(error).__name__}") from error

    return ask
