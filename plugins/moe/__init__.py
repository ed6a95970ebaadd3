"""Mixture of experts: modules ``moe``, ``moe_w4a16``, ``moe_fused_batch2``, ``_batch3``, ``_shared``, ``moe_shared``.

Two paths compute the same: grouped (sort the slots by expert, read each routed expert once, put back) and pairwise
(``moe_fused_batch*``: token by token). ``moe_fused_shared`` is pairwise, with the router's choice and the shared expert
in the same launches. M tokens choose T experts each; slot ``m * T + t`` is choice t of token m.
"""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins._cuda import nvfp4_layout
from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.moe.combine import contracts as combine
from kernel_muster.plugins.moe.combine import cpu as combine_cpu
from kernel_muster.plugins.moe.combine import launch as combine_launch
from kernel_muster.plugins.moe.experts import cpu as experts_cpu
from kernel_muster.plugins.moe.grouped import contracts as grouped
from kernel_muster.plugins.moe.grouped import cpu as grouped_cpu
from kernel_muster.plugins.moe.grouped import launch as grouped_launch
from kernel_muster.plugins.moe.pairwise import contracts as pairwise
from kernel_muster.plugins.moe.pairwise import cpu as pairwise_cpu
from kernel_muster.plugins.moe.pairwise import fused_contracts, fused_cpu, fused_launch
from kernel_muster.plugins.moe.pairwise import launch as pairwise_launch
from kernel_muster.plugins.moe.router import contracts as router
from kernel_muster.plugins.moe.router import cpu as router_cpu
from kernel_muster.plugins.moe.router import launch as router_launch
from kernel_muster.plugins.silu.launch import SILU_MUL
from kernel_muster.registry.backends.cuda_kernel import CudaKernel
from kernel_muster.registry.contract import nvfp4, weights
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_expert_host_spec = partial(host_spec, shares=(router_cpu, experts_cpu))
_expert_spec = partial(device_spec, weight_layout=nvfp4_layout.LAYOUT, prepare=nvfp4_layout.to_mma_layout)


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contracts of routing, of both paths, and of the shared expert."""
    yield from (router.TOPK_SOFTMAX, router.TOPK_SIGMOID, router.ROUTER_LOGITS, router.SORT_BY_EXPERT, router.LOCAL_IDS)
    yield from (grouped.GROUPED_GATE_UP, grouped.GROUPED_DOWN, grouped.GROUPED_DOWN_ATOMIC)
    yield from (grouped.SILU_MUL, combine.UNPERMUTE_REDUCE, combine.SHARED_GATE_ADD, combine.UNPERMUTE_SHARED_ADD)
    yield from pairwise.PAIRWISE_GATE_UP
    yield from pairwise.PAIRWISE_DOWN
    yield from (fused_contracts.FUSED_GATE_UP, fused_contracts.FUSED_DOWN)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return every kernel."""
    yield host_spec("moe::moe_topk_softmax", router.TOPK_SOFTMAX, router_cpu.moe_topk_softmax)
    yield host_spec("moe::moe_topk_sigmoid", router.TOPK_SIGMOID, router_cpu.moe_topk_sigmoid)
    yield host_spec("moe::moe_sort_by_expert", router.SORT_BY_EXPERT, router_cpu.moe_sort_by_expert)
    yield host_spec("moe::moe_local_ids", router.LOCAL_IDS, router_cpu.moe_local_ids)
    yield host_spec(
        "moe::moe_router_logits_f32",
        router.ROUTER_LOGITS,
        router_cpu.moe_router_logits_f32,
        weight_layout=weights.BF16_ROW_MAJOR,
        opt_in="MUSTER_FP32_ROUTING",
    )
    yield _expert_host_spec("moe::moe_silu_mul", grouped.SILU_MUL, grouped_cpu.moe_silu_mul)
    yield _expert_host_spec("moe::moe_unpermute_reduce_indexed", combine.UNPERMUTE_REDUCE, combine_cpu.unpermute_reduce)
    yield _expert_host_spec("moe_shared::moe_shared_gate_add", combine.SHARED_GATE_ADD, combine_cpu.moe_shared_gate_add)
    yield _expert_host_spec(
        "moe_shared::moe_unpermute_shared_add", combine.UNPERMUTE_SHARED_ADD, combine_cpu.unpermute_shared_add
    )
    yield from _grouped()
    yield from _pairwise()
    yield from _on_a_device()
    yield from _experts_on_a_device()


def _grouped() -> Iterable[KernelSpec]:
    layout = nvfp4.ROW_MAJOR
    for contract, function in (
        (grouped.GROUPED_GATE_UP, grouped_cpu.grouped_gate_up),
        (grouped.GROUPED_DOWN, grouped_cpu.grouped_down),
    ):
        key = f"moe_w4a16::{contract.name}"
        yield _expert_host_spec(key, contract, function, weight_layout=layout)
        yield _expert_host_spec(f"{key}_k64", contract, function, weight_layout=layout, bit_identical_to=(key,))
    atomic = grouped.GROUPED_DOWN_ATOMIC
    yield _expert_host_spec(
        f"moe_w4a16::{atomic.name}",
        atomic,
        grouped_cpu.grouped_down_atomic,
        weight_layout=layout,
        deterministic=False,
    )


def _pairwise() -> Iterable[KernelSpec]:
    for (two, three), function in (
        (pairwise.PAIRWISE_GATE_UP, pairwise_cpu.pairwise_gate_up),
        (pairwise.PAIRWISE_DOWN, pairwise_cpu.pairwise_down),
    ):
        key = f"moe_fused_batch2::{two.name}"
        yield _expert_host_spec(key, two, function, weight_layout=nvfp4.ROW_MAJOR)
        other = f"moe_fused_batch3::{three.name}"
        yield _expert_host_spec(other, three, function, weight_layout=nvfp4.ROW_MAJOR, bit_identical_to=(key,))
    for contract, fused in (
        (fused_contracts.FUSED_GATE_UP, fused_cpu.fused_gate_up),
        (fused_contracts.FUSED_DOWN, fused_cpu.fused_down),
    ):
        yield host_spec(
            f"moe_fused_shared::{contract.name}",
            contract,
            fused,
            shares=(pairwise_cpu, combine_cpu, experts_cpu, router_cpu),
            weight_layout=nvfp4.ROW_MAJOR,
        )


def _on_a_device() -> Iterable[KernelSpec]:
    """Return the CUDA kernels without experts' weights."""
    for key, contract, backend in (
        ("moe::moe_topk_softmax", router.TOPK_SOFTMAX, router_launch.TOPK_SOFTMAX),
        ("moe::moe_topk_sigmoid", router.TOPK_SIGMOID, router_launch.TOPK_SIGMOID),
        ("moe::moe_sort_by_expert", router.SORT_BY_EXPERT, router_launch.SORT),
        ("moe::moe_local_ids", router.LOCAL_IDS, router_launch.LOCAL_IDS),
        ("moe::moe_silu_mul", grouped.SILU_MUL, SILU_MUL),
        ("moe::moe_unpermute_reduce_indexed", combine.UNPERMUTE_REDUCE, combine_launch.UNPERMUTE),
        ("moe_shared::moe_shared_gate_add", combine.SHARED_GATE_ADD, combine_launch.SHARED_GATE_ADD),
        ("moe_shared::moe_unpermute_shared_add", combine.UNPERMUTE_SHARED_ADD, combine_launch.UNPERMUTE_SHARED_ADD),
    ):
        yield device_spec(key=key, contract=contract.name, backend=backend)
    yield device_spec(
        key="moe::moe_router_logits_f32",
        contract=router.ROUTER_LOGITS.name,
        backend=router_launch.LOGITS,
        weight_layout=weights.BF16_ROW_MAJOR,
        opt_in="MUSTER_FP32_ROUTING",
    )


def _experts_on_a_device() -> Iterable[KernelSpec]:
    """Return the CUDA kernels of the experts, grouped and pairwise."""
    kernels: tuple[tuple[Contract, CudaKernel], ...] = (
        (grouped.GROUPED_GATE_UP, grouped_launch.GROUPED_GATE_UP),
        (grouped.GROUPED_DOWN, grouped_launch.GROUPED_DOWN),
    )
    for contract, backend in kernels:
        key = f"moe_w4a16::{contract.name}"
        yield _expert_spec(key=key, contract=contract.name, backend=backend)
        # The same kernel: its k step is 64 already.
        yield _expert_spec(key=f"{key}_k64", contract=contract.name, backend=backend, bit_identical_to=(key,))
    atomic = grouped.GROUPED_DOWN_ATOMIC.name
    yield _expert_spec(
        key=f"moe_w4a16::{atomic}", contract=atomic, backend=grouped_launch.GROUPED_DOWN_ATOMIC, deterministic=False
    )
    for (two, three), backend in (
        (pairwise.PAIRWISE_GATE_UP, pairwise_launch.PAIRWISE_GATE_UP),
        (pairwise.PAIRWISE_DOWN, pairwise_launch.PAIRWISE_DOWN),
    ):
        key = f"moe_fused_batch2::{two.name}"
        yield _expert_spec(key=key, contract=two.name, backend=backend)
        other = f"moe_fused_batch3::{three.name}"
        yield _expert_spec(key=other, contract=three.name, backend=backend, bit_identical_to=(key,))
    for contract, backend in (
        (fused_contracts.FUSED_GATE_UP, fused_launch.FUSED_GATE_UP),
        (fused_contracts.FUSED_DOWN, fused_launch.FUSED_DOWN),
    ):
        yield _expert_spec(key=f"moe_fused_shared::{contract.name}", contract=contract.name, backend=backend)
