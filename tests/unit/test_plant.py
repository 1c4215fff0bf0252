"""The list of planted faults says what the sources say today."""

from __future__ import annotations

import plant
import pytest


@pytest.mark.parametrize("fault", plant.faults(), ids=lambda fault: fault.name)
def test_each_fault_can_be_planted(fault: plant.Fault) -> None:
    text = (plant.ROOT / fault.source).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    assert fault.new != fault.old
    assert (plant.ROOT / fault.test.partition("::")[0]).is_file()


def test_the_names_and_the_documents_table_agree() -> None:
    table = (plant.ROOT / "docs/testing.md").read_text(encoding="utf-8")
    assert [fault.name for fault in plant.faults() if f"| {fault.name} | `{fault.source}` |" not in table] == []
