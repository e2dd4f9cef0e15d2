"""A machine about to be changed: its healthy description, and changes to it or to its answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from composer import compose, matrix
from composer.description import read
from composer.driver import gpu_part
from composer.layout import DOWNSTREAM, ROOT, Function, Layout, place
from composer.pci import netdev
from composer.processors import Processors
from gputopo.facts import Fact
from gputopo.host.base import Output
from gputopo.host.recording import Answers, nvml_key
from gputopo.host.tree import Directory, Entry
from gputopo.probes.nvml import P2P_CAPABILITIES

NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")
ONE_SWITCH = ("PIX", "PXB")
"""Path classes that do not lead through the CPU."""


class Twin:
    """What faults work on. What a machine *has* is asked of the healthy one, which never changes;
    what is *changed* goes into the description, or by hand into the answers composed of it."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = copy.deepcopy(description)
        self.machine: dict[str, Any] = self.description["machine"]
        self.healthy = read(description)
        self.layout: Layout = place(self.healthy)
        self.processors = Processors(
            self.healthy,
            [gpu.node for gpu in self.layout.gpus if gpu.settings.memory_node is not None],
        )
        self.concerned: list[str] = []
        """Nodes that may be named beside those that are broken: the other ends of links, say."""
        self._edits: list[Callable[[Answers], None]] = []

    # What the machine has

    @property
    def bare_metal(self) -> bool:
        return not self.healthy.hypervisor

    @property
    def arm(self) -> bool:
        return self.healthy.cpu.vendor == "ARM"

    @property
    def driver_branch(self) -> int:
        return int(self.healthy.driver.partition(".")[0])

    @property
    def packages(self) -> int:
        return self.healthy.cpu.packages

    @property
    def cpu_nodes(self) -> int:
        return sum(bool(node.cpus) for node in self.processors.nodes)

    def package_of(self, function: Function) -> int:
        """The CPU package that a function is attached to."""
        return self.processors.nodes[function.node].package

    @property
    def gpus(self) -> list[Function]:
        """In NVML's order."""
        return self.layout.gpus

    def last_gpu(self) -> Function | None:
        """The one to be hurt: without the last one the others keep their numbers."""
        return self.gpus[-1] if self.gpus else None

    def node_id(self, function: Function) -> str:
        """What a GPU or an RDMA device is called in the topology."""
        return function.rdma or f"gpu{self.gpus.index(function)}"

    def peers_over_pcie(self) -> bool:
        """Whether there are GPUs that may talk to each other over PCIe."""
        return len(self.gpus) > 1 and not any(gpu_part(gpu).peer_over_pcie for gpu in self.gpus)

    def port_above(self, function: Function) -> Function | None:
        """The port at the other end of a function's link; None where it is not to be seen."""
        port = self.layout.functions.get(function.above[-1]) if function.above else None
        return port if port is not None and port.port_type in (ROOT, DOWNSTREAM) else None

    def path_class(self, a: Function, b: Function) -> str:
        return matrix.path_class(self.layout, self.processors, a, b)

    def fabric_hca(self) -> Function | None:
        """The HCA beside the last GPU; None on machines without GPUs or HCAs."""
        gpu = self.last_gpu()
        return None if gpu is None else self.nearest_hca(gpu)

    def nearest_hca(self, gpu: Function) -> Function | None:
        """The fastest of the nearest HCAs of a GPU; one with the default route only for want."""
        hcas = [hca for hca in self.layout.hcas() if hca.physical is None]
        return min(hcas, key=lambda hca: self._distance(gpu, hca), default=None)

    def _distance(self, gpu: Function, hca: Function) -> tuple[bool, int, bool, float]:
        link, gateway = hca.link, self.healthy.gateway
        routes = any(gateway and netdev(other) == gateway for other in self.card(hca))
        way = NEAREST_FIRST.index(self.path_class(gpu, hca))
        return routes, way, hca.ethernet, -(link.speed * link.width if link is not None else 0)

    def card(self, hca: Function) -> list[Function]:
        """All RDMA devices of an HCA's card: they share its link."""
        return [other for other in self.layout.hcas() if other.address[:-2] == hca.address[:-2]]

    def under_one_switch(self, gpu: Function) -> list[Function]:
        """The HCAs of a GPU that are of its nearest one's part and reach it without the CPU."""
        nearest = self.nearest_hca(gpu)
        return [
            hca
            for hca in self.layout.hcas()
            if nearest is not None
            and (hca.part_name, hca.physical) == (nearest.part_name, None)
            and self.path_class(gpu, hca) in ONE_SWITCH
        ]

    # What is changed in the description

    def change(self, name: str, **settings: Any) -> None:
        """Settings of a function, as in the description's table ``change``."""
        self.machine.setdefault("change", {}).setdefault(name, {}).update(settings)

    def changed(self, function: Function, **settings: Any) -> list[str]:
        """Changes settings of a GPU or an HCA, and names it."""
        self.change(function.address, **settings)
        return [self.node_id(function)]

    @property
    def rows(self) -> list[str]:
        """The lines of the PCI tree."""
        text: str = self.machine["tree"]
        return text.splitlines()

    @rows.setter
    def rows(self, rows: Iterable[str]) -> None:
        self.machine["tree"] = "\n".join([*rows, ""])

    def move(self, hcas: list[Function], host: str) -> None:
        """Puts HCAs on root ports of their own; ``host`` as in :meth:`add`."""
        names = {hca.rdma for hca in hcas}
        lines = [row for row in self.rows if names & set(row.split())]
        self.rows = [row for row in self.rows if row not in lines]
        self.add(host, [device_of(line) for line in lines])

    def add(self, host: str, devices: list[str]) -> None:
        """Adds devices on new root ports, of a root complex that is there (``0000:80``) or of a new
        one (a line that begins with ``host``)."""
        ports = [f"  {number:02x}.0 {device}" for number, device in enumerate(devices, start=0x18)]
        rows = self.rows
        if host.startswith("host"):
            self.rows = [*rows, host, *ports]
            return
        start = next(i for i, row in enumerate(rows) if row.startswith(f"host {host} "))
        after = (i for i in range(start + 1, len(rows)) if rows[i].startswith("host"))
        end = next(after, len(rows))
        self.rows = [*rows[:end], *ports, *rows[end:]]

    def move_beside(self, line: str, other: str, number: str) -> None:
        """Puts the device of one line of the tree on the switch of another line's device."""
        moved = f"{other[: -len(other.lstrip())]}{number} {device_of(line)}"
        kept = [row for row in self.rows if row is not line and row != line]
        at = kept.index(other) + 1
        self.rows = [*kept[:at], moved, *kept[at:]]

    def row_of(self, hca: Function) -> str:
        """The line of the tree that an HCA stands on."""
        return next(row for row in self.rows if hca.rdma in row.split())

    # What is changed in the answers

    def edit(self, change: Callable[[Answers], None]) -> None:
        """A change to the answers, for what no description can say."""
        self._edits.append(change)

    def nvml(self, call: str, *args: Any, answer: Fact[Any]) -> None:
        """Another answer to one question of NVML."""

        def put(answers: Answers) -> None:
            answers.nvml[nvml_key(call, args)] = answer

        self.edit(put)

    def refuse_peers(self, a: int, b: int, status: int) -> None:
        """Peer-to-peer access between two GPUs is refused, with one of NVML's reasons."""
        for capability in P2P_CAPABILITIES.values():
            for pair in ((a, b), (b, a)):
                self.nvml("nvmlDeviceGetP2PStatus", *pair, capability, answer=status)

    def command(self, argv: Sequence[str], answer: Fact[Output]) -> None:
        """Another outcome of a command."""

        def put(answers: Answers) -> None:
            answers.commands[tuple(argv)] = answer

        self.edit(put)

    def file(self, path: str, entry: Entry) -> None:
        """Another content of a file (by its real path), or one that was not there."""

        def put(answers: Answers) -> None:
            answers.files[path] = entry
            _enter(answers, path)

        self.edit(put)

    def answers(self, healthy: Answers | None = None) -> Answers:
        """The twin's recording. ``healthy`` are the healthy machine's answers, which are then not
        composed once more where no more than answers differ."""
        if healthy is not None and read(self.description) == self.healthy:
            answers = Answers(
                healthy.header, dict(healthy.files), dict(healthy.commands), dict(healthy.nvml)
            )
        else:
            answers = compose(self.description)
        for change in self._edits:
            change(answers)
        return answers


def device_of(line: str) -> str:
    """A line of the tree without its number, and without what belongs to its place."""
    return re.sub(r"^\S+ | (?:bus|acs)=\S+", "", line.strip())


def _enter(answers: Answers, path: str) -> None:
    """Lists a path in its directory, and that one in its own, as far as they are new."""
    while path:
        parent, _, base = path.rpartition("/")
        names = answers.files.get(parent or "/")
        listed = names if isinstance(names, Directory) else Directory()
        if base in listed:
            return
        answers.files[parent or "/"] = Directory(sorted({*listed, base}))
        path = parent
