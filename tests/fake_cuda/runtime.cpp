// The functions of libcudart that PyTorch and undercroft call.
#include "fake.h"

#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include <map>
#include <set>

using namespace fake;

namespace {
thread_local cudaError_t last_error = cudaSuccess;
cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

auto& kernel_names = *new std::map<const void*, std::string>;
auto& launched_mutex = *new std::mutex;
auto& launched = *new std::set<std::string>;
constexpr double CYCLES_PER_MICROSECOND = 1500;

void launch(const void* function, void** arguments, void* handle) {
  count(LAUNCHES);
  auto name = kernel_names.find(function);
  if (name != kernel_names.end()) note_launch(name->second);
  if (name != kernel_names.end() && name->second.find("spin_kernel") != std::string::npos) {
    const long microseconds = *static_cast<int64_t*>(arguments[0]) / CYCLES_PER_MICROSECOND;
    stream_of(handle)->push([=] { usleep(microseconds); });
  } else {
    stream_of(handle)->push([] {});
  }
}
}  // namespace

void fake::note_launch(const std::string& name) {
  std::lock_guard<std::mutex> held(launched_mutex);
  launched.insert(name);
}

// Devices
EXPORT cudaError_t cudaGetDeviceCount(int* count) { *count = device_count(); return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { *device = current_device(); return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
  current_device() = device;
  need_context(device, "cudaSetDevice");
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "fake GPU");
  p->major = 9;
  p->multiProcessorCount = 132;
  p->totalGlobalMem = 80ull << 30;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->regsPerMultiprocessor = 65536;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->unifiedAddressing = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
           : attribute == cudaDevAttrMultiProcessorCount    ? 132
           : attribute == cudaDevAttrIntegrated             ? 0
                                                            : 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceSynchronize() { finish_device(current_device()); return cudaSuccess; }
EXPORT cudaError_t cudaGetLastError() {
  const auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

// Streams and events
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  need_context(current_device(), "cudaStreamCreateWithPriority");
  auto* made = new_stream();
  made->priority = priority;
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (refused_in_capture("cudaStreamQuery")) return result(cudaErrorStreamCaptureUnsupported);
  return stream_of(stream)->idle() ? cudaSuccess : result(cudaErrorNotReady);
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (refused_in_capture("cudaStreamSynchronize")) return result(cudaErrorStreamCaptureUnsupported);
  stream_of(stream)->finish();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (auto recorded = event_of(event)->recorded) stream_of(stream)->push([recorded] { recorded->wait(); });
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  need_context(current_device(), "cudaEventCreateWithFlags");
  count(EVENTS_MADE);
  auto* made = new Event;
  made->timed = !(flags & cudaEventDisableTiming);
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { delete event_of(event); return cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  count(EVENTS_RECORDED);
  auto done = std::make_shared<Done>();
  event_of(event)->recorded = done;
  stream_of(stream)->push([done] { done->set(); });
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (refused_in_capture("cudaEventQuery")) return result(cudaErrorStreamCaptureUnsupported);
  auto recorded = event_of(event)->recorded;
  return !recorded || recorded->happened() ? cudaSuccess : result(cudaErrorNotReady);
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (refused_in_capture("cudaEventSynchronize")) return result(cudaErrorStreamCaptureUnsupported);
  if (auto recorded = event_of(event)->recorded) recorded->wait();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (!event_of(begin)->timed || !event_of(end)->timed) return result(cudaErrorInvalidResourceHandle);
  *milliseconds = (event_of(end)->recorded->at - event_of(begin)->recorded->at) * 1e3;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  stream_of(stream)->push([=] { function(data); });
  return cudaSuccess;
}

// Graphs
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  captures(1);
  stream_of(stream)->capturing = std::make_shared<Graph>();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  auto& capturing = stream_of(stream)->capturing;
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(*capturing));
  capturing.reset();
  captures(-1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream_of(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 1;
  return cudaStreamIsCapturing(stream, status);
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
  *runnable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (auto& work : reinterpret_cast<Graph*>(graph)->work) stream_of(stream)->push(work);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->work.size();
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

// Memory
EXPORT cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (refused_in_capture("cudaMalloc")) return result(cudaErrorStreamCaptureUnsupported);
  need_context(current_device(), "cudaMalloc");
  return result(allocate_device(pointer, size));
}
EXPORT cudaError_t cudaFree(void* pointer) { return result(free_device(pointer)); }
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = 70ull << 30;
  *total = 80ull << 30;
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  if (refused_in_capture("cudaHostAlloc")) return result(cudaErrorStreamCaptureUnsupported);
  need_context(current_device(), "cudaHostAlloc");
  return result(allocate_host(pointer, size));
}
EXPORT cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void* pointer) { return result(free_host(pointer)); }
EXPORT cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  if (refused_in_capture("cudaHostRegister")) return result(cudaErrorStreamCaptureUnsupported);
  need_context(current_device(), "cudaHostRegister");
  return result(register_host(pointer, size));
}
EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  if (refused_in_capture("cudaHostUnregister")) return result(cudaErrorStreamCaptureUnsupported);
  need_context(current_device(), "cudaHostUnregister");
  return result(unregister_host(pointer));
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = type_of(pointer);
  attributes->device = attributes->type == cudaMemoryTypeUnregistered ? -2 : current_device();
  if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = const_cast<void*>(pointer);
  if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t size, cudaMemcpyKind,
                                   cudaStream_t stream) {
  count(SINGLE_COPIES);
  return result(copy(destination, source, size, stream));
}
EXPORT cudaError_t cudaMemcpy(void* destination, const void* source, size_t size, cudaMemcpyKind) {
  // As the legacy stream, which PyTorch's other streams do not wait for.
  stream_of(nullptr)->finish();
  memcpy(destination, source, size);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* destination, int value, size_t size, cudaStream_t stream) {
  stream_of(stream)->push([=] { memset(destination, value, size); });
  return cudaSuccess;
}

// Kernels
EXPORT void __cudaRegisterFunction(void** module, const char* host, char* device, const char* name, int limit, void* a,
                                   void* b, void* c, void* d, int* e) {
  using Register = void (*)(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*);
  static auto real = reinterpret_cast<Register>(dlsym(RTLD_NEXT, "__cudaRegisterFunction"));
  kernel_names[host] = name;
  real(module, host, device, name, limit, a, b, c, d, e);
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  launch(function, arguments, stream);
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  launch(kernel, arguments, stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  launch(function, arguments, config->stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                          unsigned) {
  *blocks = 8;
  return cudaSuccess;
}
namespace {
thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* status) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = reinterpret_cast<void*>(+[]() -> int { return CUDA_ERROR_NOT_SUPPORTED; });
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

EXPORT void fake_kernels(char* text, long size) {
  std::lock_guard<std::mutex> held(launched_mutex);
  std::string names;
  for (auto& name : launched) names += name + "\n";
  launched.clear();
  snprintf(text, size, "%s", names.c_str());
}
