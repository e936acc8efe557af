/* A double of the CUDA runtime, for hosts without a GPU: "device" memory is a memfd of the process
 * that allocated it, an IPC handle names that process and its descriptor, so memory ends with its
 * owner and the last mapping, and nothing is left behind. An event is a shared word. It is strict:
 * what the real one forbids or leaves undefined fails here. Memory is that of the host, and
 * cudaPointerGetAttributes says so.
 *
 *   DOUBLE_DEVICES   how many there are (2)           DOUBLE_BYTES   memory of each (256 MiB)
 *   DOUBLE_COUNT_ERROR  what cudaGetDeviceCount returns (0)
 *   DOUBLE_SIDE      what cudaPointerGetAttributes says: 1 host, 2 device (1)
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, LAUNCH_FAILURE = 719
};
enum { DEFAULT_COPY = 4, INTERPROCESS = 6, LAZY_PEER_ACCESS = 1, MOST = 4096 };
enum { MEMORY = 0x6d656d30, EVENT = 0x65766e30 };

typedef struct { unsigned char bytes[64]; } Handle;
typedef struct { uint32_t magic, device; int32_t pid, fd; uint64_t size; } Name;
typedef struct { char *address; size_t size; int fd, device, opened; Name of; } Piece;
typedef struct { volatile uint32_t *state; int fd, device, is_mine; } Event;

static Piece pieces[MOST];
static size_t used[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current = 0, last = 0;

static long number_of(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}
static int devices(void) { return (int)number_of("DOUBLE_DEVICES", 2); }
static int fail(int error) { if (error) last = error; return error; }

const char *cudaGetErrorName(int error) {
    switch (error) {
    case OK: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case NO_MEMORY: return "cudaErrorMemoryAllocation";
    case NO_DEVICE: return "cudaErrorNoDevice";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case INVALID_CONTEXT: return "cudaErrorDeviceUninitialized";
    case INVALID_HANDLE: return "cudaErrorInvalidResourceHandle";
    case NOT_READY: return "cudaErrorNotReady";
    case LAUNCH_FAILURE: return "cudaErrorLaunchFailure";
    }
    return "cudaErrorUnknown";
}
const char *cudaGetErrorString(int error) { return error == NO_MEMORY ? "out of memory" : "no"; }
int cudaGetLastError(void) { int was = last; last = 0; return was; }
int cudaRuntimeGetVersion(int *version) { *version = 12080; return OK; }
int cudaDriverGetVersion(int *version) { *version = 12090; return OK; }
int cudaGetDeviceCount(int *count) {
    *count = devices();
    return fail((int)number_of("DOUBLE_COUNT_ERROR", 0));
}
int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    if (device < 0 || device >= devices()) return fail(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
    return OK;
}
int cudaDeviceGetByPCIBusId(int *device, const char *text) {
    unsigned at;
    if (sscanf(text, "0000:%x:00.0", &at) != 1 || at < 1 || (int)at > devices())
        return fail(INVALID_DEVICE);
    *device = (int)at - 1;
    return OK;
}
int cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return fail(INVALID_DEVICE);
    current = device;
    return OK;
}
int cudaGetDevice(int *device) {
    *device = current;
    return OK;
}
static size_t whole(void) { return (size_t)number_of("DOUBLE_BYTES", 256L << 20); }
int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = whole();
    *free_bytes = *total - used[current];
    return OK;
}

static Piece *piece_at(const void *address) {
    for (int i = 0; i < MOST; i++)
        if (pieces[i].address && pieces[i].address == address) return &pieces[i];
    return NULL;
}
static Piece *piece_with(const void *address) {
    for (int i = 0; i < MOST; i++) {
        char *low = pieces[i].address;
        if (low && (char *)address >= low && (char *)address < low + pieces[i].size)
            return &pieces[i];
    }
    return NULL;
}
static Piece *free_piece(void) {
    for (int i = 0; i < MOST; i++)
        if (!pieces[i].address) return &pieces[i];
    return NULL;
}

int cudaMalloc(void **address, size_t size) {
    pthread_mutex_lock(&lock);
    Piece *one = free_piece();
    int error = NO_MEMORY;
    if (one && size && used[current] + size <= whole()) {
        int fd = memfd_create("double-cuda", MFD_CLOEXEC);
        void *found = MAP_FAILED;
        if (fd >= 0 && !ftruncate(fd, (off_t)size))
            found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (found != MAP_FAILED) {
            memset(found, 0xA5, size); /* what is there is nobody's business */
            *one = (Piece){found, size, fd, current, 0, {0}};
            used[current] += size;
            *address = found;
            error = OK;
        }
    }
    pthread_mutex_unlock(&lock);
    return fail(error);
}
int cudaFree(void *address) {
    pthread_mutex_lock(&lock);
    Piece *one = piece_at(address);
    int error = one && !one->opened ? OK : INVALID_VALUE;
    if (!error) {
        used[one->device] -= one->size;
        munmap(one->address, one->size);
        close(one->fd);
        *one = (Piece){0};
    }
    pthread_mutex_unlock(&lock);
    return fail(error);
}
int cudaMemset(void *address, int value, size_t size) {
    memset(address, value, size);
    return OK;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    if (kind != DEFAULT_COPY) return fail(INVALID_VALUE);
    memmove(to, from, size);
    return OK;
}
int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                 size_t height, int kind) {
    if (kind != DEFAULT_COPY || width > to_pitch || width > from_pitch) return fail(INVALID_VALUE);
    for (size_t i = 0; i < height; i++)
        memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return OK;
}
int cudaDeviceSynchronize(void) { return OK; }

typedef struct { int type, device; void *device_pointer, *host_pointer; long reserved[8]; } Where;
int cudaPointerGetAttributes(Where *where, const void *address) {
    Piece *one = piece_with(address);
    memset(where, 0, sizeof *where);
    if (one) {
        where->type = (int)number_of("DOUBLE_SIDE", 1);
        where->device = one->device;
        where->host_pointer = (void *)address;
    }
    return OK;
}

int cudaIpcGetMemHandle(Handle *handle, void *address) {
    Piece *one = piece_at(address);
    if (!one || one->opened) return fail(INVALID_VALUE);
    Name name = {MEMORY, (uint32_t)one->device, getpid(), one->fd, one->size};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &name, sizeof name);
    return OK;
}
static int reopen(const Name *name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name->pid, name->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}
int cudaIpcOpenMemHandle(void **address, Handle handle, unsigned flags) {
    Name name;
    memcpy(&name, &handle, sizeof name);
    if (name.magic != MEMORY || flags != LAZY_PEER_ACCESS) return fail(INVALID_VALUE);
    if (name.pid == getpid()) return fail(INVALID_CONTEXT);
    if ((int)name.device != current) return fail(INVALID_DEVICE);
    pthread_mutex_lock(&lock);
    int error = INVALID_HANDLE;
    Piece *one = NULL;
    for (int i = 0; i < MOST && !one; i++)
        if (pieces[i].opened && !memcmp(&pieces[i].of, &name, sizeof name)) one = &pieces[i];
    if (one) {
        one->opened++;
        *address = one->address;
        error = OK;
    } else if ((one = free_piece())) {
        int fd = reopen(&name);
        struct stat now;
        if (fd >= 0 && !fstat(fd, &now) && (uint64_t)now.st_size == name.size) {
            void *found = mmap(NULL, name.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (found != MAP_FAILED) {
                *one = (Piece){found, name.size, -1, (int)name.device, 1, name};
                *address = found;
                error = OK;
            }
        }
        if (fd >= 0) close(fd);
    }
    pthread_mutex_unlock(&lock);
    return fail(error);
}
int cudaIpcCloseMemHandle(void *address) {
    pthread_mutex_lock(&lock);
    Piece *one = piece_at(address);
    int error = one && one->opened ? OK : INVALID_VALUE;
    if (!error && !--one->opened) {
        munmap(one->address, one->size);
        *one = (Piece){0};
    }
    pthread_mutex_unlock(&lock);
    return fail(error);
}

static int map_event(Event **event, int fd, int is_mine) {
    void *found = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    Event *one = calloc(1, sizeof *one);
    if (found == MAP_FAILED || !one) return fail(NO_MEMORY);
    *one = (Event){found, fd, current, is_mine};
    *event = one;
    return OK;
}
int cudaEventCreateWithFlags(Event **event, unsigned flags) {
    int fd = memfd_create("double-cuda-event", MFD_CLOEXEC);
    if (flags != INTERPROCESS || fd < 0 || ftruncate(fd, 4096)) return fail(INVALID_VALUE);
    return map_event(event, fd, 1);
}
/* Recorded in the default stream it has come; in any other one it comes by double_set. */
int cudaEventRecord(Event *event, void *stream) {
    *event->state = stream ? NOT_READY : OK;
    return OK;
}
int cudaEventQuery(Event *event) { return fail((int)*event->state); }
int cudaEventDestroy(Event *event) {
    munmap((void *)event->state, 4096);
    close(event->fd);
    free(event);
    return OK;
}
int cudaIpcGetEventHandle(Handle *handle, Event *event) {
    Name name = {EVENT, (uint32_t)event->device, getpid(), event->fd, 4096};
    if (!event->is_mine) return fail(INVALID_HANDLE);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &name, sizeof name);
    return OK;
}
int cudaIpcOpenEventHandle(Event **event, Handle handle) {
    Name name;
    memcpy(&name, &handle, sizeof name);
    if (name.magic != EVENT || (int)name.device != current) return fail(INVALID_HANDLE);
    if (name.pid == getpid()) return fail(INVALID_CONTEXT);
    int fd = reopen(&name);
    return fd < 0 ? fail(INVALID_HANDLE) : map_event(event, fd, 0);
}

/* Not of CUDA: what a stream does when it comes to the event. */
void double_set(Event *event, int state) { *event->state = (uint32_t)state; }
