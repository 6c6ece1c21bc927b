"""Chat templates that write tools, calls and reasoning as the templates of known families do.

Written for the tests: each keeps what matters to a server (where tools are, how a call is written, when old
reasoning is left out) and ends its turns with the tiny tokenizer's `<|im_end|>`. Knows nothing of Samovar.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.support.engines.tiny_models import make_tiny_tokenizer

_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

HERMES = (
    "{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}{{ '\n<tools>' }}{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}"
    "{{ '\n</tools>\nCall with <tool_call></tool_call>' }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{{ '<|im_start|>tool\n<tool_response>' ~ message.content ~ '</tool_response><|im_end|>\n' }}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' ~ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n' if message.content or not loop.first }}"
    '{{ \'<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) ~ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif message.role == 'user' %}"
    "{{ '<|im_start|>user\n' ~ message.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}" + _OPEN
)

# Reasoning is kept only behind the last message of the user; thinking can be switched off.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content ~ '\n\n' }}{% endif %}"
    "{{ '# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}"
    "{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '<|im_start|>user\n' ~ message.content ~ '<|im_end|>\n' }}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% set thought = message.reasoning_content or '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' }}{% endif %}{{ message.content.lstrip('\n') }}"
    "{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first }}"
    '{{ \'<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) ~ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    + _OPEN
    + "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)

# One call a message; the tools are part of the first user message.
LLAMA3 = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and loop.index0 <= 1 and tools %}"
    '{{ \'<|im_start|>user\nGiven these functions, answer with {"name": ..., "parameters": ...}\' }}'
    "{% for tool in tools %}{{ '\n' ~ (tool | tojson(indent=4)) }}{% endfor %}"
    "{{ '\n' ~ message.content | trim ~ '<|im_end|>' }}"
    "{% elif message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    '{{ \'<|im_start|>assistant\n{"name": "\' ~ call.name ~ \'", "parameters": \' }}'
    "{{ (call.arguments | tojson) ~ '}<|im_end|>' }}"
    "{% elif message.role == 'tool' %}"
    "{{ '<|im_start|>ipython\n' ~ (message.content | tojson) ~ '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content | trim ~ '<|im_end|>' }}{% endif %}"
    "{% endfor %}" + _OPEN
)

# Short ids only, and the answer begins without a header.
MISTRAL = (
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] ~ ', \"id\": \"' ~ call.id ~ '\"}' ~ (', ' if not loop.last else '') }}"
    "{% endfor %}{{ ']<|im_end|>' }}"
    "{% elif message.role == 'tool' %}"
    '{{ \'[TOOL_RESULTS]{"content": \' ~ (message.content | tojson) ~ \', "call_id": "\' }}'
    "{{ message.tool_call_id ~ '\"}[/TOOL_RESULTS]' }}"
    "{% elif message.role == 'assistant' %}{{ message.content ~ '<|im_end|>' }}"
    "{% else %}{{ '[INST]' ~ message.content ~ '[/INST]' }}{% endif %}{% endfor %}"
)

# The answer begins inside of a thought; arguments are text.
DEEPSEEK = (
    "{% if tools %}{{ '<|im_start|>system\n' ~ (tools | tojson) ~ '<|im_end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if message.tool_calls %}{{ message.content ~ '<BARtool▁calls▁beginBAR>' }}"
    "{% for call in message.tool_calls %}"
    "{{ '<BARtool▁call▁beginBAR>function<BARtool▁sepBAR>' + call.function.name + '\n```json\n' + "
    "call.function.arguments + '\n```<BARtool▁call▁endBAR>' }}{% endfor %}{{ '<BARtool▁calls▁endBAR>' }}"
    "{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}{{ '<|im_end|>' }}"
    "{% elif message.role == 'tool' %}"
    "{{ '<BARtool▁output▁beginBAR>' ~ message.content ~ '<BARtool▁output▁endBAR>' }}"
    "{% else %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
).replace("BAR", "\uff5c")

# Each part of an answer has a channel; a turn has one call, and only its thought stays in a history. Each
# tool has a description.
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') ~ '<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|>' }}{% for tool in tools %}"
    "{{ '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = () => any;\n' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% set last = namespace(name=none) %}{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}"
    "{% set call = message.tool_calls[0].function %}{% set last.name = call.name %}"
    "{% if message.content and message.thinking %}{{ raise_exception('content and thinking') }}"
    "{% endif %}{% set thought = message.content or message.thinking %}"
    "{% if thought %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ thought ~ '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' ~ message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif message.role == 'tool' %}{{ '<|start|>functions.' ~ last.name }}"
    "{{ ' to=assistant<|channel|>commentary<|message|>' ~ (message.content | tojson) ~ '<|end|>' }}"
    "{% else %}{{ '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
HARMONY_TOKENS = ("start", "channel", "message", "constrain", "end", "call", "return")

TEMPLATES = {"hermes": HERMES, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "deepseek": DEEPSEEK}


def tokenizer_with(template: str | None) -> Any:
    """The tiny tokenizer with another chat template; None: its own, which knows no tools."""
    tokenizer = copy.copy(make_tiny_tokenizer())
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer
