"""API keys that come and go, as digests: who has which, since when and until when.

`samovar keys` and the administrator's routes write them, all ingresses follow them. In a file, which is
replaced as a whole under a lock beside it, so a reader needs no lock; or in a table of PostgreSQL.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from samovar.configs.atomic_file import atomic_write, lock_beside
from samovar.configs.extras import require
from samovar.configs.json_text import parse_json
from samovar.configs.optional_sections import PostgresSettings
from samovar.configs.settings import Settings, TenantName

KEYS_MAX = 10_000
LASTS_S_MAX = 3650 * 86400
"""The longest time that a key is made for."""
FILE_BYTES_MAX = 8 << 20
KEY_BEGIN = "smv-"
KEY_BYTES = 32
SAID_CHARS_MAX = 300
SHOWN_CHARS = 12
"""Characters of a key that lists show: 48 of its 256 random bits."""
LOCK_S = 5.0
"""How long a change waits for another process's."""
KEPT_S = 90 * 86400
"""How long a key that is over stays in lists; then the next new one takes its line."""
USED_STEP_S = 3600
"""Steps in which the last use is kept: a write an hour and key, not one a request."""
TOO_OPEN = stat.S_IWGRP | stat.S_IWOTH

Seconds = Annotated[int, Field(ge=0, le=1 << 40)]


class KeysRefused(Exception):
    """The file must not be used, or a change is not possible; the message says why and what to do."""


def has_one_owner(tenant: str | None, admin: bool) -> bool:
    """Return whether a key would be a tenant's or the administrator's: not of both, nor of neither."""
    return admin != (tenant is not None)


class NoSuchKey(KeysRefused):
    """The file has no key of an id."""


class KeyIsOver(KeysRefused):
    """A key that is expired or revoked cannot be rotated."""


class KeyRecord(BaseModel):
    """A key as the file has it; times are Unix seconds. `tenant`: None: the administrator's.

    `sha256`: of the whole key. A plain digest is enough, where a password needs a slow and salted one: a key
    is 256 random bits that we drew, so there is no list of likely ones to try, and each request can pay for
    it. `shown`: the key's first characters.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: Annotated[str, StringConstraints(pattern=r"^key_[0-9a-f]{12}$")]
    tenant: TenantName | None
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    shown: Annotated[str, StringConstraints(max_length=SHOWN_CHARS)]
    created: Seconds
    expires: Seconds | None = None
    used: Seconds | None = None
    revoked: Seconds | None = None

    def state(self, now_s: float) -> Literal["valid", "expired", "revoked"]:
        """Return whether the key is good at this time."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now_s >= self.expires else "valid"

    def told(self, now_s: float) -> dict[str, object]:
        """Return what a list shows of the key: all but its digest."""
        return self.model_dump(exclude={"sha256"}) | {"state": self.state(now_s)}


class _Content(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    version: Literal[1]
    keys: Annotated[list[KeyRecord], Field(max_length=KEYS_MAX)]


class KeyStore(ABC):
    """Keys in one place that all ingresses read. Thread-safe, and safe beside other processes.

    `name`: of the place, for messages. `grace_s`: how long keys that were read are good while it cannot be
    read. `clock`: Unix time.
    """

    grace_s = 0.0

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock

    @abstractmethod
    def mark(self) -> tuple[int, ...]:
        """Return what changes with each write: it costs little. Raises `OSError`, `KeysRefused`."""

    @abstractmethod
    def read(self) -> tuple[KeyRecord, ...]:
        """Return all keys. Raises `OSError`, `FileNotFoundError` where none was ever made, `KeysRefused`."""

    def read_if_there(self) -> tuple[KeyRecord, ...]:
        """Return all keys, none if there is no place for them yet. Raises `OSError`, `KeysRefused`."""
        try:
            return self.read()
        except FileNotFoundError:
            return ()

    def create(self, tenant: str | None, lasts_s: int | None = None) -> tuple[KeyRecord, str]:
        """Make a key; return its record, and the key itself, which is nowhere else from then on.

        `tenant`: None: the administrator. Raises `OSError`, `KeysRefused`.
        """
        with self._changing() as keys:
            return self._added(keys, tenant, lasts_s)

    def rotate(self, key_id: str, keep_s: int) -> tuple[KeyRecord, str]:
        """Make another key for the same tenant that lasts as long; the old one ends `keep_s` from now.

        Raises `OSError`, `KeysRefused`.
        """
        now_s = int(self._clock())
        with self._changing() as keys:
            place = _place(keys, key_id)
            old = keys[place]
            if old.state(now_s) != "valid":
                raise KeyIsOver(f"{key_id} is {old.state(now_s)}. Make a new key")
            lasts_s = None if old.expires is None else old.expires - old.created
            ends = now_s + keep_s if old.expires is None else min(old.expires, now_s + keep_s)
            keys[place] = old.model_copy(update={"expires": ends})
            return self._added(keys, old.tenant, lasts_s)

    def revoke(self, key_id: str) -> KeyRecord:
        """End a key now; one that is revoked stays as it is. Raises `OSError`, `KeysRefused`."""
        with self._changing() as keys:
            place = _place(keys, key_id)
            if keys[place].revoked is None:
                keys[place] = keys[place].model_copy(update={"revoked": int(self._clock())})
            return keys[place]

    def note_used(self, used: Mapping[str, float]) -> None:
        """Write down when keys were last used, by their ids. Raises `OSError`, `KeysRefused`."""
        with self._changing() as keys:
            for place, key in enumerate(keys):
                last = int(used.get(key.id, 0)) // USED_STEP_S * USED_STEP_S
                if last > (key.used or 0):
                    keys[place] = key.model_copy(update={"used": last})

    def _added(self, keys: list[KeyRecord], tenant: str | None, lasts_s: int | None) -> tuple[KeyRecord, str]:
        now_s = int(self._clock())
        keys[:] = [key for key in keys if now_s - _over(key, now_s) < KEPT_S]
        if len(keys) >= KEYS_MAX:
            raise KeysRefused(f"{self.name} has {KEYS_MAX} keys, and no more may be in one place")
        key = KEY_BEGIN + secrets.token_urlsafe(KEY_BYTES)
        record = KeyRecord(
            id=f"key_{secrets.token_hex(6)}",
            tenant=tenant,
            sha256=hashlib.sha256(key.encode()).hexdigest(),
            shown=key[:SHOWN_CHARS],
            created=now_s,
            expires=None if lasts_s is None else now_s + lasts_s,
        )
        keys.append(record)
        return record, key

    @abstractmethod
    def _changing(self) -> AbstractContextManager[list[KeyRecord]]:
        """Give the keys, and write back what was changed of them, while no other process writes."""


class KeyFile(KeyStore):
    """Keys in the file at `path`. `clock`: Unix time."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path.expanduser()
        super().__init__(str(self.path), clock)

    def mark(self) -> tuple[int, int, int]:
        found = self.path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> tuple[KeyRecord, ...]:
        """Return all keys; see `KeyStore`.

        Root may own it, and others may read it, as where Kubernetes mounts a Secret; but no other user may
        be able to write keys into it.
        """
        # O_NONBLOCK: opening a pipe would block for ever.
        file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise KeysRefused(f"{self.path} is not a file. Give another auth.keys_file")
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & TOO_OPEN:
                mode = stat.S_IMODE(found.st_mode)
                raise KeysRefused(
                    f"others may write to {self.path} (owner {found.st_uid}, mode {mode:04o}), and so "
                    "make keys. See that it has no foreign ones, chmod 600 it, and use it as its owner"
                )
            data = opened.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise KeysRefused(f"{self.path} is larger than {FILE_BYTES_MAX} bytes: it is no file of keys")
        try:
            return tuple(_Content.model_validate(parse_json(data)).keys)
        except ValidationError as error:
            at = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
            raise KeysRefused(f"{self.path} is no file of `samovar keys`: see {at}") from None
        except ValueError:
            raise KeysRefused(f"{self.path} is no JSON. Restore it, or move it away") from None

    @contextmanager
    def _changing(self) -> Iterator[list[KeyRecord]]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path.resolve()  # of a link what it leads to is replaced, not the link
        with lock_beside(path, LOCK_S):
            before = self.read_if_there()
            keys = list(before)
            yield keys
            if tuple(keys) != before:
                content = _Content(version=1, keys=keys).model_dump()
                atomic_write(path, (json.dumps(content, indent=1) + "\n").encode())


GRACE_S = 300.0
"""How long keys are good that were read before a database went away: so long a revoked one may be."""
TABLE_FORMAT = 1
COLUMNS = tuple(KeyRecord.model_fields)
TABLES = """
CREATE SCHEMA IF NOT EXISTS {0};
CREATE TABLE {0}.api_keys_state(format integer NOT NULL, changes bigint NOT NULL);
CREATE TABLE {0}.api_keys(place bigint GENERATED ALWAYS AS IDENTITY UNIQUE, id text COLLATE "C" PRIMARY KEY,
    tenant text COLLATE "C", sha256 text COLLATE "C" NOT NULL UNIQUE, shown text NOT NULL,
    created bigint NOT NULL, expires bigint, used bigint, revoked bigint);
INSERT INTO {0}.api_keys_state VALUES ({1}, 0);
"""


class KeyTable(KeyStore):
    """Keys in a table of PostgreSQL, over one connection that is made when it is needed.

    `busy_s`: how long a change waits for another's. No error quotes the URL.
    """

    grace_s = GRACE_S

    def __init__(
        self, settings: PostgresSettings, busy_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(f"table {settings.schema_name}.api_keys", clock)
        self._settings = settings
        self._schema = settings.schema_name
        self._busy_s = busy_s
        self._lock = threading.Lock()
        self._connection: Any = None

    def mark(self) -> tuple[int, ...]:
        with self._transaction() as db:
            return (self._changes(db),)

    def read(self) -> tuple[KeyRecord, ...]:
        with self._transaction() as db:
            self._changes(db)
            return self._all(db)

    @contextmanager
    def _changing(self) -> Iterator[list[KeyRecord]]:
        with self._transaction() as db:
            # One at a time, also before there is a table.
            db.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"samovar {self.name}",))
            try:
                self._changes(db)
            except FileNotFoundError:
                db.execute(TABLES.format(self._schema, TABLE_FORMAT))
            before = {key.id: key for key in self._all(db)}
            keys = list(before.values())
            yield keys
            self._write(db, before, {key.id: key for key in keys})

    def _write(self, db: Any, before: Mapping[str, KeyRecord], now: Mapping[str, KeyRecord]) -> None:
        gone = list(before.keys() - now.keys())
        changed = [key for name, key in now.items() if before.get(name) != key]
        if not gone and not changed:
            return
        table, names = f"{self._schema}.api_keys", ", ".join(COLUMNS)
        db.execute(f"DELETE FROM {table} WHERE id = ANY(%s)", (gone,))
        new = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS)
        for key in changed:
            db.execute(
                f"INSERT INTO {table}({names}) VALUES ({', '.join(['%s'] * len(COLUMNS))})"
                f" ON CONFLICT (id) DO UPDATE SET {new}",
                [getattr(key, name) for name in COLUMNS],
            )
        db.execute(f"UPDATE {self._schema}.api_keys_state SET changes = changes + 1")

    def _changes(self, db: Any) -> int:
        """Return how often they were changed. Raises `FileNotFoundError` where there is no table yet."""
        query = "SELECT FROM pg_catalog.pg_tables WHERE schemaname = %s AND tablename = 'api_keys_state'"
        if db.execute(query, (self._schema,)).fetchone() is None:
            raise FileNotFoundError(errno.ENOENT, "no key was made yet", self.name)
        row = db.execute(f"SELECT format, changes FROM {self._schema}.api_keys_state").fetchone()
        if row is None or row[0] != TABLE_FORMAT:
            raise KeysRefused(f"{self.name} is of another release: this one reads format {TABLE_FORMAT}")
        return int(row[1])

    def _all(self, db: Any) -> tuple[KeyRecord, ...]:
        rows = db.execute(
            f"SELECT {', '.join(COLUMNS)} FROM {self._schema}.api_keys ORDER BY place"
        ).fetchall()
        try:
            return tuple(KeyRecord(**dict(zip(COLUMNS, row, strict=True))) for row in rows)
        except ValidationError as error:
            at = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
            raise KeysRefused(f"{self.name} has what is no key: see {at}") from None

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Give the connection in a transaction. Raises `KeysRefused` for what PostgreSQL raises."""
        import psycopg  # who has a file needs no client

        with self._lock:
            try:
                db = self._connected()
                with db.transaction():
                    for name, seconds in (
                        ("lock_timeout", self._busy_s),
                        ("statement_timeout", self._settings.statement_s),
                    ):
                        db.execute("SELECT set_config(%s, %s, true)", (name, f"{round(1000 * seconds)}ms"))
                    yield db
            except psycopg.Error as error:
                self._drop()
                said = error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__
                where = "the database of API keys (auth.keys_file, knowledge.postgres.url)"
                raise KeysRefused(f"{where} fails: {self._hidden(said)}") from None

    def _connected(self) -> Any:
        import psycopg

        if self._connection is not None:
            try:
                self._connection.execute("SELECT 1")
                return self._connection
            except psycopg.Error:  # as after a restart of the server
                self._drop()
        assert self._settings.url is not None
        self._connection = psycopg.connect(
            self._settings.url.get_secret_value(),
            autocommit=True,
            prepare_threshold=None,  # a pooler may stand between
            connect_timeout=math.ceil(self._settings.connect_s),
            tcp_user_timeout=int(1000 * self._settings.statement_s),
            keepalives_idle=10,
            keepalives_interval=10,
            keepalives_count=3,
            application_name="samovar",
        )
        return self._connection

    def _hidden(self, said: str) -> str:
        """Return what libpq says without the password; of a URL that is none it would quote all."""
        from psycopg import ProgrammingError, conninfo

        assert self._settings.url is not None
        try:
            password = conninfo.conninfo_to_dict(self._settings.url.get_secret_value()).get("password")
        except ProgrammingError:
            return "the URL is none that libpq understands"
        return (said.replace(str(password), "***") if password else said)[:SAID_CHARS_MAX]

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()


def open_keys(settings: Settings, clock: Callable[[], float] = time.time) -> KeyStore | None:
    """Return where the API keys are that come and go (`auth.keys_file`); None: nowhere. Reads nothing yet.

    Raises `ExtraMissing` if they are in PostgreSQL, and its client is not installed.
    """
    if settings.auth.keys_file is None:
        return None
    if settings.auth.has_key_table:
        require("psycopg", "auth.keys_file=postgres:")
        return KeyTable(settings.knowledge.postgres, settings.knowledge.busy_s, clock)
    return KeyFile(settings.auth.keys_file, clock)


def _place(keys: Sequence[KeyRecord], key_id: str) -> int:
    found = next((place for place, key in enumerate(keys) if key.id == key_id), None)
    if found is None:
        raise NoSuchKey(f"there is no key {key_id[:40]!r}. `samovar keys list` has their ids")
    return found


def _over(key: KeyRecord, now_s: int) -> int:
    """Return since when a key is over; now, if it is not."""
    return min(now_s if key.revoked is None else key.revoked, now_s if key.expires is None else key.expires)
