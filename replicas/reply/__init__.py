"""An answer's text as a message: what is thought, what is said, and which tools are called."""

from samovar.replicas.reply.calls import TOOL_NAME, Piece, finite
from samovar.replicas.reply.formats import (
    FORMATS,
    CallFrame,
    ReplyFormat,
    declared_format,
    format_named,
    sniffed_format,
)
from samovar.replicas.reply.reader import (
    Call,
    Reply,
    ReplyReader,
    ReplyReading,
    called_tools,
    read_reply,
)

__all__ = [
    "FORMATS",
    "TOOL_NAME",
    "Call",
    "CallFrame",
    "Piece",
    "Reply",
    "ReplyFormat",
    "ReplyReader",
    "ReplyReading",
    "called_tools",
    "declared_format",
    "finite",
    "format_named",
    "read_reply",
    "sniffed_format",
]
