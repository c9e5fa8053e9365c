"""Messages that belong together: ``Prepared``, a message that is sent later, ``Chain``, messages that follow each
other, and ``Group``, messages with a completion message."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, Unpack

from django.db import IntegrityError, connections, router
from django.db.models import Sum
from django.db.utils import DEFAULT_DB_ALIAS

from .. import messages, notifier
from ..consuming.context import handling
from ..errors import InvalidMessage, MessageNotFound
from ..flow import group_members
from ..models import GroupAddition, GroupMember, GroupMessage, MessageGroup
from ..sql.message_columns import Outgoing
from . import bulk, early_acks
from .isolation import as_of_now, atomic_on
from .preparation import encode_body, refuse_encryption_subject, with_correlation
from .send import Step, build_message, insert, seconds_kept, steps_of, with_workflow
from .validation import CarriedOptions, alias_of, build_outgoing


class Prepared(Step):
    """A message that was checked and encoded, and is sent later: what ``Queue.prepare`` returns."""

    __slots__ = ()

    def send(self) -> uuid.UUID:
        """Send it now, in the caller's transaction; returns its id."""
        return self.send_all()[0]

    def send_all(self) -> tuple[uuid.UUID, ...]:
        """``send`` that returns the ids of what follows as well."""
        message, ids = self.ready()
        insert(self.queue, connections[self.alias], message, self.body_class, None, None)
        return (message.id, *ids)

    def ready(self) -> tuple[Outgoing, list[uuid.UUID]]:
        """(the message with what follows it in its headers, the ids of that)."""
        message = self.anew()
        if not self.then and self.keep_result is None:
            return message, []
        given = messages.decode_headers(message.headers)
        headers, ids = with_workflow(self.queue, self.alias, message.id, given, None, self.then, self.keep_result)
        return message._replace(headers=messages.encode_headers(headers)), ids


def prepare(
    queue: Any,
    body: Any,
    *,
    headers: Mapping[str, str] | None = None,
    priority: int = 0,
    recipient: str = "",
    correlation_id: str | None = None,
    reply_to: str | None = None,
    using: str | None = None,
    then: Prepared | Chain | None = None,
    keep_result: timedelta | None = None,
    **carried: Any,
) -> Prepared:
    """A message of this queue that is not sent yet; the arguments are those of ``send``. Raises InvalidMessage, also
    for a queue with dedupe keys: what is sent later would pass over them."""
    if queue.delivery.dedupe_key is not None:
        raise InvalidMessage(f"{queue._meta.label} has dedupe keys: no message of it can be prepared.")
    message = build_message(
        queue, body, messages.new_id(), headers, None, priority, recipient, correlation_id, reply_to, carried
    )
    following = () if then is None else steps_of(then)
    kept = seconds_kept(queue, recipient, keep_result)
    return Prepared(queue, alias_of(queue, using), message, type(body), then=following, keep_result=kept)


class Chain:
    """Messages that follow each other: each is sent in the transaction of the ack of the one before.

    >>> Chain([Orders.prepare({"order": 7}), Invoices.prepare({"order": 7}), Mails.prepare({"order": 7})]).send()
    """

    def __init__(self, messages: Iterable[Prepared]) -> None:
        """Raises InvalidMessage for a chain without a message, or of anything but ``Queue.prepare(body, ...)``."""
        found = list(messages)
        if not found or not all(isinstance(message, Prepared) for message in found):
            raise InvalidMessage("A chain takes a list of prepared messages: Chain([Queue.prepare(body, ...), ...]).")
        _, *then = (step for message in found for step in message.steps)
        #: The first message, which carries the others.
        self._whole = replace(found[0], then=tuple(then))
        self.steps: tuple[Step, ...] = self._whole.steps

    def send(self) -> tuple[uuid.UUID, ...]:
        """Send the first message, which carries the others; returns the ids of all of them. Raises InvalidMessage."""
        return self._whole.send_all()


#: Arguments of ``send`` that a member cannot have: it would be stored elsewhere, or by another transaction, or not at
#: all.
_REFUSED = ("dedupe_key", "isolated", "delayed_in", "using", "message_id", "is_barrier")


class GroupCounts(NamedTuple):
    """The members of a group. An inner group counts as one."""

    waiting: int
    done: int
    failed: int


class Group:
    """Messages with a completion message, which is sent in the transaction in which the last of them ends.

    ``on_complete`` is sent when all members were handled, ``on_failure`` when one of them has failed (poison, expired,
    discarded, deleted); without ``on_failure`` ``on_complete`` is sent in both cases. ``parent``: the group that this
    one is a member of. ``name`` is for operators. ``using``: its database, by default that of its parent or of its
    message.

    >>> with Group(on_complete=Reports.prepare({"month": 11})) as group:
    ...     group.send(Invoices, {"customer": 7})
    """

    def __init__(
        self,
        *,
        on_complete: Prepared | None = None,
        on_failure: Prepared | None = None,
        parent: Group | None = None,
        name: str = "",
        using: str | None = None,
    ) -> None:
        self.id = messages.new_id()
        self.parent, self.name = parent, name
        self._prepared = {False: on_complete, True: on_failure}
        for message in filter(None, self._prepared.values()):
            if not isinstance(message, Prepared):
                raise InvalidMessage(f"{message!r} is no completion message: write Queue.prepare(body, ...).")
            using = using or message.alias
        self.alias: str = using or (parent.alias if parent is not None else router.db_for_write(MessageGroup))
        for message in filter(None, self._prepared.values()):
            self._refuse_alias(message.queue, message.alias)
        if parent is not None and parent.alias != self.alias:
            raise InvalidMessage(f"Group {self.id} lies in {self.alias!r}, and its parent in {parent.alias!r}.")

    @classmethod
    def get(cls, identity: uuid.UUID, *, using: str = DEFAULT_DB_ALIAS) -> Group:
        """A group that was opened before. Raises MessageNotFound."""
        row = MessageGroup.objects.using(using).filter(pk=identity).first()
        if row is None:
            raise MessageNotFound(f"There is no group {identity} in {using!r}.")
        group = cls(name=row.name, using=using)
        group.id = identity
        return group

    @classmethod
    def of(cls, context: Any) -> Group | None:
        """The group of the message with this context; None: it is no member."""
        identity = context.headers.get(messages.GROUP)
        return None if identity is None else cls.get(uuid.UUID(identity), using=context.alias)

    # -- open and closed ----------------------------------------------------------------------------------------------

    def open(self) -> Group:
        """Store the group; it completes after ``close`` only. Raises InvalidMessage if it is stored already."""
        parent = self.parent.id if self.parent is not None else None
        row = MessageGroup(id=self.id, name=self.name[:200], parent=parent)
        stored = [self._stored(message, bool(failed)) for failed, message in self._prepared.items() if message]
        try:
            group_members.create(self.alias, row, stored)
        except IntegrityError as error:
            raise InvalidMessage(
                f"Group {self.id} has been opened before: make a new Group for more members."
            ) from error
        return self

    def close(self) -> None:
        """No more members from outside: the group completes as soon as none waits. Handlers of members may still
        add."""
        group_members.close(self.alias, self.id)

    def __enter__(self) -> Group:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _stored(self, prepared: Prepared, on_failure: bool) -> GroupMessage:
        message, _ = prepared.ready()
        if prepared.queue.delivery.encoding:
            message = encode_body(prepared.queue, message, self.alias)
        return GroupMessage(
            group_id=self.id,
            destination=prepared.queue._meta.label,
            on_failure=on_failure,
            message_id=message.id,
            headers=message.headers,
            body=message.body,
            recipient=message.recipient,
            priority=message.priority,
            correlation_id=message.correlation_id,
            reply_to_address=message.reply_to_address,
            is_barrier=message.is_barrier,
        )

    # -- members ------------------------------------------------------------------------------------------------------

    def send(self, queue: Any, body: Any, **options: Any) -> uuid.UUID:
        """``queue.send(body, ...)`` of a member, in the caller's transaction; returns its id. Raises InvalidMessage,
        also when the group is complete."""
        self._refuse(queue, options)
        identity = messages.new_id()
        headers = self._headers(options.pop("headers", None))
        with atomic_on(connections[self.alias]):
            # First: where messages are handled at once (EAGER) it has ended when the send returns.
            group_members.add(connections[self.alias], self.id, [identity])
            queue.send(body, headers=headers, message_id=identity, using=self.alias, **options)
        return identity

    def send_many(
        self,
        queue: Any,
        bodies: Iterable[Any],
        *,
        headers: Mapping[str, str] | None = None,
        expires_in: timedelta | None = None,
        priority: int = 0,
        **carried: Unpack[CarriedOptions],
    ) -> int:
        """``queue.send_many(bodies, ...)`` of members, in the caller's transaction; returns how many were sent. Raises
        InvalidMessage."""
        self._refuse(queue, carried)
        bulk.refuse_one_message("Group.send_many", "Group.send(...)", bodies)
        refuse_encryption_subject(queue, headers)
        connection, ids = connections[self.alias], list[bytes]()
        headers = self._headers(headers)
        if (caller := handling.get()) is not None:
            headers = with_correlation(headers, None, caller) or headers
        like = build_outgoing(queue, messages.new_id(), "{}", None, expires_in, priority, "", None, None, carried)

        def recorded() -> Iterator[bulk.Encoded]:
            for run in bulk.encoded(bodies, headers, queue.delivery.message_type):
                ids.extend(run.ids)
                yield run

        with atomic_on(connection):
            runs = bulk.runs_for(queue, recorded(), like, connection)
            # Not committed yet, so none of them is handled before it is a member.
            count = early_acks.insert_runs(queue, connection, runs, isinstance(bodies, list | tuple))
            for first in range(0, len(ids), ADDED_AT_ONCE):
                part = [uuid.UUID(bytes=identity) for identity in ids[first : first + ADDED_AT_ONCE]]
                group_members.add(connection, self.id, part)
        if count:
            notifier.sent(queue, connection)
        return count

    def _headers(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        return {**(headers or {}), messages.GROUP: str(self.id)}

    def _refuse(self, queue: Any, options: Mapping[str, Any]) -> None:
        if not queue.delivery.groups:
            raise InvalidMessage(f"{queue._meta.label} has no members of groups: set Delivery.groups = True.")
        self._refuse_alias(queue, router.db_for_write(queue) if self.alias == DEFAULT_DB_ALIAS else self.alias)
        if queue.delivery.dedupe_key is not None:
            raise InvalidMessage(
                f"{queue._meta.label} has dedupe keys: a message that is not stored cannot be a member."
            )
        for name in _REFUSED:
            if name in options:
                raise InvalidMessage(f"{name} is not accepted by a group.")

    def _refuse_alias(self, queue: Any, alias: str) -> None:
        if alias != self.alias:
            raise InvalidMessage(f"{queue._meta.label} lies in {alias!r}, and group {self.id} in {self.alias!r}.")

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether its last member has ended."""
        rows = MessageGroup.objects.using(self.alias).filter(pk=self.id, completed_at__isnull=False)
        return as_of_now(self.alias, rows.exists)

    def counts(self) -> GroupCounts:
        """How many members wait, were handled and have failed."""
        return as_of_now(self.alias, lambda: counts_of(self.alias, self.id))


#: Members that one statement adds.
ADDED_AT_ONCE = 10_000


def counts_of(alias: str, identity: uuid.UUID) -> GroupCounts:
    """The members of a group."""
    row = MessageGroup.objects.using(alias).filter(pk=identity).first()
    if row is not None and row.completed_at is not None:
        return GroupCounts(0, row.done or 0, row.failed or 0)
    members = GroupMember.objects.using(alias).filter(group_id=identity)
    members = members.exclude(pk=group_members.opening_of(identity))
    waiting = members.filter(outcome=GroupMember.Outcome.WAITING).count()
    failed = members.exclude(outcome=GroupMember.Outcome.WAITING).count()
    added = GroupAddition.objects.using(alias).filter(group_id=identity).aggregate(total=Sum("members"))["total"] or 0
    return GroupCounts(waiting, max(0, added - waiting - failed), failed)
