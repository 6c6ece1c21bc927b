"""docs/diagnosis.md has the words of the commands."""

from __future__ import annotations

import pytest

from samovar.cluster.doctor.runbook import PAGE, check_table, rendered, runbook
from samovar.configs.fields import setting_fields
from samovar.router.observe.diagnosis import diagnose
from samovar.router.observe.diagnosis.snapshot import SETTINGS
from tests.support.router.snapshots import PLANTED


def test_the_page_is_that_of_the_commands() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page), "run `python -m samovar.cluster.doctor.runbook`"
    assert runbook() in page
    assert check_table() in page


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="substring"):
        rendered("# no marks")


def test_every_setting_that_is_named_exists() -> None:
    known = setting_fields().keys()
    assert set(SETTINGS) <= known
    changed = {
        c.setting for s in PLANTED.values() for f in diagnose(s).holding for c in f.changes if c.setting
    }
    assert changed <= known
