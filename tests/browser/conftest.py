"""A real Chromium on the live site. The browser runs in a thread of its own: Playwright's synchronous API keeps an
event loop running in its thread, and Django rightly refuses to use its ORM beside one.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.http import HttpRequest, HttpResponse
from django.test import Client
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, expect, sync_playwright
from pytest_django.live_server_helper import LiveServer

from tests.browser import pages, rows
from tests.chromium import find_chromium

T = TypeVar("T")
#: How long a page is waited for: two cores that others want as well draw slowly.
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)
Scenario = Callable[[Page], T]

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def strict_content_security_policy(get_response: Any) -> Any:
    """Middleware: nothing inline, nothing from elsewhere. What it stops is an error in the browser's console."""

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response.setdefault(
            "Content-Security-Policy", "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"
        )
        return response

    return middleware


def _is_error(line: ConsoleMessage) -> bool:
    return line.type == "error" and not line.location.get("url", "").endswith("/favicon.ico")


class BrowserThread:
    """Runs scenarios, each in a fresh context, in the one thread that owns the browser."""

    def __init__(self, program: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="browser")
        self._playwright: Playwright
        self._browser: Browser
        self._thread.submit(self._start, program).result()

    def _start(self, program: str) -> None:
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=program, args=ARGUMENTS)

    def run(self, scenario: "Scenario[T]", cookie: dict[str, Any], **context: Any) -> T:
        """Carry a scenario out; fails when the page logged an error, or asked for anything outside the site."""
        return self._thread.submit(self._run, scenario, cookie, context).result()

    def _run(self, scenario: "Scenario[T]", cookie: dict[str, Any], options: dict[str, Any]) -> T:
        context = self._browser.new_context(**options)
        try:
            context.add_cookies([cookie])
            context.set_default_timeout(PATIENCE_MS)
            page = context.new_page()
            problems: list[str] = []
            site = cookie["url"]
            page.on("console", lambda line: problems.append(line.text) if _is_error(line) else None)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda r: None if r.url.startswith((site, "data:", "blob:")) else problems.append(r.url))
            result = scenario(page)
            assert problems == []
            return result
        finally:
            context.close()

    def close(self) -> None:
        self._thread.submit(self._stop).result()
        self._thread.shutdown()

    def _stop(self) -> None:
        self._browser.close()
        self._playwright.stop()


@pytest.fixture(scope="session")
def chromium() -> Iterator[BrowserThread]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on PATH (sudo apt-get install chromium)")
    browser = BrowserThread(str(program))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe, which checks a page for accessibility."""
    path = Path(sys.prefix, "axe/node_modules/axe-core/axe.min.js")
    if not path.exists():
        pytest.skip("axe is not installed: `make axe` does it")
    return path.read_text()


@pytest.fixture
def browse(
    chromium: BrowserThread, transactional_db: None, live_server: LiveServer, settings: Any
) -> Callable[..., Any]:
    """Carries a scenario out on the live site as a superuser, or as a user who has just the ``permissions``
    (``app.codename``): ``browse(lambda page: ..., color_scheme="dark")``."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.strict_content_security_policy"]

    def run(scenario: "Scenario[T]", permissions: Sequence[str] | None = None, **context: Any) -> T:
        client = Client()
        client.force_login(rows.operator() if permissions is None else _staff(permissions))
        value = client.cookies[_session_cookie()].value
        cookie = {"name": _session_cookie(), "value": value, "url": live_server.url}
        return chromium.run(scenario, cookie, **{"base_url": live_server.url, **context})

    return run


def _staff(permissions: Sequence[str]) -> User:
    user = User.objects.create_user("reader", password="x", is_staff=True)
    for app, codename in (name.split(".") for name in permissions):
        user.user_permissions.add(Permission.objects.get(content_type__app_label=app, codename=codename))
    return user


def _session_cookie() -> str:
    return settings.SESSION_COOKIE_NAME


@pytest.fixture
def populated(transactional_db: None) -> None:
    """Something in every state and on every page."""
    rows.everything()


@pytest.fixture
def addresses(populated: None) -> list[str]:
    """At least one of every kind of page."""
    return pages.addresses()
