"""Editing a poison message: headers and body in a form, the edited copy is requeued, the original is kept.

The copy is exactly what was typed: nothing is reformatted, and an unchanged body keeps its bytes. A body that a text
field would change (binary, with control characters, or large) is not editable; its headers are.
"""

from __future__ import annotations

from typing import Any

import msgspec
from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from ..errors import InvalidMessage, MessageNotFound, QueueNotFound, UndecodableMessage
from ..failures import poison_operations
from ..messages import decode_headers
from ..models import PoisonMessage
from ..sql import nonblocking
from .body_reader import editable_body
from .formatting.untrusted import visible
from .operations import breadcrumbs, log_entry

#: Bytes of the longest body, and characters of the longest headers, that a form offers to edit.
LONGEST = 512 * 1024
TEMPLATE = "admin/queueapp/edit.html"


class EditForm(forms.Form):
    """Headers as a JSON object of strings, and the body where it is text."""

    headers = forms.CharField(
        strip=False,
        widget=forms.Textarea(attrs={"rows": 8, "cols": 100, "spellcheck": "false", "dir": "ltr"}),
        help_text="A JSON object of strings. Ids, correlation and what failed are locked; with another type or content "
        "type the message is for other consumers.",
    )
    body = forms.CharField(
        strip=False,
        required=False,
        widget=forms.Textarea(attrs={"rows": 20, "cols": 100, "spellcheck": "false", "dir": "ltr"}),
    )

    def __init__(self, message: PoisonMessage, body: bytes | None, data: Any = None) -> None:
        self.text = editable(body)
        super().__init__(data, initial={"headers": _indented(message.headers), "body": self.text})
        if self.text is None:
            del self.fields["body"]
        elif visible(self.text) != self.text:
            self.fields["body"].help_text = "This body contains characters that are invisible here."

    def clean_headers(self) -> dict[str, str]:
        """The headers as a mapping."""
        try:
            return msgspec.json.decode(self.cleaned_data["headers"], type=dict[str, str])
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            raise forms.ValidationError(f"This is not a JSON object of strings: {error}") from error

    @property
    def new_body(self) -> bytes | None:
        """The body that was typed; None if it is unchanged."""
        if self.text is None:
            return None
        typed = _unix(self.cleaned_data["body"])
        if typed == _unix(self.text):
            return None
        # Browsers send every line end as CR LF; restore those of the message.
        return (typed.replace("\n", "\r\n") if "\r\n" in self.text else typed).encode()


def editable(body: bytes | None) -> str | None:
    """A body as the text of a form; None if a form would not return it unchanged."""
    if body is None or len(body) > LONGEST:
        return None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    one_kind_of_line_end = "\r" not in text.replace("\r\n", "") and (
        "\r\n" not in text or "\n" not in text.replace("\r\n", "")
    )
    return text if one_kind_of_line_end and all(c >= " " or c in "\t\r\n" for c in text) else None


def edit_view(page: Any, request: HttpRequest, message: PoisonMessage) -> HttpResponse:
    """The form. A POST requeues the copy and redirects to the list, as does a message that can no longer be edited."""
    if not page.may_edit(request, message):
        raise PermissionDenied
    alias = message._state.db or "default"
    back = page.list_url(alias)
    full = nonblocking(PoisonMessage.objects.using(alias)).filter(pk=message.pk).first()
    if full is None or full.status != PoisonMessage.Status.UNRESOLVED or len(full.headers) > LONGEST:
        reason = "too large to be edited here" if full and len(full.headers) > LONGEST else "no longer unresolved"
        page.message_user(request, f"Message {message.pk} is {reason}.", messages.WARNING)
        return HttpResponseRedirect(back)
    body = editable_body(request, full)
    form = EditForm(full, body, request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            new = poison_operations.edit_and_requeue(
                full.pk, body=form.new_body, headers=form.cleaned_data["headers"], using=alias
            )
        except (InvalidMessage, QueueNotFound) as error:
            form.add_error(None, visible(str(error)))
        except MessageNotFound as error:
            page.message_user(request, str(error), messages.WARNING)
            return HttpResponseRedirect(back)
        else:
            log_entry(page, request, f"Edited and requeued as {new}.", row=full).save()
            page.message_user(
                request, f"The edited message was requeued as {new}; the original is kept as edited.", messages.SUCCESS
            )
            return HttpResponseRedirect(back)
    context = {
        **page.admin_site.each_context(request),
        "title": f"Edit and requeue {full.message_id}",
        "opts": page.opts,
        "media": page.media,
        "form": form,
        "back_to": "../change/",
        **breadcrumbs(page, ("../change/", full.pk), ("", "Edit")),
        "queue": visible(full.destination or full.queue),
    }
    request.current_app = page.admin_site.name  # type: ignore[attr-defined]
    return TemplateResponse(request, TEMPLATE, context)


def _indented(headers: str) -> str:
    try:
        return msgspec.json.format(msgspec.json.encode(decode_headers(headers)), indent=2).decode()
    except UndecodableMessage:
        return headers


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")
