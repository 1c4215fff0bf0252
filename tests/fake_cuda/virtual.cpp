// Device memory in two steps, as the allocator of vLLM's sleep mode has it: addresses are reserved, memory is mapped.
#include "fake.h"

#include <sys/mman.h>

#include <map>

using namespace fake;

namespace {
constexpr size_t GRANULARITY = 2 << 20;

struct Reserved {
  void* begin;  // as the system gave it, before it was aligned
  size_t size;
};
auto& mutex = *new std::mutex;
auto& reserved = *new std::map<uintptr_t, Reserved>;
/// Sizes of memory by handle, and of what is mapped by address.
auto& made = *new std::map<CUmemGenericAllocationHandle, size_t>;
auto& mapped = *new std::map<uintptr_t, size_t>;
CUmemGenericAllocationHandle next_handle = 1;

bool is_whole(size_t size) { return size && size % GRANULARITY == 0; }

bool is_mapped(uintptr_t begin, size_t size) {
  auto range = mapped.find(begin);
  return range != mapped.end() && range->second == size;
}

/// Changes what lies behind addresses that stay reserved.
bool replace(uintptr_t begin, size_t size, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(reinterpret_cast<void*>(begin), size, protection, flags, -1, 0) != MAP_FAILED;
}
}  // namespace

EXPORT CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *granularity = GRANULARITY;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  if (!is_whole(size)) return CUDA_ERROR_INVALID_VALUE;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* found = mmap(nullptr, size + GRANULARITY, PROT_NONE, flags, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(found) + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  std::lock_guard<std::mutex> held(mutex);
  reserved[begin] = {found, size + GRANULARITY};
  *pointer = begin;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  std::lock_guard<std::mutex> held(mutex);
  auto range = reserved.find(pointer);
  if (range == reserved.end() || range->second.size != size + GRANULARITY || mapped.count(pointer))
    return CUDA_ERROR_INVALID_VALUE;
  munmap(range->second.begin, range->second.size);
  reserved.erase(range);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                            unsigned long long) {
  if (!is_whole(size)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> held(mutex);
  made[*handle = next_handle++] = size;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> held(mutex);
  return made.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long) {
  std::lock_guard<std::mutex> held(mutex);
  auto memory = made.find(handle);
  if (!reserved.count(pointer) || mapped.count(pointer) || offset || memory == made.end() || memory->second != size)
    return CUDA_ERROR_INVALID_VALUE;
  mapped[pointer] = size;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc*, size_t) {
  std::lock_guard<std::mutex> held(mutex);
  if (!is_mapped(pointer, size) || !replace(pointer, size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
  add_device(pointer, size);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  std::lock_guard<std::mutex> held(mutex);
  if (!is_mapped(pointer, size) || !remove_device(pointer, size)) return CUDA_ERROR_INVALID_VALUE;
  mapped.erase(pointer);
  return replace(pointer, size, PROT_NONE) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}
