"""Writes the template goldens beside this script: expected texts come from Hugging Face transformers.

Run:  python3 generate.py     (transformers 5.19.0, jinja2 3.1; no network, no model)

The templates were written for these tests. Each exercises features that differ between Python's jinja2
and other engines; together they cover what chat templates in use rely on. Output: `cases.json`.
"""

import json
import pathlib

import jinja2
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = {
    # Plain block tags on their own, indented lines: correct only with block trimming and left-stripping.
    "indented_blocks": """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- '<|start|>system\\nYou are terse.<|end|>\\n' }}
    {% endif %}
    {% if message.role == 'user' %}
<|start|>user
{{ message.content }}<|end|>
    {% elif message.role == 'assistant' %}
<|start|>assistant
{{ message.content }}<|end|>
    {% else %}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|start|>assistant
{% endif %}
""",
    # Header and date; BOS printed by the template; trimmed contents; a default for an option.
    "headers_with_date": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<head>system</head>\\n\\nToday: " + date_string + "\\n" + system_message + "<eot>" }}
{%- for message in messages %}
    {{- '<head>' + message['role'] + '</head>\\n\\n' + message['content'] | trim + '<eot>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<head>assistant</head>\\n\\n' }}
{%- endif %}
""",
    # Thinking option; earlier reasoning dropped; backwards search through a namespace; string methods.
    "thinking": """{%- set ns = namespace(last_query=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" %}
        {%- set ns.open = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|end|>\\n' }}
    {%- else %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    # Strict alternation, enforced by the template itself; EOS after each answer.
    "strict_alternation": """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[Q] ' + message['content'] + ' [/Q]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}
""",
    # Role renamed by a macro, system text merged into the first user turn, loop neighbours.
    "renamed_roles": """{{ bos_token }}
{%- macro name_of(role) -%}
    {{ 'model' if role == 'assistant' else role }}
{%- endmacro -%}
{%- set first = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- for message in messages if message['role'] != 'system' -%}
    {{ '<turn>' + name_of(message['role']) + '\\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {% for item in message['content'] %}{{ item['text'] | trim }}{% endfor %}
    {%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<turn>model\\n' }}
{%- endif -%}
""",
    # Tools as JSON in both layouts, tool calls, tool results, dictionary methods, break.
    "tools": """{%- if tools %}
    {{- '<|start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' + (tool | tojson(indent=4)) + '\\n' }}
        {%- for key, value in tool.items() %}{{ key }}{% if not loop.last %}, {% endif %}{% endfor %}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>user\\n<result>' ~ message.content ~ '</result><|end|>\\n' }}
    {%- else %}
        {{- '<|start|>' ~ message.role ~ '\\n' ~ message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}
            {%- if call.get('last') %}{% break %}{% endif %}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{% endif %}
""",
    # Generation tags, plain and dash-trimmed: they print nothing, but trim white space like any block.
    "generation_tags": """{% for message in messages %}
{{ '<|start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
    {% generation %}
    {{- message.content + '<|end|>' -}}
    {% endgeneration %}
{%- else -%}
    {%- generation -%}
    {{ message.content }}
    {%- endgeneration -%}
    {{ '<|end|>' }}
{%- endif %}

{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
""",
    # Truth values, none, numbers and lists printed as Python prints them; filters and tests.
    "python_values": """{% set flags = {'a': true, 'b': none, 'c': [1, 2.5, 'x']} %}
{{ flags.a }} {{ flags.b }} {{ flags.c }} {{ flags }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 1e20 }} {{ 3 % 2 == 1 }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | map(attribute='role') | join('+') }}
{{ 'abc' is sequence }} {{ none is iterable }} {{ flags is mapping }} {{ undefined_name is defined }} {{ undefined_name }}|
{% for message in messages %}{{ loop.index }}:{{ message.content[:3] | upper }}{{ message['content'].startswith('H') }}{% if not loop.last %};{% endif %}{% endfor %}

{{ ('a' if add_generation_prompt else 'b') ~ 1 ~ none ~ true }}
""",
}

HI = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": " Hello \u2b62 na\u00efve! "}]
SYSTEM = [{"role": "system", "content": " Be kind. \n"}]
LONG = HI + [{"role": "user", "content": "And\u2028then?\n"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNothing."}]
CONVERSATIONS = {
    "one_turn": HI[:1],
    "one_answer": HI,
    "system_and_answer": SYSTEM + HI,
    "three_turns": LONG[:3],
    "two_answers": LONG,
    "two_answers_with_system": SYSTEM + LONG,
    "reasoning_field": HI[:1] + [{"role": "assistant", "content": "Hello", "reasoning_content": "\nthink a bit\n"}],
    "empty_answer": HI[:1] + [{"role": "assistant", "content": ""}],
    "user_twice": HI[:1] + HI,
    "tool_call": HI[:1]
    + [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Z\u00fcrich <b>", "days": 2, "exact": True}}, "last": True}],
        },
        {"role": "tool", "content": "{\"sun\": 1}"},
        {"role": "assistant", "content": "Sunny."},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Asks \"the\" sky & more", "parameters": {"type": "object", "properties": {}, "required": ["city"], "limit": 1.5e-7}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OPTIONS = [{}, {"enable_thinking": False}, {"date_string": "01 Jan 2025"}]


def main():
    cases = []
    for template_name, template in TEMPLATES.items():
        for name, messages in CONVERSATIONS.items():
            for options in OPTIONS:
                if not all(option in template for option in options):
                    continue
                for generation_prompt in (False, True):
                    tools = TOOLS if name == "tool_call" else None
                    case = dict(template=template_name, conversation=name, options=options, tools=tools, add_generation_prompt=generation_prompt)
                    try:
                        rendered, _ = render_jinja_template(
                            [messages], tools=tools, chat_template=template, add_generation_prompt=generation_prompt, **SPECIAL, **options
                        )
                        case["expected"] = rendered[0]
                    except jinja2.exceptions.TemplateError as error:
                        case["error"] = str(error)
                    cases.append(case)
    golden = dict(
        versions=dict(transformers=transformers.__version__, jinja2=jinja2.__version__),
        special_tokens=SPECIAL,
        templates=TEMPLATES,
        conversations=CONVERSATIONS,
        cases=cases,
    )
    path = pathlib.Path(__file__).with_name("cases.json")
    path.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    print(len(cases), "cases,", sum("error" in case for case in cases), "refused")


if __name__ == "__main__":
    main()
