"""Where a result came from, with and without a git tree."""

import duotone.provenance as provenance


def test_a_copy_without_git_takes_the_commit_of_its_sender(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("DUOTONE_COMMIT", "abc")
    assert provenance.commit() == "abc"
    monkeypatch.delenv("DUOTONE_COMMIT")
    assert provenance.commit() is None


def test_a_git_tree_speaks_for_itself(monkeypatch):
    if provenance.commit() is None:
        return
    monkeypatch.setenv("DUOTONE_COMMIT", "abc")
    assert provenance.commit() != "abc"
