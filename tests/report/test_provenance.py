"""Provenance of a result, with and without a git tree."""

import subprocess

import duotone.report.provenance as provenance


def test_a_git_tree_is_named_with_its_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    monkeypatch.delenv("DUOTONE_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert len(provenance.commit()) == 40
    (tmp_path / "change").touch()
    assert provenance.commit().endswith("+dirty")


def test_a_copy_takes_the_commit_of_its_sender(monkeypatch):
    monkeypatch.setenv("DUOTONE_COMMIT", "abc")
    assert provenance.commit() == "abc"
