"""What the README and the docs say: their code runs, their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")


def code_blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{number}", block)
        for page in PAGES
        for number, block in enumerate(BLOCK.findall(page.read_text()), 1)
    ]


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in code_blocks()])
def test_python_code_runs(block):
    exec(compile(block, "block", "exec"), {})


def test_the_table_of_many_devices_is_what_its_program_prints(capsys):
    page = (ROOT / "docs" / "scaling.md").read_text()
    (program,) = [block for block in BLOCK.findall(page) if "MemoryPlan.build" in block]
    exec(compile(program, "block", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 12
    assert f"|---|---|---|---|---|---|---|---|\n{printed}\n" in page


def test_the_readme_has_python_and_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert BLOCK.search(text)
    assert "pip install '.[examples]' && python examples/train_digits.py\n" in text
    assert "pip install '.[test]' && python -m pytest\n" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link
