// Devices, contexts, streams and counters.
#include "fake.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <map>
#include <thread>

namespace fake {
namespace {

constexpr int MOST_DEVICES = 8;
const char* const NAMES[COUNTERS] = {
    "launches",      "batches",         "descriptors",      "single_copies",      "pageable_copies", "events_made",
    "events_recorded", "host_allocations", "device_allocations", "registrations", "unregistrations", "streams",
};
std::atomic<long> totals[COUNTERS];
thread_local long mine[COUNTERS];
thread_local int device_of_thread = 0;
std::atomic<bool> contexts[MOST_DEVICES];
std::atomic<int> capture_count;
std::atomic<double> longest_delay{0};
std::atomic<unsigned> delay_seed{0};
std::atomic<int> stream_numbers;
// Never freed: threads of streams outlive the program's own destructors.
auto& mutex = *new std::mutex;
auto& violations = *new std::string;
auto& streams = *new std::vector<Stream*>;
auto& defaults = *new std::map<int, Stream*>;

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

int counter_of(const char* name) {
  for (int index = 0; index < COUNTERS; index++)
    if (!strcmp(name, NAMES[index])) return index;
  return -1;
}

}  // namespace

void count(Counter counter, long by) {
  totals[counter] += by;
  mine[counter] += by;
}

void violation(const char* format, ...) {
  char text[512], thread[32] = "";
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  std::lock_guard<std::mutex> held(mutex);
  violations += std::string(text) + " (thread " + thread + ")\n";
}

void Done::set() {
  std::lock_guard<std::mutex> held(mutex);
  done = true;
  at = now();
  changed.notify_all();
}

void Done::wait() {
  std::unique_lock<std::mutex> held(mutex);
  changed.wait(held, [&] { return done; });
}

bool Done::happened() {
  std::lock_guard<std::mutex> held(mutex);
  return done;
}

Stream::Stream(int device) : device(device), number(stream_numbers++) {
  std::thread([this] {
    pthread_setname_np(pthread_self(), "fake-stream");
    run();
  }).detach();
}

void Stream::delay() {
  const double longest = longest_delay;
  if (longest <= 0) return;
  if (const unsigned seed = delay_seed; seed != seeded) {
    seeded = seed;
    random.seed(seed * 7919 + number);
  }
  // Mostly short, seldom long: work of other streams then overtakes now a piece, now many.
  const double drawn = std::uniform_real_distribution<>()(random);
  std::this_thread::sleep_for(std::chrono::duration<double>(longest * drawn * drawn * drawn * drawn));
}

void Stream::run() {
  std::unique_lock<std::mutex> held(mutex);
  for (;;) {
    changed.wait(held, [&] { return !queue.empty(); });
    Work work = std::move(queue.front());
    queue.pop_front();
    running = true;
    held.unlock();
    delay();
    work();
    work = nullptr;
    held.lock();
    running = false;
  }
}

void Stream::push(Work work) {
  std::lock_guard<std::mutex> held(mutex);
  if (capturing) {
    capturing->work.push_back(std::move(work));
    return;
  }
  queue.push_back(std::move(work));
  changed.notify_all();
}

void Stream::finish() {
  auto done = std::make_shared<Done>();
  push([done] { done->set(); });
  done->wait();
}

bool Stream::idle() {
  std::lock_guard<std::mutex> held(mutex);
  return queue.empty() && !running;
}

int device_count() {
  static const int devices = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : 2;
  return devices < MOST_DEVICES ? devices : MOST_DEVICES;
}

int& current_device() { return device_of_thread; }

void need_context(int device, const char* function) {
  static const char* own = getenv("FAKE_CUDA_OWN_DEVICE");
  if (contexts[device].exchange(true)) return;
  if (own && atoi(own) != device) violation("%s made a context on device %d", function, device);
}

bool has_context(int device) { return contexts[device]; }

Stream* new_stream() {
  count(STREAMS);
  auto* stream = new Stream(current_device());
  std::lock_guard<std::mutex> held(mutex);
  streams.push_back(stream);
  return stream;
}

Stream* stream_of(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
  std::lock_guard<std::mutex> held(mutex);
  auto& stream = defaults[current_device()];
  if (!stream) streams.push_back(stream = new Stream(current_device()));
  return stream;
}

void finish_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> held(mutex);
    all = streams;
  }
  for (auto* stream : all)
    if (stream->device == device) stream->finish();
}

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
bool refused_in_capture(const char* function) {
  if (capture_count == 0 || capture_mode == cudaStreamCaptureModeRelaxed) return false;
  violation("%s while a stream is captured", function);
  return true;
}
void captures(int by) { capture_count += by; }

}  // namespace fake

// Read by the tests.
EXPORT long fake_count(const char* name, int of_this_thread) {
  const int counter = fake::counter_of(name);
  if (counter < 0) return -1;
  return of_this_thread ? fake::mine[counter] : fake::totals[counter].load();
}
EXPORT long fake_violations(char* text, long size) {
  std::lock_guard<std::mutex> held(fake::mutex);
  snprintf(text, size, "%s", fake::violations.c_str());
  return fake::violations.size();
}
EXPORT void fake_forget_violations() {
  std::lock_guard<std::mutex> held(fake::mutex);
  fake::violations.clear();
}
/// From now on each piece of work of a stream begins up to so many seconds late, drawn from the seed and the stream.
EXPORT void fake_delays(unsigned seed, double longest) {
  fake::delay_seed = seed;
  fake::longest_delay = longest;
}
EXPORT int fake_has_context(int device) { return fake::has_context(device); }
