"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE), read and written.

Read are the elements that NCCL 2.28.9 knows (src/graph/xml.cc); others are left out with all that
is in them, and numbers are taken as it takes them: the digits at the beginning, else 0. The text is
foreign: its size, depth and number of elements are bounded, and it may hold no DTD.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from xml.etree.ElementTree import ParseError

from gputopo.errors import SourceError
from gputopo.nccl.tree import C2c, Cpu, Gpu, Net, Nic, NvLink, Pci, Tree
from gputopo.text import clean

MAX_BYTES = 8 << 20
MAX_DEPTH = 40
MAX_ELEMENTS = 20_000
MAX_OF_A_KIND = 96
"""How many GPUs, ports or CPU nodes a file may have: enough for a rack of 72 GPUs, and a bound for
the work that follows, which grows with the third power."""

VERSION = 1
"""The version that NCCL wants. RCCL, which this does not model, writes 2 as well."""

_INTEGER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,19})")
_BOUND = (1 << 31) - 1


class NcclXmlError(SourceError):
    """A text that is no NCCL topology, or one that is too large to be."""


class Element:
    """An element with its attributes and the elements in it."""

    __slots__ = ("attributes", "children", "name")

    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        self.name = name
        self.attributes = attributes
        self.children: list[Element] = []

    def text(self, key: str) -> str:
        return self.attributes.get(key, "")

    def number(self, key: str) -> int:
        return _number(self.text(key))

    def optional(self, key: str) -> int | None:
        return self.number(key) if key in self.attributes else None

    def named(self, name: str) -> list[Element]:
        return [child for child in self.children if child.name == name]

    def address(self, key: str) -> str:
        """A PCI address, which NCCL compares in lower case."""
        if not self.text(key):
            raise NcclXmlError(f"NCCL topology: a {clean(self.name, 20)} without {key}")
        return self.text(key).lower()


def read(text: str | bytes) -> Tree:
    """The machine that a topology file describes.

    Raises :class:`NcclXmlError`, and nothing else, for a text that is no such file.
    """
    root = _parse(text)
    if root.name != "system":
        name = clean(root.name, 40)
        raise NcclXmlError(f"not an NCCL topology: the root is <{name}>, not <system>")
    if root.number("version") != VERSION:
        version = clean(root.text("version"), 20) or "none"
        raise NcclXmlError(f"NCCL topology of version {version}; version {VERSION} can be read")
    return Tree(tuple(_cpu(cpu) for cpu in root.named("cpu")), root.attributes.get("name"))


def write(tree: Tree) -> str:
    """The topology file of a machine, which NCCL loads as NCCL_TOPO_FILE."""
    system = Element("system", _attributes(version=VERSION, name=tree.name))
    system.children = [_cpu_element(cpu) for cpu in tree.cpus]
    return "".join(f"{line}\n" for line in _lines(system, 0))


# Reading


class _Builder:
    """What the parser calls for each tag: keeps elements, and stops it where there are too many."""

    def __init__(self) -> None:
        self.root: Element | None = None
        self.open: list[Element] = []
        self.counts: Counter[str] = Counter()

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.counts[name] += 1
        self.counts["all"] += 1
        if self.counts["all"] > MAX_ELEMENTS:
            raise NcclXmlError(f"NCCL topology: more than {MAX_ELEMENTS} elements")
        if name in ("cpu", "gpu", "net") and self.counts[name] > MAX_OF_A_KIND:
            raise NcclXmlError(f"NCCL topology: more than {MAX_OF_A_KIND} of <{name}>")
        if len(self.open) >= MAX_DEPTH:
            raise NcclXmlError(f"NCCL topology: elements nested deeper than {MAX_DEPTH}")
        element = Element(name, attributes)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def end(self, name: str) -> None:
        self.open.pop()

    def data(self, text: str) -> None:
        pass

    def close(self) -> Element | None:
        return self.root


def _parse(text: str | bytes) -> Element:
    from defusedxml.common import DefusedXmlException
    from defusedxml.ElementTree import DefusedXMLParser

    if len(text) > MAX_BYTES:
        raise NcclXmlError(f"NCCL topology: larger than {MAX_BYTES >> 20} MiB")
    parser = DefusedXMLParser(target=_Builder(), forbid_dtd=True)
    try:
        # Old files begin with an empty line, which XML allows only without a declaration.
        parser.feed(text.lstrip())
        root = parser.close()
    except NcclXmlError:
        raise
    except (ParseError, DefusedXmlException, LookupError, ValueError) as error:
        raise NcclXmlError(f"not XML: {clean(str(error), 100)}") from None
    if not isinstance(root, Element):
        raise NcclXmlError("not XML: no element")
    return root


def _number(text: str) -> int:
    match = _INTEGER.match(text)
    if match is None:
        return 0
    value = int(match[2], 16 if match[2][:2] in ("0x", "0X") else 10)
    return max(-_BOUND, min(_BOUND, -value if match[1] == "-" else value))


def _cpu(element: Element) -> Cpu:
    return Cpu(
        numa=element.number("numaid"),
        affinity=element.attributes.get("affinity"),
        arch=element.text("arch"),
        vendor=element.text("vendor"),
        family=element.optional("familyid"),
        model=element.optional("modelid"),
        host_hash=element.attributes.get("host_hash"),
        children=tuple(_pci(pci) for pci in element.named("pci")),
        nics=tuple(_nic(nic) for nic in element.named("nic")),
    )


def _pci(element: Element) -> Pci:
    gpus, nics = element.named("gpu"), element.named("nic")
    return Pci(
        busid=element.address("busid"),
        class_code=element.text("class"),
        vendor=element.text("vendor"),
        device=element.text("device"),
        subsystem_vendor=element.text("subsystem_vendor"),
        subsystem_device=element.text("subsystem_device"),
        link_speed=element.text("link_speed"),
        link_width=max(element.number("link_width"), 0),
        children=tuple(_pci(pci) for pci in element.named("pci")),
        gpu=_gpu(gpus[0]) if gpus else None,
        nic=_nic(nics[0]) if nics else None,
        peers=tuple(link.address("target") for link in element.named("pcilink")),
    )


def _gpu(element: Element) -> Gpu:
    c2c = element.named("c2c")
    return Gpu(
        dev=max(element.number("dev"), 0),
        sm=element.number("sm"),
        rank=element.optional("rank"),
        gdr=element.number("gdr") != 0,
        nvlinks=tuple(
            NvLink(
                link.address("target"),
                max(link.number("count"), 0),
                link.text("tclass"),
            )
            for link in element.named("nvlink")
        ),
        c2c=C2c(max(c2c[0].number("bw"), 0), max(c2c[0].number("count"), 0)) if c2c else None,
    )


def _nic(element: Element) -> Nic:
    return Nic(
        tuple(
            Net(
                name=net.text("name"),
                dev=net.number("dev"),
                speed_mbps=net.number("speed"),
                port=net.number("port"),
                guid=net.attributes.get("guid"),
                max_connections=net.optional("maxconn"),
                gdr=net.number("gdr") != 0,
            )
            for net in element.named("net")
            if "dev" in net.attributes
        )
    )


# Writing


def _attributes(**values: object) -> dict[str, str]:
    """Attributes by name (``class_`` is class), without those that have no value."""
    return {
        key.rstrip("_"): str(int(value) if isinstance(value, bool) else value)
        for key, value in values.items()
        if value is not None
    }


def _lines(element: Element, depth: int) -> Iterator[str]:
    attributes = "".join(f' {key}="{_plain(text)}"' for key, text in element.attributes.items())
    indent = "  " * depth
    if not element.children:
        yield f"{indent}<{element.name}{attributes}/>"
        return
    yield f"{indent}<{element.name}{attributes}>"
    for child in element.children:
        yield from _lines(child, depth + 1)
    yield f"{indent}</{element.name}>"


def _plain(text: str) -> str:
    """``text`` without what XML would have to escape: NCCL reads attributes as they stand."""
    return re.sub(r"[^ -~]|[<>&\"']", "_", text)


def _cpu_element(cpu: Cpu) -> Element:
    element = Element(
        "cpu",
        _attributes(
            host_hash=cpu.host_hash,
            numaid=cpu.numa,
            affinity=cpu.affinity,
            arch=cpu.arch,
            vendor=cpu.vendor or None,
            familyid=cpu.family,
            modelid=cpu.model,
        ),
    )
    element.children = [*map(_pci_element, cpu.children), *map(_nic_element, cpu.nics)]
    return element


def _pci_element(pci: Pci) -> Element:
    element = Element(
        "pci",
        _attributes(
            busid=pci.busid,
            class_=pci.class_code,
            vendor=pci.vendor or None,
            device=pci.device or None,
            subsystem_vendor=pci.subsystem_vendor or None,
            subsystem_device=pci.subsystem_device or None,
            link_speed=pci.link_speed,
            link_width=pci.link_width,
        ),
    )
    element.children = [
        *(Element("pcilink", _attributes(target=peer)) for peer in pci.peers),
        *map(_pci_element, pci.children),
        *([_gpu_element(pci.gpu)] if pci.gpu else []),
        *([_nic_element(pci.nic)] if pci.nic else []),
    ]
    return element


def _gpu_element(gpu: Gpu) -> Element:
    element = Element("gpu", _attributes(dev=gpu.dev, sm=gpu.sm, rank=gpu.rank, gdr=gpu.gdr))
    element.children = [
        Element("nvlink", _attributes(target=k.target, count=k.count, tclass=k.target_class))
        for k in gpu.nvlinks
    ]
    if gpu.c2c is not None:
        c2c = _attributes(bw=gpu.c2c.mbytes_per_s, count=gpu.c2c.count)
        element.children.append(Element("c2c", c2c))
    return element


def _nic_element(nic: Nic) -> Element:
    element = Element("nic", {})
    element.children = [
        Element(
            "net",
            _attributes(
                name=net.name,
                dev=net.dev,
                speed=net.speed_mbps,
                port=net.port,
                latency="0.000000",
                guid=net.guid,
                maxconn=net.max_connections,
                gdr=net.gdr,
            ),
        )
        for net in nic.nets
    ]
    return element
