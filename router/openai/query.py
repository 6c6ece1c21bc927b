"""Values of a query string."""

from __future__ import annotations

from collections.abc import Mapping

from router.openai.errors import InvalidValue, shown

DIGITS_MAX = 10


def whole_number(params: Mapping[str, str], name: str, default: int, most: int) -> int:
    """Return a number from 1 to `most`; `default` where it is not given. Raises `InvalidValue`."""
    given = params.get(name)
    if given is None:
        return default
    is_number = given.isascii() and given.isdigit() and len(given) <= DIGITS_MAX
    if not is_number or not 1 <= int(given) <= most:
        raise InvalidValue(name, f"{name}={shown(given)} is no number from 1 to {most}.")
    return int(given)


def cursor(params: Mapping[str, str]) -> str:
    """Return the id that a page begins behind. Raises `InvalidValue` for what no id has."""
    given = params.get("after", "")
    if not given.isprintable():
        raise InvalidValue("after", f"after={shown(given)} has characters that no id has.")
    return given


def no_such_cursor(after: str) -> InvalidValue:
    """Return the error for the id of no item: an empty page would look like the end of the list."""
    message = f"after={shown(after)} is the id of no item here: it may have been deleted. Begin without it."
    return InvalidValue("after", message)
