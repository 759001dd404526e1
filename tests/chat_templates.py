"""Seven chat templates after the formats of public model families, and a tokenizer for each. Not a test.

Written for these tests, short, with what matters for a mask: which marks and newlines stand where, which token ends a
turn, what happens to earlier turns, to a system prompt and to tools.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'

_CHATML_TURNS = """
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}BEGIN{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>\\n' }}CALL{{ '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}END{{ '\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""".replace("CALL", _CALL)

CHATML = _CHATML_TURNS.replace("BEGIN", "").replace("END", "")
MARKED = _CHATML_TURNS.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
MARKED_WITH_NEWLINE = _CHATML_TURNS.replace("BEGIN", "{% generation %}").replace(
    "END{{ '\\n' }}", "{{ '\\n' }}{% endgeneration %}"
)
MARKED_WITH_HEADER = CHATML.replace(
    "{%- elif m.role == 'assistant' %}", "{%- elif m.role == 'assistant' %}{% generation %}"
).replace("{{- '<|im_end|>' }}{{ '\\n' }}", "{{- '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}")

LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- if tools and m.role == 'user' and (loop.first or (loop.index0 == 1 and messages[0].role == 'system')) %}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n\\n' }}{% endfor %}
{%- endif %}
{%- if m.tool_calls %}{% set call = m.tool_calls[0] %}CALL{% else %}{{ m.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""".replace(
    "CALL", _CALL.replace("arguments", "parameters", 1)
)

# Thoughts of turns before the last question are dropped; the last turn always gets its think tags, empty if need be.
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- set thought = m.reasoning_content or '' %}{% set content = m.content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}{% set content = content.split('</think>')[-1] %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content.lstrip('\\n') }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}CALL{{ '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""".replace("CALL", _CALL)

GEMMA = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# System prompt and tools stand in front of the last question only, so a later question takes them from the earlier.
MISTRAL = """{%- set ns = namespace(last=-1, system='') %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}
{{- '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}CALL{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}""".replace("CALL", _CALL)

# Thinking is chosen in the prompt; a turn that is over shows its answer alone, as if it had not been thought about.
DEEPSEEK = """{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{%- if messages[loop.index0 - 1].role == 'user' %}{{ '<｜Assistant｜></think>' }}{% endif %}
{{- (m.content or '').split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments | tojson }}{{ '<｜tool▁call▁end｜>' }}{% endfor %}
{{- eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}{{ '<｜Assistant｜>' }}
{{- '<think>' if thinking else '</think>' }}{% endif %}"""

# A finished conversation gets an end of text after the end of its last turn.
PHI = """{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""


@dataclass(frozen=True)
class Format:
    """A template, its special tokens and facts: `end` ends a turn, `before` is what the model writes in front of an
    answer; thoughts: answers come with them; which of system prompts and tools it takes; whether it keeps earlier
    turns as they were."""

    template: str
    specials: tuple[str, ...]
    end: str
    bos: str | None = None
    eos: str | None = None
    before: str = ""
    thoughts: bool = False
    system: bool = True
    tools: bool = True
    keeps_turns: bool = True

    def tokenizer(self, template: str | None = None) -> PreTrainedTokenizerFast:
        """Bytes and the special tokens; two newlines are one token, as in most vocabularies."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = {piece: index for index, piece in enumerate([*alphabet, "ĊĊ"])}
        core = Tokenizer(models.BPE(vocab=words, merges=[("Ċ", "Ċ")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        named = {name: token for name, token in (("bos_token", self.bos), ("eos_token", self.eos or self.end)) if token}
        made = PreTrainedTokenizerFast(
            tokenizer_object=core,
            additional_special_tokens=list(self.specials),
            chat_template=self.template if template is None else template,
            clean_up_tokenization_spaces=False,
            **named,
        )
        made.name_or_path = "made-for-tests"
        return made


_IM = ("<|im_start|>", "<|im_end|>")
FORMATS = {
    "chatml": Format(CHATML, _IM, "<|im_end|>"),
    "llama3": Format(
        LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", bos="<|begin_of_text|>"
    ),
    "qwen3": Format(QWEN3, (*_IM, "<think>", "</think>"), "<|im_end|>", thoughts=True, keeps_turns=False),
    "gemma": Format(
        GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", bos="<bos>", system=False, tools=False
    ),
    "mistral": Format(MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]"), "</s>", bos="<s>", before=" "),
    "deepseek": Format(
        DEEPSEEK, ("<｜User｜>", "<｜Assistant｜>"), "<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"
    ),
    "phi": Format(
        PHI, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>", eos="<|endoftext|>", tools=False
    ),
}
