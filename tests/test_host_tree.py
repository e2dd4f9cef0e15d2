"""Trees that are not the live machine: links stay inside, whatever they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gputopo.facts import ABSENT, Missing
from gputopo.host.base import FILE_LIMIT
from gputopo.host.live import LiveHost
from gputopo.host.tree import (
    MAX_LINKS,
    Directory,
    Entry,
    Link,
    MemoryTree,
    RootHost,
    TreeHost,
    read_regular,
)
from tests.standin.fixtures import watchdog  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
LOOP = Missing("failed", "too many levels of symbolic links")

Layout = dict[str, "str | Link | None"]
"""A tree to make: text of files, links, None for directories that are empty."""

Make = Callable[[Layout], TreeHost]


def on_disk(layout: Layout, top: Path) -> RootHost:
    for path, what in layout.items():
        place = top / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if what is None:
            place.mkdir(exist_ok=True)
        elif isinstance(what, Link):
            os.symlink(what, place)
        else:
            place.write_text(what)
    return RootHost("root", str(top))


def in_memory(layout: Layout) -> MemoryTree:
    entries: dict[str, Entry] = {
        path: Directory() if what is None else what for path, what in layout.items()
    }
    return MemoryTree("memory", entries)


@pytest.fixture(params=["root", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a tree of either kind; both must answer alike."""
    if request.param == "memory":
        return in_memory
    return lambda layout: on_disk(layout, tmp_path / "root")


SYSFS: Layout = {
    "/sys/devices/pci0000:15/0000:15:01.0/0000:17:00.0/numa_node": "0\n",
    "/sys/devices/pci0000:15/0000:15:01.0/0000:17:00.0/driver": Link(
        "../../../../bus/pci/drivers/nvidia"
    ),
    "/sys/bus/pci/drivers/nvidia/module": Link("/sys/module/nvidia"),
    "/sys/bus/pci/devices/0000:17:00.0": Link(
        "../../../devices/pci0000:15/0000:15:01.0/0000:17:00.0"
    ),
    "/sys/class/net/eth0": Link("../../bus/pci/devices/0000:17:00.0"),
    "/sys/module/nvidia/version": "580.95.05\n",
    "/sys/empty": None,
    "/etc": Link("/sys/module"),
}


def test_links_lead_on(make: Make) -> None:
    host = make(SYSFS)
    device = "/sys/bus/pci/devices/0000:17:00.0"
    assert host.read_text(f"{device}/numa_node") == "0"
    assert host.read_bytes(f"{device}/numa_node") == b"0\n"
    assert host.read_text("/sys/class/net/eth0/numa_node") == "0"
    assert host.list_dir("/sys/class/net/eth0") == ["driver", "numa_node"]
    assert host.read_link("/sys/class/net/eth0") == "../../bus/pci/devices/0000:17:00.0"
    assert host.read_link("/sys/class/net/eth0/driver") == "../../../../bus/pci/drivers/nvidia"
    assert host.read_text("/sys/class/net/eth0/driver/module/version") == "580.95.05"
    # What follows a link and .. is the parent of where the link leads, as for the kernel.
    assert host.list_dir("/sys/class/net/eth0/..") == ["0000:17:00.0"]
    assert host.read_text("/sys/class/net/eth0/../../../../module/nvidia/version") == "580.95.05"


def test_absolute_links_start_at_the_trees_own_root(make: Make) -> None:
    host = make(SYSFS)
    assert host.list_dir("/etc") == ["nvidia"], "this machine has another /etc"
    assert host.read_text("/etc/nvidia/version") == "580.95.05"
    assert host.read_text("/etc/passwd") == ABSENT


def test_other_spellings_of_a_path(make: Make) -> None:
    host = make(SYSFS)
    version = "/sys/module/nvidia/version"
    for path in (
        f"/{version}",
        "/sys//module/./nvidia/version",
        "/sys/bus/../module/nvidia/version",
        "/../../sys/module/nvidia/version",
    ):
        assert host.read_text(path) == "580.95.05", path
    for path in ("/", "", "//", "/sys/..", "/../..", "/."):
        assert host.list_dir(path) == ["etc", "sys"], path
    for path in ("/sys/empty", "/sys/empty/", "/sys/empty/."):
        assert host.list_dir(path) == [], path


def test_what_is_not_there(make: Make) -> None:
    host = make(SYSFS)
    for ask in (host.read_bytes, host.read_text, host.list_dir, host.read_link):
        for path in (
            "/proc",
            "/sys/nothing",
            "/sys/nothing/below",
            "/sys/module/nvidia/version/below",
            "/sys/class/net/eth0/nothing",
            "/nul\0inside",
            "/\ud800",
        ):
            assert ask(path) == ABSENT, path


def test_each_thing_asked_for_as_another(make: Make) -> None:
    host = make(SYSFS)
    file, directory = "/sys/module/nvidia/version", "/sys/module/nvidia"
    assert host.read_text(directory) == Missing("failed", "is a directory")
    assert host.read_bytes(directory) == Missing("failed", "is a directory")
    assert host.list_dir(file) == Missing("failed", "not a directory")
    for path in (file, directory, "/"):
        assert host.read_link(path) == Missing("failed", "not a symbolic link"), path


def test_loops_are_errors(make: Make) -> None:
    host = make(
        {
            "/self": Link("self"),
            "/a": Link("/b"),
            "/b": Link("a"),
            "/deeper": Link("deeper/x"),
            "/dir/up": Link(".."),
            "/dangling": Link("nowhere"),
        }
    )
    for path in ("/self", "/a", "/a/below", "/deeper"):
        for ask in (host.read_text, host.list_dir):
            assert ask(path) == LOOP, path
    assert host.read_link("/self") == "self"
    assert host.read_link("/self/below") == LOOP
    assert host.read_text("/dangling") == ABSENT
    assert host.read_link("/dangling") == "nowhere"
    assert host.list_dir("/dir/up/dir/up/dir") == ["up"]
    assert host.list_dir("/dir" + "/up/dir" * (MAX_LINKS + 1)) == LOOP


def test_a_chain_may_be_as_long_as_the_kernels(make: Make, tmp_path: Path) -> None:
    links: Layout = {f"/{n}": Link(f"{n + 1}") for n in range(MAX_LINKS + 1)}
    host = make({**links, f"/{MAX_LINKS + 1}": "end"})
    assert host.read_text("/1") == "end"
    assert host.read_text("/0") == LOOP


def test_links_that_multiply_come_to_an_end(make: Make) -> None:
    """Each link doubles the path: followed to the end that would be 2**40 components."""
    links: Layout = {f"/{n}": Link(f"{n + 1}/../{n + 1}/x") for n in range(60)}
    host = make(links)
    answer = host.read_text("/0")
    assert isinstance(answer, Missing)


def test_deep_paths(make: Make) -> None:
    host = make({"/a/file": "deep", "/a/here": Link(".")})
    assert host.read_text("/a" + "/." * 500 + "/file") == "deep"
    for path in ("/x" * 2000, "/a/file" + "/z" * 2000, "/a/here" + "/here" * 800):
        answer = host.read_text(path)
        assert isinstance(answer, Missing), path
    for path in ("/x" * 5000, "/" + "y" * 5000, "/a" * 1_000_000):
        assert host.read_text(path) == Missing("failed", "File name too long")


def test_link_targets_without_end() -> None:
    """A damaged recording can hold a link of any length."""
    for target in ("x" * 5000, "../" * 1_000_000, "a/" * 1_000_000):
        host = in_memory({"/a": Link(target)})
        assert host.read_text("/a") == Missing("failed", "File name too long")
    # Two that fit, one after the other.
    host = in_memory({"/a": Link("x/" * 1500 + "b"), "/x" * 1500 + "/b": Link("y/" * 1500 + "c")})
    assert host.read_text("/a") == Missing("failed", "File name too long")


def test_a_root_is_closed_above_and_below(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("the secret")
    host = on_disk(
        {
            "/sys/file": "inside",
            "/sys/up": Link("../../secret"),
            "/sys/far": Link("../" * 30 + str(secret).lstrip("/")),
            "/sys/absolute": Link(str(secret)),
            "/sys/key": Link(f"{secret}/key"),
            "/sys/proc": Link("/proc/self/root"),
        },
        tmp_path / "root",
    )
    for path in (
        "/../secret/key",
        "/sys/../../secret/key",
        "/sys/up/key",
        "/sys/far/key",
        "/sys/absolute/key",
        "/sys/key",
        f"/sys/proc{secret}/key",
        f"{secret}/key",
    ):
        for ask in (host.read_bytes, host.read_text):
            assert ask(path) == ABSENT, path
        assert host.list_dir(os.path.dirname(path)) != ["key"], path
    assert host.read_link("/sys/key") == f"{secret}/key", "what a link says is no secret"


def test_a_root_that_is_itself_reached_by_a_link(tmp_path: Path) -> None:
    on_disk(SYSFS, tmp_path / "real")
    os.symlink("real", tmp_path / "link")
    for name in (f"{tmp_path}/link", f"{tmp_path}/link/", f"{tmp_path}/real//"):
        assert RootHost("root", name).read_text("/etc/nvidia/version") == "580.95.05"


def test_odd_files_in_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.symlink("fifo", tmp_path / "link")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(FILE_LIMIT * 5)
    (tmp_path / "bytes").write_bytes(b"\xff\n\n")
    host = RootHost("root", str(tmp_path))
    with monkeypatch.context() as patch:
        # They are not even opened: for some devices that alone does something.
        patch.delattr(os, "open")
        assert host.read_bytes("/fifo") == Missing("failed", "not a regular file")
        assert host.read_text("/link") == Missing("failed", "not a regular file")
    assert host.read_bytes("/huge") == bytes(FILE_LIMIT)
    assert host.read_bytes("/bytes") == b"\xff\n\n"
    assert host.read_text("/bytes") == "\ufffd"


def test_a_file_that_has_become_a_link_is_not_followed(tmp_path: Path) -> None:
    """Between the look at a file and its reading somebody may have put a link there."""
    (tmp_path / "secret").write_text("the secret")
    os.symlink("secret", tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(str(tmp_path / "file"), os.O_NOFOLLOW)


CLOSED = """
import json, os, sys
from gputopo.host.tree import RootHost
host = RootHost("root", sys.argv[1])
if os.geteuid() == 0:
    os.seteuid(65534)
print(json.dumps([str(answer) for answer in (
    host.read_text("/file"),
    host.list_dir("/dir"),
    host.read_text("/dir/file"),
    host.read_link("/dir/link"),
    host.read_text("/link"),
    host.read_text("/none"),
)]))
"""


def test_what_this_user_may_not_read_in_a_root() -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "dir").mkdir()
        for path in (top / "file", top / "dir" / "file"):
            path.touch(mode=0o000)
        os.symlink("file", top / "dir" / "link")
        os.symlink("dir/file", top / "link")
        (top / "dir").chmod(0o000)
        done = subprocess.run(
            [sys.executable, "-c", CLOSED, name], cwd=ROOT, capture_output=True, timeout=30
        )
        (top / "dir").chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["denied"] * 5 + ["absent"]


def test_what_a_denied_directory_holds_is_denied() -> None:
    host = MemoryTree("memory", {"/proc/1/fd": Missing("denied"), "/proc/1/comm": "init\n"})
    assert host.list_dir("/proc/1/fd") == Missing("denied")
    assert host.read_link("/proc/1/fd/0") == Missing("denied")
    assert host.read_text("/proc/1/comm") == "init"
    assert host.read_text("/proc/1/other") == ABSENT


def test_trees_have_no_commands_and_no_nvml(make: Make) -> None:
    host = make({"/file": "x"})
    for answer in (host.run(["nvidia-smi"], 1), host.nvml("nvmlInit")):
        assert isinstance(answer, Missing) and answer.reason == "absent"
    assert host.remaining() == float("inf")
    host.close()


# Random trees

NAMES = ("a", "b", "c")
COMPONENTS = st.sampled_from((*NAMES, "..", ".", "", "secret", "key"))


def targets(secret: str) -> st.SearchStrategy[str]:
    """What a link may say: any way up, down, round, or straight at the secret."""
    return st.builds(
        lambda start, parts: start + "/".join(parts),
        st.sampled_from(("", "/", "../" * 9 + secret.lstrip("/") + "/", secret + "/")),
        st.lists(COMPONENTS, max_size=5),
    ).filter(bool)


PLACES = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
QUESTIONS = st.lists(COMPONENTS, max_size=6).map(lambda parts: "/" + "/".join(parts))
SECRET = "the secret"


@settings(deadline=None)
@given(st.data())
def test_no_tree_of_links_gives_the_secret_away(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        outside = os.path.join(name, "secret")
        os.mkdir(outside)
        for key in ("key", "a"):
            Path(outside, key).write_text(SECRET)
        root = Path(name, "root")
        root.mkdir()
        places = data.draw(st.dictionaries(PLACES, st.none() | targets(outside), max_size=8))
        for place, target in places.items():
            try:
                (root / place).parent.mkdir(parents=True, exist_ok=True)
                if target is None:
                    (root / place).write_text("inside")
                else:
                    os.symlink(target, root / place)
            except OSError:
                continue  # something else is there already, or a link leads out: not this test's
        # Building must not have written through a link; nothing but the two files is outside.
        asked = data.draw(st.lists(QUESTIONS | targets(outside), min_size=1, max_size=6))
        host = RootHost("root", str(root))
        for path in asked:
            for answer in (host.read_bytes(path), host.read_text(path), host.list_dir(path)):
                assert answer in (b"inside", "inside") or isinstance(answer, (list, Missing))
                assert answer != ["a", "key"]
            host.read_link(path)


def layouts() -> st.SearchStrategy[Layout]:
    """Trees whose files and links have real directories above them."""
    leaf = st.just("inside") | st.lists(COMPONENTS, min_size=1, max_size=4).map(
        lambda parts: Link("/".join(parts) or ".")
    )

    def place(choice: dict[str, str | Link]) -> Layout:
        taken = sorted(choice)
        return {
            f"/{path}": choice[path]
            for path in taken
            if not any(other != path and path.startswith(f"{other}/") for other in taken)
        }

    return st.dictionaries(PLACES, leaf, min_size=1, max_size=8).map(place)


@example({"/a/b": Link("../c"), "/c": Link("a/b")}, ["/a/b", "/c/.."])
@example({"/a/b": Link(".."), "/b": "inside"}, ["/a/b/b", "/a/b/../b", "/a/b/a"])
@settings(deadline=None)
@given(layouts(), st.lists(QUESTIONS, min_size=1, max_size=6))
def test_a_tree_in_memory_answers_as_the_same_tree_on_disk(
    layout: Layout, asked: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        disk, memory = on_disk(layout, Path(name)), in_memory(layout)
        for path in asked:
            assert memory.read_bytes(path) == disk.read_bytes(path), path
            assert memory.list_dir(path) == disk.list_dir(path), path
            assert memory.read_link(path) == disk.read_link(path), path


@settings(deadline=None)
@given(layouts(), st.lists(PLACES, min_size=1, max_size=6))
def test_a_root_answers_as_the_kernel_does(layout: Layout, asked: list[str]) -> None:
    """Where no link leaves the tree, the live host says the same below the same directory.

    (A tree takes FILE/. and NOTHING/.. by their words, where the kernel wants a directory.)
    """
    inside = {
        path: what
        for path, what in layout.items()
        if not (isinstance(what, Link) and {"", ".", ".."} & set(what.split("/")))
    }
    with tempfile.TemporaryDirectory() as name:
        disk, live = on_disk(inside, Path(name)), LiveHost()
        for place in asked:
            path = f"/{place}"
            below = os.path.realpath(name) + path
            for one, other in (
                (disk.read_bytes(path), live.read_bytes(below)),
                (disk.list_dir(path), live.list_dir(below)),
                (disk.read_link(path), live.read_link(below)),
            ):
                if LOOP in (one, other):  # the kernel has its own words for it
                    assert isinstance(other, Missing) and other.reason == "failed"
                else:
                    assert one == other, path
        live.close()
