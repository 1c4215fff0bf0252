// Device memory, page-locked host memory, and the rules for copies between them.
#include "fake.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>

namespace fake {
namespace {

/// Ranges by their first byte.
using Ranges = std::map<uintptr_t, size_t>;
auto& mutex = *new std::mutex;
auto& on_device = *new Ranges;
auto& allocated = *new Ranges;
auto& registered = *new Ranges;

bool holds(const Ranges& ranges, uintptr_t begin, size_t size) {
  auto next = ranges.upper_bound(begin);
  if (next == ranges.begin()) return false;
  --next;
  return begin + size <= next->first + next->second;
}

bool touches(const Ranges& ranges, uintptr_t begin, size_t size) {
  auto next = ranges.upper_bound(begin + size - 1);
  if (next == ranges.begin()) return false;
  --next;
  return next->first + next->second > begin;
}

cudaError_t allocate(Ranges& ranges, void** pointer, size_t size) {
  // Not reserved: a KV cache of 40 GiB takes the pages that are written.
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> held(mutex);
  ranges[reinterpret_cast<uintptr_t>(memory)] = size;
  *pointer = memory;
  return cudaSuccess;
}

cudaError_t release(Ranges& ranges, void* pointer) {
  if (!pointer) return cudaSuccess;
  std::lock_guard<std::mutex> held(mutex);
  auto range = ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (range == ranges.end()) return cudaErrorInvalidValue;
  munmap(pointer, range->second);
  ranges.erase(range);
  return cudaSuccess;
}

enum class Side { DIRECT, PAGEABLE, REFUSED };

Side side(const void* pointer, size_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> held(mutex);
  if (holds(on_device, begin, size) || holds(allocated, begin, size) || holds(registered, begin, size))
    return Side::DIRECT;
  if (touches(on_device, begin, size) || touches(allocated, begin, size) || touches(registered, begin, size))
    return Side::REFUSED;
  return Side::PAGEABLE;
}

/// Memory may have gone by the time that the stream comes to a copy: the device would fail, and so does the test.
bool still_there(const void* pointer, size_t size, Side was) {
  return was == Side::PAGEABLE || side(pointer, size) == Side::DIRECT;
}

/// Bytes that may be allocated of device memory from now on; below 0: any number.
std::atomic<long> device_memory_left{-1};

/// Device memory without anything behind it, as in a vLLM that sleeps, by its first byte.
auto& suspended = *new Ranges;

/// Bytes a second of each stream; 0: as fast as they can be moved; below 0: nothing is moved.
std::atomic<double> speed{0};

std::atomic<double> unregister_seconds{0};

void move(void* destination, const void* source, size_t size) {
  const double now = speed;
  if (now >= 0) memcpy(destination, source, size);
  if (now > 0) usleep(size / now * 1e6);
}

}  // namespace

cudaError_t allocate_device(void** pointer, size_t size) {
  count(DEVICE_ALLOCATIONS);
  if (device_memory_left >= 0 && (device_memory_left -= size) < 0) {
    device_memory_left = 0;
    return cudaErrorMemoryAllocation;
  }
  return allocate(on_device, pointer, size);
}

cudaError_t free_device(void* pointer) {
  finish_device(current_device());
  return release(on_device, pointer);
}

void add_device(uintptr_t begin, size_t size) {
  count(DEVICE_ALLOCATIONS);
  std::lock_guard<std::mutex> held(mutex);
  on_device[begin] = size;
}

bool remove_device(uintptr_t begin, size_t size) {
  std::lock_guard<std::mutex> held(mutex);
  auto range = on_device.find(begin);
  if (range == on_device.end() || range->second != size) return false;
  on_device.erase(range);
  return true;
}

cudaError_t allocate_host(void** pointer, size_t size) {
  count(HOST_ALLOCATIONS);
  return allocate(allocated, pointer, size);
}

cudaError_t free_host(void* pointer) { return release(allocated, pointer); }

cudaError_t register_host(void* pointer, size_t size) {
  count(REGISTRATIONS);
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> held(mutex);
  if (touches(registered, begin, size)) return cudaErrorHostMemoryAlreadyRegistered;
  registered[begin] = size;
  return cudaSuccess;
}

cudaError_t unregister_host(void* pointer) {
  count(UNREGISTRATIONS);
  usleep(unregister_seconds * 1e6);
  std::lock_guard<std::mutex> held(mutex);
  return registered.erase(reinterpret_cast<uintptr_t>(pointer)) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

cudaMemoryType type_of(const void* pointer) {
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> held(mutex);
  if (holds(on_device, begin, 1)) return cudaMemoryTypeDevice;
  if (holds(allocated, begin, 1) || holds(registered, begin, 1)) return cudaMemoryTypeHost;
  return cudaMemoryTypeUnregistered;
}

cudaError_t copy(void* destination, const void* source, size_t size, void* handle, bool early) {
  if (!size) return cudaSuccess;
  const Side to = side(destination, size), from = side(source, size);
  if (to == Side::REFUSED || from == Side::REFUSED) {
    violation("a copy of %zu bytes from %p to %p reaches over the end of memory or of a registration", size, source,
              destination);
    return cudaErrorInvalidValue;
  }
  auto* stream = stream_of(handle);
  std::shared_ptr<std::vector<char>> read;
  if (early && speed >= 0) {
    const auto* bytes = static_cast<const char*>(source);
    read = std::make_shared<std::vector<char>>(bytes, bytes + size);
  }
  stream->push([=] {
    if (still_there(destination, size, to) && still_there(source, size, from))
      move(destination, read ? read->data() : source, size);
    else
      violation("a copy of %zu bytes from %p to %p ran after its memory had gone", size, source, destination);
  });
  if (to == Side::PAGEABLE || from == Side::PAGEABLE) {
    count(PAGEABLE_COPIES);
    stream->finish();  // as the driver, which blocks the caller
  }
  return cudaSuccess;
}

void move_on_device(std::vector<Move> moves, size_t unit, void* stream) {
  const auto is_wrong = [unit](const Move& one) {
    const auto ends = {reinterpret_cast<uintptr_t>(one.destination), reinterpret_cast<uintptr_t>(one.source)};
    std::lock_guard<std::mutex> held(mutex);
    for (auto end : ends)
      if (end % unit || one.size % unit || !holds(on_device, end, one.size)) return true;
    return false;
  };
  stream_of(stream)->push([=] {
    for (auto& one : moves) {
      if (is_wrong(one))
        return violation("a kernel that moves %zu bytes from %p to %p: outside of device memory, or not aligned",
                         one.size, one.source, one.destination);
      if (speed >= 0) memcpy(one.destination, one.source, one.size);
    }
  });
}

}  // namespace fake

/// Takes away the memory behind an allocation that `pointer` lies in, which keeps its addresses; or brings it back, empty.
EXPORT void fake_suspend(uintptr_t pointer, int back) {
  std::lock_guard<std::mutex> held(fake::mutex);
  auto &from = back ? fake::suspended : fake::on_device, &to = back ? fake::on_device : fake::suspended;
  auto range = from.upper_bound(pointer);
  if (range == from.begin()) return fake::violation("no device memory at %#lx to suspend or to bring back", pointer);
  --range;
  auto* memory = reinterpret_cast<void*>(range->first);
  madvise(memory, range->second, MADV_DONTNEED);
  to.insert(*range);
  from.erase(range);
}
EXPORT void fake_limits_device_memory(long bytes) { fake::device_memory_left = bytes; }
EXPORT long fake_registered_ranges() {
  std::lock_guard<std::mutex> held(fake::mutex);
  return fake::registered.size();
}
EXPORT void fake_unregisters_in(double seconds) { fake::unregister_seconds = seconds; }
EXPORT void fake_copies_at(double bytes_per_second) { fake::speed = bytes_per_second; }
