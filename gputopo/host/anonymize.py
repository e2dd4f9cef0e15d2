"""Takes out of a recording what names a machine, and leaves what describes it.

Host names, serial numbers, UUIDs, GUIDs, MAC and IP addresses are replaced by stand-ins of the same
form: as long, with the same separators and letter case. The same original always gets the same
stand-in within one recording, in whatever notation it stands (a port's GUID is also the low half of
its GID, a fabric's UUID is bare hex in NVML and has dashes elsewhere), so links between them
survive. Stand-ins come from a keyed hash whose key is thrown away: two recordings of one machine
cannot be matched by them.

What names no machine stays: zeros and ones, loopback, link-local prefixes, ``localhost``.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gputopo.facts import Missing
from gputopo.host.base import Output
from gputopo.host.recording import Answers
from gputopo.host.tree import Directory, Entry, Link
from gputopo.pciaddr import is_address

HOSTNAME_FILES = ("/proc/sys/kernel/hostname", "/etc/hostname")
ROUTES = "/proc/net/route"

SERIAL_FILES = re.compile(
    r".*/(?:serial|serial_number|subsysnqn|hostnqn|wwid|(?:product|board|chassis)_serial"
    r"|(?:board|chassis)_asset_tag)"
)
"""Files of sysfs whose whole content names one piece of hardware."""

FREE_TEXT = ("/proc/cmdline",)
"""Files in which an IP address may stand. In others four numbers with dots are a version."""

PLACEHOLDERS = frozenset(
    (
        "(none)",
        "0123456789",
        "1234567890",
        "123456789",
        "asset tag",
        "default string",
        "empty",
        "localhost",
        "localhost.localdomain",
        "n/a",
        "[n/a]",
        "no asset tag",
        "none",
        "not applicable",
        "not available",
        "not provided",
        "not specified",
        "not supported",
        "system serial number",
        "to be filled by o.e.m.",
        "unknown",
    )
)
"""What stands where a name or a serial number should, on machines that have none."""

_LINK_LOCAL = 0xFE80 << 48
_LOW = (1 << 64) - 1


def anonymize(answers: Answers, key: bytes | None = None) -> Answers:
    """A copy of a recording without what identifies its machine; its header says what kinds those
    were. ``key`` is for tests: the same key gives the same stand-ins."""
    return Anonymizer(answers, key).replace(answers)


class Anonymizer:
    """The stand-ins for one recording."""

    def __init__(self, answers: Answers, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        self._made: dict[tuple[str, Any], Any] = {}
        self._taken: set[tuple[str, Any]] = set()
        self._seen: dict[str, str] = {}
        self.kinds: set[str] = set()
        """What has been replaced so far: guid, hostname, ip, mac, serial, uuid."""
        self.originals: dict[str, str] = {}
        """Each text that was replaced so far, and its stand-in."""
        words = dict(_words(answers))
        structure = "\n".join(_structure(answers))
        self._words = {
            word: kind
            for word, kind in words.items()
            if _telling(word) and not re.search(_bounded(word), structure)
        }
        self._everywhere = self._pattern(_IDENTIFIERS)
        self._in_free_text = self._pattern(_IDENTIFIERS | _ADDRESSES)

    def text(self, text: str, free: bool = True) -> str:
        """``text`` with the recording's stand-ins. In free text (command lines, outputs) IP
        addresses and bare GUIDs are replaced too, which elsewhere would be versions and numbers."""
        if free:
            return self._in_free_text.sub(self._stand_in, text)
        if len(text) > 200:
            return self._everywhere.sub(self._stand_in, text)
        done = self._seen.get(text)  # sysfs says the same few things many times over
        if done is None:
            done = self._seen[text] = self._everywhere.sub(self._stand_in, text)
        return done

    def replace(self, answers: Answers) -> Answers:
        """A copy of a recording with stand-ins."""
        files = {self._path(path): self._entry(path, what) for path, what in answers.files.items()}
        commands = {argv: self._output(output) for argv, output in answers.commands.items()}
        nvml = {key: self._answer(key[0], value) for key, value in answers.nvml.items()}
        header = msgspec.structs.replace(
            answers.header,
            kernel=self.text(answers.header.kernel, free=False),
            note=self.text(answers.header.note),
            anonymized=sorted(self.kinds.union(answers.header.anonymized)),
        )
        return Answers(header, files, commands, nvml)

    # What holds text

    def _path(self, path: str) -> str:
        return "/".join(self.text(part, free=False) for part in path.split("/"))

    def _entry(self, path: str, what: Entry) -> Entry:
        if isinstance(what, Missing):
            return self._missing(what)
        if isinstance(what, Link):
            return Link(self._path(what))
        if isinstance(what, Directory):
            return Directory(sorted(self.text(name, free=False) for name in what))
        if isinstance(what, bytes):
            if path.endswith("/config"):
                return self._config(what)
            text = what.decode("utf-8", "surrogateescape")
            return self._content(path, text).encode("utf-8", "surrogateescape")
        if path.endswith("/config"):  # a recording stores as text whatever happens to be UTF-8
            return self._config(what.encode()).decode()
        return self._content(path, what)

    def _content(self, path: str, text: str) -> str:
        if path in HOSTNAME_FILES or SERIAL_FILES.fullmatch(path):
            return self._named(text, "hostname" if path in HOSTNAME_FILES else "serial")
        if path == ROUTES:
            return _ROUTE.sub(self._route, text)
        return self.text(text, free=path in FREE_TEXT)

    def _named(self, text: str, kind: str) -> str:
        """A text that as a whole is a host name or a serial number."""
        name = text.strip(_BLANK) if kind == "hostname" else _serial_part(text)
        changed = self.text(text, free=False)
        if changed != text or _placeholder(name):
            return changed
        return text.replace(name, self._host(name) if kind == "hostname" else self._serial(name))

    def _output(self, output: Output | Missing) -> Output | Missing:
        if isinstance(output, Missing):
            return self._missing(output)
        return Output(output.exit, self.text(output.stdout), self.text(output.stderr))

    def _missing(self, missing: Missing) -> Missing:
        return Missing(missing.reason, self.text(missing.detail)) if missing.detail else missing

    def _answer(self, call: str, value: Any) -> Any:
        if isinstance(value, Missing):
            return self._missing(value)
        return self._value("serial" if call == "nvmlDeviceGetSerial" else "", value)

    def _value(self, name: str, value: Any) -> Any:
        """One value of an NVML answer; ``name`` is that of the field it stands in."""
        if isinstance(value, dict):
            return {key: self._value(str(key), item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._value(name, item) for item in value]
        if not isinstance(value, str):
            return value
        if name in ("serial", "chassisSerialNumber"):
            return self._named(value, "serial")
        return self.text(value, free=False)

    def _config(self, data: bytes) -> bytes:
        """PCI config space with its Device Serial Number (extended capability 3) set to zero."""
        at, seen = 0x100, set[int]()
        while at >= 0x100 and at + 12 <= len(data) and at not in seen:
            seen.add(at)
            (head,) = struct.unpack_from("<I", data, at)
            if head & 0xFFFF == 3 and any(data[at + 4 : at + 12]):
                data = data[: at + 4] + bytes(8) + data[at + 12 :]
                self.kinds.add("serial")
            at = head >> 20
        return data

    # What is found in text

    def _pattern(self, parts: dict[str, str]) -> re.Pattern[str]:
        """All identifiers as one pattern: where two begin at one place the first one named wins."""
        named = [f"(?P<{kind}>{pattern})" for kind, pattern in parts.items()]
        longest_first = sorted(self._words, key=len, reverse=True)
        if longest_first:
            named.append(f"(?P<word>{_bounded(*longest_first)})")
        return re.compile("|".join(named))

    def _stand_in(self, match: re.Match[str]) -> str:
        text = match[0]
        kind = match.lastgroup
        if kind == "ipv4" and _VERSION.search(
            match.string, max(0, match.start() - 40), match.start()
        ):
            return text
        stand_in: str = getattr(self, f"_{kind}")(text)
        if stand_in != text:
            self.originals[text] = stand_in
        return stand_in

    def _uuid(self, text: str) -> str:
        if len(text) == 32 and text.endswith("0" * 16):  # NVML's ibGuid: 8 bytes in a field of 16
            return f"{self._guid(text[:16])}{text[16:]}"
        return _refill(text, self._hex("uuid", re.sub("[-_]", "", text)))

    _disk = _uuid

    def _interface(self, text: str) -> str:
        prefix, _, digits = text.partition("x")
        return f"{prefix}x{self._octets(digits)}"

    def _gid(self, text: str) -> str:
        return _refill(text, f"{self._address(int(text.replace(':', ''), 16)):032x}")

    def _mac(self, text: str) -> str:
        return _refill(text, self._octets(re.sub("[:-]", "", text)))

    def _octets(self, digits: str) -> str:
        """A hardware address by its length: Ethernet, that with its type, EUI-64, IPoIB."""
        if len(digits) == 14:
            return digits[:2] + self._octets(digits[2:])
        if len(digits) == 16:
            return self._guid(digits)
        if len(digits) == 40:  # queue pair and GID
            return f"{digits[:8]}{self._address(int(digits[8:], 16)):032x}"
        return self._hex("mac", digits)

    def _guid(self, text: str) -> str:
        """A GUID in any notation of its 16 hex digits."""
        start = 2 if text[:2] in ("0x", "0X") else 0
        value = int(text[start:].replace(":", ""), 16)
        return text[:start] + _refill(text[start:], f"{self._half(value):016x}")

    _hex_guid = _bare_guid = _guid

    def _ipv4(self, text: str) -> str:
        return str(ipaddress.IPv4Address(self._dotted(int(ipaddress.IPv4Address(text)))))

    def _ipv6(self, text: str) -> str:
        try:
            number = int(ipaddress.IPv6Address(text))
        except ValueError:
            return text
        head, gap, tail = text.partition("::")
        if "." in text:  # IPv4 in IPv6: what stands before it is a well-known prefix
            start = text.rindex(":") + 1
            return text[:start] + self._ipv4(text[start:])
        digits = f"{self._address(number):032x}"
        groups = [digits[at : at + 4] for at in range(0, 32, 4)]
        left = head.split(":") if head else []
        right = tail.split(":") if tail else []
        written = zip(left + right, groups[: len(left)] + groups[8 - len(right) :])
        words = [_cased(word, group[4 - len(word) :]) for word, group in written]
        return ":".join(words[: len(left)]) + gap + ":".join(words[len(left) :])

    def _route(self, match: re.Match[str]) -> str:
        """Destination and gateway of a route: hex in the CPU's byte order (little-endian)."""
        interface, destination, gap, gateway = match.groups()

        def changed(digits: str) -> str:
            number = self._dotted(int.from_bytes(bytes.fromhex(digits), "little"))
            return number.to_bytes(4, "little").hex().upper()

        name = self.text(interface, free=False)
        return f"{name}{changed(destination)}{gap}{changed(gateway)}"

    def _word(self, text: str) -> str:
        kind = self._words[text]
        if kind == "serial":
            return self._serial(text)
        if kind == "volume":
            return self._host(text.replace("--", "-")).replace("-", "--")
        return self._host(text)

    # Stand-ins by value

    def _draw(self, kind: str, value: Any, size: int, make: Callable[[bytes], Any]) -> Any:
        """The stand-in for a value: ``make`` shapes ``size`` bytes of its keyed hash."""
        if (kind, value) not in self._made:
            stand_in = value
            for attempt in range(100):  # short values have few stand-ins: no two share one
                seed = f"{kind}:{attempt}:{value}".encode("utf-8", "surrogatepass")
                stand_in = make(hashlib.shake_256(self._key + seed).digest(size))
                if stand_in != value and (kind, stand_in) not in self._taken:
                    break
            self._made[kind, value] = stand_in
            self._taken.add((kind, stand_in))
        self.kinds.add(kind)
        return self._made[kind, value]

    def _host(self, name: str) -> str:
        """Label by label, so that a host's short name and its full one agree."""
        return ".".join(self._like("hostname", label) for label in name.split("."))

    def _serial(self, text: str) -> str:
        return self._like("serial", text)

    def _like(self, kind: str, text: str) -> str:
        """Letters for letters and digits for digits; all else stays."""
        if not any(char.isalnum() for char in text):
            return text

        def shape(noise: bytes) -> str:
            return "".join(map(_same_class, text, noise))

        result: str = self._draw(kind, text, len(text), shape)
        self.originals[text] = result
        return result

    def _hex(self, kind: str, digits: str) -> str:
        """Hex digits for hex digits; nothing but 0 or nothing but f stays."""
        value = digits.lower()
        if len(set(value)) < 2 and value[:1] in ("", "0", "f"):
            return digits

        def shape(noise: bytes) -> str:
            shaped = noise.hex()[: len(value)]
            if kind == "mac":  # whether it is a group's, and whether made up, are its lowest bits
                first = int(shaped[1], 16) & 0b1100 | int(value[1], 16) & 0b0011
                shaped = f"{shaped[0]}{first:x}{shaped[2:]}"
            return shaped

        result: str = self._draw(kind, value, len(value), shape)
        return result

    def _half(self, value: int) -> int:
        """64 bits: a GUID, or half of an IPv6 address. Each group of four digits keeps its leading
        zeros, so that compressed addresses stay as long as they are."""
        if value in (0, _LOW, _LINK_LOCAL):
            return value

        def shape(noise: bytes) -> int:
            result = 0
            for shift, group in zip((48, 32, 16, 0), struct.unpack(">4H", noise)):
                digits = -(-(value >> shift & 0xFFFF).bit_length() // 4)
                if digits:
                    least = 16 ** (digits - 1)
                    result |= (least + group % (15 * least)) << shift
            return result

        result: int = self._draw("guid", value, 8, shape)
        return result

    def _address(self, number: int) -> int:
        """An IPv6 address or GID: its halves one by one; IPv4 where it is a mapped one."""
        if number < 2 or number >> 120 == 0xFF:  # none, loopback, multicast
            return number
        if number >> 32 == 0xFFFF:
            return number >> 32 << 32 | self._dotted(number & 0xFFFFFFFF)
        return self._half(number >> 64) << 64 | self._half(number & _LOW)

    def _dotted(self, number: int) -> int:
        """An IPv4 address: each part with as many digits as before, and 0 for 0."""
        octets = number.to_bytes(4, "big")
        if octets[0] in (0, 127) or octets[0] >= 224:  # none, loopback, multicast, masks
            return number

        def shape(noise: bytes) -> int:
            ranges = [_OCTETS[len(str(octet))] if octet else (0, 0) for octet in octets]
            if octets[0] > 99:  # classes A, and B or C
                ranges[0] = (100, 126) if octets[0] < 127 else (128, 223)
            made = (low + byte % (high - low + 1) for (low, high), byte in zip(ranges, noise))
            return int.from_bytes(bytes(made), "big")

        result: int = self._draw("ip", number, 4, shape)
        return result


_BLANK = " \t\n\0"
_OCTETS = {1: (1, 9), 2: (10, 99), 3: (100, 255)}
"""The octets of an IPv4 address by their number of decimal digits."""

_H = "[0-9a-fA-F]"
_START = "(?<![0-9A-Za-z])"
_END = "(?![0-9A-Za-z])"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"

_IDENTIFIERS = {
    # With underscores, and "pod" before it, in the cgroup of a Kubernetes pod; without any
    # separator as machine id and cluster UUID; twice as long for a container.
    "uuid": (
        rf"(?:{_START}|(?<=pod)){_H}{{8}}(?P<s>[-_])(?:{_H}{{4}}(?P=s)){{3}}{_H}{{12}}{_END}"
        rf"|{_START}(?:{_H}{{64}}|{_H}{{32}}){_END}"
    ),
    # Named by their address: enx525400123456, ibx946dae0300f23c1a.
    "interface": (
        rf"{_START}(?:enx|wlx|wwx|ibx|rocex|iwx|opax)(?:[0-9a-f]{{16}}|[0-9a-f]{{12}}){_END}"
    ),
    "gid": rf"(?<![0-9A-Za-z:])(?:{_H}{{4}}:){{7}}{_H}{{4}}(?![0-9A-Za-z:])",
    "mac": (
        rf"(?<![0-9A-Za-z:]){_H}{{2}}(?P<m>[:-]){_H}{{2}}(?:(?P=m){_H}{{2}}){{4,18}}"
        r"(?![0-9A-Za-z:])"
    ),
    "guid": rf"(?<![0-9A-Za-z:])(?:{_H}{{4}}:){{3}}{_H}{{4}}(?![0-9A-Za-z:])",
}
"""What identifies something wherever it stands. PCI addresses and CPU masks have other forms."""

_ADDRESSES = {
    # The serial number of a FAT or DOS disk, where others have a UUID.
    "disk": rf"(?<=UUID=){_H}{{4,8}}-{_H}{{2,4}}{_END}",
    # A GUID begins with its maker's number, unlike a mask or a count.
    "hex_guid": rf"{_START}0[xX](?!000000){_H}{{16}}{_END}",
    "bare_guid": rf"{_START}(?!000000)(?=\d*[a-fA-F]){_H}{{16}}{_END}",
    "ipv4": rf"(?<![\w.-])(?:{_OCTET}\.){{3}}{_OCTET}(?!\w|\.\d|-[a-z])",
    "ipv6": (
        rf"(?<![\w:.])(?:{_H}{{0,4}}:){{2,7}}"
        rf"(?:(?:{_OCTET}\.){{3}}{_OCTET}|{_H}{{1,4}})?(?![\w:])"
    ),
}
"""What identifies something in free text only."""

_VERSION = re.compile(
    r"\b(?:version|vbios|firmware|fw|fw_ver|release|rev)\b[^\n\d]{0,16}$", re.IGNORECASE
)
"""Words before four numbers with dots that are no address."""

_ROUTE = re.compile(r"^(\S+\s+)([0-9A-F]{8})(\s+)([0-9A-F]{8})(?=\s)", re.MULTILINE)


def _words(answers: Answers) -> Iterator[tuple[str, str]]:
    """The host names and serial numbers of a machine, each with its kind."""
    for path, what in answers.files.items():
        if isinstance(what, (Directory, Link, Missing)):
            continue
        text = what if isinstance(what, str) else what.decode("utf-8", "surrogateescape")
        if SERIAL_FILES.fullmatch(path):
            yield _serial_part(text), "serial"
        elif path in HOSTNAME_FILES:
            name = text.strip(_BLANK)
            short, _, domain = name.partition(".")
            for word in (name, short, domain if "." in domain else name):
                yield word, "hostname"
                if "-" in word:  # as the device mapper writes the name of a volume
                    yield word.replace("-", "--"), "volume"
    for (call, *_), value in answers.nvml.items():
        if call == "nvmlDeviceGetSerial" and isinstance(value, str):
            yield _serial_part(value), "serial"
        elif call == "nvmlDeviceGetPlatformInfo" and isinstance(value, dict):
            yield _serial_part(str(value.get("chassisSerialNumber", ""))), "serial"


def _structure(answers: Answers) -> Iterator[str]:
    """The names that the kernel gave to what it shows. A host that is called node0 or nvidia is not
    told by that, and replacing the word would make the recording unreadable."""
    for path, what in answers.files.items():
        if path.startswith(("/sys/", "/proc/", "/run/")):
            yield path
            if isinstance(what, Directory):
                yield from what
            elif isinstance(what, Link):
                yield what
        elif isinstance(what, Directory):
            yield from (name for name in what if name.startswith("nvidia"))


def _telling(word: str) -> bool:
    """Whether a word can be looked for in other text: not where it might as well be a number."""
    long_enough = 4 if any(char.isalpha() for char in word) else 8
    return len(word) >= long_enough and not _placeholder(word)


def _placeholder(word: str) -> bool:
    # The serial number of a USB host controller is its PCI address.
    return len(set(word)) < 2 or word.lower() in PLACEHOLDERS or is_address(word)


def _serial_part(text: str) -> str:
    """The serial number in a text; of an NVMe name (nqn.DATE.MAKER:NAME, eui.NUMBER) the end."""
    name = text.strip(_BLANK)
    if name.startswith("nqn."):
        return name.rpartition(":")[2]
    return re.sub(r"^(?:eui|nvme|naa|t10|uuid)\.", "", name)


def _bounded(*words: str) -> str:
    return f"{_START}(?:{'|'.join(map(re.escape, words))}){_END}"


def _same_class(char: str, noise: int) -> str:
    if "0" <= char <= "9":
        return str(noise % 10)
    if not char.isalpha():
        return char
    return chr((65 if char.isupper() else 97) + noise % 26)


def _refill(text: str, digits: str) -> str:
    """``text`` with its hex digits replaced one by one."""
    rest = iter(_cased(text, digits))
    return "".join(next(rest) if char.isalnum() else char for char in text)


def _cased(original: str, digits: str) -> str:
    return digits.upper() if original.upper() == original != original.lower() else digits
