"""Erasing a subject: enter it, see its keys, confirm.

The page has no list and no search: a list of keys would disclose the subjects, and a search term would be in the URLs
that servers log. The history records which user destroyed which key, and not its subject.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import DELETION
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse

from ..encryption import subject_keys
from ..encryption.subject_keys import LONGEST
from ..models import SubjectKey
from .databases import OfDatabases
from .formatting import display, untrusted
from .operations import Options, ask, log_entry
from .read_only import ReadOnlyAdmin

ERASE = "queueapp.erase_subject"
ERASE_TEXT = (
    "The keys of the subject are destroyed in every database: nothing that was encrypted for it can be read any more, "
    "in any queue, store or copy, and workers discard such messages. This cannot be undone. Messages sent for it later "
    "get a new key."
)


class Subject(Options):
    """The subject to erase."""

    subject = forms.CharField(
        max_length=LONGEST,
        strip=False,
        help_text="The full subject, as in the header encrypt-for.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )


class SubjectKeyAdmin(ReadOnlyAdmin, OfDatabases):
    """The form in place of a list."""

    # -- permissions ----------------------------------------------------------------------------------------------

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(ERASE)

    # -- pages ----------------------------------------------------------------------------------------------------

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Ask for the subject, then for confirmation; then erase."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return self.or_note(request, self.database(request), lambda: self._erase(request))

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        """There is no page per key."""
        raise PermissionDenied

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """The log of the site has the entries."""
        raise PermissionDenied

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Deleting a row would leave a missing key, not an erased one."""
        raise PermissionDenied

    def _erase(self, request: HttpRequest) -> HttpResponse:
        form = Subject(request.POST) if request.method == "POST" else Subject()
        if not form.is_bound or not form.is_valid():
            return self._ask(
                request, "Erase a subject", ERASE_TEXT, form=form, yes="Look for its keys", dangerous=False
            )
        subject = form.cleaned_data["subject"]
        found = subject_keys.find(subject)
        if not found:
            form.add_error(
                "subject", "This subject has no key: it is misspelt, nothing was sent for it, or it is erased."
            )
            return self._ask(
                request, "Erase a subject", ERASE_TEXT, form=form, yes="Look for its keys", dangerous=False
            )
        if "sure" not in request.POST:
            return self._ask(
                request,
                "Erase this subject?",
                ERASE_TEXT,
                few=[display.below(untrusted.inline(subject, LONGEST), *map(_describe, found))],
                hidden=[("subject", subject), ("sure", "yes")],
                form=Options(),
                yes="Destroy its keys",
                dangerous=True,
            )
        keys = self._keys(subject, found)
        gone = subject_keys.erase(subject, found)
        for key in keys:
            log_entry(self, request, "Key of a subject destroyed.", row=key, flag=DELETION).save()
        count = sum(gone.values())
        self.message_user(request, f"{count} key{'' if count == 1 else 's'} destroyed.", messages.SUCCESS)
        return HttpResponseRedirect(request.path)

    def _keys(self, subject: str, found: list[subject_keys.Found]) -> list[Any]:
        rows = (SubjectKey.objects.using(match.database).filter(subject=subject) for match in found)
        return [key for rows_found in rows for key in rows_found]

    def _ask(self, request: HttpRequest, title: str, explanation: str, **question: Any) -> HttpResponse:
        question = {"hidden": [], "few": []} | question
        back_to = request.path if question["dangerous"] else reverse(f"{self.admin_site.name}:index")
        return ask(
            self, request, title=title, explanation=explanation, post_to=request.path, back_to=back_to, **question
        )


def _describe(found: subject_keys.Found) -> Any:
    return untrusted.inline(f"database {found.database}, since {found.since:%Y-%m-%d}")
