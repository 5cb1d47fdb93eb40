"""Every setting is read by the part of the code that the table names, and the page shows the table."""

from __future__ import annotations

import pytest

from layerzero.settings import SETTINGS
from tools import settings


@pytest.mark.parametrize("item", SETTINGS, ids=lambda item: item.key or item.variable)
def test_a_setting_is_read_by_its_reader(item):
    assert settings.readers(item), (
        f"nothing in {item.reader} reads it: give it a reader, correct the table or take it out"
    )


def test_a_setting_that_nobody_reads_is_found():
    made_up = SETTINGS[0]._replace(key="plan_everything", variable="PLAN_EVERYTHING")
    assert settings.readers(made_up) == []


def test_the_page_shows_the_table():
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "run python -m tools.settings"
