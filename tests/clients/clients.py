"""Which clients are tried, in which versions, and which of their calls are known to fail, and why.

Calls are planned by the scripts (`scripts/with_*`), each with what it needs of a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Client:
    """A client and the script that uses it.

    `packages`: what pip installs for it, the client itself first; empty for the clients of JavaScript, whose
    versions are in `scripts/js/package.json`. `package`: its name there.
    """

    name: str
    script: str
    packages: tuple[str, ...] = ()
    package: str = ""

    @property
    def is_javascript(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai", "with_openai.py", ("openai==3.54.0",)),
    Client("openai (JS)", "with_openai.mjs", package="openai"),
    Client("Vercel AI SDK", "with_ai_sdk.mjs", package="ai"),
    Client("litellm", "with_litellm.py", ("litellm[mcp]==1.106.2",)),  # it sends tools only with mcp
    Client("langchain-openai", "with_langchain.py", ("langchain-openai==1.7.3",)),
    Client("instructor", "with_instructor.py", ("instructor[anthropic]==1.17.0",)),
    Client("pydantic-ai", "with_pydantic_ai.py", ("pydantic-ai-slim[openai,anthropic]==2.66.0",)),
    Client("openai-agents", "with_openai_agents.py", ("openai-agents==0.24.0",)),
    Client("llm", "with_llm.py", ("llm==0.36",)),
    Client("anthropic", "with_anthropic.py", ("anthropic==2.12.0",)),
    Client("aiperf", "with_aiperf.py", ("aiperf==0.13.0",)),
)

NEEDS = ("tools", "schema", "responses", "messages")
"""What a call may need besides models, chat and text completions."""

NOT_YET: Mapping[str, str] = MappingProxyType({})
"""What this tree does not serve: a call that needs it is expected to fail. Take out what is served."""

KNOWN_FAILURES: Mapping[tuple[str, str], str] = MappingProxyType({})
"""(client, call) -> why it is expected to fail although all it needs is served."""


def expected_failure(client: str, call: str, needs: tuple[str, ...]) -> str | None:
    """Say why a call is expected to fail; None: it has to work."""
    if known := KNOWN_FAILURES.get((client, call)):
        return known
    return next((NOT_YET[need] for need in needs if need in NOT_YET), None)
