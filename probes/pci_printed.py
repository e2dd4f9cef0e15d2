"""The PCI functions of a paste: those of ``lspci``, and GPUs that ``nvidia-smi -q`` names.

A piece of ``-q`` tells a GPU's address and link but not its number: it is no fact of NVML's.
"""

from __future__ import annotations

import msgspec

from gputopo.facts import Fact, Missing, known
from gputopo.hardware.pcie import SPEEDS
from gputopo.host.base import Host
from gputopo.pciaddr import sort_key
from gputopo.probes import lspci, smi_printed, smi_query
from gputopo.probes.lspci import NOT_SHOWN
from gputopo.probes.pci import NVIDIA, LinkEnd, PciFacts, PciFunction
from gputopo.probes.smi_query import SmiGpu

CLASS_GPU = 0x030200


def printed(host: Host) -> Fact[PciFacts]:
    """All functions that a paste names; Missing where it names none."""
    listing = lspci.printed(host)
    facts = known(listing)
    here = {function.address for function in facts.functions} if facts else set()
    records = smi_query.all_of(smi_printed.outputs(host)).gpus
    unnumbered = [_function(gpu) for gpu in records if gpu.index is None and gpu.pci]
    added = [function for function in unnumbered if function.address not in here]
    if not added:
        return listing
    if facts is None:
        return PciFacts(functions=added, problems=[], whole=False)
    functions = sorted([*facts.functions, *added], key=lambda f: sort_key(f.address))
    return msgspec.structs.replace(facts, functions=functions, whole=False)


def _function(gpu: SmiGpu) -> PciFunction:
    name = gpu.values.get("name")
    generations = (gpu.values.get(f"pcie_{which}generation") for which in ("", "gpu_max_"))
    speeds = [_speed(generation) for generation in generations]
    widths = [gpu.values.get(f"pcie_{which}width", NOT_SHOWN) for which in ("", "max_")]
    return PciFunction(
        address=gpu.pci or "",
        root_complex=None,
        parents=(),
        class_code=CLASS_GPU,
        vendor=NVIDIA,
        device=None,
        numa_node=NOT_SHOWN,
        local_cpus=NOT_SHOWN,
        driver="nvidia",  # it lists no others
        link=LinkEnd(speed=speeds[0], width=widths[0], max_speed=speeds[1], max_width=widths[1]),
        product=name if isinstance(name, str) else None,
    )


def _speed(generation: Fact[int] | None) -> Fact[float]:
    if generation is None:
        return NOT_SHOWN
    if isinstance(generation, Missing):
        return generation
    speed = SPEEDS.get(generation)
    return speed if speed else Missing("unparsed", f"PCIe generation {generation}")
