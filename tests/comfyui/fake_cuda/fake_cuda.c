// A CUDA driver without a card: the functions that comfy-aimdo asks for, over the simulated devices.
//
// comfy-aimdo takes a module called libcuda.so.1 that is already loaded, and asks cuGetProcAddress for what it calls.
// Capacity, copies, events, streams and locked host memory are those of headless/simdevice, by the C functions declared
// below; only address ranges are managed here. So torch and comfy-aimdo share one set of books, and each one's
// allocations are the other's pressure.
//
// [Note: what a page is]
// Device memory is host memory here. An address range that is reserved is inaccessible; mapping makes it accessible
// and fills it with 0xFF, which is NaN for every float type; unmapping makes it inaccessible again. So a use before
// the first write computes NaN, and a use after an eviction is a segmentation fault.
//
// [Note: hooks]
// comfy-aimdo rewrites the first bytes of the six functions that allocate and free, hence HOOKABLE. None of the six
// calls another: the hook would run twice.
//
// [Note: locks]
// comfy-aimdo holds its own lock while it calls these functions, and these take the simulated devices' lock. Never the
// other way round: the simulated devices call `claim` and `release` without their lock.
//
// Left out: contexts, modules, kernels, graphs, NVML, WDDM. A handle is mapped at one place, whole.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int Result;
typedef unsigned long long Address;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_FOUND = 500 };

// headless/simdevice/simdevice.cpp, [Note: driver]. Results are CUDA's codes.
int highwater_sim_num_devices(void);
int highwater_sim_current_device(void);
int highwater_sim_charge(int device, int64_t num_bytes);
void highwater_sim_refund(int device, int64_t num_bytes);
void highwater_sim_memory_info(int device, int64_t* free_bytes, int64_t* total_bytes);
void highwater_sim_add_range(int device, void* begin, int64_t num_bytes);
void highwater_sim_remove_range(void* begin);
int highwater_sim_copy(int device, int64_t stream, void* to, const void* from, int64_t num_bytes, int to_device);
void highwater_sim_synchronize(int device);
void* highwater_sim_record(int device, int64_t stream);
void highwater_sim_wait(void* event);
void highwater_sim_forget(void* event);
int highwater_sim_register(void* begin, int64_t num_bytes);
int highwater_sim_unregister(void* begin);
void highwater_sim_route(void* (*claim)(int64_t num_bytes), void (*release)(void* claimed));

#define HOOKABLE __attribute__((patchable_function_entry(32, 0), noinline))
#define EACH_FUNCTION(X)                                                                                             \
  X(cuInit) X(cuGetErrorString) X(cuCtxGetDevice) X(cuCtxSynchronize) X(cuDeviceGet) X(cuDeviceGetAttribute)         \
  X(cuDeviceTotalMem) X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree)               \
  X(cuMemAllocAsync) X(cuMemAllocAsync_ptsz) X(cuMemFreeAsync) X(cuMemFreeAsync_ptsz) X(cuMemAllocHost)              \
  X(cuMemFreeHost) X(cuMemHostRegister) X(cuMemHostUnregister) X(cuMemAddressReserve) X(cuMemAddressFree)            \
  X(cuMemCreate) X(cuMemMap) X(cuMemSetAccess) X(cuMemUnmap) X(cuMemRelease) X(cuMemcpyHtoDAsync)                    \
  X(cuMemcpyDtoHAsync) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventSynchronize)

// ------------------------------------------------------------------------------------- Counters and injected faults

enum {
#define NUMBER(name) NUMBER_##name,
  EACH_FUNCTION(NUMBER) NUM_FUNCTIONS
};

static const char* const names[] = {
#define NAME(name) #name,
    EACH_FUNCTION(NAME)};

static atomic_llong num_calls[NUM_FUNCTIONS], calls_until_failure[NUM_FUNCTIONS];
static atomic_llong mapped_bytes, copied_to_device, copied_to_host;

static int is_to_fail(int number) {
  num_calls[number]++;
  long long left = calls_until_failure[number];
  while (left > 0)
    if (atomic_compare_exchange_weak(&calls_until_failure[number], &left, left - 1)) return left == 1;
  return 0;
}

// The first line of every function: counts the call, and fails it if that was asked for.
#define CALLED(name) \
  if (is_to_fail(NUMBER_##name)) return OUT_OF_MEMORY

static int number_of(const char* name) {
  for (int i = 0; i < NUM_FUNCTIONS; i++)
    if (!strcmp(names[i], name)) return i;
  return -1;
}

const char* fake_cuda_name(int number) { return number < NUM_FUNCTIONS ? names[number] : NULL; }
long long fake_cuda_num_calls(int number) { return num_calls[number]; }

// Make the nth call from now fail with "out of memory" (1: the next, 0: none). Returns 0 for an unknown function.
int fake_cuda_fail(const char* name, long long nth) {
  const int number = number_of(name);
  if (number < 0) return 0;
  calls_until_failure[number] = nth;
  return 1;
}

// All counters but the bytes that are mapped now start again.
void fake_cuda_reset(void) {
  for (int i = 0; i < NUM_FUNCTIONS; i++) num_calls[i] = 0;
  copied_to_device = copied_to_host = 0;
}

long long fake_cuda_mapped_bytes(void) { return mapped_bytes; }
long long fake_cuda_copied_to_device(void) { return copied_to_device; }
long long fake_cuda_copied_to_host(void) { return copied_to_host; }

// ----------------------------------------------------------------------------------------------------- The device

Result cuInit(unsigned flags) {
  CALLED(cuInit);
  return SUCCESS;
}

Result cuGetErrorString(Result error, const char** text) {
  CALLED(cuGetErrorString);
  *text = error == OUT_OF_MEMORY ? "out of memory" : "an error of the fake CUDA driver";
  return SUCCESS;
}

Result cuCtxGetDevice(int* device) {
  CALLED(cuCtxGetDevice);
  *device = highwater_sim_current_device();
  return SUCCESS;
}

Result cuCtxSynchronize(void) {
  CALLED(cuCtxSynchronize);
  highwater_sim_synchronize(highwater_sim_current_device());
  return SUCCESS;
}

Result cuDeviceGet(int* device, int ordinal) {
  CALLED(cuDeviceGet);
  *device = ordinal;
  return ordinal >= 0 && ordinal < highwater_sim_num_devices() ? SUCCESS : INVALID_DEVICE;
}

Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  CALLED(cuDeviceGetAttribute);
  *value = 0;  // asked for: whether the device shares the host's memory
  return SUCCESS;
}

Result cuDeviceTotalMem_v2(uint64_t* total, int device) {
  CALLED(cuDeviceTotalMem);
  int64_t free_bytes, total_bytes;
  highwater_sim_memory_info(device, &free_bytes, &total_bytes);
  *total = total_bytes;
  return SUCCESS;
}

Result cuDeviceGetName(char* name, int length, int device) {
  CALLED(cuDeviceGetName);
  snprintf(name, length, "simulated accelerator %d", device);
  return SUCCESS;
}

Result cuDeviceGetUuid(void* uuid, int device) {
  CALLED(cuDeviceGetUuid);
  memset(uuid, device, 16);
  return SUCCESS;
}

Result cuMemGetInfo_v2(uint64_t* free_bytes, uint64_t* total_bytes) {
  CALLED(cuMemGetInfo);
  int64_t free, total;
  highwater_sim_memory_info(highwater_sim_current_device(), &free, &total);
  *free_bytes = free, *total_bytes = total;
  return SUCCESS;
}

// ------------------------------------------------------------------------------------------- Allocating and freeing

// What stands before the bytes of an allocation; the bytes begin a page later.
typedef struct {
  int64_t num_bytes;
  int device;
  unsigned given;  // GIVEN
} Head;

enum { HEAD_BYTES = 4096, GIVEN = 0x61C88647 };

static Result allocate(Address* address, uint64_t num_bytes) {
  if (!num_bytes) return INVALID_VALUE;
  const int device = highwater_sim_current_device();
  const Result refused = highwater_sim_charge(device, num_bytes);
  if (refused) return refused;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  Head* head = mmap(NULL, HEAD_BYTES + num_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (head == MAP_FAILED) {
    highwater_sim_refund(device, num_bytes);
    return OUT_OF_MEMORY;
  }
  *head = (Head){num_bytes, device, GIVEN};
  *address = (Address)head + HEAD_BYTES;
  return SUCCESS;
}

static Result release(Address address) {
  if (!address) return SUCCESS;
  Head* head = (Head*)(address - HEAD_BYTES);
  if (head->given != GIVEN) return INVALID_VALUE;
  highwater_sim_refund(head->device, head->num_bytes);
  munmap(head, HEAD_BYTES + head->num_bytes);
  return SUCCESS;
}

HOOKABLE Result cuMemAlloc_v2(Address* address, uint64_t num_bytes) {
  CALLED(cuMemAlloc);
  return allocate(address, num_bytes);
}

HOOKABLE Result cuMemFree_v2(Address address) {
  CALLED(cuMemFree);
  return release(address);
}

HOOKABLE Result cuMemAllocAsync(Address* address, uint64_t num_bytes, void* stream) {
  CALLED(cuMemAllocAsync);
  return allocate(address, num_bytes);
}

HOOKABLE Result cuMemAllocAsync_ptsz(Address* address, uint64_t num_bytes, void* stream) {
  CALLED(cuMemAllocAsync_ptsz);
  return allocate(address, num_bytes);
}

HOOKABLE Result cuMemFreeAsync(Address address, void* stream) {
  CALLED(cuMemFreeAsync);
  return release(address);
}

HOOKABLE Result cuMemFreeAsync_ptsz(Address address, void* stream) {
  CALLED(cuMemFreeAsync_ptsz);
  return release(address);
}

// Every allocation of the simulated devices asks here first, and so meets comfy-aimdo's hooks. Its bytes lie elsewhere:
// the addresses only stand for them. The calls are volatile, for the compiler must not look into a hooked function.
static Result (*volatile hooked_alloc)(Address*, uint64_t) = cuMemAlloc_v2;
static Result (*volatile hooked_free)(Address) = cuMemFree_v2;
static Result (*volatile hooked_alloc_async)(Address*, uint64_t, void*) = cuMemAllocAsync;
static Result (*volatile hooked_free_async)(Address, void*) = cuMemFreeAsync;

static void* claim(int64_t num_bytes) {
  Address address;
  return hooked_alloc(&address, num_bytes) ? NULL : (void*)address;
}

static void unclaim(void* claimed) { hooked_free((Address)claimed); }

// What torch does with its allocator cudaMallocAsync, which ComfyUI chooses; all on the default stream.
static void* claim_async(int64_t num_bytes) {
  Address address;
  return hooked_alloc_async(&address, num_bytes, NULL) ? NULL : (void*)address;
}

static void unclaim_async(void* claimed) {
  if (hooked_free_async((Address)claimed, NULL)) abort();  // torch cannot go on either: it frees in a destructor
}

// Only in stream order does comfy-aimdo record allocations ([Note: hooks]).
void fake_cuda_take_allocations(int in_stream_order) {
  if (in_stream_order)
    highwater_sim_route(claim_async, unclaim_async);
  else
    highwater_sim_route(claim, unclaim);
}

// --------------------------------------------------------------------------------------------- Locked host memory

Result cuMemHostRegister_v2(void* begin, uint64_t num_bytes, unsigned flags) {
  CALLED(cuMemHostRegister);
  return highwater_sim_register(begin, num_bytes);
}

Result cuMemHostUnregister(void* begin) {
  CALLED(cuMemHostUnregister);
  return highwater_sim_unregister(begin);
}

Result cuMemAllocHost_v2(void** begin, uint64_t num_bytes) {
  CALLED(cuMemAllocHost);
  if (!num_bytes) return INVALID_VALUE;
  Head* head = mmap(NULL, HEAD_BYTES + num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (head == MAP_FAILED) return OUT_OF_MEMORY;
  *head = (Head){num_bytes, -1, GIVEN};
  *begin = (char*)head + HEAD_BYTES;
  const Result refused = highwater_sim_register(*begin, num_bytes);
  if (refused) munmap(head, HEAD_BYTES + num_bytes);
  return refused;
}

Result cuMemFreeHost(void* begin) {
  CALLED(cuMemFreeHost);
  Head* head = (Head*)((char*)begin - HEAD_BYTES);
  const Result refused = highwater_sim_unregister(begin);
  if (!refused) munmap(head, HEAD_BYTES + head->num_bytes);
  return refused;
}

// ------------------------------------------------------------------------------------------------- Virtual memory

typedef struct {
  int type, handle_types;
  struct {
    int type, id;
  } location;
} Properties;

typedef struct Handle {
  int64_t num_bytes;
  int device;
  int is_released;
  Address mapped_at;  // 0: nowhere
  struct Handle* next;
} Handle;

static Handle* handles;
static pthread_mutex_t handles_mutex = PTHREAD_MUTEX_INITIALIZER;

// The memory of a handle is given back when it is neither mapped nor held.
static void free_unused(void) {
  for (Handle** link = &handles; *link;) {
    Handle* handle = *link;
    if (handle->is_released && !handle->mapped_at) {
      *link = handle->next;
      highwater_sim_refund(handle->device, handle->num_bytes);
      mapped_bytes -= handle->num_bytes;
      free(handle);
    } else {
      link = &handle->next;
    }
  }
}

Result cuMemAddressReserve(Address* address, uint64_t num_bytes, uint64_t alignment, Address hint, uint64_t flags) {
  CALLED(cuMemAddressReserve);
  void* begin = mmap(NULL, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return OUT_OF_MEMORY;
  *address = (Address)begin;
  return SUCCESS;
}

Result cuMemAddressFree(Address address, uint64_t num_bytes) {
  CALLED(cuMemAddressFree);
  return munmap((void*)address, num_bytes) ? INVALID_VALUE : SUCCESS;
}

Result cuMemCreate(Handle** created, uint64_t num_bytes, const Properties* properties, uint64_t flags) {
  CALLED(cuMemCreate);
  const int device = properties->location.id;
  const Result refused = highwater_sim_charge(device, num_bytes);
  if (refused) return refused;
  Handle* handle = calloc(1, sizeof *handle);
  handle->num_bytes = num_bytes;
  handle->device = device;
  pthread_mutex_lock(&handles_mutex);
  handle->next = handles;
  handles = handle;
  pthread_mutex_unlock(&handles_mutex);
  mapped_bytes += num_bytes;
  *created = handle;
  return SUCCESS;
}

Result cuMemRelease(Handle* handle) {
  CALLED(cuMemRelease);
  pthread_mutex_lock(&handles_mutex);
  handle->is_released = 1;
  free_unused();
  pthread_mutex_unlock(&handles_mutex);
  return SUCCESS;
}

Result cuMemMap(Address address, uint64_t num_bytes, uint64_t offset, Handle* handle, uint64_t flags) {
  CALLED(cuMemMap);
  if (offset || handle->mapped_at || num_bytes != (uint64_t)handle->num_bytes) return INVALID_VALUE;
  handle->mapped_at = address;
  highwater_sim_add_range(handle->device, (void*)address, num_bytes);
  return SUCCESS;
}

Result cuMemSetAccess(Address address, uint64_t num_bytes, const void* descriptors, uint64_t num_descriptors) {
  CALLED(cuMemSetAccess);
  if (mprotect((void*)address, num_bytes, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
  madvise((void*)address, num_bytes, MADV_HUGEPAGE);
  memset((void*)address, 0xFF, num_bytes);
  return SUCCESS;
}

Result cuMemUnmap(Address address, uint64_t num_bytes) {
  CALLED(cuMemUnmap);
  pthread_mutex_lock(&handles_mutex);
  for (Handle* handle = handles; handle; handle = handle->next)
    if (handle->mapped_at >= address && handle->mapped_at < address + num_bytes) {
      highwater_sim_remove_range((void*)handle->mapped_at);
      handle->mapped_at = 0;
    }
  free_unused();
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const int failed = mmap((void*)address, num_bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED;
  pthread_mutex_unlock(&handles_mutex);
  return failed ? INVALID_VALUE : SUCCESS;
}

// ---------------------------------------------------------------------------------------------- Copies and events

Result cuMemcpyHtoDAsync_v2(Address to, const void* from, uint64_t num_bytes, void* stream) {
  CALLED(cuMemcpyHtoDAsync);
  copied_to_device += num_bytes;
  const int device = highwater_sim_current_device();
  return highwater_sim_copy(device, (int64_t)stream, (void*)to, from, num_bytes, 1);
}

Result cuMemcpyDtoHAsync_v2(void* to, Address from, uint64_t num_bytes, void* stream) {
  CALLED(cuMemcpyDtoHAsync);
  copied_to_host += num_bytes;
  const int device = highwater_sim_current_device();
  return highwater_sim_copy(device, (int64_t)stream, to, (void*)from, num_bytes, 0);
}

typedef struct {
  void* recorded;  // of the simulated device; NULL: never
} Event;

Result cuEventCreate(Event** event, unsigned flags) {
  CALLED(cuEventCreate);
  *event = calloc(1, sizeof **event);
  return SUCCESS;
}

Result cuEventDestroy_v2(Event* event) {
  CALLED(cuEventDestroy);
  highwater_sim_forget(event->recorded);
  free(event);
  return SUCCESS;
}

Result cuEventRecord(Event* event, void* stream) {
  CALLED(cuEventRecord);
  highwater_sim_forget(event->recorded);
  event->recorded = highwater_sim_record(highwater_sim_current_device(), (int64_t)stream);
  return SUCCESS;
}

Result cuEventSynchronize(Event* event) {
  CALLED(cuEventSynchronize);
  highwater_sim_wait(event->recorded);
  return SUCCESS;
}

// ------------------------------------------------------------------------------------------- How the driver is found

Result cuGetProcAddress(const char* name, void** function, int version, uint64_t flags, void* status) {
  static const struct {
    const char* name;
    void* function;
  } functions[] = {
#define AS_NAMED(name) {#name, name}
#define VERSION_2(name) {#name, name##_v2}
      AS_NAMED(cuInit), AS_NAMED(cuGetErrorString), AS_NAMED(cuCtxGetDevice), AS_NAMED(cuCtxSynchronize),
      AS_NAMED(cuDeviceGet), AS_NAMED(cuDeviceGetAttribute), VERSION_2(cuDeviceTotalMem), AS_NAMED(cuDeviceGetName),
      AS_NAMED(cuDeviceGetUuid), VERSION_2(cuMemGetInfo), VERSION_2(cuMemAlloc), VERSION_2(cuMemFree),
      AS_NAMED(cuMemAllocAsync), AS_NAMED(cuMemFreeAsync), VERSION_2(cuMemAllocHost), AS_NAMED(cuMemFreeHost),
      VERSION_2(cuMemHostRegister), AS_NAMED(cuMemHostUnregister), AS_NAMED(cuMemAddressReserve),
      AS_NAMED(cuMemAddressFree), AS_NAMED(cuMemCreate), AS_NAMED(cuMemMap), AS_NAMED(cuMemSetAccess),
      AS_NAMED(cuMemUnmap), AS_NAMED(cuMemRelease), VERSION_2(cuMemcpyHtoDAsync), VERSION_2(cuMemcpyDtoHAsync),
      AS_NAMED(cuEventCreate), VERSION_2(cuEventDestroy), AS_NAMED(cuEventRecord), AS_NAMED(cuEventSynchronize)};
  enum { PER_THREAD_STREAM = 2 };
  *function = NULL;
  for (unsigned i = 0; i < sizeof functions / sizeof *functions; i++)
    if (!strcmp(name, functions[i].name)) *function = functions[i].function;
  if (*function == cuMemAllocAsync && flags & PER_THREAD_STREAM) *function = cuMemAllocAsync_ptsz;
  if (*function == cuMemFreeAsync && flags & PER_THREAD_STREAM) *function = cuMemFreeAsync_ptsz;
  if (!*function) fprintf(stderr, "the fake CUDA driver has no %s\n", name);
  return *function ? SUCCESS : NOT_FOUND;
}
