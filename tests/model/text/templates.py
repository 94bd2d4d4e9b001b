# ruff: noqa: E501
"""Chat templates written for these tests: what newer templates use, and what a hostile one might."""

FEATURES = {
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}"
    "{% endfor %}{{ ns.n }} {{ ns.last }} {{ ns.other }}",
    "list in a namespace": "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m.role] %}{% endfor %}"
    "{{ ns.l }}{{ ns.l | join(', ') }}",
    "loop": "{% for m in messages %}[{{ loop.previtem.role if loop.previtem is defined }}|{{ loop.nextitem.role if not loop.last }}"
    "|{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.length }}{{ loop.first }}{{ loop.depth }}"
    "|{{ loop.cycle('a', 'b') }}|{{ loop.changed(m.role) }}]{% endfor %}",
    "filtered loop": "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m.role }}{% else %}none{% endfor %}"
    "{% for m in [] %}{% else %}none{% endfor %}",
    "break and continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "nested loops": "{% for m in messages %}{% for c in (m.content or '')[:3] %}{{ loop.index }}{{ c }}{% endfor %};{% endfor %}",
    "types of what is given": "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% for k, v in (c.function or c).arguments | items %}{{ k }} {{ v is number }}{{ v is integer }}"
    "{{ v is sequence }}{{ v is string }}{{ v is mapping }}{{ v is none }};{% endfor %}{{ c is sequence }}{% endfor %}"
    "{{ m.role is sequence }}{% endfor %}{{ tools is sequence }}",
    "recursive loop": "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}"
    "{% endfor %}",
    "tests": "{{ x is defined }}{{ x is undefined }}{{ messages[0] is mapping }}{{ messages is iterable }}{{ messages is sequence }}"
    "{{ messages[0].content is string }}{{ 1 is number }}{{ 1 is integer }}{{ 1.0 is float }}{{ true is boolean }}{{ none is none }}"
    "{{ tools is none }}{{ 3 is odd }}{{ 4 is even }}{{ 4 is divisibleby 2 }}{{ 'a' is eq 'a' }}{{ 'a' in ['a'] }}"
    "{{ 'a' is in 'abc' }}{{ 'a' is not string }}{{ true is true }}{{ messages is mapping }}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(ensure_ascii=true) }}"
    "{{ tools | tojson(separators=(',', ':')) }}{{ tools | tojson(sort_keys=true, indent=4) }}{{ 'é<>&\\'\"' | tojson }}",
    "json of literals": "{{ {'b': 1, 'a': [none, true, 'x', 1.5]} | tojson }}{{ [] | tojson }}{{ none | tojson }}",
    "json of arguments": "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set c = c.function if c.function is defined else c %}"
    "{{ c.name }}{{ c.arguments | tojson }}{% for k, v in c.arguments.items() %}<{{ k }}>{{ v if v is string else v | tojson }}"
    "={{ v }}={{ v | string }}{% endfor %}{% endfor %}{% endfor %}",
    "the date": "{{ strftime_now('%Y-%m') }}{% if strftime_now is defined %}{% set d = strftime_now('%d %b %Y') %}{{ d | length }}{% endif %}",
    "raise": "{{ raise_exception('not like that') }}",
    "raise if": "{% if messages[0].role == 'system' %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}ok",
    "macros": "{% macro f(a, b='x', c=none) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(1, c=3) }}{{ f(b=1, a=2) }}",
    "macros in macros": "{% macro f(n) %}{% if n <= 1 %}1{% else %}{{ n * (f(n - 1) | int) }}{% endif %}{% endmacro %}{{ f(5) }}"
    "{%- macro g(m, sep='|') -%}{%- for k in m %}{{ k ~ sep }}{% endfor %}{%- endmacro %}{{ g(messages[0]) }}{{ g(messages[0], sep='') }}",
    "call": "{% macro box(t) %}<{{ t }}{{ caller() }}>{% endmacro %}{% call box('a') %}in{% endcall %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    "{%- generation -%} x {%- endgeneration -%}\n{%generation%}y{%endgeneration%}",
    "generation is a scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "strings": "{{ ' ab '.strip() }}|{{ 'xxabxx'.strip('x') }}|{{ ' a '.lstrip() }}|{{ ' a '.rstrip() }}|{{ 'abc'.startswith('a') }}|"
    "{{ 'abc'.startswith(('x', 'a')) }}|{{ 'abc'.endswith('c') }}|{{ 'a,b,c'.split(',') }}|{{ ' a b  c'.split() }}|{{ 'a,b,c'.split(',', 1) }}|"
    "{{ 'a\\nb'.splitlines() }}|{{ 'aXbX'.replace('X', 'y') }}|{{ 'aXbX'.replace('X', 'y', 1) }}|{{ 'AbC'.lower() }}|{{ 'AbC'.upper() }}|"
    "{{ \"ab cd\".title() }}|{{ 'aBC'.capitalize() }}|{{ 'abc'.find('c') }}|{{ 'abcb'.rfind('b') }}|{{ 'abb'.count('b') }}|"
    "{{ '12'.isdigit() }}|{{ 'ab'.isalpha() }}|{{ ','.join(['a', 'b']) }}|{{ '{} {a}'.format(1, a='x') }}|{{ 'Éa'.lower() }}",
    "thinking": "{% for m in messages %}{% set c = m.content or '' %}{% if '</think>' in c %}{{ c.split('</think>')[-1].lstrip('\\n') }}"
    "{{ c.split('</think>')[0].rstrip('\\n').split('<think>')[-1] }}{% endif %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "slices": "{{ messages[::-1] | map(attribute='role') | list }}{{ messages[1:] | length }}{{ messages[-1].role }}{{ messages[:-1] | length }}"
    "{{ 'abc'[::-1] }}{{ 'abc'[1] }}{{ 'abc'[-1] }}{{ 'abcdef'[1:5:2] }}{{ messages[99:] }}{{ [1, 2, 3, 4][::-2] }}{{ 'abc'[10:] }}",
    "backwards": "{% set ns = namespace(at=-1) %}{% for m in messages[::-1] %}{% set i = messages | length - 1 - loop.index0 %}"
    "{% if m.role == 'user' and ns.at < 0 %}{% set ns.at = i %}{% endif %}{% endfor %}{{ ns.at }}",
    "objects": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for k in messages[0] %}{{ k }}{% endfor %}"
    "{{ messages[0].keys() | list }}{{ messages[0].values() | list }}{{ messages[0].get('role') }}{{ messages[0].get('no') }}"
    "{{ messages[0].get('no', 'd') }}{% for k, v in messages[0] | items %}{{ k }}{% endfor %}{{ messages[0] | dictsort }}{{ messages[0] }}",
    "literal objects": "{% set d = {'a': 1, 'b': {'c': 2}} %}{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{{ d.get('a') }}"
    "{{ d.keys() | list }}{{ 'a' in d }}{{ 'z' not in d }}{{ d.b.c }}{{ d['b']['c'] }}{{ d | length }}{{ d }}{{ dict(a=1) }}",
    "keys like methods": "{% for t in (tools or [])[:1] %}{% set p = t.function.parameters %}{{ p['items'] }}{{ p.get('items') }}{{ p.properties }}{% endfor %}",
    "tilde": "{{ 1 ~ 'a' ~ none ~ true ~ 1.5 ~ [1, 'x'] ~ x ~ {'a': none} }}",
    "printing": "{{ none }}{{ true }}{{ 1.0 }}{{ [1, none, 'a', true, \"it's\", 'q\"'] }}{{ (1, 'a') }}{{ (1,) }}{{ {} }}{{ 'é\\n' }}{{ ['é\\n'] }}",
    "numbers": "{{ 10 // 3 }}{{ 10 / 4 }}{{ 10 % 3 }}{{ 2 ** 3 }}{{ -5 // 2 }}{{ 1 + 2.0 }}{{ 0.1 + 0.2 }}{{ 7 * 1.0 }}{{ 3.7 | int }}{{ 3.14159 | round(2) }}"
    "{{ '12' | int + 1 }}{{ 'x' | int }}{{ '' | int }}{{ 'x' | int(7) }}{{ '1.5' | float }}{{ -3 | abs }}{{ 'x' | float }}",
    "white space": "a\n  {%- if true -%}  b  {%- endif %}\n   {%+ if true %}c{% endif %}\n{% if true +%}\nd\n{% endif %}  e {{- ' f ' -}} g\n"
    "{# comment #}\n  {#- comment -#}  h\n\n",
    "blocks at lines": "\n\nx\n  {% if true %}\n  y {{ 1 }}\n  {% endif %}\n\t{% for m in messages %}\n- {{ m.role }}\n\t{% endfor %}\nend\n",
    "one newline at the end": "a\n",
    "two newlines at the end": "{{ 'a' }}\n\n",
    "filters of lists": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') }}|"
    "{{ messages | rejectattr('role', 'in', ['user', 'system']) | list | length }}|{{ messages | map(attribute='role') | unique | join(',') }}|"
    "{{ messages | map(attribute='role') | sort | join(',') }}|{{ [3, 1, 2] | sort(reverse=true) }}|{{ messages | sort(attribute='role') | length }}|"
    "{{ messages | selectattr('tool_calls', 'defined') | list | length }}|{{ ['a', ' b '] | map('upper') | map('trim') | list }}|"
    "{% for role, ms in messages | groupby('role') %}{{ role }}:{{ ms | length }};{% endfor %}|{{ [1, 2, 3] | select('odd') | list }}|"
    "{{ [1, 2, 3, 4, 5] | batch(2) | list }}|{{ [1, 2] | sum }}|{{ [1, 2] | first }}{{ [1, 2] | last }}{{ [1, 3] | max }}{{ [1, 3] | min }}|"
    "{{ [1, 2] | reverse | list }}|{{ ['b', 'A', 'a'] | sort }}",
    "filters of texts": "{{ 'abc' | upper }}{{ 'ABC' | lower }}{{ 'a b' | title }}{{ 'abc' | capitalize }}{{ ' a ' | trim }}{{ 'xax' | trim('x') }}"
    "{{ 'aXbX' | replace('X', 'y') }}{{ 'aXbX' | replace('X', 'y', 1) }}{{ 'abc' | length }}{{ 'a\\nb' | indent(2) }}{{ 'a\\nb' | indent(2, true) }}"
    "{{ '<a>' | e }}{{ '<a>' | safe }}{{ 'abc' | reverse }}{{ 'abc' | list }}{{ '%s: %d' | format('x', 3) }}{{ 'a b c' | wordcount }}{{ 'a' | center(5) }}"
    "{{ 1.0 | string }}{{ x | default('d') }}{{ '' | default('d', true) }}{{ none | default('d') }}{{ x | trim }}{{ x | upper }}",
    "what is not there": "{{ x }}{{ messages[0].x }}{{ messages[0]['x'] }}{{ messages[99] }}{{ x | length }}{{ x | list }}{{ x | join }}"
    "{% for y in x %}{{ y }}{% endfor %}{% if x %}{% endif %}{{ 'a' ~ x }}{{ 'b' if x else 'c' }}{{ x == none }}{{ not x }}",
    "what is not there, deeper": "{{ messages[0].x.y }}",
    "what is not there, added": "{{ 'a' + x }}",
    "what is not there, further": "{{ messages[99].role }}",
    "none has nothing": "{{ none.x }}",
    "texts and numbers": "{{ 'a' + 1 }}",
    "conditions": "{{ 1 if 0 else 2 if 0 else 3 }}{{ 'a' if false }}{{ not true }}{{ 1 and 'a' }}{{ '' or 'b' }}{{ none or [] }}{{ 1 < 2 <= 2 }}"
    "{{ 'a' not in 'b' }}{{ true == 1 }}{{ [1] == [1] }}{{ messages | length > 2 and messages[0].role == 'system' or false }}",
    "sets": "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set x %}in {{ bos_token }}{% endset %}{{ x }}{{ x | length }}{% set y | upper %}a{% endset %}{{ y }}"
    "{% for i in [1, 2] %}{% set a = a + 1 %}{% endfor %}{{ a }}{% if true %}{% set a = 5 %}{% endif %}{{ a }}"
    "{% with c = 3 %}{{ c }}{% endwith %}{{ c }}{% filter upper %}abc{% endfilter %}",
    "literals": "{{ 'a' 'b' }}{{ \"a\\tb\\n\\\\ \\\"q\\\" 'r'\" }}{% raw %}{{ x }}{% endraw %}{{ '{{' }}{{ 1_000 }}{{ [0] * 3 }}{{ 'ab' * 2 }}{{ True }}{{ None }}",
    "ranges": "{{ range(3) | list }}{{ range(1, 5, 2) | list }}{{ range(5, 0, -2) | list }}{% for i in range(messages | length) %}{{ i }}{% endfor %}",
    "content in parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif 'image' in p %}<image {{ p.image }}>{% endif %}{% endfor %}{% endif %}{% endfor %}",
    "tools there or not": "{% if tools is iterable and tools | length > 0 %}yes{% endif %}{% if tools is not none %}t{% endif %}{% if documents %}d{% endif %}"
    "{% if tools is defined %}d{% endif %}{% if nope is not defined %}n{% endif %}{{ tools | length if tools else 0 }}",
    "changing the conversation": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
    "taking from a message": "{{ messages[0].pop('role') }}",
    "changing a new list": "{% set l = [1] %}{{ l.append(2) }}",
    "inside Python": "{{ messages.__class__.__mro__ }}",
    "inside Python, a method": "{{ messages[0].__init__.__globals__ }}",
    "other templates": "{% include 'x' %}",
    "values of any type": """\
{%- macro value(v, quote=true) -%}
  {%- if v is string -%}{{- '<|"|>' + v + '<|"|>' if quote else v -}}
  {%- elif v is boolean -%}{{- 'true' if v else 'false' -}}
  {%- elif v is mapping -%}
    {{- '{' -}}
    {%- set ns = namespace(found=false) -%}
    {%- for key, x in v | dictsort -%}
      {%- if ns.found %},{% endif -%}{%- set ns.found = true -%}
      {{- key -}}:{{- value(x, quote=quote) -}}
    {%- endfor -%}
    {{- '}' -}}
  {%- elif v is sequence -%}[{%- for x in v -%}{{- value(x, quote=quote) -}}{%- if not loop.last %},{% endif -%}{%- endfor -%}]
  {%- else -%}{{- v -}}
  {%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
  {%- for c in m['tool_calls'] -%}{%- set f = c['function'] | default(c) -%}
    {{- f['name'] -}}{{- value(f['arguments']) -}}{{- value(f['arguments'], quote=False) -}}
  {%- endfor -%}
{%- endfor -%}
{%- for t in tools or [] %}{{ value(t) }}{% endfor %}""",
    "arguments in tags": """\
{%- macro text(c) -%}
    {%- if c is string -%}{{- c }}{%- elif c is iterable and c is not mapping -%}
        {%- for p in c -%}{%- if p is mapping and p.type == 'text' -%}{{- p.text }}{%- elif p is string -%}{{- p }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{- c }}{%- endif -%}
{%- endmacro -%}
[M]<sop>
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ text(m.content) }}
{{- '/no' if (thinking is defined and not thinking and not text(m.content).endswith('/no')) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{% if m.tool_calls %}
{% for c in m.tool_calls %}
{%- if c.function %}
    {%- set c = c.function %}
{%- endif %}
{{ '\\n<call>' + c.name }}
{% set args = c.arguments or {} %}
{% for k, v in args.items() %}
<key>{{ k }}</key>
<value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</value>
{% endfor %}
</call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' and (loop.first or messages[loop.index0 - 1].role != 'tool') -%}
{{- '<|observation|>' }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>{% endif %}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (thinking is defined and not thinking) else '' -}}
{%- endif -%}
""",
    "thoughts taken out": """\
{%- macro strip_thoughts(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('i') -%}
        {%- if 'l' in part -%}{%- set ns.result = ns.result + part.split('l')[0] -%}{%- else -%}{%- set ns.result = ns.result + part -%}{%- endif -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{%- for m in messages if m.content is string -%}{%- set content -%}{{ strip_thoughts(m.content) }}{%- endset -%}[{{ content }}]{%- endfor -%}""",
    "a date unless given": """\
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = 'today' %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}{{- "Date: " + date_string + "\\n\\n" }}{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | string | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message and message.tool_calls|length != 1 %}{{- 'several' }}
    {%- endif %}
{%- endfor %}""",
    "commas between blocks": "{% for m in messages %}{%- if m.content %} a{%- if loop.last %},{%- else -%} {%- set x = true -%} {% endif -%}b:{{ x }}{%- endif -%}\n{% endfor %}",
    "an outer loop": "{% for m in messages %}{% set outer = loop %}{% for k in m %}{{ outer.index }}{{ loop.index }}{{ k }}{{ '' if loop.last else ',' }}{% endfor %}{{ '\\n' if not loop.last }}{% endfor %}",
    "filters bind tighter": "{{ 'p' + messages[0]['name'] | default('u') + '{' }}{{ not flag | default(false) }}{{ -1 | abs }}{{ 'a' ~ 'b' | upper }}{{ (messages[0].x | default('', true)) | trim }}",
    "chosen loops": "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}{{ m.role }}{% endfor %}{% for m in messages | selectattr('role', 'in', ['user', 'tool']) %}{{ m.role }}{% endfor %}",
    "first and last of some": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ users[0]['content'] }}{{ (users | last).content }}{{ users[-1] is sameas users[-1] }}",
    "parts of a text": "{% set t = messages[-1].content | string %}{{ t[0] }}{{ t[:4] + '...' }}{{ t[-1:] }}{{ t[1:-1:2] }}{{ t | length }}{{ 'a' < 'b' }}{{ t in ('a', t) }}",
    "numbers as texts": "{{ '%02d' | format(3) }}{{ '%.2f' | format(3.14159) }}{{ '{:.2f}'.format(3.14159) }}{{ 2.5 | round(0, 'floor') }}{{ 3 | string + '3' }}{{ '3' | int == 3 }}",
    "messages as JSON": "{{ messages | tojson }}{{ messages[-1] | tojson(indent=1) }}{% for m in messages %}{{ (m.content or none) | tojson }}{% endfor %}",
    "raise in a macro": "{% macro check(m) %}{% if m.role not in ['user', 'system'] %}{{ raise_exception('no ' ~ m.role) }}{% endif %}{% endmacro %}{% for m in messages %}{{ check(m) }}{% endfor %}ok",
    "names of tools": "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}{{ tools | map(attribute='function.name') | list }}{{ (tools | first).function.parameters.properties | items | list }}{% endif %}",
    "comments everywhere": "{#- one -#} a {# two #} b {#\n three -#}\n c\n{# four #}\nd",
}

HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "a long range": "{{ range(10**9) | list }}",
    "a loop over a long range": "{% for a in range(10**12) %}x{% endfor %}",
    "a long text": "{{ 'x' * 10**10 }}",
    "a text nearly as long as may be": "{{ 'x' * 10**8 }}",
    "many long texts": "{{ ('x' * 10**8) * 9 }}{{ ('x' * 10**8) * 9 }}",
    "a text that doubles": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "a list that doubles": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "a text that squares": "{% set x = 'x' * 10**6 %}{{ x | replace('x', x) }}",
    "a wide number": "{{ '%1000000000d' | format(1) }}",
    "a big number": "{{ 9 ** 9 ** 9 ** 9 }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "a deep list": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "a deep list in JSON": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "a deep expression": "{{ " + "not " * 100_000 + "x }}",
    "a long expression": "{{ 1" + " + 1" * 300_000 + " }}",
    "deep brackets": "{{ " + "(" * 100_000 + "x" + ")" * 100_000 + " }}",
    "deep blocks": "{% if x %}" * 100_000 + "{% endif %}" * 100_000,
    "recursion in a loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
}
