"""Chromium for page tests: found, started once, or the reason why not."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {1440: 900, 390: 844}
LAYERS, EXPERTS = 78, 256


def plain(value: str) -> str:
    return value.replace("\u202f", " ")


def near(found: list[Any], expected: list[Any], digits: int = 6) -> bool:
    """Equal to the digits that the page's data keeps, or the last of them one off.

    One off where twice rounded would be shown as another number; see reports.view.six.
    """

    def equal(told: Any, exact: Any) -> bool:
        if not isinstance(exact, float) or not isinstance(told, float | int):
            return bool(told == exact)
        rounded = float(f"{exact:.{digits}g}")
        return told == rounded or math.isclose(told, exact, rel_tol=10 ** (1 - digits))

    return len(found) == len(expected) and all(map(equal, found, expected))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running browser; skips with the reason where there is none."""
    api = pytest.importorskip(
        "playwright.sync_api",
        reason="not run: playwright is not installed (pip install playwright)",
    )
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("not run: no Chromium here (apt-get install chromium)")
        browser = playwright.chromium.launch(executable_path=found, args=[*_FLAGS, *root])
        yield browser
        browser.close()


class Opened:
    """One page and all that it did: addresses asked for, errors, console lines."""

    def __init__(self, browser: Any, path: Path, width: int = 1440, **context: Any) -> None:
        options = {"color_scheme": "light", "locale": "en-US"} | context
        self._context = browser.new_context(
            viewport={"width": width, "height": SIZES[width]}, **options
        )
        self.page = self._context.new_page()
        self.page.set_default_timeout(10_000)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.address = path.as_uri()
        self.page.goto(self.address)
        self.page.wait_for_function("document.documentElement.dataset.ready")

    def close(self) -> None:
        self._context.close()

    def attribute(self, selector: str, name: str) -> str:
        return str(self.page.locator(selector).get_attribute(name))

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def tip(self) -> str:
        """The tooltip's visible text, one space between words."""
        self.page.locator("#tip:not([hidden])").wait_for()
        return " ".join(self.page.locator("#tip").inner_text().split())

    def rows(self, table: str) -> list[list[float | str | None]]:
        """Every cell of a chart's data table, opened if need be: exact numbers, or text."""
        details = self.page.locator(f'details[data-table="{table}"]')
        if details.get_attribute("open") is None:
            details.locator("summary").click()
        details.locator("table").wait_for()
        return list(
            details.evaluate("""(d) => [...d.querySelectorAll("tbody tr")].map((row) =>
                [...row.cells].map((c) => c.dataset.v === undefined ? c.textContent
                    : c.dataset.v === "" ? null : Number(c.dataset.v)))""")
        )
