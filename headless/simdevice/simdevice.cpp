// Simulated accelerators: torch devices whose memory is host RAM and whose operators run on the CPU.
//
// [Note: how an operator runs]
// Nothing is computed here. A boxed fallback takes every operator, checks that its tensors share a device,
// aliases them to CPU tensors over the same bytes, runs torch's own CPU kernel, and adopts what the kernel
// allocated: the bytes are charged to the device without being copied. Only what must not be a CPU kernel
// (allocation, copies, streams) has code of its own.
//
// [Note: three books are kept]
// Bytes: every allocation is charged exactly; over the capacity it is a torch.OutOfMemoryError.
// Time: virtual seconds, one clock per stream and for the host. No wall clock is read, so the same program gives the
//   same times. An operation starts when the host has launched it, its stream is free and the engine is free on which
//   it runs: see [Note: shared engines].
// Order: a vector clock per stream and for the host says which operations are known to be finished. Two
//   accesses to overlapping bytes, one of them a write, that no event, stream or host wait orders, are a race.
//
// [Note: shared engines]
// A device computes on one engine, which also copies within the device. Other copies run on three more: the link to the
// host in each direction, and the one to other devices. An engine does one thing at a time, so kernels on two streams
// take as long as on one; kernels and copies overlap. The time of an operation is settled when it is queued and does
// not move afterwards: it takes what those before it have left free from the moment at which it is ready, in parts if
// need be (a card mixes the thread blocks and packets of its streams). So an operation that waits for an event holds up
// none that is ready before it, and the compute engine is never idle while a kernel is ready.
//
// [Note: deferred copies]
// Work runs when it is submitted, in the order of the program, which hides a missing wait. So, on request, an
// asynchronous copy fills its destination with 0xFF and moves the bytes only when something orders it: a later
// operation of its stream, a wait for its event, a synchronize. A reader that did not wait sees poison, and a
// pinned buffer that was overwritten too early sends the wrong bytes, as on real hardware. Reuse of a slot that
// is still being read is invisible to this (the reader has run already); the order book reports it.
//
// [Note: copy engine]
// For measurements in wall time, a thread may move deferred copies meanwhile, piece by piece, as a card fetches its bytes
// while the host does something else: it holds `moving_mutex` then, not the state's lock. Nothing is poisoned: that would
// be a write by the host, as slow as the copy. The books are the same with and without it. A copy from pageable memory then passes through
// two pinned buffers, from which the thread moves it, as a driver does (CUDA driver API, "API synchronization behavior":
// the bytes are staged first, then moved to the device).
//
// [Note: backed memory]
// A page of a device is a page of RAM, which the system provides when it is first touched, and a virtual machine's host
// may have to find it first: a copy then costs several times what moving its bytes does. A card's memory is there. For
// measurements in wall time devices therefore take their memory from one range that was touched beforehand, as long as
// it has room.
//
// [Note: registered memory]
// Host memory is pinned by torch's allocator, which rounds to powers of two, or by registering an exact range of
// memory of the caller, as cudaHostRegister does. Its bytes are never ours: the caller unregisters before it
// frees. Four rules of the driver are kept: a range that shares a page with a registered one is refused (newer drivers
// allow it: `share_pages`); a copy
// lies in one pinned range or touches none (else CUDA_ERROR_INVALID_VALUE, CUDA driver API, "API synchronization
// behavior"); only the base address unregisters; and a refusal stays the thread's last error until it is
// read, which torch does after every kernel it launches (C10_CUDA_KERNEL_LAUNCH_CHECK), so the next operator raises
// what it has nothing to do with. One is stricter: unregistering under a copy that the host has not waited for is
// a race, because no document promises that the driver waits.
//
// [Note: driver]
// A library that stands for a vendor's driver may keep its bytes, copies, events and locked memory in these books, by
// the C functions at the end of this file. It adds the ranges of device memory that it maps, so that operators, copies
// and the race check know them (`tensor_at` makes a tensor there), and removes them. With `highwater_sim_route` every
// allocation of a tensor asks it first: the library charges the device, and may free its own memory for that. It is
// asked and told outside of `state_mutex`, for it has locks of its own, under which it calls these functions.
//
// [Note: what is left out]
// Fragmentation and caching, workspaces and kernel temporaries, a GPU's rounding, sparse tensors, graphs. Memory traffic
// counts every argument once, launches cost the same for all kernels, a kernel fills its device however small it is,
// links are not shared between devices, pinning takes no time. A strided tensor is one byte range to the order book, its
// gaps included.
//
// [Note: one lock, and never the GIL under it]
// `state_mutex` guards all of this file's state but the bytes that a deferred copy has moved. A thread may hold the GIL when it asks for the mutex, so
// nothing may ask for the GIL while holding it: under the lock there is arithmetic, memcpy, and the release of
// `Memory`, which no Python object can own. Operators and tensor destructors run outside.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using at::IValue;
using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;
using c10::Stream;
using c10::TensorImpl;
using torch::jit::Stack;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
const DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
const DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);

// torch's autograd engine sizes its thread pool once, at the first backward, by the guard's device count;
// so the arrays are this long from the start and `configure` only says how many of them are in use.
constexpr int kMaxDevices = 8;
// As c10/cuda/CUDAStream.cpp: streams come from a pool of 32 per device, handed out in turn. Id 0 is the default.
constexpr int kPoolStreams = 32;
constexpr int kStreams = 1 + kPoolStreams;
// As cudaMalloc and more than any CPU kernel asks for, so that a result never depends on where a tensor lies.
constexpr size_t kAlignment = 512;
// From here on memory is mapped without reserving it: a model of 40 GB fits as long as its bytes are not touched.
constexpr size_t kMappedBytes = size_t(64) << 20;
// Of each of the two buffers through which a copy from pageable memory passes to the copy engine.
constexpr size_t kStagingBytes = size_t(4) << 20;
// As in driver_types.h.
constexpr int kErrorInvalidValue = 1, kErrorMemoryAllocation = 2, kErrorInvalidDevice = 101;
constexpr int kErrorHostMemoryAlreadyRegistered = 712, kErrorHostMemoryNotRegistered = 713;
constexpr int64_t kHostRegisterFlags = 0xF;  // portable, mapped, I/O memory, read-only
// What one look at an unfinished event costs the host; without it a polling loop would never end.
constexpr double kPollSeconds = 1e-6;
// No operation has so little left to do: rounding has. What fits a gap exactly ends with it.
constexpr double kRoundingSeconds = 1e-12;

// ---------------------------------------------------------------------------------------------- Order

// Which operations are known to be finished: for each stream, the number of the last one.
class VectorClock {
 public:
  void learn(int stream, int64_t operation) {
    if (static_cast<int>(finished_.size()) <= stream) finished_.resize(stream + 1, 0);
    finished_[stream] = std::max(finished_[stream], operation);
  }
  void learn(const VectorClock& other) {
    if (finished_.size() < other.finished_.size()) finished_.resize(other.finished_.size(), 0);
    for (size_t i = 0; i < other.finished_.size(); i++) finished_[i] = std::max(finished_[i], other.finished_[i]);
  }
  bool knows(int stream, int64_t operation) const {
    return stream < static_cast<int>(finished_.size()) && finished_[stream] >= operation;
  }

 private:
  std::vector<int64_t> finished_;
};

// One operation's use of a range of bytes. For a strided tensor the range spans the gaps too.
struct Access {
  const char* begin;
  const char* end;
  int stream;
  int64_t operation;
  bool writes;
  const char* name;
};

// ---------------------------------------------------------------------------------------------- State

std::recursive_mutex state_mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// The RAM behind an allocation. A deferred copy shares it, so that freeing a tensor too early is reported as a
// race and does not crash.
struct Memory {
  char* bytes = nullptr;
  std::shared_ptr<void> owner;  // of the bytes: a heap block, a mapping, or what a CPU kernel allocated
  int64_t pinned_bytes = 0;
  int64_t epoch = 0;

  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory();
};

size_t aligned(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Untouched pages; null if the host has no room.
std::shared_ptr<void> map_ram(size_t num_bytes) {
  void* mapped = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  madvise(mapped, num_bytes, MADV_HUGEPAGE);  // a first touch costs half as much
#endif
  return {mapped, [num_bytes](void* bytes) { munmap(bytes, num_bytes); }};
}

// Touched pages that allocations share: see [Note: backed memory]. Guarded by `state_mutex`.
class Backing : public std::enable_shared_from_this<Backing> {
 public:
  explicit Backing(size_t num_bytes) : pages_(map_ram(num_bytes)) {
    TORCH_CHECK_WITH(OutOfMemoryError, pages_, "the host cannot map ", num_bytes, " bytes for simulated devices");
    std::memset(pages_.get(), 0, num_bytes);
    free_[static_cast<char*>(pages_.get())] = num_bytes;
  }

  // The lowest free bytes that are enough; null if none are.
  std::shared_ptr<void> take(size_t num_bytes) {
    const size_t count = aligned(num_bytes);
    const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& gap) { return gap.second >= count; });
    if (found == free_.end()) return nullptr;
    const auto [begin, room] = *found;
    free_.erase(found);
    if (room > count) free_[begin + count] = room - count;
    return {begin, [backing = shared_from_this(), count](void* bytes) {
              Lock lock(state_mutex);
              backing->give_back(static_cast<char*>(bytes), count);
            }};
  }

 private:
  void give_back(char* begin, size_t count) {
    auto gap = free_.emplace(begin, count).first;
    if (const auto next = std::next(gap); next != free_.end() && begin + count == next->first) {
      gap->second += next->second;
      free_.erase(next);
    }
    if (gap == free_.begin()) return;
    const auto before = std::prev(gap);
    if (before->first + before->second != begin) return;
    before->second += gap->second;
    free_.erase(gap);
  }

  std::shared_ptr<void> pages_;
  std::map<char*, size_t> free_;  // bytes by where they begin; neighbours are joined
};

std::shared_ptr<Memory> allocate_ram(size_t num_bytes) {
  auto memory = std::make_shared<Memory>();
  if (num_bytes >= kMappedBytes) {
    memory->owner = map_ram(num_bytes);
  } else {
    if (void* block = std::aligned_alloc(kAlignment, aligned(num_bytes))) memory->owner.reset(block, &std::free);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, memory->owner, "the host cannot map ", num_bytes,
                   " bytes for a simulated device");
  memory->bytes = static_cast<char*>(memory->owner.get());
  return memory;
}

// The context of every DataPtr that this file hands out.
struct Allocation {
  std::shared_ptr<Memory> memory;
  size_t num_bytes = 0;       // as asked for
  int64_t charged_bytes = 0;  // as accounted for
  int device = -1;            // -1: pinned host memory
  bool registered = false;    // pinned, but not ours: `memory` is null
  void* claimed = nullptr;    // what the driver gave for it; it then charges and refunds: see [Note: driver]
  int64_t epoch = 0;
  int home_stream = -1;  // where the caching allocator would hand the bytes out again
  std::vector<int> recorded_streams;
  std::vector<Access> accesses;
};

// Held while bytes of a deferred copy are moved. The copy engine holds no other lock meanwhile, as a card needs none of
// its host's; who holds `state_mutex` may ask for this one, never the other way around.
std::mutex moving_mutex;

struct DeferredCopy {
  int64_t operation;
  std::shared_ptr<Memory> source_memory, destination_memory;
  const char* source;
  char* destination;
  size_t num_bytes;
  size_t num_moved = 0;  // by the copy engine

  void move(size_t most) {
    const std::lock_guard<std::mutex> alone(moving_mutex);
    move_alone(most);
  }

  void move_alone(size_t most) {
    const size_t count = std::min(most, num_bytes - num_moved);
    std::memcpy(destination + num_moved, source + num_moved, count);
    num_moved += count;
  }
};

// What does one thing at a time: see [Note: shared engines].
class Engine {
 public:
  struct Gap {
    double begin_s, end_s;
  };

  // The first time from a moment on in which it has nothing to do.
  Gap next_gap(double from_s) const {
    const auto next = busy_.upper_bound(from_s);
    if (next != busy_.begin()) from_s = std::max(from_s, std::prev(next)->second);
    return {from_s, next == busy_.end() ? std::numeric_limits<double>::infinity() : next->first};
  }

  // Take a part of a gap.
  void occupy(double begin_s, double end_s) {
    if (begin_s == end_s) return;
    if (const auto next = busy_.find(end_s); next != busy_.end()) {
      end_s = next->second;
      busy_.erase(next);
    }
    const auto next = busy_.upper_bound(begin_s);
    if (next != busy_.begin() && std::prev(next)->second == begin_s)
      std::prev(next)->second = end_s;
    else
      busy_[begin_s] = end_s;
  }

  // Nothing will be asked about the time before.
  void forget_until(double moment_s) {
    while (!busy_.empty() && busy_.begin()->second <= moment_s) busy_.erase(busy_.begin());
  }

 private:
  std::map<double, double> busy_;  // ends by beginnings; neighbours are joined
};

struct SimStream {
  int number = 0;        // unique over all devices, the index into vector clocks
  double free_at_s = 0;  // when its last operation ends
  int64_t last_operation = 0;
  VectorClock clock;  // what its next operation comes after
  std::deque<DeferredCopy> deferred;
};

struct SimEvent {
  double reached_at_s;
  int64_t clock_reset;  // the number of clock resets before it; an event from before the latest is long past
  SimStream* stream;
  int64_t operation;
  VectorClock clock;
};

struct Counters {
  int64_t allocs = 0, h2d_bytes = 0, d2h_bytes = 0, peer_bytes = 0, h2d = 0, d2h = 0, peer = 0;
  int64_t ooms = 0, kernels = 0, syncs = 0;
};

struct Rates {
  double h2d_bytes_per_s = 25e9, d2h_bytes_per_s = 25e9, peer_bytes_per_s = 25e9;
  double flops_per_s = 1e13, memory_bytes_per_s = 1e12, launch_s = 5e-6, latency_s = 1e-5;
};

struct SimDevice {
  int64_t total_bytes = int64_t(1) << 40, reserve_bytes = 0, round_to = 1;
  int64_t used_bytes = 0, peak_bytes = 0, live_allocs = 0;
  int64_t torch_bytes = 0, torch_peak = 0;  // of these what torch has allocated, the rest is a driver's
  Counters counters;
  Rates rates;
  Engine compute, h2d, d2h, peer;
  std::array<SimStream, kStreams> streams;
  int next_pool_stream = 0;
  int64_t allocs_until_failure = 0, copies_until_failure = 0;  // 0: none
  std::optional<at::Generator> generator;

  int64_t free_bytes() const { return std::max<int64_t>(0, total_bytes - reserve_bytes - used_bytes); }
};

struct Simulator {
  std::array<SimDevice, kMaxDevices> devices;
  int num_devices = 1;
  double host_s = 0;
  int64_t clock_resets = 0;
  VectorClock host_clock;
  bool defer_copies = false, check_races = false, copy_engine = false, share_pages = false;
  std::vector<std::string> races;
  int64_t pinned_cap = int64_t(1) << 60, pinned_used = 0, pinned_peak = 0;
  std::map<const char*, Allocation*> pinned;  // live pinned allocations and registered ranges by address
  std::map<const char*, Allocation*> ranges;  // device memory that a driver has mapped
  std::map<const char*, Allocation*> claimed;  // live allocations of torch's that a driver has charged
  int64_t registrations_until_failure = 0;    // 0: none
  int64_t epoch = 0;                          // allocations of an earlier epoch are no longer on the books
  std::shared_ptr<Backing> backing;           // null: allocations map their own memory

  Simulator() {
    int number = 0;
    for (auto& device : devices)
      for (auto& stream : device.streams) stream.number = number++;
  }
};

// Never destroyed: tensors may outlive static destructors.
Simulator& sim = *new Simulator;

// Who is asked for every allocation: see [Note: driver].
struct {
  void* (*claim)(int64_t num_bytes) = nullptr;  // on the current device; null: does not fit
  void (*release)(void* claimed) = nullptr;
} driver;

template <typename Function>
auto locked(Function function) {
  Lock lock(state_mutex);
  return function();
}

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};
thread_local int last_error = 0;  // of a refused registration, until it is read: see [Note: registered memory]

SimDevice& device_at(int index) {
  TORCH_CHECK(index >= 0 && index < sim.num_devices, "invalid device ordinal ", Device(kSim, index).str(), ": ",
              sim.num_devices, " simulated devices are configured");
  return sim.devices[index];
}

Device with_index(Device device) { return device.has_index() ? device : Device(kSim, current_device); }

SimStream& stream_of(const Stream& stream) { return device_at(stream.device_index()).streams.at(stream.id()); }

SimStream& current_stream(int device) { return device_at(device).streams[current_streams[device]]; }

std::string stream_name(int number) {
  return Device(kSim, number / kStreams).str() + " stream " + std::to_string(number % kStreams);
}

Memory::~Memory() {
  if (!pinned_bytes) return;
  Lock lock(state_mutex);
  if (epoch == sim.epoch) sim.pinned_used -= pinned_bytes;
}

// --------------------------------------------------------------------------------- Time and ordering

// Run the stream's deferred copies up to an operation. The lock is held: see [Note: one lock].
void run_deferred(SimStream& stream, int64_t up_to_operation) {
  while (!stream.deferred.empty() && stream.deferred.front().operation <= up_to_operation) {
    DeferredCopy& copy = stream.deferred.front();
    copy.move(copy.num_bytes);
    stream.deferred.pop_front();
  }
}

void run_deferred(SimStream& stream) { run_deferred(stream, stream.last_operation); }

// Run something on all of these engines together, in the first time that all of them have for it; return its end.
double run_on(std::initializer_list<Engine*> engines, double ready_s, double duration_s) {
  for (Engine* engine : engines) engine->forget_until(sim.host_s);
  while (true) {
    Engine::Gap gap{ready_s, std::numeric_limits<double>::infinity()};
    for (const Engine* engine : engines) {
      const Engine::Gap own = engine->next_gap(gap.begin_s);
      gap = {own.begin_s, std::min(gap.end_s, own.end_s)};
    }
    // No time at all if the gap of one ends before that of another begins.
    const double until_s = std::max(gap.begin_s, gap.end_s);
    const double end_s = std::min(gap.begin_s + duration_s, until_s);
    for (Engine* engine : engines) engine->occupy(gap.begin_s, end_s);
    duration_s -= until_s - gap.begin_s;
    if (duration_s <= kRoundingSeconds) return end_s;
    ready_s = until_s;
  }
}

// Put one operation on a stream: it takes `duration_s` of its engines' time once the host and the stream are there.
void enqueue(SimStream& stream, const Rates& rates, double duration_s, std::initializer_list<Engine*> engines) {
  sim.host_s += rates.launch_s;
  stream.free_at_s = run_on(engines, std::max(sim.host_s, stream.free_at_s), duration_s);
  stream.last_operation++;
  // The host launched it after everything the host has waited for.
  stream.clock.learn(sim.host_clock);
  stream.clock.learn(stream.number, stream.last_operation);
}

SimEvent record_event(SimStream& stream) {
  SimEvent event{std::max(stream.free_at_s, sim.host_s), sim.clock_resets, &stream, stream.last_operation,
                 stream.clock};
  event.clock.learn(sim.host_clock);
  return event;
}

double reached_at_s(const SimEvent& event) {
  return event.clock_reset == sim.clock_resets ? event.reached_at_s : 0.0;
}

void stream_waits(SimStream& stream, const SimEvent& event) {
  run_deferred(*event.stream, event.operation);
  stream.free_at_s = std::max(stream.free_at_s, reached_at_s(event));
  stream.clock.learn(event.clock);
}

void host_waits(const SimEvent& event) {
  run_deferred(*event.stream, event.operation);
  sim.host_s = std::max(sim.host_s, reached_at_s(event));
  sim.host_clock.learn(event.clock);
}

// A stream that never worked is done now, not at the host's present time: waiting for it costs nothing.
void host_waits(SimStream& stream) {
  run_deferred(stream);
  sim.host_s = std::max(sim.host_s, stream.free_at_s);
  sim.host_clock.learn(stream.clock);
}

void wait_for_device(SimDevice& device) {
  device.counters.syncs++;
  for (auto& stream : device.streams) host_waits(stream);
}

void finish_everything() {
  for (auto& device : sim.devices)
    for (auto& stream : device.streams) host_waits(stream);
}

// ----------------------------------------------------------------------------------------- Race check

void release_allocation(void* context);

Allocation* allocation_of(const DataPtr& data) {
  return data.get_deleter() == &release_allocation ? static_cast<Allocation*>(data.get_context()) : nullptr;
}

Allocation* pinned_allocation_at(const void* address) {
  auto after = sim.pinned.upper_bound(static_cast<const char*>(address));
  if (after == sim.pinned.begin()) return nullptr;
  auto [begin, allocation] = *std::prev(after);
  return static_cast<const char*>(address) < begin + allocation->num_bytes ? allocation : nullptr;
}

const char* first_byte(const Tensor& tensor) {
  return static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.element_size();
}

// Null for pageable memory and for memory that the caller brought.
Allocation* allocation_behind(const Tensor& tensor) {
  return tensor.is_cpu() ? pinned_allocation_at(first_byte(tensor)) : allocation_of(tensor.storage().data_ptr());
}

void report_race(std::string text) {
  constexpr size_t kMostRaces = 1000;  // a broken loop reports the same thing at every step
  if (sim.races.size() < kMostRaces) sim.races.push_back(std::move(text));
}

// The stream's latest operation uses these bytes.
void record_access(Allocation& allocation, const Access& now, const VectorClock& clock) {
  const auto superseded = [&](const Access& earlier) {
    const bool ordered = earlier.stream == now.stream || clock.knows(earlier.stream, earlier.operation);
    const bool overlaps = now.begin < earlier.end && earlier.begin < now.end;
    if (!ordered && overlaps && (now.writes || earlier.writes)) {
      report_race(std::string(now.name) + " on " + stream_name(now.stream) + (now.writes ? " writes" : " reads") +
                  " bytes that " + earlier.name + " on " + stream_name(earlier.stream) +
                  (earlier.writes ? " writes" : " reads") + ", and nothing orders the two");
    }
    // An access that is ordered after the new one is ordered after the earlier one too, so only the new one is kept.
    const bool covered = now.begin <= earlier.begin && earlier.end <= now.end;
    return ordered && covered && (now.writes || !earlier.writes);
  };
  auto& accesses = allocation.accesses;
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), superseded), accesses.end());
  accesses.push_back(now);
}

// The same for device memory that a driver has mapped: the bytes may lie in several of its ranges.
void touch_ranges(const Access& now, const VectorClock& clock) {
  auto here = sim.ranges.upper_bound(now.begin);
  if (here != sim.ranges.begin()) --here;
  for (; here != sim.ranges.end() && here->first < now.end; ++here) {
    Access part = now;
    part.begin = std::max(now.begin, here->first);
    part.end = std::min(now.end, here->first + here->second->num_bytes);
    if (part.begin < part.end) record_access(*here->second, part, clock);
  }
}

void touch(const Tensor& tensor, const SimStream& stream, bool writes, const char* name) {
  if (!sim.check_races || !tensor.defined() || tensor.numel() == 0) return;
  Allocation* allocation = allocation_behind(tensor);
  if (!allocation && (tensor.is_cpu() || sim.ranges.empty())) return;
  int64_t last_element = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last_element += (tensor.size(d) - 1) * tensor.stride(d);
  const char* begin = first_byte(tensor);
  const char* end = begin + (last_element + 1) * static_cast<int64_t>(tensor.element_size());
  const Access now{begin, end, stream.number, stream.last_operation, writes, name};
  allocation ? record_access(*allocation, now, stream.clock) : touch_ranges(now, stream.clock);
}

// The caching allocator gives freed bytes to the next allocation of their home stream. Any other stream that
// used them must be known to be done there, or have been recorded with record_stream.
void check_free(const Allocation& allocation) {
  if (!sim.check_races || allocation.device < 0) return;
  const SimStream& home = sim.devices[allocation.device].streams[allocation.home_stream % kStreams];
  const auto& recorded = allocation.recorded_streams;
  for (const Access& access : allocation.accesses) {
    if (access.stream == allocation.home_stream) continue;
    if (home.clock.knows(access.stream, access.operation)) continue;
    if (sim.host_clock.knows(access.stream, access.operation)) continue;
    if (std::find(recorded.begin(), recorded.end(), access.stream) != recorded.end()) continue;
    report_race(std::string("memory was freed while ") + access.name + " on " + stream_name(access.stream) +
                " may still use it (no wait, no record_stream)");
    return;
  }
}

// -------------------------------------------------------------------------------------- Device memory

int64_t rounded(const SimDevice& device, size_t num_bytes) {
  return (static_cast<int64_t>(num_bytes) + device.round_to - 1) / device.round_to * device.round_to;
}

enum class Charged { yes, full, injected };

Charged try_to_charge(SimDevice& device, int64_t charged_bytes) {
  const bool injected = device.allocs_until_failure > 0 && --device.allocs_until_failure == 0;
  if (injected || charged_bytes > device.free_bytes()) {
    device.counters.ooms++;
    return injected ? Charged::injected : Charged::full;
  }
  device.used_bytes += charged_bytes;
  device.peak_bytes = std::max(device.peak_bytes, device.used_bytes);
  device.live_allocs++;
  device.counters.allocs++;
  return Charged::yes;
}

void raise_out_of_memory(int index, int64_t asked_bytes, Charged why) {
  const SimDevice& device = sim.devices[index];
  last_error = 0;  // as CUDACachingAllocator, which reads the error before it frees what it caches and tries again
  TORCH_CHECK_WITH(OutOfMemoryError, false, Device(kSim, index).str(), " out of memory",
                   why == Charged::injected ? " (injected)" : "", ". Tried to allocate ", asked_bytes, " bytes: ",
                   device.free_bytes(), " free of ", device.total_bytes, ", ", device.used_bytes, " in use, ",
                   device.reserve_bytes, " reserved");
}

void refund(int index, int64_t charged_bytes) {
  sim.devices[index].used_bytes -= charged_bytes;
  sim.devices[index].live_allocs--;
}

void run_deferred_in(const char* begin, const char* end);

void release_allocation(void* context) {
  std::unique_ptr<Allocation> allocation(static_cast<Allocation*>(context));
  {
    Lock lock(state_mutex);
    check_free(*allocation);
    if (allocation->claimed && allocation->memory) {  // a driver's copies do not keep the memory alive
      const char* begin = allocation->memory->bytes;
      sim.claimed.erase(begin);
      run_deferred_in(begin, begin + allocation->num_bytes);
    }
    if (allocation->epoch == sim.epoch) {
      sim.devices[allocation->device].torch_bytes -= allocation->charged_bytes;
      if (!allocation->claimed) refund(allocation->device, allocation->charged_bytes);
    }
  }
  if (allocation->claimed) driver.release(allocation->claimed);
}

// Charge an allocation whose bytes are found afterwards: what does not fit must not ask the host for RAM first.
// Raises torch.OutOfMemoryError.
std::unique_ptr<Allocation> open_allocation(int index, size_t num_bytes) {
  auto allocation = std::make_unique<Allocation>();
  const bool by_driver = driver.claim != nullptr;
  if (by_driver) {
    const c10::DeviceGuard on(Device(kSim, index));
    allocation->claimed = driver.claim(num_bytes);
  }
  Lock lock(state_mutex);
  SimDevice& device = device_at(index);
  const int64_t charged = rounded(device, num_bytes);
  const Charged result = !by_driver            ? try_to_charge(device, charged)
                         : allocation->claimed ? Charged::yes
                                               : Charged::full;
  if (result != Charged::yes) raise_out_of_memory(index, charged, result);
  device.torch_bytes += charged;
  device.torch_peak = std::max(device.torch_peak, device.torch_bytes);
  allocation->home_stream = current_stream(index).number;
  allocation->device = index;
  allocation->num_bytes = num_bytes;
  allocation->charged_bytes = charged;
  allocation->epoch = sim.epoch;
  return allocation;
}

DataPtr close_allocation(std::unique_ptr<Allocation> allocation, std::shared_ptr<Memory> memory) {
  char* bytes = memory->bytes;
  const Device device(kSim, allocation->device);
  allocation->memory = std::move(memory);
  if (allocation->claimed) {
    Lock lock(state_mutex);
    sim.claimed[bytes] = allocation.get();
  }
  return {bytes, allocation.release(), &release_allocation, device};
}

std::shared_ptr<Memory> allocate_device_ram(size_t num_bytes) {
  {
    Lock lock(state_mutex);
    if (std::shared_ptr<void> taken = sim.backing ? sim.backing->take(num_bytes) : nullptr) {
      auto memory = std::make_shared<Memory>();
      memory->bytes = static_cast<char*>(taken.get());
      memory->owner = std::move(taken);
      return memory;
    }
  }
  return allocate_ram(num_bytes);
}

DataPtr allocate_on(int index, size_t num_bytes) {
  if (num_bytes == 0) return {nullptr, Device(kSim, index)};
  auto allocation = open_allocation(index, num_bytes);
  try {
    return close_allocation(std::move(allocation), allocate_device_ram(num_bytes));
  } catch (const c10::Error&) {
    if (allocation) release_allocation(allocation.release());
    throw;
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  DataPtr allocate(size_t num_bytes) override { return allocate_on(current_device, num_bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is cached: freed bytes are free at once
  void recordStream(const DataPtr& data, Stream stream) override {
    Lock lock(state_mutex);
    if (Allocation* allocation = allocation_of(data))
      allocation->recorded_streams.push_back(stream_of(stream).number);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    Lock lock(state_mutex);
    const SimDevice& device = device_at(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = device.torch_bytes;
      (*bytes)[0].peak = device.torch_peak;
    }
    stats.allocation[0].current = stats.active[0].current = device.live_allocs;
    stats.num_ooms = device.counters.ooms;
    stats.num_device_alloc = device.counters.allocs;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override {
    Lock lock(state_mutex);
    device_at(index).peak_bytes = device_at(index).used_bytes;
    device_at(index).torch_peak = device_at(index).torch_bytes;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    Lock lock(state_mutex);
    return {device_at(index).free_bytes(), device_at(index).total_bytes};
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kSim, &device_memory);

// -------------------------------------------------------------------------------------- Pinned memory

void release_pinned(void* context) {
  std::unique_ptr<Allocation> allocation(static_cast<Allocation*>(context));
  Lock lock(state_mutex);
  sim.pinned.erase(allocation->memory->bytes);
  // The bytes come off the books with the Memory: as in torch, not before the copies in flight are done.
}

struct PinnedMemory final : at::HostAllocator {
  DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, Device(c10::DeviceType::CPU)};
    // As torch's CachingHostAllocator: the next power of two, so nearly half of a block can be air.
    const int64_t rounded = static_cast<int64_t>(c10::llvm::PowerOf2Ceil(num_bytes));
    auto allocation = std::make_unique<Allocation>();
    Lock lock(state_mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, sim.pinned_used + rounded <= sim.pinned_cap, "out of pinned memory. Need ",
                     rounded, " bytes (", num_bytes, " rounded up to a power of two): ", sim.pinned_used,
                     " in use of ", sim.pinned_cap);
    allocation->memory = allocate_ram(num_bytes);
    allocation->memory->pinned_bytes = rounded;
    allocation->memory->epoch = sim.epoch;
    allocation->num_bytes = num_bytes;
    sim.pinned_used += rounded;
    sim.pinned_peak = std::max(sim.pinned_peak, sim.pinned_used);
    char* bytes = allocation->memory->bytes;
    sim.pinned[bytes] = allocation.get();
    return {bytes, allocation.release(), &release_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    Lock lock(state_mutex);
    at::HostStats stats;
    stats.active_bytes.current = stats.allocated_bytes.current = sim.pinned_used;
    stats.active_bytes.peak = stats.allocated_bytes.peak = sim.pinned_peak;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    Lock lock(state_mutex);
    sim.pinned_peak = sim.pinned_used;
  }
};

PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(kSim, &pinned_memory);

int refuse(int error) { return last_error = error; }

// Run the copies that still read or write these bytes.
void run_deferred_in(const char* begin, const char* end) {
  const auto overlaps = [&](const char* first, size_t num_bytes) { return first < end && begin < first + num_bytes; };
  for (auto& device : sim.devices)
    for (auto& stream : device.streams) {
      int64_t must_run = 0;
      for (const DeferredCopy& copy : stream.deferred)
        if (overlaps(copy.source, copy.num_bytes) || overlaps(copy.destination, copy.num_bytes))
          must_run = copy.operation;
      run_deferred(stream, must_run);
    }
}

// Move up to so many bytes of the first deferred copy there is; return how many are left of all. For one thread only: a
// second one would wait with the state's lock.
int64_t move_deferred(int64_t most) {
  std::unique_lock<std::mutex> moving(moving_mutex, std::defer_lock);
  DeferredCopy* first = nullptr;  // stays where it is while it is moved: who takes it off its stream moves it, too
  if (most) {
    Lock lock(state_mutex);
    for (auto& device : sim.devices)
      for (auto& stream : device.streams)
        if (!first && !stream.deferred.empty()) first = &stream.deferred.front();
    if (first) moving.lock();
  }
  if (first) {
    first->move_alone(most);
    moving.unlock();
  }
  Lock lock(state_mutex);
  const std::lock_guard<std::mutex> alone(moving_mutex);
  int64_t left = 0;
  for (auto& device : sim.devices)
    for (auto& stream : device.streams) {
      while (!stream.deferred.empty() && stream.deferred.front().num_moved == stream.deferred.front().num_bytes)
        stream.deferred.pop_front();
      for (const DeferredCopy& copy : stream.deferred) left += copy.num_bytes - copy.num_moved;
    }
  return left;
}

// Memory must not go while work that the host has not waited for may use it.
void check_removed(const Allocation& allocation, const char* what) {
  for (const Access& access : allocation.accesses)
    if (!sim.host_clock.knows(access.stream, access.operation)) {
      report_race(std::string(what) + " while " + access.name + " on " + stream_name(access.stream) +
                  " may still use it (the host has not waited)");
      return;
    }
}

// Take a registered range off the books.
void forget_registered(std::map<const char*, Allocation*>::iterator found) {
  const std::unique_ptr<Allocation> allocation(found->second);
  sim.pinned.erase(found);
  if (allocation->epoch == sim.epoch) sim.pinned_used -= allocation->charged_bytes;
}

// As cudaHostRegister and cudaHostUnregister: return 0 or the error's code. See [Note: registered memory].
int64_t host_register(int64_t address, int64_t num_bytes, int64_t flags) {
  at::globalContext().lazyInitDevice(kSim);  // as torch's cudart(); before it, torch calls no memory pinned
  Lock lock(state_mutex);
  if (!address || num_bytes <= 0 || (flags & ~kHostRegisterFlags)) return refuse(kErrorInvalidValue);
  const bool injected = sim.registrations_until_failure > 0 && --sim.registrations_until_failure == 0;
  if (injected || sim.pinned_used + num_bytes > sim.pinned_cap) return refuse(kErrorMemoryAllocation);
  const int64_t page = sysconf(_SC_PAGESIZE);
  const auto first_page = [&](const char* byte) { return reinterpret_cast<int64_t>(byte) / page; };
  const char* begin = reinterpret_cast<const char*>(address);
  for (auto other = sim.pinned.begin(); other != sim.pinned.end();) {
    const auto here = other++;
    const char* last = here->first + here->second->num_bytes - 1;
    if (first_page(last) < first_page(begin) || first_page(begin + num_bytes - 1) < first_page(here->first)) continue;
    // A range that a failed test left, whose memory may be long gone.
    if (here->second->registered && here->second->epoch != sim.epoch)
      forget_registered(here);
    else if ((here->second->registered && !sim.share_pages) || (here->first < begin + num_bytes && begin <= last))
      return refuse(kErrorHostMemoryAlreadyRegistered);
  }
  auto allocation = std::make_unique<Allocation>();
  allocation->registered = true;
  allocation->num_bytes = num_bytes;
  allocation->charged_bytes = num_bytes;
  allocation->epoch = sim.epoch;
  sim.pinned_used += num_bytes;
  sim.pinned_peak = std::max(sim.pinned_peak, sim.pinned_used);
  sim.pinned[begin] = allocation.release();
  return 0;
}

int64_t host_unregister(int64_t address) {
  Lock lock(state_mutex);
  const auto found = sim.pinned.find(reinterpret_cast<const char*>(address));
  if (found == sim.pinned.end() || !found->second->registered) return refuse(kErrorHostMemoryNotRegistered);
  check_removed(*found->second, "host memory was unregistered");
  run_deferred_in(found->first, found->first + found->second->num_bytes);
  forget_registered(found);
  return 0;
}

// The bytes of registered ranges, and how many there are.
std::vector<int64_t> registered() {
  Lock lock(state_mutex);
  std::vector<int64_t> total{0, 0};
  for (const auto& [begin, allocation] : sim.pinned)
    if (allocation->registered && allocation->epoch == sim.epoch) {
      total[0] += allocation->charged_bytes;
      total[1]++;
    }
  return total;
}

// ----------------------------------------------------------------------- Streams, events, generators

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device getDevice() const override { return Device(kSim, current_device); }
  // Any of the fixed number of devices: the autograd engine parks a thread on each of them.
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kMaxDevices, "invalid device ordinal ", device.str());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  DeviceIndex deviceCount() const noexcept override { return kMaxDevices; }

  Stream getStream(Device device) const override {
    device = with_index(device);
    device_at(device.index());
    return Stream(Stream::UNSAFE, device, current_streams[device.index()]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, with_index(device)); }
  Stream getNewStream(Device device, int) const override {
    device = with_index(device);
    Lock lock(state_mutex);
    const int taken = device_at(device.index()).next_pool_stream++ % kPoolStreams;
    return Stream(Stream::UNSAFE, device, 1 + taken);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream previous = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return previous;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(state_mutex);
    SimStream& asked = stream_of(stream);
    sim.host_s += kPollSeconds;
    if (asked.free_at_s > sim.host_s) return false;
    host_waits(asked);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(state_mutex);
    host_waits(stream_of(stream));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    Lock lock(state_mutex);
    wait_for_device(device_at(index));
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(state_mutex);
    if (!*event) *event = new SimEvent{};
    *static_cast<SimEvent*>(*event) = record_event(stream_of(stream));
  }
  // torch: an event that was never recorded is no work at all, so waiting for it is a no-op.
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Lock lock(state_mutex);
    stream_waits(stream_of(stream), *static_cast<SimEvent*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock lock(state_mutex);
    sim.host_s += kPollSeconds;
    if (reached_at_s(*static_cast<SimEvent*>(event)) > sim.host_s) return false;
    host_waits(*static_cast<SimEvent*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock(state_mutex);
    host_waits(*static_cast<SimEvent*>(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<SimEvent*>(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    TORCH_CHECK(from && to, "both events must be recorded before their distance is asked for");
    Lock lock(state_mutex);
    return (reached_at_s(*static_cast<SimEvent*>(to)) - reached_at_s(*static_cast<SimEvent*>(from))) * 1e3;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A device generator draws from a CPU generator of its own, so a seed gives the same numbers as on the CPU.
struct SimGenerator final : at::CPUGeneratorImpl {
  at::Generator on_cpu = at::detail::createCPUGenerator();

  explicit SimGenerator(DeviceIndex index) {
    device_ = Device(kSim, index);
    key_set_ = kSimKeys;
  }
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.seed(); }
  void set_state(const TensorImpl& state) override { on_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<TensorImpl> get_state() const override { return on_cpu.unsafeGetGeneratorImpl()->get_state(); }
};

at::Generator on_cpu(const at::Generator& generator) {
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->on_cpu;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex index) const override { return index < sim.num_devices; }
  DeviceIndex deviceCount() const override { return sim.num_devices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override {
    device_at(index);
    current_device = index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex previous = current_device;
    if (index >= 0) setCurrentDevice(index);
    return previous;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* address) const override {
    Lock lock(state_mutex);
    return pinned_allocation_at(address) != nullptr;
  }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    Lock lock(state_mutex);
    SimDevice& device = sim.devices.at(index < 0 ? current_device : index);
    if (!device.generator) device.generator = at::make_generator<SimGenerator>(index < 0 ? current_device : index);
    return *device.generator;
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<SimGenerator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t num_bytes) const override;
};

const Hooks& hooks = []() -> const Hooks& {
  auto* registered = new Hooks;
  at::RegisterPrivateUse1HooksInterface(registered);
  return *registered;
}();

// ------------------------------------------------------------------------------ Sim tensors as CPU tensors

bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The bytes that a kernel touches: an expanded dimension is read once.
double bytes_of(const Tensor& tensor) {
  double elements = 1;
  for (int64_t d = 0; d < tensor.dim(); d++)
    if (tensor.stride(d) != 0 || tensor.size(d) == 0) elements *= tensor.size(d);
  return elements * tensor.element_size();
}

// A CPU storage over the same bytes. It does not own them: the sim storage outlives the call.
Storage cpu_storage_over(const Storage& storage) {
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(),
                                          DataPtr(storage.mutable_data(), Device(c10::DeviceType::CPU)),
                                          c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
}

// A tensor with the geometry of `like` over another storage.
Tensor tensor_over(Storage storage, const Tensor& like, DispatchKeySet keys, bool is_view) {
  Tensor tensor = is_view
                      ? at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(storage), keys, like.dtype())
                      : at::detail::make_tensor<TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

Tensor cpu_alias(const Tensor& tensor, Storage cpu_storage) {
  Tensor alias = tensor_over(std::move(cpu_storage), tensor, kCpuKeys, false);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}

Tensor cpu_alias(const Tensor& tensor) {
  return is_sim(tensor) ? cpu_alias(tensor, cpu_storage_over(tensor.storage())) : tensor;
}

// What a CPU kernel allocated becomes device memory: charged, not copied.
DataPtr adopt_memory(int index, const Storage& cpu_storage) {
  if (cpu_storage.nbytes() == 0) return {nullptr, Device(kSim, index)};
  auto allocation = open_allocation(index, cpu_storage.nbytes());
  auto memory = std::make_shared<Memory>();
  memory->bytes = static_cast<char*>(cpu_storage.mutable_data());
  memory->owner = std::make_shared<Storage>(cpu_storage);
  return close_allocation(std::move(allocation), std::move(memory));
}

Storage adopt_storage(int index, const Storage& cpu_storage) {
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), cpu_storage.nbytes(),
                                          adopt_memory(index, cpu_storage), &device_memory, /*resizable=*/true);
}

void replace_bytes(StorageImpl& storage, DataPtr data, size_t num_bytes) {
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(num_bytes);
}

void Hooks::resizePrivateUse1Bytes(const Storage& storage, size_t num_bytes) const {
  DataPtr data = allocate_on(storage.device().index(), num_bytes);
  locked([&] { run_deferred(current_stream(storage.device().index())); });
  const size_t kept = std::min(num_bytes, storage.nbytes());
  if (kept) std::memcpy(data.get(), storage.data(), kept);
  replace_bytes(*storage.unsafeGetStorageImpl(), std::move(data), num_bytes);
}

// ------------------------------------------------------------------------------- What an operator costs

struct OperatorTraits {
  std::string name;
  std::vector<bool> writes;  // per argument
  int left_matrix = -1;      // argument, for matrix products
  bool convolves = false, convolves_backward = false, attends = false;
  bool gathers = false;            // reads only the rows it returns
  bool takes_cpu_index = false;    // as on CUDA, an index may stay on the host
  bool host_reads_result = false;  // the size of the result depends on the data, so the host waits for it
  int generator = -1;              // argument
};

OperatorTraits traits_from(const c10::FunctionSchema& schema) {
  OperatorTraits traits;
  traits.name = schema.operator_name().name;
  const auto is_one_of = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(),
                       [&](const char* name) { return traits.name == std::string("aten::") + name; });
  };
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    traits.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    if (argument.name() == "generator") traits.generator = static_cast<int>(i);
  }
  if (is_one_of({"mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm"})) traits.left_matrix = 0;
  if (is_one_of({"addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "addmv_", "_addmm_activation"}))
    traits.left_matrix = 1;
  traits.convolves = is_one_of({"convolution"});
  traits.convolves_backward = is_one_of({"convolution_backward"});
  traits.attends = is_one_of({"scaled_dot_product_attention"});
  traits.gathers = is_one_of({"embedding", "index", "index_select", "gather"});
  traits.takes_cpu_index =
      is_one_of({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"});
  traits.host_reads_result = is_one_of({"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"});
  return traits;
}

// Entries are never removed: `Access::name` points into them.
const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  static auto& known = *new std::unordered_map<c10::OperatorName, OperatorTraits>;
  Lock lock(state_mutex);
  const auto found = known.find(op.operator_name());
  return found != known.end() ? found->second
                              : known.emplace(op.operator_name(), traits_from(op.schema())).first->second;
}

// Multiply-adds count as two, as in torch.utils.flop_counter.
double convolution_flops(const Tensor& input, const Tensor& weight, const Tensor& output, bool transposed) {
  // Every output element (input element if transposed) meets one filter: the weight over its first dimension.
  const double meetings = static_cast<double>(transposed ? input.numel() : output.numel());
  return weight.numel() ? 2.0 * meetings * weight.numel() / weight.size(0) : 0.0;
}

double attention_flops(const Tensor& query, const Tensor& key, const Tensor& value) {
  // rows: batch * heads * queries
  const double rows = query.size(-1) ? static_cast<double>(query.numel()) / query.size(-1) : 0.0;
  return 2.0 * rows * key.size(-2) * (query.size(-1) + value.size(-1));
}

// ------------------------------------------------------------------------------------ The boxed fallback

template <typename Function>
void for_each_tensor(const IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {  // Tensor[] and Tensor?[]
    for (const IValue& element : value.toListRef())
      if (element.isTensor()) function(element.toTensor());
  }
}

template <typename Function>
void replace_tensors(IValue& value, Function function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> replaced;
    for (const Tensor& tensor : value.toTensorVector()) replaced.push_back(function(tensor));
    value = replaced;
  } else if (value.isList()) {
    auto replaced = value.toList().copy();
    for (size_t i = 0; i < replaced.size(); i++) {
      const IValue element = replaced.get(i);
      if (element.isTensor()) replaced.set(i, function(element.toTensor()));
    }
    value = replaced;
  }
}

// One operator call, from sim tensors to CPU tensors and back. See [Note: how an operator runs].
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        traits_(traits_of(op)),
        stack_(*stack),
        num_arguments_(op.schema().arguments().size()) {}

  void run() {
    find_device();
    locked([&] { run_deferred(current_stream(index_)); });  // a stream runs in order
    to_cpu();
    op_.redispatchBoxed(kCpuKeys, &stack_);
    take_back_arguments();
    from_cpu();
    account();
  }

 private:
  struct SharedStorage {
    Storage on_sim, on_cpu;
    const void* bytes;
    size_t num_bytes;
  };
  struct Alias {
    Tensor on_sim, on_cpu;
    bool writes;
  };

  IValue& argument(size_t i) { return stack_[stack_.size() - num_arguments_ + i]; }

  void find_device() {
    std::optional<Device> device;
    const auto require_same = [&](const Tensor& tensor) {
      TORCH_CHECK(!device || *device == tensor.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  tensor.device(), "! (", traits_.name, ")");
    };
    for (size_t i = 0; i < num_arguments_; i++)
      for_each_tensor(argument(i), [&](const Tensor& tensor) {
        if (!is_sim(tensor)) return;
        require_same(tensor);
        device = tensor.device();
      });
    for (size_t i = 0; i < num_arguments_; i++)
      for_each_tensor(argument(i), [&](const Tensor& tensor) {
        if (!tensor.defined() || is_sim(tensor)) return;
        if (tensor.dim() == 0 && !traits_.writes[i]) return;  // a scalar
        if (traits_.takes_cpu_index && !traits_.writes[i] && c10::isIntegralType(tensor.scalar_type(), true)) return;
        require_same(tensor);
      });
    for (size_t i = 0; i < num_arguments_; i++) {
      IValue& value = argument(i);
      if (!value.isDevice() || value.toDevice().type() != kSim) continue;
      if (!device) device = with_index(value.toDevice());
      value = Device(c10::DeviceType::CPU);
    }
    index_ = device ? device->index() : current_device;
  }

  void to_cpu() {
    for (size_t i = 0; i < num_arguments_; i++)
      replace_tensors(argument(i), [&](const Tensor& tensor) { return alias(tensor, traits_.writes[i]); });
    for (size_t i = 0; i < num_arguments_; i++)
      arguments_.push_back(argument(i).isTensor() ? argument(i).toTensor() : Tensor());
    if (traits_.convolves) transposed_ = argument(6).toBool();
    if (traits_.generator >= 0) {
      IValue& generator = argument(traits_.generator);
      const at::Generator& chosen = generator.isNone() ? hooks.getDefaultGenerator(index_) : generator.toGenerator();
      TORCH_CHECK(chosen.device().type() == kSim, "Expected a '", c10::DeviceTypeName(kSim, true),
                  "' device type for generator but found '", chosen.device().type(), "'");
      generator = on_cpu(chosen);
    }
  }

  // Arguments that share a storage share the alias too: CPU kernels check for overlap by storage.
  Tensor alias(const Tensor& tensor, bool writes) {
    if (!is_sim(tensor)) return tensor;
    SharedStorage* shared = find(&SharedStorage::on_sim, tensor.storage());
    if (!shared) {
      Storage over = cpu_storage_over(tensor.storage());
      storages_.push_back({tensor.storage(), over, over.data(), over.nbytes()});
      shared = &storages_.back();
    }
    aliases_.push_back({tensor, cpu_alias(tensor, shared->on_cpu), writes});
    return aliases_.back().on_cpu;
  }

  SharedStorage* find(Storage SharedStorage::* side, const Storage& storage) {
    for (auto& shared : storages_)
      if ((shared.*side).unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return &shared;
    return nullptr;
  }

  // The kernel may have resized or restrided what it wrote to.
  void take_back_arguments() {
    for (auto& shared : storages_) {
      if (shared.on_cpu.data() == shared.bytes && shared.on_cpu.nbytes() == shared.num_bytes) continue;
      replace_bytes(*shared.on_sim.unsafeGetStorageImpl(), adopt_memory(index_, shared.on_cpu),
                    shared.on_cpu.nbytes());
    }
    for (auto& [on_sim, on_cpu, writes] : aliases_) {
      if (!writes) continue;
      TensorImpl* impl = on_sim.unsafeGetTensorImpl();
      if (!find(&SharedStorage::on_cpu, on_cpu.storage()))
        impl->set_storage_keep_dtype(adopt_storage(index_, on_cpu.storage()));
      if (on_cpu.sizes() != on_sim.sizes() || on_cpu.strides() != on_sim.strides() ||
          on_cpu.storage_offset() != on_sim.storage_offset())
        impl->set_sizes_and_strides(on_cpu.sizes(), on_cpu.strides(), on_cpu.storage_offset());
    }
  }

  void from_cpu() {
    const size_t num_returns = op_.schema().returns().size();
    for (size_t i = stack_.size() - num_returns; i < stack_.size(); i++)
      replace_tensors(stack_[i], [&](const Tensor& tensor) { return to_sim(tensor); });
  }

  Tensor to_sim(const Tensor& result) {
    if (!result.defined()) return result;
    for (const Alias& alias : aliases_)
      if (alias.on_cpu.is_same(result)) return alias.on_sim;
    TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::kStrided, traits_.name,
                                ": simulated devices hold strided tensors only");
    if (SharedStorage* shared = find(&SharedStorage::on_cpu, result.storage()))
      return tensor_over(shared->on_sim, result, kSimKeys, true);
    Storage storage = adopt_storage(index_, result.storage());
    storages_.push_back({storage, result.storage(), storage.data(), storage.nbytes()});
    Tensor adopted = tensor_over(storage, result, kSimKeys, false);
    results_.push_back(adopted);
    return adopted;
  }

  double flops() const {
    if (traits_.left_matrix >= 0) {
      const Tensor& left = arguments_[traits_.left_matrix];
      return 2.0 * output().numel() * (left.dim() ? left.size(-1) : 1);  // 2MNK
    }
    if (traits_.convolves) return convolution_flops(arguments_[0], arguments_[1], output(), transposed_);
    // Two convolutions of the forward's size: one for the input's gradient, one for the weight's.
    if (traits_.convolves_backward)
      return 2.0 * convolution_flops(arguments_[1], arguments_[2], arguments_[0], false);
    if (traits_.attends) return attention_flops(arguments_[0], arguments_[1], arguments_[2]);
    return 0.0;
  }

  // What the kernel made, or what it was told to write to.
  const Tensor& output() const {
    if (!results_.empty()) return results_[0];
    return std::find_if(aliases_.begin(), aliases_.end(), [](const Alias& alias) { return alias.writes; })->on_sim;
  }

  void account() {
    const bool writes =
        std::any_of(aliases_.begin(), aliases_.end(), [](const Alias& alias) { return alias.writes; });
    if (!writes && results_.empty()) return;  // a view, or a question about metadata: no kernel
    double num_bytes = 0;
    for (const Alias& alias : aliases_) num_bytes += bytes_of(alias.on_sim);
    for (const Tensor& result : results_) num_bytes += bytes_of(result);
    if (traits_.gathers) num_bytes = 2 * bytes_of(output());

    Lock lock(state_mutex);
    SimDevice& device = device_at(index_);
    SimStream& stream = current_stream(index_);
    device.counters.kernels++;
    const Rates& rates = device.rates;
    enqueue(stream, rates, std::max(flops() / rates.flops_per_s, num_bytes / rates.memory_bytes_per_s),
            {&device.compute});
    for (const Alias& alias : aliases_) touch(alias.on_sim, stream, alias.writes, traits_.name.c_str());
    for (const Tensor& result : results_) touch(result, stream, true, traits_.name.c_str());
    if (traits_.host_reads_result) host_waits(stream);
    if (const int error = std::exchange(last_error, 0))
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, error,
                                  "error " + std::to_string(error) +
                                      " of an earlier host registration, which was not read before, raised by " +
                                      traits_.name);
  }

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  Stack& stack_;
  const size_t num_arguments_;
  int index_ = 0;
  bool transposed_ = false;
  std::vector<SharedStorage> storages_;
  std::vector<Alias> aliases_;
  std::vector<Tensor> arguments_;  // the CPU aliases of the arguments that are single tensors
  std::vector<Tensor> results_;    // what the kernel allocated
};

void run_on_cpu(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) { Call(op, stack).run(); }

// For operators that only make a view: the CPU kernel touches no bytes and works on a sim tensor as it is.
void run_as_view(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) { op.redispatchBoxed(kCpuKeys, stack); }

// ------------------------------------------------------------------------------------------------ Copies

// The names of operations that are not operators, for race reports.
constexpr const char* kCopyToDevice = "copy to device";
constexpr const char* kCopyToHost = "copy to host";
constexpr const char* kPeerCopy = "copy between devices";
constexpr const char* kCopyOnDevice = "copy on device";
constexpr const char* kItem = "item";

void count_down_to_failure(int index, const char* what) {
  int64_t& left = device_at(index).copies_until_failure;
  TORCH_CHECK(left == 0 || --left > 0, "simulated failure of a ", what, " (", Device(kSim, index).str(), ")");
}

// Both sides are the same run of bytes, so one transfer will do. Everything else goes through a contiguous
// temporary (aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries).
bool is_one_transfer(const Tensor& from, const Tensor& to) {
  if (from.dtype() != to.dtype() || from.sizes() != to.sizes()) return false;
  if (from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg()) return false;
  return (from.is_contiguous() && to.is_contiguous()) ||
         (from.strides() == to.strides() && from.is_non_overlapping_and_dense());
}

// Whether the bytes of a transfer lie in pinned memory. Raises for those that only partly do: see [Note: registered
// memory].
bool lies_in_pinned(const Tensor& on_host) {
  const char* begin = first_byte(on_host);
  const char* end = begin + on_host.nbytes();
  const Allocation* allocation = pinned_allocation_at(begin);
  const auto next = sim.pinned.upper_bound(begin);
  const bool leaves = allocation && end > std::prev(next)->first + allocation->num_bytes;
  const bool enters = !allocation && next != sim.pinned.end() && next->first < end;
  if (leaves || enters)
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kErrorInvalidValue,
                                "invalid argument: a copy of " + std::to_string(on_host.nbytes()) +
                                    " bytes of host memory lies in more than one pinned range, or partly in one");
  return allocation != nullptr;
}

char* first_byte_to_write(const Tensor& tensor) {
  return static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.element_size();
}

// Queue the bytes and poison the destination. See [Note: deferred copies].
void defer_copy(SimStream& stream, DeferredCopy copy) {
  copy.operation = stream.last_operation;
  // The poison must not overtake an earlier copy of this stream that still reads the destination.
  int64_t must_run = 0;
  for (const DeferredCopy& earlier : stream.deferred)
    if (earlier.source < copy.destination + copy.num_bytes && copy.destination < earlier.source + earlier.num_bytes)
      must_run = earlier.operation;
  run_deferred(stream, must_run);
  if (!sim.copy_engine) std::memset(copy.destination, 0xFF, copy.num_bytes);
  stream.deferred.push_back(std::move(copy));
}

void defer_copy(SimStream& stream, const Tensor& from, const Tensor& to) {
  const auto memory_of = [](const Tensor& tensor) {
    const Allocation* allocation = allocation_behind(tensor);
    return allocation ? allocation->memory : nullptr;  // a driver's range: its copies run before it is removed
  };
  DeferredCopy copy;
  copy.source_memory = memory_of(from), copy.source = first_byte(from);
  copy.destination_memory = memory_of(to), copy.destination = first_byte_to_write(to);
  copy.num_bytes = to.nbytes();
  defer_copy(stream, std::move(copy));
}

// Where bytes of pageable memory wait for the copy engine, which no host has to wait for otherwise.
struct Staging {
  std::mutex mutex;  // never asked for under `state_mutex`
  std::array<std::vector<char>, 2> buffers{std::vector<char>(kStagingBytes), std::vector<char>(kStagingBytes)};
  SimStream* stream = nullptr;  // of the last copy
};

// Move what the stream has of the buffer; the lock is held.
void finish_staged(SimStream& stream, const std::vector<char>& buffer) {
  const auto uses = [&](const DeferredCopy& copy) { return copy.source == buffer.data(); };
  while (std::any_of(stream.deferred.begin(), stream.deferred.end(), uses)) {
    stream.deferred.front().move(kStagingBytes);
    if (stream.deferred.front().num_moved == stream.deferred.front().num_bytes) stream.deferred.pop_front();
  }
}

// Copy from pageable memory with the copy engine; waits until all is staged, or moved. See [Note: copy engine].
void copy_staged(SimStream& stream, const Tensor& from, const Tensor& to, bool until_moved) {
  static Staging& staging = *new Staging;
  const std::lock_guard<std::mutex> alone(staging.mutex);
  const char* source = first_byte(from);
  char* destination = first_byte_to_write(to);
  const size_t num_bytes = to.nbytes();
  if (staging.stream)
    for (const auto& buffer : staging.buffers) locked([&] { finish_staged(*staging.stream, buffer); });
  staging.stream = &stream;
  for (size_t begin = 0, turn = 0; begin < num_bytes; begin += kStagingBytes, turn ^= 1) {
    std::vector<char>& buffer = staging.buffers[turn];
    locked([&] { finish_staged(stream, buffer); });
    DeferredCopy copy;
    copy.num_bytes = std::min(kStagingBytes, num_bytes - begin);
    std::memcpy(buffer.data(), source + begin, copy.num_bytes);
    copy.source = buffer.data(), copy.destination = destination + begin;
    Lock lock(state_mutex);
    if (const Allocation* allocation = allocation_behind(to)) copy.destination_memory = allocation->memory;
    defer_copy(stream, std::move(copy));
  }
  Lock lock(state_mutex);
  if (until_moved) run_deferred(stream);
}

void copy_over_bus(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool to_device = is_sim(to);
  const Tensor& on_device = to_device ? to : from;
  const Tensor& on_host = to_device ? from : to;
  const char* name = to_device ? kCopyToDevice : kCopyToHost;
  const int index = on_device.device().index();
  const bool one_transfer = is_one_transfer(from, to);
  // Types are converted on the host, so what crosses the bus has the device's type.
  const int64_t num_bytes = to.numel() * static_cast<int64_t>(on_device.element_size());
  if (!one_transfer && !on_device.is_contiguous())  // the temporary
    release_allocation(open_allocation(index, num_bytes).release());
  SimStream* staged = nullptr;
  {
    Lock lock(state_mutex);
    SimDevice& device = device_at(index);
    SimStream& stream = current_stream(index);
    count_down_to_failure(index, name);
    const bool pinned = one_transfer && lies_in_pinned(on_host);
    const bool asynchronous = pinned && non_blocking;
    (to_device ? device.counters.h2d : device.counters.d2h)++;
    (to_device ? device.counters.h2d_bytes : device.counters.d2h_bytes) += num_bytes;
    const double rate = to_device ? device.rates.h2d_bytes_per_s : device.rates.d2h_bytes_per_s;

    const bool deferred = asynchronous && (sim.defer_copies || sim.copy_engine);
    if (sim.copy_engine && one_transfer && to_device && !pinned) staged = &stream;
    if (!deferred && !staged) run_deferred(stream);
    enqueue(stream, device.rates, device.rates.latency_s + num_bytes / rate,
            {to_device ? &device.h2d : &device.d2h});
    touch(from, stream, false, name);
    touch(to, stream, true, name);
    if (!asynchronous) sim.host_s = std::max(sim.host_s, stream.free_at_s);
    // From pageable memory the host is only held until its bytes are staged; it has not waited for the stream.
    if (!non_blocking || (!asynchronous && !to_device)) sim.host_clock.learn(stream.clock);
    if (deferred) return defer_copy(stream, from, to);
  }
  if (staged) return copy_staged(*staged, from, to, !non_blocking);
  cpu_alias(to).copy_(cpu_alias(from));
}

// torch orders a peer copy after both current streams and both after it (Copy.cu: a two-way barrier).
void copy_between_devices(const Tensor& from, const Tensor& to) {
  {
    Lock lock(state_mutex);
    const int from_index = from.device().index(), to_index = to.device().index();
    SimDevice &sender = device_at(from_index), &receiver = device_at(to_index);
    SimStream &source = current_stream(from_index), &destination = current_stream(to_index);
    count_down_to_failure(from_index, kPeerCopy);
    count_down_to_failure(to_index, kPeerCopy);
    const int64_t num_bytes = to.nbytes();
    for (SimDevice* device : {&sender, &receiver}) {
      device->counters.peer++;
      device->counters.peer_bytes += num_bytes;
    }
    run_deferred(source);
    stream_waits(source, record_event(destination));
    const double rate = std::min(sender.rates.peer_bytes_per_s, receiver.rates.peer_bytes_per_s);
    enqueue(source, sender.rates, sender.rates.latency_s + num_bytes / rate,
            {&sender.peer, &receiver.peer});
    touch(from, source, false, kPeerCopy);
    touch(to, source, true, kPeerCopy);
    stream_waits(destination, record_event(source));
  }
  cpu_alias(to).copy_(cpu_alias(from));
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  {
    Lock lock(state_mutex);
    SimDevice& device = device_at(to.device().index());
    SimStream& stream = current_stream(to.device().index());
    run_deferred(stream);
    device.counters.kernels++;
    enqueue(stream, device.rates, (bytes_of(from) + bytes_of(to)) / device.rates.memory_bytes_per_s,
            {&device.compute});
    touch(from, stream, false, kCopyOnDevice);
    touch(to, stream, true, kCopyOnDevice);
  }
  cpu_alias(to).copy_(cpu_alias(from));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (!is_sim(from) || !is_sim(to))
    copy_over_bus(from, to, non_blocking);
  else if (from.device() != to.device())
    copy_between_devices(from, to);
  else
    copy_on_device(from, to);
  return to;
}

// ------------------------------------------------------------------------------------------ Other kernels

Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(with_index(device.value_or(Device(kSim))));
  return at::detail::empty_generic(size, &device_memory, kSimKeys,
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(with_index(device.value_or(Device(kSim))));
  return at::detail::empty_strided_generic(size, stride, &device_memory, kSimKeys,
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const size_t needed = (self.storage_offset() + c10::multiply_integers(size)) * self.element_size();
  if (self.storage().nbytes() < needed) hooks.resizePrivateUse1Bytes(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

// The host reads a value: a copy too small to count, for which it waits.
void read_on_host(const Tensor& tensor) {
  Lock lock(state_mutex);
  const Rates& rates = device_at(tensor.device().index()).rates;
  SimStream& stream = current_stream(tensor.device().index());
  run_deferred(stream);
  enqueue(stream, rates, rates.latency_s, {});
  touch(tensor, stream, false, kItem);
  host_waits(stream);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  read_on_host(tensor);
  return cpu_alias(tensor).item();
}

bool equal(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.device() == b.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", a.device(), " and ",
              b.device(), "! (aten::equal)");
  read_on_host(a);
  read_on_host(b);
  return cpu_alias(a).equal(cpu_alias(b));
}

void record_stream(Tensor& tensor, Stream stream) { device_memory.recordStream(tensor.storage().data_ptr(), stream); }

// Lets `parameter.data = parameter.data.to(device)`, hence Module.to, keep the Parameter's identity, as on CUDA.
bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

// Attention is one kernel, as flash attention is: it allocates its output and nothing else. Where a gradient is
// wanted, it is torch's differentiable composite, which allocates the score matrix.
Tensor attention_with_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& mask, double dropout, bool is_causal,
                               std::optional<double> scale, bool enable_gqa) {
  const bool differentiable =
      at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad());
  if (differentiable)
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal,
                                                              std::nullopt, scale, enable_gqa));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
}

// Recurrent layers compute with fused cells off the CPU, which has none: the same in single operators, so that autograd
// sees them. The last tensor of a fused cell is a workspace for its own backward pass, which is not used here.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  Tensor sum = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) sum = sum + *input_bias + *hidden_bias;
  const std::vector<Tensor> gates = sum.chunk(4, 1);  // input, forget, cell, output
  const Tensor new_cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * new_cell.tanh(), new_cell, at::empty({0}, cell.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  const bool has_bias = input_bias && input_bias->defined();
  const std::vector<Tensor> from_input = (has_bias ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const std::vector<Tensor> from_hidden = (has_bias ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const Tensor candidate = (from_input[2] + reset * from_hidden[2]).tanh();
  return {(hidden - candidate) * update + candidate, at::empty({0}, hidden.options())};
}

// -------------------------------------------------------------------------------------------- Registration

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("equal", equal);
  library.impl("record_stream", record_stream);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  for (const char* name : {"as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex",
                           "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_.source_Storage"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_as_view>());
  // These have composite kernels that torch would prefer to the fallback; a GPU runs each of them as one kernel.
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm", "native_group_norm",
                           "scaled_dot_product_attention"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", attention_with_autograd);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

// Without these, a copy of a lazily conjugated tensor resolves it by a copy, which resolves it by a copy, ...
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define HIGHWATER_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGHWATER_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define HIGHWATER_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define HIGHWATER_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(HIGHWATER_LOWER_PRECISION)
  AT_FORALL_FP32(HIGHWATER_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(HIGHWATER_FP32_SET_OPT_DTYPE)
  AT_FORALL_PROMOTE(HIGHWATER_PROMOTE)
}

// ------------------------------------------------------------------ Control, as torch.ops.highwater_simdevice

// Per device three sizes and seven rates, in the order of the fields below.
void configure(std::vector<int64_t> sizes, std::vector<double> rates, int64_t pinned_cap) {
  Lock lock(state_mutex);
  const int num_devices = static_cast<int>(sizes.size() / 3);
  TORCH_CHECK_VALUE(num_devices >= 1 && num_devices <= kMaxDevices, "1 to ", kMaxDevices, " simulated devices, not ",
                    num_devices);
  for (int i = num_devices; i < sim.num_devices; i++)
    TORCH_CHECK(sim.devices[i].live_allocs == 0, "cannot remove ", Device(kSim, i).str(), ": it still holds ",
                sim.devices[i].used_bytes, " bytes in ", sim.devices[i].live_allocs, " allocations");
  for (int i = 0; i < num_devices; i++) {
    SimDevice& device = sim.devices[i];
    device.total_bytes = sizes[3 * i];
    device.reserve_bytes = sizes[3 * i + 1];
    device.round_to = sizes[3 * i + 2];
    const double* r = &rates[7 * i];
    device.rates = {r[0], r[1], r[2], r[3], r[4], r[5], r[6]};
    device.allocs_until_failure = device.copies_until_failure = 0;
  }
  sim.num_devices = num_devices;
  sim.pinned_cap = pinned_cap;
  sim.registrations_until_failure = 0;
  if (current_device >= num_devices) current_device = 0;
}

std::vector<int64_t> stats(int64_t index) {
  Lock lock(state_mutex);
  const SimDevice& device = device_at(index);
  const Counters& n = device.counters;
  return {device.used_bytes,
          device.peak_bytes,
          device.total_bytes,
          n.allocs,
          n.h2d_bytes,
          n.d2h_bytes,
          n.peer_bytes,
          n.h2d,
          n.d2h,
          n.peer,
          n.ooms,
          n.kernels,
          n.syncs};
}

void reset_stats() {
  Lock lock(state_mutex);
  for (auto& device : sim.devices) {
    device.counters = {};
    device.peak_bytes = device.used_bytes;
    device.torch_peak = device.torch_bytes;
  }
  sim.pinned_peak = sim.pinned_used;
}

// Times only. The order book stays: what was unordered before is unordered after.
void reset_clock() {
  Lock lock(state_mutex);
  finish_everything();
  sim.host_s = 0;
  sim.clock_resets++;
  for (auto& device : sim.devices) {
    device.compute = device.h2d = device.d2h = device.peer = {};
    for (auto& stream : device.streams) stream.free_at_s = 0;
  }
}

// Take everything still allocated off the books, so that one failed test does not fail the next ones.
int64_t abandon() {
  Lock lock(state_mutex);
  int64_t abandoned = sim.pinned_used;
  sim.pinned_used = 0;
  for (auto& device : sim.devices) {
    abandoned += device.used_bytes;
    device.used_bytes = device.torch_bytes = device.live_allocs = 0;
  }
  sim.epoch++;
  return abandoned;
}

// Touch so many bytes for devices to take their memory from; 0: none. What was taken before stays where it is.
void back_memory(int64_t num_bytes) {
  auto backing = num_bytes ? std::make_shared<Backing>(num_bytes) : nullptr;
  Lock lock(state_mutex);
  sim.backing.swap(backing);
}

void advance(int64_t index, int64_t stream_id, double seconds) {
  Lock lock(state_mutex);
  SimDevice& device = device_at(index);
  SimStream& stream = device.streams.at(stream_id < 0 ? current_streams[index] : stream_id);
  run_deferred(stream);
  device.counters.kernels++;
  enqueue(stream, device.rates, seconds, {&device.compute});
}

// A tensor over device memory that a driver has mapped: see [Note: driver]. It does not own the bytes.
Tensor tensor_at(int64_t address, int64_t num_bytes, Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(with_index(device));
  return at::for_blob(reinterpret_cast<void*>(address), {num_bytes})
      .options(options)
      .target_device(with_index(device))
      .make_tensor();
}

TORCH_LIBRARY(highwater_simdevice, library) {
  library.def("tensor_at", &tensor_at);
  library.def("configure", &configure);
  library.def("stats", &stats);
  library.def("reset_stats", &reset_stats);
  library.def("reset_clock", &reset_clock);
  library.def("abandon", &abandon);
  library.def("advance", &advance);
  library.def("num_devices", []() { return static_cast<int64_t>(sim.num_devices); });
  library.def("finish_everything", [] { return locked([] { finish_everything(); }); });
  library.def("pinned", [] { return locked([] { return std::vector<int64_t>{sim.pinned_used, sim.pinned_peak}; }); });
  library.def("races", [] { return locked([] { return std::exchange(sim.races, {}); }); });
  library.def("host_time", [] { return locked([] { return sim.host_s; }); });
  library.def("advance_host", [](double seconds) { locked([&] { sim.host_s += seconds; }); });
  library.def("live_allocs", [](int64_t index) { return locked([&] { return device_at(index).live_allocs; }); });
  library.def("stream_time", [](int64_t index, int64_t stream_id) {
    return locked([&] { return device_at(index).streams.at(stream_id).free_at_s; });
  });
  library.def("strict", [](bool defer_copies, bool check_races) {
    locked([&] { sim.defer_copies = defer_copies, sim.check_races = check_races; });
  });
  library.def("copy_engine", [](bool running) { locked([&] { sim.copy_engine = running; }); });
  library.def("move_deferred", &move_deferred);
  library.def("back_memory", &back_memory);
  library.def("occupy", [](int64_t index, int64_t num_bytes) {
    locked([&] { device_at(index).reserve_bytes = num_bytes; });
  });
  library.def("fail_alloc",
              [](int64_t index, int64_t nth) { locked([&] { device_at(index).allocs_until_failure = nth; }); });
  library.def("fail_copy",
              [](int64_t index, int64_t nth) { locked([&] { device_at(index).copies_until_failure = nth; }); });
  library.def("fail_registration", [](int64_t nth) { locked([&] { sim.registrations_until_failure = nth; }); });
  library.def("host_register", &host_register);
  library.def("host_unregister", &host_unregister);
  library.def("registered", &registered);
  library.def("share_pages", [](bool allowed) { locked([&] { sim.share_pages = allowed; }); });
  library.def("take_last_error", [] { return static_cast<int64_t>(std::exchange(last_error, 0)); });
  library.def("default_generator",
              [](int64_t index) { return hooks.getDefaultGenerator(static_cast<DeviceIndex>(index)); });
}

}  // namespace

// ---------------------------------------------------------------------------- For a driver: see [Note: driver]
// Results are CUDA's codes.

extern "C" {

int highwater_sim_num_devices() { return sim.num_devices; }

int highwater_sim_current_device() { return current_device; }

int highwater_sim_charge(int index, int64_t num_bytes) {
  Lock lock(state_mutex);
  if (index < 0 || index >= sim.num_devices) return kErrorInvalidDevice;
  SimDevice& device = sim.devices[index];
  return try_to_charge(device, rounded(device, num_bytes)) == Charged::yes ? 0 : kErrorMemoryAllocation;
}

void highwater_sim_refund(int index, int64_t num_bytes) {
  Lock lock(state_mutex);
  refund(index, rounded(sim.devices[index], num_bytes));
}

void highwater_sim_memory_info(int index, int64_t* free_bytes, int64_t* total_bytes) {
  Lock lock(state_mutex);
  *free_bytes = sim.devices[index].free_bytes();
  *total_bytes = sim.devices[index].total_bytes;
}

// From here on these bytes are memory of the device. They belong to the driver, which charges them.
void highwater_sim_add_range(int index, void* begin, int64_t num_bytes) {
  Lock lock(state_mutex);
  auto range = std::make_unique<Allocation>();
  range->num_bytes = num_bytes;
  range->device = index;
  sim.ranges[static_cast<const char*>(begin)] = range.release();
}

// Runs the copies that still use the range. Work that the host has not waited for is a race.
void highwater_sim_remove_range(void* begin) {
  Lock lock(state_mutex);
  const auto found = sim.ranges.find(static_cast<const char*>(begin));
  if (found == sim.ranges.end()) return;
  const std::unique_ptr<Allocation> range(found->second);
  check_removed(*range, "device memory was unmapped");
  run_deferred_in(found->first, found->first + range->num_bytes);
  sim.ranges.erase(found);
}

// As an asynchronous copy of the driver: queued where the host's side is pinned, else made at once. The copy is of the
// device whose memory it is, whichever is current.
int highwater_sim_copy(int index, int64_t stream_id, void* to, const void* from, int64_t num_bytes, int to_device) {
  Lock lock(state_mutex);
  const char *source = static_cast<const char*>(from), *destination = static_cast<const char*>(to);
  const char* on_device = to_device ? destination : source;
  for (const auto* known : {&sim.ranges, &sim.claimed}) {
    const auto after = known->upper_bound(on_device);
    if (after == known->begin()) continue;
    const auto& [begin, owner] = *std::prev(after);
    if (on_device < begin + owner->num_bytes) index = owner->device;
  }
  SimDevice& device = sim.devices[index];
  SimStream& stream = device.streams[stream_id];
  if (device.copies_until_failure && --device.copies_until_failure == 0) return kErrorInvalidValue;
  (to_device ? device.counters.h2d : device.counters.d2h)++;
  (to_device ? device.counters.h2d_bytes : device.counters.d2h_bytes) += num_bytes;
  const double rate = to_device ? device.rates.h2d_bytes_per_s : device.rates.d2h_bytes_per_s;
  Allocation* pinned = pinned_allocation_at(to_device ? from : to);
  const bool deferred = pinned && (sim.defer_copies || sim.copy_engine);
  if (!deferred) run_deferred(stream);
  enqueue(stream, device.rates, device.rates.latency_s + num_bytes / rate,
          {to_device ? &device.h2d : &device.d2h});
  const char* name = to_device ? kCopyToDevice : kCopyToHost;
  const auto access = [&](const char* begin, bool writes) {
    return Access{begin, begin + num_bytes, stream.number, stream.last_operation, writes, name};
  };
  const Access reads = access(source, false), writes = access(destination, true);
  if (sim.check_races) touch_ranges(to_device ? writes : reads, stream.clock);
  if (sim.check_races && pinned) record_access(*pinned, to_device ? reads : writes, stream.clock);
  if (!pinned) {
    sim.host_s = std::max(sim.host_s, stream.free_at_s);
    if (!to_device) sim.host_clock.learn(stream.clock);
  }
  if (!deferred) {
    std::memcpy(to, from, num_bytes);
    return 0;
  }
  DeferredCopy copy;
  copy.source = source, copy.destination = static_cast<char*>(to), copy.num_bytes = num_bytes;
  defer_copy(stream, std::move(copy));
  return 0;
}

void highwater_sim_synchronize(int index) {
  Lock lock(state_mutex);
  wait_for_device(sim.devices[index]);
}

void* highwater_sim_record(int index, int64_t stream_id) {
  Lock lock(state_mutex);
  return new SimEvent(record_event(sim.devices[index].streams[stream_id]));
}

void highwater_sim_wait(void* event) {
  if (!event) return;
  Lock lock(state_mutex);
  host_waits(*static_cast<SimEvent*>(event));
}

void highwater_sim_forget(void* event) { delete static_cast<SimEvent*>(event); }

int highwater_sim_register(void* begin, int64_t num_bytes) {
  const int error = host_register(reinterpret_cast<int64_t>(begin), num_bytes, 0);
  last_error = 0;  // the driver's own functions return errors and keep none
  return error;
}

int highwater_sim_unregister(void* begin) {
  const int error = host_unregister(reinterpret_cast<int64_t>(begin));
  last_error = 0;
  return error;
}

void highwater_sim_route(void* (*claim)(int64_t num_bytes), void (*release)(void* claimed)) {
  driver.claim = claim;
  driver.release = release;
}

}  // extern "C"
