"""What a chat template can make is bounded: a few characters never make gigabytes of text."""

from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from test_conversation import CHATML, make_tokenizer

from weir.stream import BrokenTemplate, render_chat, template_bounds
from weir.stream.template_bounds import BoundedEnvironment, OutOfBounds, bounded, size_of

LONG = 3_000_000
"""Characters that the hostile templates make, few enough to do no harm if they are not stopped."""
MOST = 100_000
ASK = [{"role": "user", "content": "Hello"}]
TWICE = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(19) %}"
HOSTILE = {
    "times": "{{ 'a' * 3000000 }}",
    "times, the number first": "{{ (3000000 * 'a')[0] }}",
    "times of a list": "{{ ([0] * 3000000) | length }}",
    "power": "{{ (10 ** 3000000) % 7 }}",
    "squares": "{% set ns = namespace(x=10) %}{% for i in range(22) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "sums": TWICE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "sums of lists": TWICE + "{% set ns.x = (ns.x | list) + (ns.x | list) %}{% endfor %}",
    "joins": TWICE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "one long join": "{% set x = 'a' * 50000 %}{{ (" + "~".join("x" * 60) + ") | length }}",
    "lists in lists": TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "dictionaries": TWICE + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x }}",
    "made dictionaries": TWICE + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "a list of long texts": "{% set x = 'a' * 50000 %}{{ ([x] * 60) | string | length }}",
    "said often": "{% set x = 'a' * 50000 %}{% for i in range(60) %}{{ x }}{% endfor %}",
    "set from a block": "{% set x = 'a' * 50000 %}{% set y %}{% for i in range(60) %}{{ x }}"
    "{% endfor %}{% endset %}{{ y | length }}",
    "a macro": "{% set x = 'a' * 50000 %}{% macro f() %}{% for i in range(60) %}{{ x }}"
    "{% endfor %}{% endmacro %}{{ f() | length }}",
    "center": "{{ 'a' | center(3000000) }}",
    "a mapped filter": "{{ ['a'] | map('center', 3000000) | list | length }}",
    "indent": "{{ ('a\\n' * 3000) | indent(1000) | length }}",
    "replace": "{{ ('a' * 3000) | replace('a', 'b' * 1000) | length }}",
    "join": "{{ range(3000) | join('b' * 1000) | length }}",
    "join of an iterator": "{{ (messages * 600) | map(attribute='content') | join('b' * 1000) }}",
    "json": "{{ messages | tojson(indent=3000000) | length }}",
    "batch": "{{ 'a' | batch(3000000, 0) | list | length }}",
    "lipsum": "{{ lipsum(n=3000, html=False) | length }}",
    "format": "{{ '%3000000d' | format(1) | length }}",
    "a width that is given": "{{ '%*d' | format(3000000, 1) | length }}",
    "percent": "{{ ('%3000000d' % 1) | length }}",
    "fields": "{{ (('%(a)s' * 3000) % {'a': 'b' * 1000}) | length }}",
    "braces": "{{ '{:3000000}'.format(1) | length }}",
    "braces in braces": "{{ '{:{}}'.format(1, 3000000) | length }}",
    "a format by name": "{{ ('{:3000000}' | attr('format'))(1) | length }}",
    "ljust": "{{ 'a'.ljust(3000000) | length }}",
    "zfill": "{{ 'a'.zfill(3000000) | length }}",
    "tabs": "{{ ('\\t' * 3000).expandtabs(1000) | length }}",
    "method replace": "{{ ('a' * 3000).replace('a', 'b' * 1000) | length }}",
    "method join": "{{ ('b' * 1000).join('a' * 3000) | length }}",
    "translate": "{% set table = 'a'.maketrans({'a': 'b' * 1000}) %}"
    "{{ ('a' * 3000).translate(table) | length }}",
    "bytes": "{{ (5).to_bytes(3000000) | length }}",
    "slices": "{% set x = 'a' * 50000 %}{% for i in range(60) %}{% set y = x[1:] %}{% endfor %}",
}
HONEST = {
    "chatml": CHATML,
    "sums": "{{ '<' + messages[0].role + '>' + messages[0]['content'][1:] ~ 5 }}",
    "numbers": "{{ 2 ** 8 * 3 % 7 + 1 }} {{ '%s has %d and %.2f' % ('x', 12345678, 3.14159) }}",
    "formats": "{{ '{} of {:>8} {{}}'.format('x', 12345678) }} {{ '%5s' | format('x') }}",
    "lists": "{{ [1, (2, 'x'), {'a': [None, true]}] }} {{ ([1] + [2]) * 2 }} {{ ('-' * 8) }}",
    "json": "{{ messages | tojson(indent=4) }} {{ {'a': 'ü'} | tojson }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') | upper | center(40) }}"
    "{{ 'a\\nb' | indent(4, true) | trim | replace('a', 'ccc') }}{{ 'x' | default('y') }}",
    "methods": "{{ ' a,b '.strip().split(',')[::-1] }} {{ '7'.zfill(3) }} {{ ','.join('abc') }}",
    "blocks": "{% set x %}a{{ 1 }}{% endset %}{% macro f(y) %}[{{ y }}{{ caller() }}]{% endmacro %}"
    "{% call f(x) %}!{% endcall %}{% filter upper %}{{ x }}{% endfilter %}",
    "names": "{% set ns = namespace(a=0) %}{% for k, v in {'x': 1}.items() %}{{ k ~ v }}"
    "{% set ns.a = ns.a + v %}{% endfor %}{{ ns.a }}{% set a, b = 1, 2 %}{{ (a, b) }}",
}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let templates make only little text."""
    monkeypatch.setattr(template_bounds, "MAX_MADE", MOST)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.thinned(4)
def test_what_makes_too_much_is_stopped_and_the_error_names_the_template(few, kind):
    tokenizer = make_tokenizer(HOSTILE[kind])
    tokenizer.name_or_path = "some/model"
    with pytest.raises(BrokenTemplate, match=r"template of some/model takes too much memory.*100,"):
        render_chat(tokenizer, ASK)


@pytest.mark.parametrize("kind", HONEST)
def test_other_templates_say_what_they_said(few, kind):
    said = ImmutableSandboxedEnvironment().from_string(HONEST[kind])
    counted = BoundedEnvironment().from_string(HONEST[kind])
    given = {"messages": ASK, "add_generation_prompt": True}
    assert counted.render(given) == said.render(given)
    with bounded(ASK):
        assert counted.render(given) == said.render(given)


def test_a_template_may_make_a_few_times_what_it_is_given(few):
    long = [{"role": "user", "content": "a" * LONG}]
    tokenizer = make_tokenizer(CHATML)
    assert len(render_chat(tokenizer, long)) > LONG
    often = "{% for i in range(20) %}{% set x = messages[0].content + '.' %}{% endfor %}"
    tokenizer = make_tokenizer(CHATML + often)
    assert len(render_chat(tokenizer, long)) > LONG
    tokenizer = make_tokenizer(CHATML + often + often)
    with pytest.raises(BrokenTemplate):
        render_chat(tokenizer, long)


def test_nothing_is_counted_after_a_rendering(few):
    template = BoundedEnvironment().from_string("{{ 'a' * 200000 }}")
    with pytest.raises(OutOfBounds), bounded(ASK):
        template.render()
    assert len(template.render()) == 200_000


def test_a_size_counts_everything_once_for_each_place():
    part = ["ab", 5]
    assert size_of(part) == 1 + (1 + 2) + (1 + 1)
    assert size_of([part, part]) == 1 + 2 * (1 + size_of(part))
    assert size_of({"a": "bc"}) == 1 + (1 + 1) + (1 + 2)
    assert size_of(["ab", ["c"]], indent=10) == 1 + (11 + 2) + 11 + 1 + (21 + 1)
    for _ in range(60):
        part = [part, part]
    assert 1000 < size_of(part, most=1000) < 1100
