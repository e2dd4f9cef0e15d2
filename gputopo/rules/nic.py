"""NIC: HCAs and GPUDirect."""

from __future__ import annotations

from collections.abc import Iterator

from gputopo.probes.rdma import DEVICES
from gputopo.rules.finding import Evidence, Remedy, Verdict
from gputopo.rules.registry import rule
from gputopo.topology.graph import Topology


@rule(
    code="NIC508",
    name="soft-rdma-device",
    severity="note",
    needs=("rdma",),
    rationale="""
        A software RDMA device (rxe, siw) has no PCI function. It is harmless by itself, but one such
        device makes `nvidia-smi topo -m` fail on some driver versions, and whatever reads the
        topology from there then sees none.
    """,
    verify="readlink /sys/class/infiniband/NAME (a path below /sys/devices/virtual)",
    mend="Leave it, or remove it with `rdma link delete NAME` if nobody uses it.",
    sources=("NVIDIA/NVSentinel issue 1485: topo -m exits with 255 on every node",),
)
def soft_rdma_device(topology: Topology) -> Iterator[Verdict]:
    for hca in topology.hcas:
        if not hca.software:
            continue
        yield Verdict(
            subjects=[hca.id],
            summary=f"{hca.id} is a software RDMA device: no PCI function stands behind it",
            evidence=[
                Evidence(
                    source=f"{DEVICES}/{hca.name}",
                    seen="a link below /sys/devices/virtual",
                    expected="a link below a PCI function",
                )
            ],
            confidence="reported",
            remedy=Remedy(
                text="Keep it out of NCCL_IB_HCA; delete it if nobody uses it.",
                commands=[f"rdma link delete {hca.name}"],
                needs="root",
                undo=f"rdma link add {hca.name} type TYPE netdev INTERFACE",
            ),
        )
