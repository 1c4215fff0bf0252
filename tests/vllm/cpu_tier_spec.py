"""vLLM's offloading, with tiers and without, on the CPU platform, loaded through ``spec_module_path``. Everything is
vLLM's own but the copy between the device's blocks and the host memory, for which vLLM needs a GPU."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import (
    _build_copy_plan,
    _canonical_block_sizes,
    _canonical_page_ids,
    compute_sub_block_ptrs,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTierWorker(OffloadingWorker):
    """Copies by memmove, at once."""

    def __init__(
        self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion, *, canonical_layout: bool
    ) -> None:
        self._per_chunk, self._refs, self._region = blocks_per_chunk, kv_caches.group_data_refs, region
        self._is_canonical = canonical_layout
        self._done: list[TransferResult] = []
        self._device = [
            one.tensor.view(torch.int8).as_strided(
                (one.tensor.shape[0], one.page_size_bytes), (one.tensor.stride(0), 1)
            )
            for one in kv_caches.tensors
        ]
        if canonical_layout:
            sizes = _canonical_block_sizes(self._refs, len(self._device))
            self._host = [region.create_next_canonical_view(size * blocks_per_chunk) for size in sizes]
        else:
            self._host = [region.create_next_worker_view(one.shape[1] * blocks_per_chunk) for one in self._device]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=False)

    def _copy(self, job_id: int, source: Any, target: Any, *, is_store: bool) -> bool:
        began, total, from_block, to_block = time.perf_counter(), 0, 0, 0
        device = source if is_store else target
        per_source, per_target = (1, self._per_chunk) if is_store else (self._per_chunk, 1)
        sources, targets = (self._device, self._host) if is_store else (self._host, self._device)
        for count, first, refs in zip(device.group_sizes, device.block_indices, self._refs, strict=True):
            if not count:
                continue
            skip_source, skip_target = first % per_source, first % per_target
            source_blocks = cdiv(count + skip_source, per_source)
            target_blocks = cdiv(count + skip_target, per_target)
            pointers = np.empty(count, np.uint64), np.empty(count, np.uint64)
            pages = None
            if self._is_canonical and is_store:
                chunks = target.block_ids[to_block : to_block + target_blocks]
                pages = _canonical_page_ids(chunks, self._per_chunk, count, skip_target)
            for ref in refs:
                compute_sub_block_ptrs(
                    source.block_ids[from_block : from_block + source_blocks],
                    per_source,
                    pointers[0],
                    sources[ref.tensor_idx],
                    skip_count=skip_source,
                )
                compute_sub_block_ptrs(
                    target.block_ids[to_block : to_block + target_blocks],
                    per_target,
                    pointers[1],
                    targets[ref.tensor_idx],
                    skip_count=skip_target,
                )
                pieces = self._pieces(ref, is_store=is_store)
                for number, (read, written) in enumerate(zip(*pointers, strict=True)):
                    if pages is not None and not ref.mapping.is_writer(int(pages[number])):
                        continue
                    for at, to, size in pieces:
                        ctypes.memmove(int(written) + to, int(read) + at, size)
                        total += size
            from_block += source_blocks
            to_block += target_blocks
        seconds = time.perf_counter() - began
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=total, transfer_time=seconds))
        return True

    def _pieces(self, ref: Any, *, is_store: bool) -> list[tuple[int, int, int]]:
        """Where the pieces of a page come from and go to, and their sizes."""
        if not self._is_canonical:
            return [(0, 0, ref.page_size_bytes)]
        plan = _build_copy_plan(ref, is_store)
        return list(
            zip(plan.frag_offsets_src.tolist(), plan.frag_offsets_dst.tolist(), plan.frag_sizes.tolist(), strict=True)
        )

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: a copy has ended when it was submitted."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


class CpuOffloadingSpec(CPUOffloadingSpec):
    """The specification of vLLM without further tiers, with another worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuTierWorker(
                kv_caches, self.blocks_per_chunk, region, canonical_layout=self.config.canonical_layout
            )
        return self._worker


class CpuTieringSpec(CpuOffloadingSpec, TieringOffloadingSpec):
    """The specification of vLLM with tiers, with another worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self.config.canonical_layout and not self._worker:
            self._validate_canonical_refs(kv_caches)
        return super().get_worker(kv_caches)
