"""The classes that are printed: their names, their form, and that nothing of a configuration becomes code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from queueapp.contrib.amps.convert import IMPORTED, Imported, as_python

from .importing import configuration, import_text, queue

EVERYTHING = """\
<UnderlyingTopic>^orders/</UnderlyingTopic>
<DefaultPublishTarget>orders/new</DefaultPublishTarget>
<Filter>/side = "buy" AND /customer/name != 'test' AND /customer/country IN ('AT', 'CH') AND /n > 0</Filter>
<Semantics>at-least-once</Semantics>
<LeasePeriod>30s</LeasePeriod>
<Leasing>strict</Leasing>
<MaxDeliveries>5</MaxDeliveries>
<MaxCancels>2</MaxCancels>
<Expiration>1h</Expiration>
<ExpirationModel>earliest</ExpirationModel>
<DeferredAckExpiration>2h</DeferredAckExpiration>
<MaxBacklog>1k</MaxBacklog>
<MaxPerSubscriptionBacklog>10</MaxPerSubscriptionBacklog>
<FairnessModel>fast</FairnessModel>
<Priority>/priority</Priority>
<FileBackedMetadata>enabled</FileBackedMetadata>
<RecoveryPoint>now</RecoveryPoint>
""".replace("> 0", "&gt; 0")


def classes(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize(
    ("name", "class_name", "table"),
    [
        ("orders", "Orders", "orders"),
        ("/queue/orders", "QueueOrders", "queue_orders"),
        ("newOrders.EU-2", "NewOrdersEU2", "new_orders_eu_2"),
        ("HTTPErrors", "HTTPErrors", "http_errors"),
        ("3rd", "Q3Rd", "q_3_rd"),
        ("_x_", "X", "x"),
        ("Straße", "Strae", "strae"),
        ("注文", "QueueQueue", "queue"),
        ("queue", "QueueQueue", "queue"),
        ("none", "NoneQueue", "none"),
        ("timedelta", "TimedeltaQueue", "timedelta"),
        ("fairness model", "FairnessModelQueue", "fairness_model"),
        ("x" * 200, "X" + "x" * 49, "x" * 50),
    ],
)
def test_names_of_classes_and_tables(name: str, class_name: str, table: str, tmp_path: Path) -> None:
    (item,) = import_text(queue(name=name), tmp_path).queues
    assert (item.class_name, item.table) == (class_name, table)


def test_names_are_unique_without_case(tmp_path: Path) -> None:
    names = ["a/b", "aB", "A_B", "AB", "ab", "a b 2", "queue", "QUEUE", "q/ueue"]
    imported = import_text(configuration(*(queue(name=name) for name in names)), tmp_path)
    for given in (
        [entity.class_name.lower() for entity in imported.queues],
        [entity.table.lower() for entity in imported.queues],
    ):
        assert len(set(given)) == len(names)
        assert not set(given) & {"queueapp"}
    assert not {queue.class_name.lower() for queue in imported.queues} & {name.lower() for name in IMPORTED}


def many(directory: Path) -> Imported:
    """Everything at once: each element, findings, a journal, names that are none."""
    return import_text(
        configuration(
            queue(EVERYTHING, name="orders/^x"),
            queue("<MaxBacklog>x</MaxBacklog>" + "<Unknown>1</Unknown>" * 3, name="it's"),
            queue("<Semantics>at-most-once</Semantics><LeasePeriod>5s</LeasePeriod>", name='"quoted"'),
            queue(element="GroupLocalQueue", name="\\n"),
            logged="<Topic><Name>orders/new</Name></Topic><Topic><Name>it's</Name></Topic>",
        ),
        directory,
    )


@pytest.mark.parametrize("label", ["", "shop"])
def test_it_is_formatted_as_ruff_does_and_ruff_finds_nothing(label: str, tmp_path: Path) -> None:
    source = as_python(many(tmp_path), label)
    file = tmp_path / "models.py"
    file.write_text(source)
    for command in (["format", "--diff"], ["check", "--select", "E,F,I,UP,W"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "120", str(file)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_compiles_and_imports_what_it_uses_and_no_more(tmp_path: Path) -> None:
    source = as_python(many(tmp_path), "shop")
    compile(source, "models.py", "exec")
    tree = ast.parse(source)
    brought = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert brought == used - {"app_label", "db_table"} - stored(tree)


def stored(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_what_was_not_mapped_stands_in_its_class(tmp_path: Path) -> None:
    imported = many(tmp_path)
    source = as_python(imported)
    assert len(imported.unmapped) == 7
    for finding in (*imported.unmapped, *imported.notes):
        text = " ".join(part.strip().removeprefix("# ") for part in source.splitlines())
        assert f"Line {finding.line}, {finding.element}: {finding.reason}." in text


def test_the_journal_is_suggested(tmp_path: Path) -> None:
    source = as_python(many(tmp_path))
    assert '# QUEUEAPP["JOURNAL"] = {\n#     "orders/new": None,\n#     "it\'s": None,\n# }\n' in source


def test_without_a_queue_it_is_an_empty_module(tmp_path: Path) -> None:
    assert classes(as_python(import_text("<SOW/>", tmp_path))) == []


@pytest.mark.parametrize(
    "text",
    [
        '"\nimport os; os.abort()\n#',
        "'''\nraise SystemExit\n",
        '"""; raise SystemExit; """',
        "\\",
        "\\\nraise SystemExit",
        "a\u2028raise SystemExit",
        "a\x85raise SystemExit",
        "a\rraise SystemExit",
        "${X}",
        "):\n    raise SystemExit\nclass X(Queue",
    ],
)
def test_nothing_of_a_configuration_becomes_code(text: str, tmp_path: Path) -> None:
    def hostile(element: str) -> str:
        return f"<{element}><![CDATA[{text}]]></{element}>"

    inside = "".join(
        hostile(text) for text in ("UnderlyingTopic", "DefaultPublishTarget", "Filter", "MaxBacklog", "Colour")
    )
    defined = queue(inside, name=f"<![CDATA[{text}]]>")
    imported = import_text(configuration(defined, logged="<Topic><Name>.*</Name></Topic>"), tmp_path, {"X": text})
    source = as_python(imported)

    assert all(line.isprintable() for line in source.splitlines())
    tree = ast.parse(source)
    (made,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert {type(node) for node in tree.body} == {ast.Expr, ast.ImportFrom, ast.ClassDef}
    assert {type(node) for node in made.body} == {ast.ClassDef}
    for inner in made.body:
        assert isinstance(inner, ast.ClassDef)
        assert {type(node) for node in inner.body} == {ast.Assign}
    (name,) = [
        node.value.value
        for node in ast.walk(made)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "name"
        and isinstance(node.value, ast.Constant)
    ]
    assert name == text.replace("\r", "\n").strip()
