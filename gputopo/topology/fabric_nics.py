"""Which RDMA devices carry the GPUs' traffic, and which are there for storage or management.

Nothing names a port's purpose, so several signals decide together: link layer, rate class, how near
the GPUs are, whether the machine's default route or a bond runs over the card, and whether the port
is of the same kind (board, functions of the card) as those that stand beside GPUs. Whether a port
is up plays no part: a fabric port that is down stays a fabric port. No signal takes away all that a
GPU has beside it, but the link layer: an Ethernet port is no way into an InfiniBand fabric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from gputopo.facts import known
from gputopo.topology.model import Hca, Port
from gputopo.topology.paths import rank

if TYPE_CHECKING:
    from gputopo.topology.graph import Topology

Role = Literal["compute", "spare", "other", "virtual-function", "software"]

NEAR = "PHB"
"""The farthest class that counts as beside a GPU: one root complex. Beyond it traffic crosses
between host bridges or sockets."""

ACTIVE = "ACTIVE"

Kind = tuple[object, ...]


class NicRole(msgspec.Struct, frozen=True, kw_only=True):
    """What an RDMA device is there for, and why that is believed.

    ``compute``: carries GPU traffic; ``spare``: the same kind, but beside no GPU while each has
    one; ``other``: storage, management, or another fabric; ``virtual-function``: of a device that
    is here too; ``software``: no hardware. ``usable``: a port is ACTIVE. ``gpus`` are those beside
    it.
    """

    hca: str
    role: Role
    usable: bool
    gpus: list[str]
    reasons: list[str]


class _Device(msgspec.Struct, frozen=True, kw_only=True):
    """An HCA with the signals that speak of its purpose."""

    hca: Hca
    card: str
    layer: str | None
    kind: Kind
    gpus: list[str]
    nearest: str
    carries: str
    """What of the machine's own network runs over the card; empty where nothing does."""
    rate: float | None
    """Gb/s of the kind: the highest of its active ports, since a single one may be degraded."""


def port_of(hca: Hca) -> Port | None:
    """The port that counts: an active one, else the first."""
    return next((port for port in hca.ports if port.state == ACTIVE), next(iter(hca.ports), None))


def usable(hca: Hca) -> bool:
    """Whether a port is up for traffic."""
    return any(port.state == ACTIVE for port in hca.ports)


def card_of(hca: Hca) -> str:
    """What the functions of one card share: the PCI address without its last number."""
    return hca.pci.rpartition(".")[0] if hca.pci else hca.id


def kinds_of(topology: Topology) -> dict[str, Kind]:
    """By node id, what HCAs must share to be compared: board, functions of a card, link layer."""
    functions = Counter(card_of(hca) for hca in topology.physical_hcas)
    found: dict[str, Kind] = {}
    for hca in topology.physical_hcas:
        port = port_of(hca)
        board = hca.board_id or (hca.vendor, hca.device, hca.model)
        found[hca.id] = (board, functions[card_of(hca)], port.link_layer if port else None)
    return found


def classify(topology: Topology) -> dict[str, NicRole]:
    """The role of every RDMA device by its node id."""
    devices = {device.hca.id: device for device in _devices(topology)}
    why: dict[str, list[str]] = {hca: [] for hca in devices}
    left = list(devices.values()) if topology.gpus else []
    left = _of_one_fabric(left, why)
    left = _without(left, why, _own_network)
    top = max((device.rate for device in left if device.rate is not None), default=0.0)
    left = _without(left, why, lambda device: _slower(device, top))
    left, spares = _beside_gpus(left, why, topology)
    compute = {device.hca.id for device in left}
    roles: dict[str, NicRole] = {}
    for hca in topology.hcas:
        role: Role
        reasons: list[str]
        device = devices.get(hca.id)
        if hca.software:
            role, reasons = "software", ["no PCI function stands behind it"]
        elif device is None:
            role, reasons = "virtual-function", [f"of {hca.physical_function}"]
        elif hca.id in compute:
            role, reasons = "compute", [*_for(device), *why[hca.id]]
        elif hca.id in spares:
            role, reasons = "spare", why[hca.id]
        else:
            role, reasons = "other", why[hca.id] or ["no GPU is here"]
        roles[hca.id] = NicRole(
            hca=hca.id,
            role=role,
            usable=usable(hca),
            gpus=device.gpus if device else [],
            reasons=reasons,
        )
    return roles


def _for(device: _Device) -> list[str]:
    where = f"beside {', '.join(device.gpus)}" if device.gpus else "nearest GPU"
    rate = f" {device.rate:g} Gb/s" if device.rate else ""
    return [f"{where} ({device.nearest})", *([f"{device.layer}{rate}"] if device.layer else [])]


def _devices(topology: Topology) -> list[_Device]:
    kinds, carried = kinds_of(topology), _carried(topology)
    rates: dict[Kind, float] = {}
    for hca in topology.physical_hcas:
        for port in hca.ports:
            if port.state == ACTIVE and port.rate_gbps:
                rates[kinds[hca.id]] = max(rates.get(kinds[hca.id], 0.0), port.rate_gbps)
    devices: list[_Device] = []
    for hca in topology.physical_hcas:
        classes = {gpu.id: topology.pcie_class(gpu.id, hca.id) for gpu in topology.gpus}
        main = port_of(hca)
        devices.append(
            _Device(
                hca=hca,
                card=card_of(hca),
                layer=main.link_layer if main else None,
                kind=kinds[hca.id],
                gpus=[gpu for gpu, found in classes.items() if rank(found) <= rank(NEAR)],
                nearest=min(classes.values(), key=rank, default="?"),
                carries=carried.get(card_of(hca), ""),
                rate=rates.get(kinds[hca.id]),
            )
        )
    return devices


def _carried(topology: Topology) -> dict[str, str]:
    """Cards over which the machine's own network runs, and what that is."""
    net = known(topology.facts.net)
    found: dict[str, str] = {}
    if net is None:
        return found
    # A default route may stand on a VLAN: eth0.100 is carried by eth0.
    routed = {name for route in net.default_routes for name in (route, route.split(".")[0])}
    for interface in net.interfaces:
        card = interface.pci.rpartition(".")[0]
        if interface.default_route or routed & {interface.name, interface.bond}:
            found[card] = f"carries the default route ({interface.name})"
        elif interface.bond is not None:
            found.setdefault(card, f"{interface.name} is a port of {interface.bond}")
    return found


def _own_network(device: _Device) -> str:
    return device.carries


def _slower(device: _Device, top: float) -> str:
    if device.rate is None or device.rate >= top:
        return ""
    return f"{device.rate:g} Gb/s, where others run at {top:g}"


def _of_one_fabric(devices: list[_Device], why: dict[str, list[str]]) -> list[_Device]:
    """Those of the fabric's link layer: the one with the most bandwidth beside GPUs."""
    pool = [device for device in devices if device.gpus] or devices
    pool = [device for device in pool if not device.carries] or pool
    cards = {device.card: device for device in sorted(pool, key=lambda d: d.rate or 0.0)}
    weights: dict[str, float] = {}
    for device in cards.values():  # of a card with two ports one counts: they share its link
        if device.layer is not None:
            weights[device.layer] = weights.get(device.layer, 0.0) + (device.rate or 1.0)
    if not weights:
        return devices
    fabric = max(weights, key=lambda layer: (weights[layer], layer == "InfiniBand"))
    for device in devices:
        if device.layer not in (fabric, None):
            why[device.hca.id].append(f"{device.layer}, where the GPUs' fabric is {fabric}")
    return [device for device in devices if device.layer in (fabric, None)]


def _without(
    devices: list[_Device], why: dict[str, list[str]], against: Callable[[_Device], str]
) -> list[_Device]:
    """Without those that something speaks against, unless they are all that a GPU has beside it."""
    kept = {device.hca.id for device in devices if not against(device)}
    if not kept:
        return devices
    served = {gpu for device in devices if device.hca.id in kept for gpu in device.gpus}
    for device in devices:
        reason = against(device)
        if not reason:
            continue
        alone = [gpu for gpu in device.gpus if gpu not in served]
        if alone:
            kept.add(device.hca.id)
            reason += f", but {', '.join(alone)} has nothing else beside it"
        why[device.hca.id].append(reason)
    return [device for device in devices if device.hca.id in kept]


def _beside_gpus(
    devices: list[_Device], why: dict[str, list[str]], topology: Topology
) -> tuple[list[_Device], set[str]]:
    """Those beside GPUs; where some GPU has none, those that it must do with; and the spares."""
    near = [device for device in devices if device.gpus]
    if not near:
        return devices, set()
    kinds = {device.kind for device in near}
    served = {gpu for device in near for gpu in device.gpus}
    lacking = [gpu for gpu in topology.gpus if gpu.id not in served]
    kept: list[_Device] = []
    spares: set[str] = set()
    for device in devices:
        wanted = device.kind in kinds or device.hca.numa in [gpu.numa for gpu in lacking]
        if device.gpus or (lacking and wanted):
            kept.append(device)
        elif device.kind in kinds:
            spares.add(device.hca.id)
            why[device.hca.id].append("beside no GPU, and each GPU has another beside it")
        else:
            why[device.hca.id].append("beside no GPU, and of another kind than those that are")
    return kept, spares
