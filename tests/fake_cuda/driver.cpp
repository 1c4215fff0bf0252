// The functions of libcuda that undercroft and PyTorch call, under the driver's rules.
#include "fake.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

using namespace fake;

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);

static_assert(sizeof(CUmemcpyAttributes) == 24 && offsetof(CUmemcpyAttributes, flags) == 20, "CUDA 12.8's structure");

namespace {
CUresult batch(CUdeviceptr* destinations, CUdeviceptr* sources, size_t* sizes, size_t copies,
               CUmemcpyAttributes* attributes, size_t* attribute_begins, size_t attribute_count, size_t* failed,
               CUstream handle) {
  count(BATCHES);
  count(DESCRIPTORS, copies);
  *failed = SIZE_MAX;
  if (reinterpret_cast<uintptr_t>(handle) <= 1) return CUDA_ERROR_INVALID_VALUE;
  if (!has_context(current_device()) || stream_of(handle)->device != current_device()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!copies || !attribute_count || attribute_count > copies || attribute_begins[0] != 0) return CUDA_ERROR_INVALID_VALUE;
  if (attributes->srcAccessOrder < 1 || attributes->srcAccessOrder > 3 || attributes->flags > 1)
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < copies; i++) {
    auto* to = reinterpret_cast<void*>(destinations[i]);
    auto* from = reinterpret_cast<void*>(sources[i]);
    // The device may read a source at once. It does so here, to find a source that is not ready yet.
    const bool early = attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
    if (auto error = copy(to, from, sizes[i], handle, early)) {
      *failed = i;
      return static_cast<CUresult>(error);
    }
  }
  return CUDA_SUCCESS;
}

/// The parameters of undercroft's kernel, `move_pages`.
constexpr int TABLE = 504;
struct Moving {
  const uint64_t* table;
  uint32_t pages, to_pages;
  uint64_t shards, shard_bytes;
};

/// What each block of threads moves. The table is read now, as the driver reads parameters.
std::vector<Move> moves_of(const Moving& all, unsigned grid) {
  std::vector<Move> moves;
  for (unsigned cta = 0; cta < grid; cta++) {
    const unsigned block = cta / all.pages, page = cta % all.pages;
    const uint64_t* entry = all.table + 4 * page;
    auto* in_cache = reinterpret_cast<char*>(entry[0] + all.table[4 * all.pages + block] * entry[1]);
    auto* in_shard = reinterpret_cast<char*>(all.shards + block * all.shard_bytes + entry[3]);
    moves.push_back(all.to_pages ? Move{in_cache, in_shard, entry[2]} : Move{in_shard, in_cache, entry[2]});
  }
  return moves;
}
}  // namespace

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { *version = 13000; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  const auto before = static_cast<CUstreamCaptureMode>(fake::capture_mode);
  fake::capture_mode = static_cast<cudaStreamCaptureMode>(*mode);
  *mode = before;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  if (!has_context(current_device())) return CUDA_ERROR_INVALID_CONTEXT;
  return static_cast<CUresult>(cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream), flags, priority));
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { *value = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context(device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  const auto device = static_cast<uintptr_t>(current_device());
  *context = has_context(device) ? reinterpret_cast<CUcontext>(device + 1) : nullptr;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) current_device() = reinterpret_cast<uintptr_t>(context) - 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  need_context(device, "cuDevicePrimaryCtxRetain");
  *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags) {
  if (!has_context(current_device())) return CUDA_ERROR_INVALID_CONTEXT;
  return static_cast<CUresult>(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), flags));
}
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  return static_cast<CUresult>(
      cudaEventRecord(reinterpret_cast<cudaEvent_t>(event), reinterpret_cast<cudaStream_t>(stream)));
}
EXPORT CUresult cuEventQuery(CUevent event) {
  // The runtime's last error does not change, unlike by cudaEventQuery.
  if (refused_in_capture("cuEventQuery")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const auto recorded = reinterpret_cast<Event*>(event)->recorded;
  return !recorded || recorded->happened() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return static_cast<CUresult>(
      cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), reinterpret_cast<cudaEvent_t>(event), flags));
}
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* text) {
  if (refused_in_capture("cuModuleLoadData")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (!has_context(current_device())) return CUDA_ERROR_INVALID_CONTEXT;
  if (!strstr(static_cast<const char*>(text), ".visible .entry move_pages(")) return CUDA_ERROR_INVALID_PTX;
  *module = reinterpret_cast<CUmodule>(const_cast<void*>(text));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  if (!module || strcmp(name, "move_pages")) return CUDA_ERROR_NOT_FOUND;
  *function = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
                               unsigned, unsigned, CUstream stream, void** parameters, void**) {
  if (!has_context(current_device()) || stream_of(stream)->device != current_device()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!function || !x || y != 1 || z != 1 || !threads || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  const Moving all = {static_cast<uint64_t*>(parameters[0]), *static_cast<uint32_t*>(parameters[1]),
                      *static_cast<uint32_t*>(parameters[2]), *static_cast<uint64_t*>(parameters[3]),
                      *static_cast<uint64_t*>(parameters[4])};
  if (!all.pages || x % all.pages || 4 * all.pages + x / all.pages > TABLE) return CUDA_ERROR_INVALID_VALUE;
  count(LAUNCHES);
  note_launch("move_pages");
  move_on_device(moves_of(all, x), 16, stream);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult, const char** text) { *text = "an error of the fake"; return CUDA_SUCCESS; }
EXPORT CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t size, CUstream stream) {
  count(SINGLE_COPIES);
  return static_cast<CUresult>(
      copy(reinterpret_cast<void*>(destination), reinterpret_cast<void*>(source), size, stream));
}
EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t,
                                    CUdriverProcAddressQueryResult* status) {
  if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  if (!strcmp(name, "cuMemcpyBatchAsync"))
    *function = version < 12080 ? nullptr : reinterpret_cast<void*>(batch);
  else
    *function = dlsym(RTLD_DEFAULT, name);
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
