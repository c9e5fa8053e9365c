"""Converts the elements of a configuration to queues, findings and notes, and queues to a module of Python, formatted
as ruff formats it.

An element that is not mapped is left out of the class and becomes a finding; the rest of its queue is written, so that
one run reports everything. A note is about an element that is mapped differently, or about its effect here.

Whatever comes from the configuration is a string literal or stands in a comment, in one line without control
characters: nothing in it can become code.
"""

from __future__ import annotations

import keyword
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import NamedTuple

from ...models.delivery.topics import is_pattern
from .elements import (
    DEFERRED_ACKS,
    DISTRIBUTED,
    DROP_ALL,
    ELEMENTS,
    EXCLUDED,
    LINE,
    MAX_ATTEMPTS,
    QUEUES,
    WRITTEN_OUT,
    Known,
    Value,
    assignment,
    text_literal,
    with_variables,
)
from .xml_reader import Element, Finding, NotMapped, UnreadableConfiguration, read, shown

#: Other elements of the SOW, which are no queues and are not reported.
_NO_QUEUES = (
    "Topic",
    "TopicDefinition",
    "View",
    "ViewDefinition",
    "ConflatedTopic",
    "ConflatedTopicDefinition",
    "TopicReplica",
)
_INCLUDED = (
    "the file that it names is not read: import what `ampServer --dump-config` prints, which has the files in "
    "their places"
)
_NOT_DISTRIBUTED = "queues of several instances are not built yet; this one is made for this database alone"


@dataclass(slots=True)
class ImportedQueue:
    """One queue: its options in the order of the configuration, and the findings for its class."""

    name: str
    element: str
    line: int
    class_name: str = ""
    table: str = ""
    options: dict[str, Value] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Imported:
    """The result of a conversion."""

    file: str
    queues: list[ImportedQueue] = field(default_factory=list)
    journal: list[str] = field(default_factory=list)
    unmapped: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)


def import_configuration(path: str, environment: Mapping[str, str], taken: tuple[str, ...] = ()) -> Imported:
    """Read a configuration. ``taken`` are names that no class may have. Raises UnreadableConfiguration."""
    return _Import(path, environment, taken).of(read(path))


class _Import:
    """One run over one configuration."""

    def __init__(self, path: str, environment: Mapping[str, str], taken: tuple[str, ...]) -> None:
        self._path, self._environment = path, environment
        self._names = Names(taken)
        self._result = Imported(path)
        self._log: list[LoggedTopic] | None = None
        self._queue: ImportedQueue | None = None
        self._seen: dict[str, int] = {}

    def of(self, root: Element) -> Imported:
        if root.name == "AMPSConfig":
            self._configuration(root)
        elif root.name == "SOW":
            self._sow(root)
        elif root.name in QUEUES:
            self._add(root)
        else:
            raise UnreadableConfiguration(
                f"{shown(self._path)}:{root.line}: <{shown(root.name)}> is no configuration of AMPS, which is an "
                "<AMPSConfig>; its <SOW> alone, or one queue of it, is read as well."
            )
        for findings in (self._result.unmapped, self._result.notes):
            findings.sort(key=lambda finding: finding.line)
        return self._result

    def _configuration(self, root: Element) -> None:
        self._log = []
        for section in root.named("TransactionLog"):
            self._transaction_log(section)
        for section in root.children:
            if section.name == "SOW":
                self._sow(section)
            elif section.name in QUEUES:
                self._unmapped(section, "a queue is defined in <SOW>, and AMPS does not see this one")
            elif section.name == "Include":
                self._unmapped(section, _INCLUDED)
            elif section.name == "Actions":
                self._note(section, "actions are not read; what becomes of expired messages is the option on_expired")
            elif section.name == "Replication":
                self._note(
                    section, "replication is not read; a queue is in one database, which may be replicated as a whole"
                )
            elif section.name != "TransactionLog" and any(child.name in QUEUES for child in section.children):
                self._unmapped(section, "it is unknown, and its queues are left out: AMPS reads those in <SOW>")

    def _transaction_log(self, section: Element) -> None:
        assert self._log is not None
        for child in section.children:
            if child.name == "Include":
                self._unmapped(child, _INCLUDED)
            elif child.name == "Topic":
                name, kind = next(child.named("Name", "Topic"), None), next(child.named("MessageType"), None)
                try:
                    if name is None or not name.text:
                        raise NotMapped("it has no Name")
                    kind_text = self._text_of(kind) if kind else ""
                    self._log.append(LoggedTopic(self._text_of(name), kind_text.lower()))
                except NotMapped as error:
                    self._unmapped(child, str(error), "TransactionLog/Topic")

    def _sow(self, sow: Element) -> None:
        for child in sow.children:
            if child.name in QUEUES:
                self._add(child)
            elif child.name == "Include":
                self._unmapped(child, _INCLUDED)
            elif child.name not in _NO_QUEUES:
                self._unmapped(child, "it is unknown" + _meant(child.name, [*QUEUES, *_NO_QUEUES]))

    # -- one queue -------------------------------------------------------------------------------------------------

    def _add(self, element: Element) -> None:
        named = next(element.named("Name"), None) or next(element.named("Topic"), None)
        self._queue = queue = ImportedQueue(named.text if named else "", element.name, element.line)
        try:
            name = self._name(named)
            if earlier := self._seen.get(name.value):
                raise NotMapped(f"a queue {shown(name.value)!r} is there already, at line {earlier}")
        except NotMapped as error:
            self._unmapped(element, f"{error}; the queue is left out")
            return
        finally:
            self._queue = None
        self._seen[name.value] = element.line
        queue.name, queue.options["name"] = name.value, name
        queue.class_name, queue.table = self._names.of(name.value)
        self._queue = queue
        self._fill(queue, element)
        self._queue = None
        self._result.queues.append(queue)

    def _name(self, element: Element | None) -> Value:
        if element is None:
            raise NotMapped("it has no Name")
        if element.children:
            raise NotMapped(f"its Name holds <{shown(element.children[0].name)}>, and is a text")
        try:
            return ELEMENTS["Name"].mapped(self._text_of(element))
        except NotMapped as error:
            raise NotMapped(f"its Name: {error}") from None

    def _fill(self, queue: ImportedQueue, element: Element) -> None:
        """The options of a queue that has a name."""
        if not QUEUES[element.name]:
            self._unmapped(element, _NOT_DISTRIBUTED)
        given = self._given(element)
        self._exclude(given)
        semantics = self._semantics(given)
        for known in ELEMENTS.values():
            found = given.get(known.name)
            if found is not None and known.leases and semantics == "at-most-once":
                self._note(found, "has no effect, there and here, on a queue that is at-most-once; left out")
            elif found is not None:
                self._map(found, known)
            elif default := WRITTEN_OUT[semantics].get(known.name):
                queue.options[known.option] = Value(None, default)
        self._write_behaviour(queue, given, semantics)
        self._lower_backlog(queue, given)
        self._check_fairness(queue, given.get("FairnessModel"), semantics)
        self._check_required(element, given)
        self._check_topics(queue, element, given, semantics)

    @staticmethod
    def _write_behaviour(queue: ImportedQueue, given: dict[str, Element], semantics: str) -> None:
        """Options for what AMPS does without an element, and a comment about the price of its default backlog."""
        if semantics == "at-least-once":
            queue.options["attempts"] = Value(None, MAX_ATTEMPTS)
        queue.options["on_expired"] = Value(None, DROP_ALL)
        if "MaxPerSubscriptionBacklog" not in given:
            queue.comments.append(
                "max_per_subscription_backlog = 1 is AMPS' default. A worker with one message at a time handles a "
                "fraction of what it handles in batches: raise it unless the subscribers need that."
            )

    def _lower_backlog(self, queue: ImportedQueue, given: dict[str, Element]) -> None:
        """A subscription never has more than the whole queue may; a class that says otherwise is refused by a check."""
        whole, backlog = queue.options.get("max_backlog"), queue.options.get("max_per_subscription_backlog")
        if whole is not None and backlog is not None and (backlog.value or 0) > whole.value:
            queue.options["max_per_subscription_backlog"] = whole
            self._note(
                given["MaxPerSubscriptionBacklog"], f"is more than MaxBacklog, which it never exceeds: {whole.source}"
            )

    def _given(self, queue: Element) -> dict[str, Element]:
        """The elements of a queue by name, without Name. Unknown and repeated ones become findings."""
        names = list(queue.named("Name")) or list(queue.named("Topic"))[:1]
        given: dict[str, Element] = {}
        for attribute in queue.attributes:
            self._unmapped(queue, f"its attribute {shown(attribute)!r} is unknown")
        for child in queue.children:
            if child is names[0]:
                continue
            if child.name == "Name":
                self._unmapped(child, f"it is there twice; that of line {names[0].line} counts")
            elif child.name == "Topic":
                self._unmapped(child, f"stands for Name where that is missing; that of line {names[0].line} counts")
            elif child.name == "Include":
                self._unmapped(child, _INCLUDED)
            elif child.name in DISTRIBUTED:
                self._distributed(queue, child)
            elif child.name not in ELEMENTS:
                self._unmapped(child, "it is unknown" + _meant(child.name, [*ELEMENTS, *DISTRIBUTED]))
            elif child.name in given:
                self._unmapped(child, f"it is there twice; that of line {given[child.name].line} counts")
            elif child.children:
                self._unmapped(child, f"it holds <{shown(child.children[0].name)}>, and is a text")
            else:
                for attribute in child.attributes:
                    self._unmapped(child, f"its attribute {shown(attribute)!r} is unknown")
                given[child.name] = child
        return given

    def _distributed(self, queue: Element, element: Element) -> None:
        if queue.name == "GroupLocalQueue":
            self._unmapped(element, "queues of several instances are not built yet")
        else:
            self._unmapped(element, f"goes with a GroupLocalQueue alone, and this is a {queue.name}")

    def _semantics(self, given: dict[str, Element]) -> str:
        if "Semantics" in given:
            try:
                return str(ELEMENTS["Semantics"].mapped(self._text_of(given["Semantics"])).value)
            except NotMapped:
                pass  # reported when it is mapped; until then AMPS' default holds
        return "at-least-once"

    def _map(self, element: Element, known: Known) -> None:
        assert self._queue is not None
        try:
            self._queue.options[known.option] = known.mapped(self._text_of(element))
        except NotMapped as error:
            self._unmapped(element, str(error))
            if error.instead is not None:
                self._queue.options[known.option] = error.instead

    def _exclude(self, given: dict[str, Element]) -> None:
        """Combinations that AMPS refuses: the first of the two stays."""
        for first, second in EXCLUDED:
            if first in given and second in given:
                self._unmapped(given.pop(second), f"does not go with {first} (line {given[first].line}); left out")

    def _check_fairness(self, queue: ImportedQueue, element: Element | None, semantics: str) -> None:
        only = WRITTEN_OUT["at-most-once"]["FairnessModel"]
        model = queue.options.get("fairness_model")
        if element is not None and semantics == "at-most-once" and model is not None and model.source != only:
            queue.options["fairness_model"] = Value("round-robin", only)
            self._unmapped(element, "a queue that is at-most-once has round-robin alone, which is taken")

    def _check_required(self, element: Element, given: dict[str, Element]) -> None:
        if "MessageType" not in given:
            self._unmapped(element, "it has no MessageType, which AMPS requires")
        if element.name == "GroupLocalQueue" and not any(element.named("InitialOwner")):
            self._unmapped(element, "it has no InitialOwner, which AMPS requires")

    # -- its topics ------------------------------------------------------------------------------------------------

    def _check_topics(self, queue: ImportedQueue, element: Element, given: dict[str, Element], semantics: str) -> None:
        topic = queue.options.get("underlying_topic", queue.options["name"]).value
        target = queue.options.get("default_publish_target")
        if is_pattern(topic) and target is None:
            self._unmapped(
                given.get("UnderlyingTopic", element),
                f"{shown(topic)!r} is a regular expression, with which AMPS requires a DefaultPublishTarget",
            )
        elif target is not None and not matches(topic, target.value):
            self._unmapped(
                given["DefaultPublishTarget"],
                f"{shown(target.value)!r} is none of the queue's topics, {shown(topic)!r}",
            )
        if self._log is None:
            return  # a part of a configuration: its log is unknown
        kind = queue.options["message_type"].value if "message_type" in queue.options else ""
        logged = [log.name for log in self._log if log.message_type in ("", kind) and covers(log.name, topic)]
        if not logged:
            self._note(element, f"no topic of the TransactionLog is its topic {shown(topic)!r}, which AMPS requires")
            return
        if target is not None and not any(covers(log.name, target.value) for log in self._log):
            self._note(
                given["DefaultPublishTarget"],
                f"no topic of the TransactionLog is {shown(target.value)!r}, which AMPS requires of a publish target",
            )
        for name in logged if is_pattern(topic) else [topic]:
            if name not in self._result.journal:
                self._result.journal.append(name)
        if semantics == "at-least-once" and "DeferredAckExpiration" not in given:
            queue.options["deferred_ack_expiration"] = Value(None, DEFERRED_ACKS)

    # -- findings --------------------------------------------------------------------------------------------------

    def _text_of(self, element: Element) -> str:
        return with_variables(element.text, self._environment)

    def _unmapped(self, element: Element, reason: str, name: str | None = None) -> None:
        self._result.unmapped.append(self._finding(element, reason, name))

    def _note(self, element: Element, reason: str) -> None:
        self._result.notes.append(self._finding(element, reason))

    def _finding(self, element: Element, reason: str, name: str | None = None) -> Finding:
        queue = self._queue.name if self._queue else ""
        found = Finding(self._path, element.line, queue, name or shown(element.name), reason)
        if self._queue:
            self._queue.findings.append(found)
        return found


def _meant(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; {close[0]} may be meant" if close else ""


class LoggedTopic(NamedTuple):
    """A topic that the transaction log keeps; of any type where that is ""."""

    name: str
    message_type: str


def matches(topic: str, name: str) -> bool:
    """Whether ``name`` is this topic, or one of those that this expression names; a broken one names none."""
    if topic == name:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets that Python may read otherwise one day
            return is_pattern(topic) and re.search(topic, name) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def covers(logged: str, topic: str) -> bool:
    """Whether a logged topic has messages of the topic. Two expressions cannot be compared, so they may."""
    if is_pattern(topic):
        return is_pattern(logged) or matches(topic, logged)
    return matches(logged, topic)


#: Of a table; PostgreSQL cuts names at 63 bytes, and the names of indexes are made from it.
LONGEST = 50


class Names:
    """Names that were given; each is given once. Django compares names of models without case."""

    def __init__(self, taken: tuple[str, ...]) -> None:
        self._taken = {name.lower() for name in taken}
        self._tables: set[str] = set()

    def of(self, queue: str) -> tuple[str, str]:
        """(class, table) for a queue of this name."""
        words = _words(queue)
        stem = "".join(word[:1].upper() + word[1:] for word in words)[:LONGEST]
        if not stem[:1].isalpha():
            stem = f"Q{stem}" if stem else "Queue"
        if stem.lower() in self._taken or keyword.iskeyword(stem):
            stem = f"{stem}Queue"
        table = "_".join(word.lower() for word in words)[:LONGEST].strip("_")
        if not table[:1].isalpha():
            table = f"q_{table}" if table else "queue"
        return _unused(stem, self._taken, "{}{}"), _unused(table, self._tables, "{}_{}")


def _words(name: str) -> list[str]:
    """The runs of letters and digits in it, without accents; a hump (``newOrders``) begins a word."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.findall(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*|[0-9]+", plain)


def _unused(name: str, taken: set[str], numbered: str) -> str:
    number, candidate = 1, name
    while candidate.lower() in taken:
        number += 1
        candidate = numbered.format(name, number)
    taken.add(candidate.lower())
    return candidate


#: Where the names of the generated module come from; no class of a queue may have one of them.
PUBLIC = ("Drop", "ExpirationModel", "FairnessModel", "Leasing", "Queue", "Semantics")
IMPORTED = (*PUBLIC, "timedelta")
_NAME = re.compile(r"\w+")


def as_python(imported: Imported, app_label: str = "") -> str:
    """The module. Without a queue it is a docstring alone."""
    lines = ['"""Queues of an AMPS configuration, written by ``manage.py importamps``."""']
    if imported.queues:
        lines += ["", *_imports(imported)]
    if imported.journal:
        lines += ["", *_comment("The TransactionLog keeps these topics. In the settings:", 0)]
        lines += [f"# {line}" for line in journal_setting(imported.journal)]
    for queue in imported.queues:
        lines += ["", "", *_class(queue, imported.file, app_label)]
    return "\n".join(lines) + "\n"


def journal_setting(topics: list[str]) -> list[str]:
    """The lines that mark topics as journaled."""
    return ['QUEUEAPP["JOURNAL"] = {', *(f"    {text_literal(topic)}: None," for topic in topics), "}"]


def _imports(imported: Imported) -> Iterator[str]:
    used = {"Queue"}
    for queue in imported.queues:
        for value in queue.options.values():
            if not value.source.startswith(("'", '"')):
                used.update(_NAME.findall(value.source))
    if "timedelta" in used:
        yield from ("from datetime import timedelta", "")
    yield f"from queueapp import {', '.join(name for name in PUBLIC if name in used)}"


def _class(queue: ImportedQueue, file: str, app_label: str) -> Iterator[str]:
    yield f"class {queue.class_name}(Queue):"
    yield from _comment(f"{queue.element} {shown(queue.name)}, {shown(file)}:{queue.line}", 4)
    for finding in queue.findings:
        yield from _comment(f"Line {finding.line}, {finding.element}: {finding.reason}.", 4)
    for comment in queue.comments:
        yield from _comment(comment, 4)
    yield "    class Meta:"
    if app_label:
        yield from assignment("app_label", text_literal(app_label), 8)
    yield from assignment("db_table", text_literal(queue.table), 8)
    yield from ("", "    class Delivery:")
    for option, value in queue.options.items():
        yield from assignment(option, value.source, 8)


def _comment(text: str, indent: int) -> list[str]:
    # visible() has left no character that ends a line; what is in a comment is never read as anything else.
    return textwrap.wrap(
        " ".join(text.split()),
        LINE,
        initial_indent=" " * indent + "# ",
        subsequent_indent=" " * indent + "# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
