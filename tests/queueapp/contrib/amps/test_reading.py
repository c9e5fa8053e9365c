"""The file itself: encodings, namespaces, what is no XML, and XML that means harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from queueapp.contrib.amps.xml_reader import MOST_BYTES, Element, UnreadableConfiguration, read

from .importing import configuration, import_text, options, queue, said


def refused(text: str | bytes, directory: Path) -> str:
    with pytest.raises(UnreadableConfiguration) as caught:
        import_text(text, directory)
    return str(caught.value)


# -- hostile -------------------------------------------------------------------------------------------------------

LAUGHS = (
    '<?xml version="1.0"?>\n<!DOCTYPE lolz [\n<!ENTITY a "lol">\n'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">\n' for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "]>\n<AMPSConfig><SOW><LocalQueue><Name>&i;</Name></LocalQueue></SOW></AMPSConfig>"
)


def test_a_billion_laughs_are_refused(tmp_path: Path) -> None:
    assert ":2: a document type (DOCTYPE) is not read" in refused(LAUGHS, tmp_path)


@pytest.mark.parametrize(
    "doctype",
    [
        '<!DOCTYPE a [<!ENTITY x SYSTEM "{secret}">]>',
        '<!DOCTYPE a [<!ENTITY % x SYSTEM "{secret}"> %x;]>',
        '<!DOCTYPE a SYSTEM "{secret}">',
        '<!DOCTYPE a PUBLIC "-//X" "http://localhost:1/x.dtd">',
    ],
)
def test_an_external_entity_is_refused_and_its_file_not_opened(doctype: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not to be read")
    text = doctype.format(secret=(tmp_path / "secret").as_uri()) + queue().replace("orders", "&x;")
    why = refused(text, tmp_path)
    assert ":1: a document type (DOCTYPE) is not read" in why
    assert "not to be read" not in why


def test_an_undeclared_entity_is_no_xml(tmp_path: Path) -> None:
    assert refused(queue(name="&x;"), tmp_path).endswith(":2: is no XML: undefined entity.")


def test_another_file_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "more.xml").write_text(queue(name="hidden"))
    inside = f"<Include>{tmp_path / 'more.xml'}</Include>"
    xinclude = '<i:include xmlns:i="http://www.w3.org/2001/XInclude" href="more.xml"/>'
    imported = import_text(configuration(queue(inside), inside, xinclude, logged=inside, more=inside), tmp_path)
    assert [queue.name for queue in imported.queues] == ["orders"]
    assert [name for _, name, _ in said(imported)].count("Include") == 4
    assert all("ampServer --dump-config" in why for _, name, why in said(imported) if name == "Include")


def test_a_deep_document_costs_memory_and_no_call(tmp_path: Path) -> None:
    depth = 200_000
    imported = import_text(configuration(queue(), more="<x>" * depth + "</x>" * depth), tmp_path)
    assert [queue.name for queue in imported.queues] == ["orders"]


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    assert f"is larger than {MOST_BYTES} bytes" in refused(b" " * (MOST_BYTES + 1), tmp_path)


# -- no configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ":1: is no XML: no element found."),
        ("orders = 5", ":1: is no XML: syntax error."),
        ("<AMPSConfig>\n<SOW>\n</AMPSConfig>", ":3: is no XML: mismatched tag."),
        ("<AMPSConfig/><AMPSConfig/>", ":1: is no XML: junk after document element."),
        ("<a>\0</a>", ":1: is no XML: not well-formed (invalid token)."),
        (b"<a>\xff</a>", ":1: is no XML: not well-formed (invalid token)."),
        (b'<?xml version="1.0" encoding="klingon"?><a/>', ":1: is in an encoding that is not read: "),
        (b'<?xml version="1.0" encoding="shift_jis"?><a/>', ":1: is in an encoding that is not read: "),
        ("<Configuration/>", ":1: <Configuration> is no configuration of AMPS"),
    ],
)
def test_what_is_no_configuration_is_one_line_with_its_line(text: str | bytes, why: str, tmp_path: Path) -> None:
    said = refused(text, tmp_path)
    assert why in said
    assert "\n" not in said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableConfiguration, match=r"none\.xml: cannot be read: No such file or directory\."):
        read(str(tmp_path / "none.xml"))
    with pytest.raises(UnreadableConfiguration, match="cannot be read: Is a directory"):
        read(str(tmp_path))


# -- encodings and namespaces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "codec"),
    [
        ("", "utf-8"),
        ("", "utf-8-sig"),
        ("utf-16", "utf-16"),
        ("iso-8859-1", "iso-8859-1"),
        ("windows-1252", "windows-1252"),
        ("UTF-8", "utf-8-sig"),
    ],
)
def test_encodings(declared: str, codec: str, tmp_path: Path) -> None:
    head = f'<?xml version="1.0" encoding="{declared}"?>' if declared else ""
    imported = import_text((head + queue(name="Aufträge")).encode(codec), tmp_path)
    assert options(imported)["name"] == '"Aufträge"'
    assert [(queue.class_name, queue.table) for queue in imported.queues] == [("Auftrage", "auftrage")]


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
def test_lines_are_counted_however_they_end(end: str, tmp_path: Path) -> None:
    text = queue("<MaxBacklog>x</MaxBacklog>\n<Filter>/a = 1\nAND /b = 2</Filter>").replace("\n", end)
    imported = import_text(text.encode(), tmp_path)
    assert options(imported)["filter"] == r'"/a = 1\nAND /b = 2"'
    assert [line for line, _, _ in said(imported)] == [4]


def test_a_namespace_of_the_document_and_a_foreign_namespace(tmp_path: Path) -> None:
    text = configuration(queue("<MaxBacklog>5</MaxBacklog>\n<x:MaxBacklog>6</x:MaxBacklog>")).replace(
        "<AMPSConfig>", '<AMPSConfig xmlns="urn:amps" xmlns:x="urn:other">'
    )
    imported = import_text(text, tmp_path)
    assert options(imported)["max_backlog"] == "5"
    assert [(name, why) for _, name, why in said(imported)] == [("{urn:other}MaxBacklog", "it is unknown")]


def test_prefixed_elements_are_those_of_the_document(tmp_path: Path) -> None:
    text = queue("<MaxBacklog>5</MaxBacklog>").replace("</", "</a:").replace("<", "<a:").replace("<a:/a:", "</a:")
    imported = import_text(text.replace("<a:LocalQueue>", '<a:LocalQueue xmlns:a="urn:amps">', 1), tmp_path)
    assert options(imported)["max_backlog"] == "5"


def test_comments_and_cdata_are_read_as_xml_states(tmp_path: Path) -> None:
    imported = import_text(queue("<Filter><![CDATA[/a < 5]]><!-- five --> AND /b &gt; 1</Filter>"), tmp_path)
    assert options(imported)["filter"] == '"/a < 5 AND /b > 1"'


def test_an_element_knows_its_line_and_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text("<a>\n <b>\n x </b>\n</a>")
    root = read(str(tmp_path / "a.xml"))
    assert [(item.line, item.text) for item in root.named("b")] == [(2, "x")]
    assert isinstance(root, Element)
