// A CUDA without a GPU: a stream is a thread with a queue, device memory is host memory, and kernels are counted.
#pragma once
#include <cuda.h>
#undef cuGetProcAddress
#undef cuMemcpyBatchAsync
#include <driver_types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

using Work = std::function<void()>;

/// What the tests count. Each is counted for the process and for the calling thread.
enum Counter {
  LAUNCHES,
  BATCHES,
  DESCRIPTORS,
  SINGLE_COPIES,
  PAGEABLE_COPIES,
  EVENTS_MADE,
  EVENTS_RECORDED,
  HOST_ALLOCATIONS,
  DEVICE_ALLOCATIONS,
  REGISTRATIONS,
  UNREGISTRATIONS,
  STREAMS,
  COUNTERS,
};
void count(Counter counter, long by = 1);

/// Notes what a correct program never does; the tests read the list.
void violation(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Done {
  void set();
  void wait();
  bool happened();
  double at = 0;  // seconds; read after it has happened

 private:
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

struct Event {
  std::shared_ptr<Done> recorded;
  bool timed = false;
};

struct Graph {
  std::vector<Work> work;
};

class Stream {
 public:
  explicit Stream(int device);
  void push(Work work);
  void finish();
  bool idle();
  const int device;
  const int number;
  int priority = 0;
  std::shared_ptr<Graph> capturing;  // while set, work goes into the graph instead

 private:
  void run();
  void delay();
  std::minstd_rand random;
  unsigned seeded = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  bool running = false;
};

int device_count();
int& current_device();
/// Makes the primary context of a device, as the first use of it does. Notes the thread that did.
void need_context(int device, const char* function);
bool has_context(int device);

Stream* new_stream();
/// The stream of a handle; the current device's default stream for the handles of the default streams.
Stream* stream_of(void* handle);
void finish_device(int device);
/// Whether the calling thread must not do what is unsafe during a capture: some stream is captured, in the global mode.
/// Such a call is noted, since it fails and may void the capture.
bool refused_in_capture(const char* function);
extern thread_local cudaStreamCaptureMode capture_mode;
void captures(int by);

cudaError_t allocate_device(void** pointer, size_t size);
cudaError_t free_device(void* pointer);
/// Device memory that the driver maps into reserved addresses, and takes out again.
void add_device(uintptr_t begin, size_t size);
bool remove_device(uintptr_t begin, size_t size);
cudaError_t allocate_host(void** pointer, size_t size);
cudaError_t free_host(void* pointer);
cudaError_t register_host(void* pointer, size_t size);
cudaError_t unregister_host(void* pointer);
cudaMemoryType type_of(const void* pointer);
/// Queues a copy under the driver's rules. `early`: reads the source now, not in the stream's order.
cudaError_t copy(void* destination, const void* source, size_t size, void* stream, bool early = false);

/// Bytes that a kernel moves between two places of device memory.
struct Move {
  char *destination, *source;
  size_t size;
};
/// Queues a kernel that moves bytes, `unit` of them at a time.
void move_on_device(std::vector<Move> moves, size_t unit, void* stream);
/// Notes the name of a kernel that was launched.
void note_launch(const std::string& name);

}  // namespace fake
