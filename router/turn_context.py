"""What the front door knows of a turn besides its tokens, for those who forecast the next one."""

from __future__ import annotations

from collections.abc import Mapping

from configs.tier_settings import TierSettings
from replicas.messages import TurnContext
from router.parsed_request import ParsedChat, ParsedCompletion
from router.placement import profile_name


def turn_context(
    settings: TierSettings, tenant: str, headers: Mapping[str, str], request: ParsedChat | ParsedCompletion
) -> TurnContext:
    """Whose the last message is (a completion's prompt is a user's), and the use case.

    `headers`: lower-case names. Raises `InvalidValue` for a profile that does not exist.
    """
    is_user = not isinstance(request, ParsedChat) or request.messages[-1].role == "user"
    return TurnContext(
        "user" if is_user else "other", profile=profile_name(settings, tenant, headers, request.cache)
    )
