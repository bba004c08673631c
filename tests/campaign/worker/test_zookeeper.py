"""A short campaign over ZooKeeper, and proof that its judge can find what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.worker.zookeeper import Campaign, judge
from tests.support.zookeeper import require


def test_short_campaign_over_zookeeper_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("kazoo")
    require()
    campaign = Campaign(7, tmp_path)
    assert campaign.run(15.0) == []
    assert campaign.faults


@pytest.mark.parametrize(
    ("logs", "why"),
    [
        (("1 begin a 1\n3 end a 3", "2 begin a 2\n4 end a 4"), "overlap"),
        (("1 begin a 5\n2 end a 2", "3 begin a 4\n4 end a 4"), "no greater fencing token"),
        (("1 error ValueError x",), "ValueError"),
        (("1 begin a 1\n2 ended x\n9 end a 5", "3 begin a 2\n4 end a 4"), ""),
        (("1 begin a 1\n9 end a 2", "3 begin a 2\n4 end a 4"), ""),
    ],
)
def test_judge_finds_overlaps_and_tokens_that_do_not_grow(
    tmp_path: Path, logs: tuple[str, ...], why: str
) -> None:
    for number, text in enumerate(logs):
        (tmp_path / f"{number}.log").write_text(text + "\n")
    wrong = judge(tmp_path)
    assert (why in wrong[0]) if why else not wrong
