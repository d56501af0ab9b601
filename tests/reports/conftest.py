"""The browser and one made-up GLM-5 run's page, for the tests that need them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports import html
from reports.record import Accuracy, RunRecord
from tests.reports.browser import EXPERTS, LAYERS, Opened, chromium
from tests.reports.made_up import record

__all__ = ["chromium"]


@pytest.fixture(scope="session")
def made() -> RunRecord:
    return record(LAYERS, EXPERTS)


@pytest.fixture(scope="session")
def accuracy(made: RunRecord) -> Accuracy:
    assert made.accuracy is not None
    return made.accuracy


@pytest.fixture(scope="session")
def file(made: RunRecord, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    html.write_page(made, path)
    return path


@pytest.fixture(scope="module")
def opened(chromium: Any, file: Path) -> Iterator[Opened]:
    page = Opened(chromium, file)
    yield page
    page.close()
