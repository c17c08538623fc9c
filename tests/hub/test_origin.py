"""Commit and pipeline tag of a model directory."""

from pathlib import Path

import pytest

from tgi.hub.origin import commit, pipeline_tag


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    directory = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    directory.mkdir(parents=True)
    return directory


def test_a_snapshot_has_its_commit(snapshot: Path) -> None:
    assert commit(snapshot) == "0" * 40


@pytest.mark.parametrize(
    ("card", "tag"),
    [
        ("---\nlicense: mit\npipeline_tag: text2text-generation\n---\n# A model\n", "text2text-generation"),
        ('---\npipeline_tag: "text-generation"\n---\n', "text-generation"),
        ("---\nlicense: mit\n---\npipeline_tag: in-the-text\n", None),
        ("pipeline_tag: no-head\n", None),
        ("---", None),
        ("", None),
    ],
)
def test_the_tag_stands_in_the_head_of_the_card(snapshot: Path, card: str, tag: str | None) -> None:
    (snapshot / "README.md").write_text(card)
    assert pipeline_tag(snapshot) == tag


def test_another_directory_tells_nothing(tmp_path: Path, snapshot: Path) -> None:
    (tmp_path / "README.md").write_text("---\npipeline_tag: text-generation\n---\n")
    assert (commit(tmp_path), pipeline_tag(tmp_path)) == (None, None)
    assert pipeline_tag(snapshot) is None
