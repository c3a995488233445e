"""A real browser for tests of the page, and what is missing where there is none."""

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mt_grpo.viewer.queries import Queries
from mt_grpo.viewer.server import Server

CHROMIUM = Path("/usr/bin/chromium-headless-shell")


def missing() -> str | None:
    """What a browser test lacks on this machine, and how to get it; `None` where all is there."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install 'mt-grpo[test]'"
    if not CHROMIUM.exists():
        return f"{CHROMIUM} is not there: `make browser`, or apt-get install chromium-headless-shell"
    return None


@contextmanager
def open_browser() -> Iterator:
    """Debian's Chromium without a window, driven by playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched(browser, **options) -> Iterator:
    """A page whose script errors, policy refusals and requests elsewhere are kept in `page.wrong`: none at the end."""
    page = browser.new_page(**options)
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(f"error: {error}"))
    page.on("console", lambda said: said.type in ("error", "warning") and page.wrong.append(said.text))
    page.on("dialog", lambda dialog: (page.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda asked: _is_elsewhere(asked.url) and page.wrong.append(f"request: {asked.url}"))
    page.set_default_timeout(60_000)
    yield page
    page.close()
    assert not page.wrong


def _is_elsewhere(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "file://", "data:"))


@contextmanager
def serving(queries: Queries) -> Iterator[Server]:
    """The page of a run, on a free port."""
    with Server(queries, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def opened(browser, queries: Queries, where: str = "overview", **options) -> Iterator:
    """A watched page over a run, or several, at one of its views."""
    with serving(queries) as server, watched(browser, **options) as page:
        page.address = server.url
        go(page, where)
        yield page


def go(page, where: str) -> None:
    """Opens a view of the page, and waits until it is shown."""
    page.evaluate("performance.clearMarks()")
    address = f"{page.address}#/{where}"
    page.reload() if page.url == address else page.goto(address)
    shown(page, where.split("?")[0])


def shown(page, view: str) -> None:
    """Waits until a view is there with its drawings, which are made when their width is known."""
    page.wait_for_function("name => performance.getEntriesByName('shown ' + name).length", arg=view)
    drawings = "[...document.querySelectorAll('.chart, .tree, .overlaid')]"
    page.wait_for_function(f"() => {drawings}.every(e => !e.clientWidth || e.childElementCount)")


def address_has(page, *parts: str) -> None:
    """Waits until the page's own address has these parts: what `page.url` is told of it comes later."""
    page.wait_for_function("parts => parts.every(part => location.href.includes(part))", arg=parts)


def texts(page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def count(page, selector: str) -> int:
    return page.locator(selector).count()
