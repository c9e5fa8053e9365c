"""Permission to read the body of a delayed or poison message: that of the messages of its queue.

The delayed and the poison table hold messages of all queues, so the permission on the table is not enough. For a queue that does
not exist any more, the permission of its name counts: superusers have it, and users that it was given to before.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from .. import registry
from ..errors import QueueNotFound


def may_view(admin_site: Any, request: HttpRequest, queue: str) -> bool:
    """Whether the user may see the messages of the queue with this label, table or address. The page of the queue decides,
    if it has one."""
    try:
        model = registry.queues.find_addressed(queue)[0]
    except QueueNotFound:
        app, _, name = queue.partition("@")[0].lower().rpartition(".")
    else:
        page = admin_site._registry.get(model)
        if page is not None:
            return bool(page.has_view_permission(request))
        app, name = model._meta.app_label, model._meta.model_name
    # As in Django's admin, the change permission includes viewing.
    return any(request.user.has_perm(f"{app}.{verb}_{name}") for verb in ("view", "change"))
