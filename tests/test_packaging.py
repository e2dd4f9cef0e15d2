"""What is built and what sets it up: package data, links, and the scripts of the README."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]

checkout = pytest.mark.skipif(
    not (TOP / "scripts" / "venv").exists(), reason="not in a checkout of the project"
)


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(TOP / "setup.cfg")
    return parser


def test_every_data_file_is_packaged(config: configparser.ConfigParser) -> None:
    patterns = config["options.package_data"]["gputopo"].split()
    for directory, _, names in os.walk(TOP / "gputopo", followlinks=True):
        for name in names:
            path = Path(directory, name).relative_to(TOP / "gputopo").as_posix()
            if not path.endswith((".py", ".pyc")):
                assert any(fnmatch.fnmatch(path, pattern) for pattern in patterns), path


def test_every_directory_of_modules_is_a_package() -> None:
    for directory, _, names in os.walk(TOP / "gputopo", followlinks=True):
        if any(name.endswith(".py") for name in names):
            assert "__init__.py" in names, directory


@checkout
@pytest.mark.parametrize("name", ["probes", "fixtures"])
def test_links_of_the_package(name: str) -> None:
    link = TOP / "gputopo" / name
    if link.is_symlink():  # a source distribution holds plain files
        assert os.readlink(link) == f"../{name}"


def test_what_is_imported_is_required(config: configparser.ConfigParser) -> None:
    required = {line.split()[0] for line in config["options"]["install_requires"].splitlines()[1:]}
    distributions = {"pynvml": "nvidia-ml-py"}
    for directory, _, names in os.walk(TOP / "gputopo", followlinks=True):
        for file in (Path(directory, name) for name in names if name.endswith(".py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                else:
                    continue
                tops = {module.partition(".")[0] for module in modules}
                tops -= {*sys.stdlib_module_names, "tomllib", "gputopo"}
                assert {distributions.get(top, top) for top in tops} <= required, file


def run(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    """A script of a copy of the checkout, with a PATH of one directory."""
    return subprocess.run(
        [f"scripts/{script}"],
        cwd=path.parent / "checkout",
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory for PATH with the programs that every system has, and no Python; beside it the
    part of the checkout that sets up."""
    place = tmp_path / "bin"
    place.mkdir()
    for program in ("sh", "cat", "cksum", "dirname", "grep"):
        (place / program).symlink_to(
            subprocess.check_output(["sh", "-c", f"command -v {program}"], text=True).strip()
        )
    (tmp_path / "checkout" / "scripts").mkdir(parents=True)
    for name in ("setup.cfg", "pyproject.toml", "scripts/venv", "scripts/scan", "scripts/test"):
        target = tmp_path / "checkout" / name
        target.write_bytes((TOP / name).read_bytes())
        target.chmod(0o755)
    return place


def stand_in(place: Path, name: str, version: str, *, ensurepip: bool = True) -> None:
    """A program that answers as a Python of that version does when it is asked what it is."""
    major, minor = version.split(".")
    program = place / name
    program.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f"*print*) echo {version} ;;\n"
        f'*"< (3, 10)"*) [ {major}{minor} -ge 310 ] ;;\n'
        f"*ensurepip*) {'true' if ensurepip else 'echo ModuleNotFoundError >&2; false'} ;;\n"
        "*) echo not so far >&2; exit 9 ;;\n"
        "esac\n"
    )
    program.chmod(0o755)


@checkout
@pytest.mark.parametrize("script", ["scan", "test"])
def test_one_line_when_python_is_missing_or_too_old(bare: Path, script: str) -> None:
    done = run(script, bare)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gputopo: Python 3.10 or newer is needed; found: none (apt-get install python3)\n"
    )
    stand_in(bare, "python3", "3.9")
    done = run(script, bare)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gputopo: Python 3.10 or newer is needed; found: 3.9 (apt-get install python3)\n"
    )


@checkout
@pytest.mark.parametrize("script", ["scan", "test"])
def test_one_line_when_python3_venv_is_missing(bare: Path, script: str) -> None:
    stand_in(bare, "python3", "3.11", ensurepip=False)
    done = run(script, bare)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gputopo: python3 cannot make virtual environments; run: apt-get install python3-venv\n"
    )


@checkout
def test_a_newer_python_is_found_beside_an_old_one(bare: Path) -> None:
    stand_in(bare, "python3", "3.8")
    stand_in(bare, "python3.12", "3.12", ensurepip=False)
    assert run("scan", bare).stderr == (
        "gputopo: python3.12 cannot make virtual environments; "
        "run: apt-get install python3.12-venv\n"
    )


@checkout
def test_nothing_is_set_up_twice(bare: Path) -> None:
    """A current .venv is used as it is, without a look at Python."""
    venv = bare.parent / "checkout" / ".venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "gputopo"):
        program = venv / "bin" / name
        program.write_text('#!/bin/sh\necho "$@"\n')
        program.chmod(0o755)
    checksum = subprocess.check_output(
        ["sh", "-c", "cat setup.cfg pyproject.toml | cksum"], cwd=venv.parent, text=True
    ).strip()
    for name in ("plain", "dev"):
        (venv / f".installed-{name}").write_text(f"{checksum} {venv.parent.resolve()}\n")
    done = run("scan", bare)
    assert (done.returncode, done.stdout, done.stderr) == (0, "scan\n", "")
    done = run("test", bare)
    assert (done.returncode, done.stdout, done.stderr) == (0, "-m pytest\n", "")
    (venv.parent / "setup.cfg").write_text("[metadata]\n")
    assert "Python 3.10 or newer is needed" in run("scan", bare).stderr
