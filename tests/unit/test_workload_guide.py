"""The code in docs/policies.md does what the page says."""
import re
from pathlib import Path

import pytest

from recover import workload
from recover.workload import Balanced, Roles, check_plan, check_share, policy

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(workload, "_factories", dict(workload._factories))


def test_the_life_of_a_run(capsys):
    exec(compile(BLOCKS[0], "docs/policies.md", "exec"), {})
    said = [line.split("#", 1)[1].strip() for line in BLOCKS[0].splitlines() if line.startswith("print")]
    assert capsys.readouterr().out.splitlines() == said


def test_the_guide_s_policy_keeps_the_rules():
    assert len(BLOCKS) == 2
    exec(compile(BLOCKS[1], "docs/policies.md", "exec"), {})
    dealt = policy("dealt")
    for total in range(1, 20):
        for vector in ({4: 1.0}, {0: 1.0, 9: 0.5}, {3: 2.0, 1: 0.0, 2: 1.0, 8: 1.0}):
            check_plan(dealt, dealt.plan(vector, 0, total), vector, total)
            able = sorted(vector)
            check_share(dealt, dealt.share(range(total), able, vector, {}), list(range(total)), able)


def test_the_table_lists_what_is_there():
    names = re.findall(r"^\| `(\w+)`(?: \(default\))? \| `\w+` \|", PAGE, re.MULTILINE)
    assert sorted(names) == sorted(workload._factories)
    assert Balanced().name in names
    assert Roles(1, 1).name in names
