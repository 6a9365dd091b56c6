"""Contents of wheel and source distribution, built by setuptools without a network."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import yaml

from paths import REPOSITORY

LARGEST_BYTES = 25_000_000
COPIED = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
BUILD = "from setuptools import build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
NEEDED = {
    "duotone/py.typed",
    "duotone/models/duotone_tiny/model.safetensors",
    "duotone/examples/examples.json",
    "duotone/planning/measured.json",
    "duotone/quant/presets/duotone-klt.safetensors",
    "duotone/attention/cuda/shared/common.cuh",
    "duotone/attention/cuda/spans/decode.cu",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, set[str]]]:
    """{kind: (bytes, names of files)}, from a copy of the repository with all its folders."""
    home = tmp_path_factory.mktemp("copy") / "duotone"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY / "src", home / "src", ignore=ignored)
    for name in COPIED:
        shutil.copy(REPOSITORY / name, home)
    for folder in ("tests", "benchmarks", "results", "training"):
        (home / folder).mkdir()
        (home / folder / f"test_{folder}.py").touch()
    subprocess.run([sys.executable, "-c", BUILD], cwd=home, check=True, capture_output=True)
    (wheel,), (sdist,) = (home / "out").glob("*.whl"), (home / "out").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {str(PurePosixPath(*Path(m.name).parts[1:])) for m in archive if m.isfile()}
    names = set(zipfile.ZipFile(wheel).namelist())
    return {"wheel": (wheel.stat().st_size, names), "sdist": (sdist.stat().st_size, members)}


@pytest.mark.slow
def test_a_wheel_holds_the_package_alone(built):
    size, names = built["wheel"]
    assert size < LARGEST_BYTES
    assert names >= NEEDED
    assert {name.split("/")[0].split("-")[0] for name in names} == {"duotone"}


@pytest.mark.slow
def test_a_source_distribution_holds_no_tests_and_no_tables(built):
    size, names = built["sdist"]
    assert size < LARGEST_BYTES
    assert names >= {f"src/{name}" for name in NEEDED}
    tops = {name.split("/")[0] for name in names if "/" in name}
    assert tops == {"src"}
    assert {name for name in names if "/" not in name} == {*COPIED, "PKG-INFO", "setup.cfg"}


def test_a_citation_and_a_package_have_one_version():
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert f'version = "{cited["version"]}"' in (REPOSITORY / "pyproject.toml").read_text()
    assert cited["license"] == "Apache-2.0"


def test_issue_templates_are_forms():
    forms = (REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    read = {form.stem: yaml.safe_load(form.read_text()) for form in forms}
    assert read.keys() == {"bug", "config", "model-refused", "question", "scheme"}
    del read["config"]
    for form in read.values():
        assert {"name", "description", "body"} <= form.keys()
        assert all(field["attributes"]["label"] for field in form["body"])


def test_no_source_reads_what_could_run_code():
    """SECURITY.md says so."""
    unsafe = ("torch.load(", "import pickle", "pickle.load", "trust_remote_code", "yaml.load(")
    for path in (REPOSITORY / "src").rglob("*.py"):
        assert not [word for word in unsafe if word in path.read_text(encoding="utf-8")], path
