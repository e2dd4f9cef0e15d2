"""A site's own promise about a machine, in TOML, and whether a machine keeps it.

Every key is optional; what is not promised is not checked. ``gputopo check --learn`` writes the
promise that a good machine keeps. See docs/checks.md for an example.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from gputopo import toml
from gputopo.errors import GputopoError
from gputopo.expect.shape import UNKNOWN, link
from gputopo.text import clean
from gputopo.topology.graph import Topology
from gputopo.topology.paths import rank


class Promise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine of this kind has to be. Names may hold ``*`` and ``?``."""

    title: str = ""
    cpu_model: str | None = None
    packages: int | None = None
    cores: int | None = None
    numa_nodes: int | None = None
    """NUMA nodes with CPUs."""
    driver: str | None = None
    kernel: str | None = None
    gpus: int | None = None
    gpu_model: str | None = None
    gpu_pcie: str | None = None
    """What both ends of each GPU's link can do: ``Gen5 x16``."""
    gpu_pcie_width: int | None = None
    """Lanes trained now (the speed now means nothing on an idle GPU)."""
    gpu_numa: list[int] | None = None
    """NUMA node of each GPU by index."""
    nvlinks: int | None = None
    """Active NVLinks of each GPU."""
    gpu_paths: str | None = None
    """The class between every two GPUs: ``NV18``."""
    hcas: int | None = None
    """HCAs with a port that is ACTIVE."""
    hca_rate_gbps: float | None = None
    """Rate of the nearest HCA of each GPU, Gb/s or more."""
    hca_link_layer: Literal["InfiniBand", "Ethernet"] | None = None
    """Link layer of the nearest HCA of each GPU."""
    hca_distance: str | None = None
    """Each GPU has an ACTIVE HCA at this class or nearer: ``PXB``."""
    hca_firmware: str | None = None
    """Firmware of all HCAs that are nearest to a GPU."""
    own_hca: bool | None = None
    """No two GPUs share their nearest HCA."""


DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a promise: ``kept`` is None where it cannot be told."""

    promise: str
    expected: str
    seen: str
    kept: bool | None
    subject: str = "machine"


def load(data: bytes, name: str) -> Promise:
    """Reads a promise. Raises GputopoError with one line for what is wrong in it."""
    promise = toml.decode(data, Promise, name)
    near = promise.hca_distance
    if near is not None and near not in DISTANCES:
        raise GputopoError(f"{clean(name)}: hca_distance is one of {', '.join(DISTANCES)}")
    if promise == Promise(title=promise.title):
        raise GputopoError(f"{clean(name)}: promises nothing")
    return promise


def check(promise: Promise, topology: Topology) -> list[Kept]:
    """Each promised line against the machine."""
    return list(_lines(promise, topology))


def _lines(promise: Promise, topology: Topology) -> Iterator[Kept]:
    host = topology.host
    for field, seen in (
        ("cpu_model", host.cpu_model),
        ("driver", host.driver),
        ("kernel", host.kernel),
    ):
        yield from _one(field, getattr(promise, field), seen, _matches)
    for field, count in (
        ("packages", host.packages),
        ("cores", host.cores),
        ("numa_nodes", len(topology.cpu_nodes) or None),
        ("gpus", len([gpu for gpu in topology.gpus if gpu.index is not None and not gpu.lost])),
        ("hcas", len(_active(topology))),
    ):
        yield from _one(field, getattr(promise, field), count, _equal)
    yield from _gpus(promise, topology)
    yield from _pairs(promise, topology)
    yield from _nearest(promise, topology)


def _one(
    field: str,
    expected: Any,
    seen: Any,
    test: Callable[[Any, Any], bool],
    subject: str = "machine",
) -> Iterator[Kept]:
    if expected is None:
        return
    unknown = seen is None or seen == UNKNOWN
    yield Kept(
        promise=field,
        expected=str(expected),
        seen=UNKNOWN if unknown else str(seen),
        kept=None if unknown else test(expected, seen),
        subject=subject,
    )


def _equal(expected: Any, seen: Any) -> bool:
    return bool(expected == seen)


def _matches(expected: str, seen: str) -> bool:
    return fnmatch.fnmatchcase(seen, expected)


def _within(expected: str, seen: str) -> bool:
    """Whether a path class is as near as promised; a sentence instead of a class is not."""
    return " " not in seen and rank(seen) <= rank(expected)


def _gpus(promise: Promise, topology: Topology) -> Iterator[Kept]:
    for number, gpu in enumerate(topology.gpus):
        width = gpu.pcie.width if gpu.pcie else None
        active = gpu.nvlink.active if gpu.nvlink else None
        yield from _one("gpu_model", promise.gpu_model, gpu.name, _matches, gpu.id)
        yield from _one("gpu_pcie", promise.gpu_pcie, link(gpu.pcie, most=True), _equal, gpu.id)
        yield from _one("gpu_pcie_width", promise.gpu_pcie_width, width, _equal, gpu.id)
        yield from _one("nvlinks", promise.nvlinks, active, _equal, gpu.id)
        if promise.gpu_numa is not None:
            wanted = promise.gpu_numa[number] if number < len(promise.gpu_numa) else None
            yield from _one("gpu_numa", wanted, gpu.numa, _equal, gpu.id)


def _pairs(promise: Promise, topology: Topology) -> Iterator[Kept]:
    if promise.gpu_paths is None:
        return
    for i, a in enumerate(topology.gpus):
        for b in topology.gpus[i + 1 :]:
            seen = topology.path_class(a.id, b.id)
            untold = seen == "?" or topology.nvlink_unknown is not None
            yield from _one(
                "gpu_paths",
                promise.gpu_paths,
                None if untold else seen,
                _equal,
                f"{a.id} to {b.id}",
            )


def _active(topology: Topology) -> list[str]:
    return [
        hca.id
        for hca in topology.physical_hcas
        if any(port.state == "ACTIVE" for port in hca.ports)
    ]


def _nearest(promise: Promise, topology: Topology) -> Iterator[Kept]:
    active = _active(topology)
    taken: dict[str, str] = {}
    for gpu in topology.gpus:
        classes = {hca: topology.path_class(gpu.id, hca) for hca in active}
        # Among equals the one that no GPU has yet: a machine with one each has a one-to-one map.
        best = min(classes, key=lambda hca: (rank(classes[hca]), hca in taken), default=None)
        distance = classes[best] if best is not None else None
        yield from _one(
            "hca_distance",
            promise.hca_distance,
            "no HCA is ACTIVE" if distance is None else None if distance == "?" else distance,
            _within,
            gpu.id,
        )
        if best is None:
            continue
        hca = next(node for node in topology.physical_hcas if node.id == best)
        port = next(port for port in hca.ports if port.state == "ACTIVE")
        subject = f"{best} (nearest to {gpu.id})"
        yield from _one(
            "hca_rate_gbps", promise.hca_rate_gbps, port.rate_gbps, lambda e, s: s >= e, subject
        )
        yield from _one("hca_link_layer", promise.hca_link_layer, port.link_layer, _equal, subject)
        yield from _one("hca_firmware", promise.hca_firmware, hca.firmware, _matches, subject)
        if promise.own_hca:
            sharer = taken.get(best)
            yield Kept(
                promise="own_hca",
                expected="an HCA of its own",
                seen=f"{best} is also nearest to {sharer}" if sharer else best,
                kept=sharer is None,
                subject=gpu.id,
            )
        taken.setdefault(best, gpu.id)


def learn(topology: Topology) -> Promise:
    """The promise that this machine keeps: what is unknown or not the same for all is out."""
    gpus = topology.gpus
    host = topology.host
    paths = {topology.path_class(a.id, b.id) for i, a in enumerate(gpus) for b in gpus[i + 1 :]}
    empty = Promise(
        hca_distance="SYS",
        hca_rate_gbps=0,
        hca_link_layer="InfiniBand",
        hca_firmware="*",
        own_hca=True,
    )
    seen: dict[str, list[Kept]] = {}
    for line in _nearest(empty, topology):
        seen.setdefault(line.promise, []).append(line)

    def common(field: str) -> str | None:
        values = {line.seen for line in seen.get(field, [])}
        return values.pop() if len(values) == 1 and UNKNOWN not in values else None

    distances = [line.seen for line in seen.get("hca_distance", [])]
    rates = [line.seen for line in seen.get("hca_rate_gbps", [])]
    known_distances = distances and all(
        d in ("PIX", "PXB", "PHB", "NODE", "SYS") for d in distances
    )
    layer = common("hca_link_layer")
    return Promise(
        title=f"learned from {host.product or 'a machine'}",
        cpu_model=host.cpu_model,
        packages=host.packages,
        cores=host.cores,
        numa_nodes=len(topology.cpu_nodes) or None,
        driver=host.driver,
        gpus=len(gpus) or None,
        gpu_model=_same(gpu.name for gpu in gpus),
        gpu_pcie=_same(link(gpu.pcie, most=True) for gpu in gpus),
        gpu_pcie_width=_same(gpu.pcie.width if gpu.pcie else None for gpu in gpus),
        gpu_numa=(
            [gpu.numa for gpu in gpus if gpu.numa is not None]
            if gpus and all(gpu.numa is not None for gpu in gpus)
            else None
        ),
        nvlinks=_same(gpu.nvlink.active if gpu.nvlink else None for gpu in gpus),
        gpu_paths=(
            paths.pop()
            if len(paths) == 1 and "?" not in paths and topology.nvlink_unknown is None
            else None
        ),
        hcas=len(_active(topology)) or None,
        hca_distance=max(distances, key=rank) if known_distances else None,
        hca_rate_gbps=min(map(float, rates)) if rates and UNKNOWN not in rates else None,
        hca_link_layer=layer if layer in ("InfiniBand", "Ethernet") else None,  # type: ignore[arg-type]
        hca_firmware=common("hca_firmware"),
        own_hca=all(line.kept for line in seen.get("own_hca", [])) or None if distances else None,
    )


def _same(values: Any) -> Any:
    """The one value of all, None where they differ or one is unknown."""
    found = set(values)
    return found.pop() if len(found) == 1 and not found & {None, UNKNOWN} else None


def render(promise: Promise) -> str:
    """The promise as TOML; each key that it leaves out stands there as a comment."""
    lines: list[str] = []
    for field in Promise.__struct_fields__:
        value = getattr(promise, field)
        if value is None:
            lines.append(f"# {field} =    (not promised)")
        elif isinstance(value, bool):
            lines.append(f"{field} = {str(value).lower()}")
        elif isinstance(value, str):
            # A JSON string without control characters is a TOML basic string.
            lines.append(f"{field} = {msgspec.json.encode(clean(value)).decode()}")
        else:
            lines.append(f"{field} = {value}")
    return "\n".join(lines) + "\n"
