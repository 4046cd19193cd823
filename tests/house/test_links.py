"""Links between the documents."""

import re

import pytest

from tests.house.documents import ROOT


@pytest.mark.parametrize(
    "document",
    sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))
    + sorted(path.name for path in ROOT.glob("*.md")),
)
def test_links_lead_to_files(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    assert not [link for link in links if "://" not in link and not (path.parent / link).exists()]
