"""Sources: what can be scanned, told by content, and what cannot, refused in one line."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import socket
import stat
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputopo.errors import SourceError
from gputopo.facts import Missing
from gputopo.host import source, tar
from gputopo.host.base import FILE_LIMIT
from gputopo.host.live import LiveHost
from gputopo.host.recording import Answers, Header, RecordedHost, render
from gputopo.host.source import list_fixtures, open_source
from gputopo.host.tree import Directory, Link, MemoryTree, RootHost
from tests.corpus import CORPUS, needs_corpus

TOP = Path(__file__).parents[1]

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}

RECORDING = render(
    Answers(
        Header(format=1, captured_at="2026-01-02T03:04:05Z"),
        {"/sys/a": b"one\n", "/sys/class": Directory(["net"]), "/proc/l": Link("../sys/a")},
    )
)


def archive(
    members: dict[str, bytes | str | None],
    *,
    form: int = tarfile.PAX_FORMAT,
    records: dict[str, dict[str, str]] | None = None,
) -> bytes:
    """A tar archive: bytes are files, text is a link's target, None a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as writer:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.pax_headers = (records or {}).get(name, {})
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            writer.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


GATHERED = archive(
    {
        "box": None,
        "box/sys/devices/system/cpu/online": b"0-3\n",
        "box/sys/class/empty": None,
        "box/sys/bus/cpu": "../devices/system/cpu",
        "box/proc/cpuinfo": b"processor\t: 0\n",
        "box/proc/hwloc-nofile-info": b"x\n",
    }
)


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Whatever a source is, its user hears of it within seconds."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 20


def refused(spec: Path | str) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(SourceError) as caught:
        open_source(str(spec))
    line = str(caught.value)
    assert line.isprintable(), line
    assert len(line) <= 500
    assert caught.value.exit_code == 2
    return line


# What is read


def test_no_source_is_the_live_machine() -> None:
    host = open_source(None, budget=3.0)
    try:
        assert isinstance(host, LiveHost)
        assert host.budget == 3.0
    finally:
        host.close()


@pytest.mark.parametrize("how", COMPRESSORS)
def test_recording(tmp_path: Path, how: str) -> None:
    file = tmp_path / "anything.txt"
    file.write_bytes(COMPRESSORS[how](RECORDING))
    host = open_source(str(file))
    assert isinstance(host, RecordedHost)
    assert (host.kind, host.name) == ("recording", str(file))
    assert host.captured_at == "2026-01-02T03:04:05Z"
    assert host.read_text("/proc/l") == "one"


@pytest.mark.parametrize("how", COMPRESSORS)
@pytest.mark.parametrize(
    "form",
    [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT],
    ids=["ustar", "gnu", "pax"],
)
def test_archive(tmp_path: Path, how: str, form: int) -> None:
    # Longer than the 100 bytes of a header's name; ustar has 255 with its prefix.
    deep = "/".join(["d" * 30] * 4 if form == tarfile.USTAR_FORMAT else ["d" * 90] * 4)
    data = archive(
        {
            "./box/": None,
            "box/sys/class": None,
            f"box/sys/devices/{deep}/file": b"deep\n",
            "box/sys/link": f"{'./' * (20 if form == tarfile.USTAR_FORMAT else 100)}devices",
            "box/proc/cpuinfo": b"processor\t: 0\n",
        },
        form=form,
    )
    file = tmp_path / "archive"
    file.write_bytes(COMPRESSORS[how](data))
    host = open_source(str(file))
    assert isinstance(host, MemoryTree)
    assert (host.kind, host.name) == ("archive", str(file))
    assert host.list_dir("/sys") == ["class", "devices", "link"]
    assert host.list_dir("/sys/class") == []
    assert host.read_text(f"/sys/link/{deep}/file") == "deep"
    assert host.read_text("/proc/cpuinfo") == "processor\t: 0"
    assert isinstance(host.read_text("/box/proc/cpuinfo"), Missing)


@pytest.mark.parametrize("prefix", ["", "./", "/", "name/", "./name/"])
def test_archive_roots(tmp_path: Path, prefix: str) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(archive({f"{prefix}sys/a": b"1", f"{prefix}dev/null": b"", "README": b"x"}))
    host = open_source(str(file))
    assert host.read_text("/sys/a") == "1"
    assert "sys" in host.list_dir("/")  # type: ignore[operator]


def test_archive_keeps_why_a_file_could_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    names = {"sys/denied": errno.EACCES, "sys/odd": errno.EIO, "sys/no": errno.EOPNOTSUPP}
    file.write_bytes(
        archive(
            dict.fromkeys([*names, "sys/wrong"], b""),
            records={
                **{name: {"GPUTOPO.errno": str(code)} for name, code in names.items()},
                "sys/wrong": {"GPUTOPO.errno": "-1"},
            },
        )
    )
    host = open_source(str(file))
    assert host.read_text("/sys/denied") == Missing("denied")
    assert host.read_text("/sys/odd") == Missing("failed", os.strerror(errno.EIO))
    assert host.read_text("/sys/no") == Missing("unsupported", os.strerror(errno.EOPNOTSUPP))
    assert host.read_text("/sys/wrong") == ""


def test_archive_members_of_other_kinds(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as writer:
        for name, kind, target in [
            ("sys/real", tarfile.REGTYPE, ""),
            ("sys/hard", tarfile.LNKTYPE, "./sys/real"),
            ("sys/dangling", tarfile.LNKTYPE, "sys/none"),
            ("sys/fifo", tarfile.FIFOTYPE, ""),
            ("dev/null", tarfile.CHRTYPE, ""),
            ("sys/../../etc/passwd", tarfile.REGTYPE, ""),
            ("sys/out", tarfile.SYMTYPE, "/etc/hostname"),
            ("sys/loop", tarfile.SYMTYPE, "loop"),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            info.size = 4 if kind == tarfile.REGTYPE else 0
            writer.addfile(info, io.BytesIO(b"data"))
    file = tmp_path / "a.tar"
    file.write_bytes(out.getvalue())
    host = open_source(str(file))
    assert host.list_dir("/sys") == ["hard", "loop", "out", "real"]
    assert host.read_text("/sys/hard") == "data"
    assert host.list_dir("/") == ["sys"]
    for path in ("/sys/out", "/sys/loop", "/sys/../etc/passwd"):
        assert isinstance(host.read_text(path), Missing)


def test_archive_file_is_cut_at_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.tar.gz"
    file.write_bytes(gzip.compress(archive({"sys/big": b"x" * (3 * FILE_LIMIT), "sys/b": b"1"})))
    host = open_source(str(file))
    big = host.read_bytes("/sys/big")
    assert isinstance(big, bytes)
    assert len(big) == FILE_LIMIT
    assert host.read_text("/sys/b") == "1"


def test_parts_compressed_one_by_one(tmp_path: Path) -> None:
    cut = len(GATHERED) // 3
    for compress in (gzip.compress, bz2.compress, lzma.compress):
        parts = [GATHERED[:cut], GATHERED[cut : 2 * cut], GATHERED[2 * cut :]]
        file = tmp_path / compress.__module__
        file.write_bytes(b"".join(compress(part) for part in parts) + bytes(1024))
        assert open_source(str(file)).read_text("/proc/cpuinfo") == "processor\t: 0"


def test_directory(tmp_path: Path) -> None:
    cpu = tmp_path / "machine" / "sys" / "devices" / "system" / "cpu"
    cpu.mkdir(parents=True)
    (cpu / "online").write_text("0-3\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "alias").symlink_to("machine")
    for root in (tmp_path / "machine", tmp_path, tmp_path / "alias"):
        host = open_source(str(root))
        assert isinstance(host, RootHost)
        assert (host.kind, host.name) == ("root", str(root))
        assert host.read_text("/sys/devices/system/cpu/online") == "0-3"


def test_directory_with_links_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret\n")
    (tmp_path / "root" / "sys").mkdir(parents=True)
    (tmp_path / "root" / "sys" / "a").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "sys" / "b").symlink_to("../../outside")
    (tmp_path / "root" / "sys" / "loop").symlink_to("loop")
    (tmp_path / "root" / "sys" / "net").symlink_to("/sys/class/net")
    host = open_source(str(tmp_path / "root"))
    for path in ("/sys/a", "/sys/b", "/sys/loop", "/sys/net/lo/mtu"):
        assert isinstance(host.read_text(path), Missing), path


def test_directory_with_a_fifo_in_it(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    os.mkfifo(tmp_path / "sys" / "fifo")
    assert isinstance(open_source(str(tmp_path)).read_text("/sys/fifo"), Missing)


@pytest.mark.parametrize("how", COMPRESSORS)
@pytest.mark.parametrize("data", [RECORDING, GATHERED], ids=["recording", "archive"])
def test_standard_input(how: str, data: bytes) -> None:
    code = (
        "from gputopo.host.source import open_source; h = open_source('-');"
        "print(h.kind, h.name, h.list_dir('/'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=COMPRESSORS[how](data),
        capture_output=True,
        check=True,
        timeout=30,
        cwd=TOP,
    )
    assert b" standard input " in done.stdout


@needs_corpus
@pytest.mark.parametrize(
    "file",
    sorted((CORPUS / "hwloc").glob("*.tar.bz2")) + sorted((CORPUS / "recorded").glob("*.tar.xz")),
    ids=lambda file: file.name,
)
def test_corpus_archive_equals_what_tarfile_reads(file: Path) -> None:
    host = open_source(str(file))
    with tarfile.open(file) as reader:
        found = reader.getmembers()
        first = found[0].name.split("/")[0]
        cut = 0 if first in ("sys", "proc") else len(first) + 1
        for member in found:
            path = f"/{member.name[cut:]}"
            if len(member.name) <= cut:
                continue
            if member.isdir():
                assert isinstance(host.list_dir(path), list), path
            elif member.issym():
                assert host.read_link(path) == member.linkname
            elif "GPUTOPO.errno" in member.pax_headers:
                assert isinstance(host.read_bytes(path), Missing)
            else:
                content = reader.extractfile(member)
                assert content is not None
                assert host.read_bytes(path) == content.read()


# Fixtures


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of fixtures in place of the bundled ones."""
    (tmp_path / "hgx-a.jsonl").write_bytes(RECORDING)
    (tmp_path / "hgx-b.jsonl.gz").write_bytes(gzip.compress(RECORDING))
    for name, origin in (("hgx-a", "composed"), ("hgx-b", "recorded")):
        (tmp_path / f"{name}.toml").write_text(
            f'title = "Machine {name}"\norigin = "{origin}"\nsources = ["x"]\n[expect]\ngpus = 8\n'
        )
    monkeypatch.setattr(source, "_fixtures", lambda: str(tmp_path))
    return tmp_path


def test_fixture(shelf: Path) -> None:
    for name in ("hgx-a", "hgx-b"):
        host = open_source(f"fixture:{name}")
        assert (host.kind, host.name) == ("recording", f"fixture:{name}")
        assert host.read_text("/sys/a") == "one"


def test_list_fixtures(shelf: Path) -> None:
    assert [(f.name, f.title, f.origin) for f in list_fixtures()] == [
        ("hgx-a", "Machine hgx-a", "composed"),
        ("hgx-b", "Machine hgx-b", "recorded"),
    ]


def test_unknown_fixture(shelf: Path) -> None:
    assert "did you mean hgx-" in refused("fixture:hgx-c")
    assert refused("fixture:zzz") == (
        "fixture:zzz: there is no such fixture; --list-fixtures names all"
    )
    assert "no such fixture" in refused("fixture:../hgx-a")
    assert "no such fixture" in refused("fixture:")
    assert "\x1b" not in refused("fixture:\x1b[31m")


def test_wrong_case_file(shelf: Path) -> None:
    (shelf / "bad.toml").write_text("title = 1\n")
    with pytest.raises(SourceError, match=r"bad\.toml is wrong"):
        list_fixtures()


def test_bundled_fixtures_are_whole() -> None:
    for fixture in list_fixtures():
        assert open_source(f"fixture:{fixture.name}").kind == "recording"
        assert fixture.title


# What is refused


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert refused(path) == f"{path}: no such file or directory"
    assert "no such file" in refused("")
    assert "not a path" in refused("a\0b")


def test_name_of_the_source_cannot_steer_the_terminal(tmp_path: Path) -> None:
    assert "\x1b" not in refused(tmp_path / "\x1b]52;c;eA==\x07")
    undecodable = os.fsdecode(b"\xff\xfe")
    (tmp_path / undecodable).write_bytes(RECORDING)
    open_source(str(tmp_path / undecodable)).name.encode()
    assert "No such" not in refused("x" * 5000)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(RECORDING)
    file.chmod(0)
    if os.geteuid() == 0:  # root may read everything

        def denied(*_: object) -> int:
            raise PermissionError(errno.EACCES, "denied")

        monkeypatch.setattr(os, "open", denied)
        monkeypatch.setattr(os, "scandir", denied)
    assert refused(file) == f"{file}: permission denied"
    (tmp_path / "d").mkdir(mode=0)
    assert refused(tmp_path / "d") == f"{tmp_path / 'd'}: permission denied"


def test_directory_that_is_no_root(tmp_path: Path) -> None:
    assert "without sys/ or proc/" in refused(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name / "proc").mkdir(parents=True)
    assert "holds 2 machines; name one of them: a, b" in refused(tmp_path)


def test_directory_whose_sys_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "sys").symlink_to("/sys")
    assert "without sys/ or proc/" in refused(tmp_path)


def test_fifo_socket_and_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "a FIFO, not a file" in refused(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(tmp_path)  # the path of a socket has 108 bytes at most
        try:
            listener.bind("s")
        finally:
            os.chdir(here)
        assert "a socket, not a file" in refused(tmp_path / "s")
    assert "a character device, not a file" in refused("/dev/zero")


def test_file_replaced_by_a_fifo_between_stat_and_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(RECORDING)
    regular = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    assert stat.S_ISREG(regular.st_mode)
    assert "a FIFO, not a file" in refused(tmp_path / "fifo")


def test_link_loop(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert refused(tmp_path / "loop").endswith("too many levels of symbolic links")


def test_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"")
    assert refused(file) == f"{file}: empty"
    for how in ("gzip", "bzip2", "xz"):
        file.write_bytes(COMPRESSORS[how](b""))
        assert refused(file) == f"{file}: empty once unpacked"


def test_sparse_file_is_refused_by_its_size(tmp_path: Path) -> None:
    file = tmp_path / "a"
    with file.open("wb") as handle:
        handle.write(RECORDING)
        handle.truncate(2 << 30)
    assert refused(file) == f"{file}: 2,147 MB large; a source has 256 MiB at most"


def test_other_content(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for content, said in [
        (Path(sys.executable).read_bytes()[:100_000], "a binary file of unknown kind"),
        (bytes(100_000), "a binary file of unknown kind"),
        (b"hello\n", "a text of unknown kind"),
        (b"{}\n", "a text of unknown kind"),
        (gzip.compress(b"hello\n" * 1000), "a text of unknown kind"),
        (gzip.compress(gzip.compress(RECORDING)), "compressed twice"),
        (b"PK\3\4" + bytes(1000), "a zip archive, which is not read here"),
        (b"\x28\xb5\x2f\xfd" + bytes(1000), "compressed with zstd, which is not read here"),
    ]:
        file.write_bytes(content)
        assert said in refused(file), content[:20]
        assert "a source is a recording or a tar archive" in refused(file) or "twice" in said


def test_endless_input_of_another_kind_is_refused_at_its_start() -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        code = "from gputopo.host.source import open_source; open_source('-')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=endless.stdout,
            capture_output=True,
            check=False,
            timeout=30,
            cwd=TOP,
        )
        endless.terminate()
    assert b"SourceError: standard input: a text of unknown kind" in done.stderr


@pytest.mark.parametrize("how", ["gzip", "bzip2", "xz"])
def test_compressed_data_cut_short_or_damaged(tmp_path: Path, how: str) -> None:
    file = tmp_path / "a"
    whole = COMPRESSORS[how](RECORDING * 50)
    for size in (20, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert refused(file) == f"{file}: the {how} data is cut short"
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes(16) + whole[middle + 16 :])
    assert "damaged" in refused(file) or "cut short" in refused(file)
    file.write_bytes(whole + b"tail")
    assert f"the {how} data is" in refused(file)


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "UNPACKED_LIMIT", 16 << 20)
    file = tmp_path / "a"
    for compress in (gzip.compress, bz2.compress, lzma.compress):
        file.write_bytes(compress(bytes(40 << 20)))
        assert refused(file) == f"{file}: unpacks to more than 16 MiB"
    monkeypatch.setattr(source, "_COPY_LIMIT", 1 << 20)
    file.write_bytes(gzip.compress(b"x") * 2000)
    assert refused(file) == f"{file}: the gzip data is in too many parts"


def test_xz_that_wants_too_much_memory(tmp_path: Path) -> None:
    data = bytearray(lzma.compress(RECORDING * 10, check=lzma.CHECK_NONE))
    # The block header after the stream's twelve bytes: size, flags, filter 0x21 with one byte of
    # properties, the dictionary's size; 40 stands for 4 GiB - 1.
    assert data[14:16] == b"\x21\x01"
    data[16] = 40
    size = 4 * (data[12] + 1)
    data[12 + size - 4 : 12 + size] = zlib.crc32(data[12 : 12 + size - 4]).to_bytes(4, "little")
    file = tmp_path / "a"
    file.write_bytes(data)
    assert "memory" in refused(file).lower()


def test_archive_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    for size in range(512, len(GATHERED.rstrip(b"\0")), 512):
        for cut in (size, size + 100):
            file.write_bytes(GATHERED[:cut])
            assert refused(file) == f"{file}: the archive is cut short"


def test_archive_without_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(archive({"home/me/sys": b"", "etc/passwd": b""}))
    assert refused(file) == f"{file}: the archive holds no sys/ or proc/"
    file.write_bytes(archive({"a/sys/x": b"", "b/sys/x": b""}))
    assert refused(file) == f"{file}: the archive holds 2 machines: a, b"
    file.write_bytes(archive({"\x1b[2J/sys/x": b"", "b/sys/x": b""}))
    assert "\x1b" not in refused(file)


def test_archive_with_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_MEMBERS", 100)
    file = tmp_path / "a.tar"
    file.write_bytes(archive({f"sys/{i}": b"" for i in range(101)}))
    assert refused(file) == f"{file}: the archive has more than 100 members"


def test_archive_whose_sizes_lie(tmp_path: Path) -> None:
    """A negative size, which sends tarfile of Python 3.11 back over the same members for ever."""
    plain = archive({f"sys/{i}": b"" for i in range(3)}, form=tarfile.GNU_FORMAT)
    file = tmp_path / "a.tar"
    for size in (b"\xff" * 10 + b"\xfc\x00", b"-0000001000\0", b"\x80" + b"\xff" * 11, b"9" * 12):
        header = bytearray(plain[1024:1536])
        header[124:136] = size
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        file.write_bytes(plain[:1024] + header + plain[1536:])
        assert "the archive is" in refused(file)


def test_recording_with_a_wrong_line(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(RECORDING + b'{"file": "/sys/x"}\n')
    assert refused(file).startswith(f"{file}: line 5 is wrong")
    file.write_bytes(RECORDING + b'{"file": "/sys/x", "error": "' + b"\\u202e" * 2000 + b'"}\n')
    assert refused(file).startswith(f"{file}: line 5 is wrong")
    file.write_bytes(b'{"gputopo-recording": 99}\n')
    assert "recording format 99" in refused(file)


# Anything at all


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_archives_raise_only_tar_errors(data: st.DataObject) -> None:
    damaged = bytearray(GATHERED[:6144])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    _read_all(bytes(damaged))
    for offset in range(0, len(damaged) - 512, 512):  # with checksums that are right again
        header = damaged[offset : offset + 512]
        if header[257:262] == b"ustar":
            header[148:156] = b" " * 8
            damaged[offset + 148 : offset + 156] = b"%06o\0 " % sum(header)
    _read_all(bytes(damaged))


def _read_all(content: bytes) -> None:
    try:
        for member in tar.members(content, FILE_LIMIT):
            assert ".." not in member.path.split("/")
    except tar.TarError as error:
        assert "archive" in str(error)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_raise_only_source_errors(content: bytes) -> None:
    for start in (b"", b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\0", b'{"gputopo-recording": 1}\n'):
        try:
            source._open_data(start + content, "x")
        except SourceError as error:
            assert str(error).startswith("x: ")
