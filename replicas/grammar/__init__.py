"""What an answer must look like: grammars compiled for a tokenizer, and which tokens may come next.

llguidance does the work. It is imported for the first grammar: a service without any never loads it.
"""

from samovar.replicas.grammar.compiler import GrammarCompiler
from samovar.replicas.grammar.exact_numbers import WRITTEN_CHARS_MAX, SchemaRefused
from samovar.replicas.grammar.json_schema import embedded_json, loosened
from samovar.replicas.grammar.state import GrammarRefused, GrammarState

__all__ = [
    "WRITTEN_CHARS_MAX",
    "GrammarCompiler",
    "GrammarRefused",
    "GrammarState",
    "SchemaRefused",
    "embedded_json",
    "loosened",
]
