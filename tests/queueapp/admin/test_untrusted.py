"""What is shown of bodies, headers and other texts that a foreign writer may have written."""

import pytest

from queueapp.admin.formatting import untrusted


def body(data: bytes) -> untrusted.Shown:
    return untrusted.body(data[: untrusted.SHOWN], len(data))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("two\r\nlines\tand a tab", "two\nlines\tand a tab"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("\u2066isolate\u2069", "⟨U+2066⟩isolate⟨U+2069⟩"),
        ("zero\u200bwidth", "zero⟨U+200B⟩width"),
        ("\ufeffmark", "⟨U+FEFF⟩mark"),
        ("nul\0", "nul⟨U+0000⟩"),
        ("\x1b[31mred", "⟨U+001B⟩[31mred"),
        ("lone\ud800", "lone⟨U+D800⟩"),
        ("tag\U000e0041", "tag⟨U+E0041⟩"),
        ("overwrite\rme", "overwrite⟨U+000D⟩me"),
        ("Tromsø שלום 航班", "Tromsø שלום 航班"),
    ],
)
def test_characters_that_deceive_are_shown_by_their_code_point(text: str, shown: str) -> None:
    assert untrusted.visible(text) == shown


def test_json_is_indented_without_changing_a_value() -> None:
    sent = b'{"n":12345678901234567890123,"f":1.10,"e":{},"l":[1,[]],"s":"a,b:{}\\"","n":2}'
    expected = """{
  "n": 12345678901234567890123,
  "f": 1.10,
  "e": {},
  "l": [
    1,
    []
  ],
  "s": "a,b:{}\\"",
  "n": 2
}"""
    assert body(sent) == ("JSON", expected, True)


@pytest.mark.parametrize("depth", [900, 30_000])
def test_deeply_nested_json_neither_overflows_nor_grows(depth: int) -> None:
    shown = body(b"[" * depth + b"]" * depth)
    assert shown.kind in ("JSON", "text")
    assert len(shown.text) <= untrusted.SHOWN


def test_json_that_would_grow_by_its_indentation_is_cut() -> None:
    data = b"[" + b",".join([b"[[[[[[[[[[1]]]]]]]]]]"] * 2500) + b"]"
    assert len(data) < untrusted.SHOWN
    shown = body(data)
    assert (shown.kind, shown.complete, len(shown.text)) == ("JSON", False, untrusted.SHOWN)


@pytest.mark.parametrize("data", [b'{"a":', b"{'a': 1}", b"7", b'"text"', b"true", b""])
def test_what_is_no_json_document_is_text(data: bytes) -> None:
    assert body(data) == ("text", data.decode(), True)


def test_bytes_are_shown_as_hex() -> None:
    kind, text, complete = body(b"\x00\xffAB<script>")
    assert (kind, complete) == ("bytes", True)
    assert text == "00000000  00 ff 41 42 3c 73 63 72  69 70 74 3e              |..AB<script>|"


def test_text_that_is_mostly_control_characters_is_bytes() -> None:
    assert body(b"\x01\x02\x03ab").kind == "bytes"


def test_large_bodies_are_cut_and_report_it() -> None:
    assert body(b"x" * 5_000_000) == ("text", "x" * untrusted.SHOWN, False)
    kind, text, complete = body(b"\xff" * 5_000_000)
    assert (kind, complete) == ("bytes", False)
    assert len(text.splitlines()) == untrusted.SHOWN_AS_HEX / 16


def test_a_cut_within_a_character_is_still_text() -> None:
    data = "å".encode() * untrusted.SHOWN
    assert untrusted.body(data[: untrusted.SHOWN - 1], len(data)).kind == "text"


def test_no_body_is_not_an_empty_body() -> None:
    assert untrusted.body(None, None).kind == "none"
    assert body(b"").kind == "text"


def test_headers_become_rows_whatever_their_values_are() -> None:
    shown = untrusted.headers('{"b":"x\\u202e","a":1,"c":{"d":null}}')
    assert shown == ([("a", "1"), ("b", "x⟨U+202E⟩"), ("c", '{"d":null}')], "", 0)


@pytest.mark.parametrize("stored", ["[1]", "{", "7", "", '{"a":' + "[" * 10_000])
def test_headers_that_are_no_object_are_shown_raw(stored: str) -> None:
    assert untrusted.headers(stored) == ([], stored, 0)


def test_headers_are_bounded_in_number_and_length() -> None:
    many = "{" + ",".join(f'"{n:04}":"{"v" * 5000}"' for n in range(250)) + "}"
    shown = untrusted.headers(many)
    assert (len(shown.rows), shown.more) == (untrusted.SHOWN_HEADERS, 50)
    assert {len(value) for _, value in shown.rows} == {untrusted.SHOWN_HEADER}


def test_inline_text_is_escaped_bounded_and_isolated() -> None:
    assert untrusted.inline("<b>\n\u202ex") == (
        '<bdi class="queueapp-untrusted" title="&lt;b&gt; ⟨U+202E⟩x">&lt;b&gt; ⟨U+202E⟩x</bdi>'
    )
    assert untrusted.inline("y" * 1_000_000, 10).endswith(">yyyyyyyyy…</bdi>")


def test_a_name_may_end_a_line_after_its_dots_and_nothing_else_gets_in() -> None:
    assert untrusted.breakable("app.models.Ord<b>") == "app.<wbr>models.<wbr>Ord&lt;b&gt;"
    for whole in ("It failed. Twice...", "2026.11.22", "10.0.0.1:80"):
        assert untrusted.breakable(whole) == whole
