"""Markup and numbers: nothing that a stranger wrote gets through, and numbers read well."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from ckptkit.markup import Markup, element, escaped_text
from ckptkit.words import format_brief, format_bytes


def test_text_is_escaped_and_markup_is_not() -> None:
    made = element("p", "a<b>&\"'", element("b", "c"), None, [Markup("<i/>")], title='"><script>')
    assert made == '<p title="&quot;&gt;&lt;script&gt;">a&lt;b&gt;&amp;&quot;&#x27;<b>c</b><i/></p>'


def test_what_xml_cannot_hold_is_spelled_out() -> None:
    hostile = "a\x00b\x1b[31m\n\ud800\u202e\uffff"
    parsed = ET.fromstring(element("text", hostile))
    assert parsed.text == r"a\x00b\x1b[31m\n\ud800\u202e\uffff"
    escaped_text(hostile).encode()


@pytest.mark.parametrize(
    ("number", "written"),
    [
        *((0.0, "0"), (3.29518, "3.295"), (0.0001009, "0.0001009"), (31640.0, "31.64k"), (999.97, "1k")),
        *((2e-10, "2e-10"), (-8.03e9, "-8.03G"), (float("nan"), "nan"), (1e300, "1e+300"), (999.9, "999.9")),
    ],
)
def test_numbers_are_brief(number: float, written: str) -> None:
    assert format_brief(number) == written


@pytest.mark.parametrize(
    ("nbytes", "written"), [(0, "0 B"), (999, "999 B"), (999.7, "1 KB"), (1500, "1.5 KB"), (4.2e12, "4.2 TB")]
)
def test_bytes(nbytes: float, written: str) -> None:
    assert format_bytes(nbytes) == written
