"""Commit and pipeline tag of a model directory."""

from pathlib import Path

import pytest

from tgi.hub.model_config import pipeline_tag, snapshot_commit

pytestmark = pytest.mark.slow


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    directory = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    directory.mkdir(parents=True)
    return directory


def test_the_commit_is_the_snapshot_directory_name(snapshot: Path) -> None:
    assert snapshot_commit(snapshot) == "0" * 40


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
def test_the_pipeline_tag_comes_from_the_model_card_header(snapshot: Path, card: str, tag: str | None) -> None:
    (snapshot / "README.md").write_text(card)
    assert pipeline_tag(snapshot) == tag


def test_other_directories_have_no_commit_and_no_tag(tmp_path: Path, snapshot: Path) -> None:
    (tmp_path / "README.md").write_text("---\npipeline_tag: text-generation\n---\n")
    assert (snapshot_commit(tmp_path), pipeline_tag(tmp_path)) == (None, None)
    assert pipeline_tag(snapshot) is None
