"""Who may read the body of a message that is not in its queue: whoever may see the messages of that queue.

The delayed and the poison table hold messages of all queues, so the permission on the table says nothing of them. Of a
queue that is no more, the permission of its name counts: superusers have it, and whoever was given it while it lived.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from .. import registry
from ..errors import QueueNotFound


def may_view(admin_site: Any, request: HttpRequest, queue: str) -> bool:
    """Whether the user may see the messages of the queue with this label, table or address: as its own page
    decides, if it has one."""
    try:
        model = registry.queues.find_addressed(queue)[0]
    except QueueNotFound:
        app, _, name = queue.partition("@")[0].lower().rpartition(".")
    else:
        page = admin_site._registry.get(model)
        if page is not None:
            return bool(page.has_view_permission(request))
        app, name = model._meta.app_label, model._meta.model_name
    # As Django's admin does: whoever may change something may look at it.
    return any(request.user.has_perm(f"{app}.{verb}_{name}") for verb in ("view", "change"))
