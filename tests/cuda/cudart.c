/* A double of the CUDA runtime, for hosts without a GPU. It is strict: what the real one forbids or
 * leaves undefined fails here. The tests of tests/gpu/test_rules.py say rule by rule what it does,
 * and run against a real device too; tests/cuda/__init__.py lists what no device has confirmed.
 *
 * "Device" memory is a memfd of the process that allocated it, mapped twice: at the address that is
 * given out for nobody (PROT_NONE: a processor that touches it dies), and once more for the copies
 * in here. An IPC handle names the process and its descriptor, so memory ends with its owner and
 * the last mapping, and nothing is left behind. An event is a word in shared memory.
 *
 * A stream is a queue and a thread: what is in one stream runs in order, of two streams in none.
 * What a call begins has not happened when it returns, unless CUDA says that it has.
 *
 *   DOUBLE_DEVICES   how many there are (2)           DOUBLE_BYTES   memory of each (256 MiB)
 *   DOUBLE_COUNT_ERROR  what cudaGetDeviceCount returns (0)
 *   DOUBLE_VERSION   of the runtime, whose major says which cudaMemcpyBatchAsync this is (12080)
 *   DOUBLE_MEMORY    "reachable": the processor reaches device memory, which says it is the host's
 *   DOUBLE_LATE_US   the longest that a copy is late (0); DOUBLE_SEED says by how much and in which
 *                    order those of a batch are done
 *   DOUBLE_PEERS     1: devices reach each other, so memory of one opens on another too
 *   DOUBLE_PINNABLE  so many bytes of the host can be registered (all)
 *   DOUBLE_BREAKS    after so many copied bytes of this process the device breaks, for good
 *   DOUBLE_OUTLIVES  1: copies run in a process of their own, and land after their caller's end
 *
 * Compiled with -DWITHOUT_BATCH, it is a runtime of before 12.8.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DIRECTION = 21,
    NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400,
    NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
    LAUNCH_FAILURE = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907
};
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT_COPY };
enum { EVENT_FLAGS = 7, DISABLE_TIMING = 2, INTERPROCESS = 4, LAZY_PEER_ACCESS = 1 };
enum { NON_BLOCKING = 1, IN_STREAM_ORDER = 1, DURING_CALL = 2, IN_ANY_ORDER = 3 };
enum { CAPTURE_GLOBAL, CAPTURE_OF_THREAD, CAPTURE_RELAXED };
enum { MEMORY = 0x6d656d30, EVENT = 0x65766e30, MOST = 4096, DEVICES = 64, PAGE = 4096 };

typedef struct { unsigned char bytes[64]; } Handle;
typedef struct { uint32_t magic, device; int32_t pid, fd; uint64_t size; } Name;
/* Device memory: at `address` for who uses it, at `mine` for the copies in here. */
typedef struct { char *address, *mine; size_t size; int fd, device, opened; Name of; } Piece;
typedef struct { char *address; size_t size; int device, is_shared; } Registration;

/* `wanted` counts how often it was recorded, `come` up to which of these its stream has come. */
typedef struct { volatile uint32_t wanted, come, failed; } Word;
typedef struct Event {
    Word *word;
    int fd, device, is_mine, is_shared, is_captured;
} Event;

typedef struct { char *to; const char *from; size_t size; int fill, is_early; } Move;
typedef void (*HostFunction)(void *);
enum { COPY, RECORD, WAIT_EVENT, WAIT_STREAM, CALL };
typedef struct Op {
    struct Op *next;
    int kind, can_outlive;
    Move *moves;
    size_t count, breaks_after; /* bytes after which it fails; SIZE_MAX: never */
    int error;                  /* of a copy that leaves its range */
    char *staged;               /* what was read when it was called */
    Word *word;
    uint32_t number;
    struct Stream *other;
    uint64_t ticket;
    HostFunction call;
    void *argument;
} Op;
typedef struct Stream {
    Op *first, **end;
    uint64_t submitted, finished;
    int device, is_blocking, is_held, is_over, is_capturing, capture_mode, is_spoiled;
    pid_t capture_thread;
} Stream;

static Piece pieces[MOST];
static Registration registrations[MOST];
static Stream *streams[MOST], *defaults[DEVICES];
static Event *events[MOST];
static int n_pieces, n_registrations; /* none lies behind these */
static size_t used[DEVICES];
/* One lock for all of it; copies run without it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int poison, next_error, is_begun, reaches; /* `reaches`: see double_reach */
static size_t next_break = SIZE_MAX, begun; /* `begun`: bytes of all copies so far */
static pid_t home;
static uint64_t dice;
static __thread int current = 0, last = 0;

static long number_of(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}
static int devices(void) { return (int)number_of("DOUBLE_DEVICES", 2); }
static int is_reachable(void) {
    const char *text = getenv("DOUBLE_MEMORY");
    return reaches || (text && !strcmp(text, "reachable"));
}
static int fail(int error) { if (error) last = error; return error; }
static int locked(int error) { pthread_mutex_unlock(&lock); return fail(error); }

static uint64_t roll(void) { /* splitmix64 */
    if (!dice) dice = (uint64_t)number_of("DOUBLE_SEED", 1);
    uint64_t found = __atomic_add_fetch(&dice, 0x9e3779b97f4a7c15, __ATOMIC_RELAXED);
    found = (found ^ (found >> 30)) * 0xbf58476d1ce4e5b9;
    found = (found ^ (found >> 27)) * 0x94d049bb133111eb;
    return found ^ (found >> 31);
}

const char *cudaGetErrorName(int error) {
    switch (error) {
    case OK: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case NO_MEMORY: return "cudaErrorMemoryAllocation";
    case NOT_INITIALIZED: return "cudaErrorInitializationError";
    case INVALID_DIRECTION: return "cudaErrorInvalidMemcpyDirection";
    case NO_DEVICE: return "cudaErrorNoDevice";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case INVALID_CONTEXT: return "cudaErrorDeviceUninitialized";
    case INVALID_HANDLE: return "cudaErrorInvalidResourceHandle";
    case NOT_READY: return "cudaErrorNotReady";
    case ILLEGAL_ADDRESS: return "cudaErrorIllegalAddress";
    case ALREADY_REGISTERED: return "cudaErrorHostMemoryAlreadyRegistered";
    case NOT_REGISTERED: return "cudaErrorHostMemoryNotRegistered";
    case LAUNCH_FAILURE: return "cudaErrorLaunchFailure";
    case CAPTURE_UNSUPPORTED: return "cudaErrorStreamCaptureUnsupported";
    case CAPTURE_INVALIDATED: return "cudaErrorStreamCaptureInvalidated";
    case CAPTURE_UNMATCHED: return "cudaErrorStreamCaptureUnmatched";
    case CAPTURE_IMPLICIT: return "cudaErrorStreamCaptureImplicit";
    case CAPTURED_EVENT: return "cudaErrorCapturedEvent";
    }
    return "cudaErrorUnknown";
}
const char *cudaGetErrorString(int error) { return error == NO_MEMORY ? "out of memory" : "no"; }
int cudaGetLastError(void) {
    int was = poison ? poison : last;
    last = 0;
    return was;
}
int cudaPeekAtLastError(void) { return poison ? poison : last; }
static int version_of(void) { return (int)number_of("DOUBLE_VERSION", 12080); }
int cudaRuntimeGetVersion(int *version) {
    *version = version_of();
    return OK;
}
int cudaDriverGetVersion(int *version) {
    *version = version_of() + 10;
    return OK;
}

/* Every call comes through here. One that may touch what is being captured is forbidden meanwhile,
 * to the thread that captures or to all, and spoils the capture. */
enum { SAFE, UNSAFE };
static _Thread_local int interaction = CAPTURE_GLOBAL; /* of this thread with captures of others */
static int enter(int is_unsafe) {
    if (is_begun && getpid() != home) return NOT_INITIALIZED; /* its threads stayed behind */
    if (!is_begun) home = getpid(), is_begun = 1;
    if (poison) return poison;
    int error = __atomic_exchange_n(&next_error, 0, __ATOMIC_SEQ_CST);
    if (error || !is_unsafe || interaction == CAPTURE_RELAXED) return error;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        Stream *one = streams[i];
        if (!one || !one->is_capturing || one->capture_mode == CAPTURE_RELAXED) continue;
        if (one->capture_thread != gettid() &&
            (one->capture_mode == CAPTURE_OF_THREAD || interaction == CAPTURE_OF_THREAD))
            continue;
        one->is_spoiled = 1;
        error = CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_unlock(&lock);
    return error;
}
int cudaThreadExchangeStreamCaptureMode(int *mode) {
    if (!mode || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return fail(INVALID_VALUE);
    int before = interaction;
    interaction = *mode;
    *mode = before;
    return OK;
}
#define ENTER(is_unsafe)                          \
    do {                                          \
        int found_ = enter(is_unsafe);            \
        if (found_) return fail(found_);          \
    } while (0)

/* ---- devices -------------------------------------------------------------------------------- */

int cudaGetDeviceCount(int *count) {
    ENTER(SAFE);
    *count = devices();
    return fail((int)number_of("DOUBLE_COUNT_ERROR", 0));
}
int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    ENTER(SAFE);
    if (device < 0 || device >= devices()) return fail(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
    return OK;
}
int cudaDeviceGetByPCIBusId(int *device, const char *text) {
    unsigned at;
    ENTER(SAFE);
    if (sscanf(text, "0000:%x:00.0", &at) != 1 || at < 1 || (int)at > devices())
        return fail(INVALID_DEVICE);
    *device = (int)at - 1;
    return OK;
}
static size_t whole(void) { return (size_t)number_of("DOUBLE_BYTES", 256L << 20); }

/* The first fields of struct cudaDeviceProp, which are where they are in CUDA 12 and 13. */
typedef struct {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned mask;
    size_t total;
} Properties;
static int properties_of(Properties *found, int device) {
    ENTER(SAFE);
    if (device < 0 || device >= devices()) return fail(INVALID_DEVICE);
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "Double of a GPU");
    memcpy(found->uuid, "a-double-of-gpu", 15);
    found->uuid[15] = (unsigned char)device;
    found->total = whole();
    return OK;
}
/* The name in CUDA 13, and that in 12. */
int cudaGetDeviceProperties(Properties *found, int device) {
    return properties_of(found, device);
}
int cudaGetDeviceProperties_v2(Properties *found, int device) {
    return properties_of(found, device);
}
int cudaSetDevice(int device) {
    ENTER(SAFE);
    if (device < 0 || device >= devices()) return fail(INVALID_DEVICE);
    current = device;
    return OK;
}
int cudaGetDevice(int *device) {
    ENTER(SAFE);
    *device = current;
    return OK;
}
int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    ENTER(SAFE);
    *total = whole();
    *free_bytes = *total - used[current];
    return OK;
}

/* ---- what lies where ------------------------------------------------------------------------ */

static Piece *piece_at(const void *address) {
    for (int i = 0; i < MOST; i++)
        if (pieces[i].address && pieces[i].address == address) return &pieces[i];
    return NULL;
}
static int meets(const char *low, size_t size, const char *other, size_t other_size) {
    return low < other + other_size && other < low + size;
}
static Piece *piece_meeting(const char *address, size_t size) {
    for (int i = 0; i < n_pieces; i++)
        if (pieces[i].address && meets(address, size, pieces[i].address, pieces[i].size))
            return &pieces[i];
    return NULL;
}
static Registration *registration_meeting(const char *address, size_t size) {
    for (int i = 0; i < n_registrations; i++)
        if (registrations[i].address &&
            meets(address, size, registrations[i].address, registrations[i].size))
            return &registrations[i];
    return NULL;
}
enum { PAGEABLE, REGISTERED, ON_DEVICE, MIXED, BEYOND };
typedef struct { int kind, is_shared; char *mine; } Range;
static Range range_of(const void *address, size_t size) {
    char *low = (char *)address;
    Piece *piece = piece_meeting(low, size);
    if (piece) {
        if (low < piece->address || low + size > piece->address + piece->size)
            return (Range){BEYOND, 0, NULL};
        return (Range){ON_DEVICE, 1, piece->mine + (low - piece->address)};
    }
    Registration *one = registration_meeting(low, size);
    if (!one) return (Range){PAGEABLE, 0, low};
    if (low < one->address || low + size > one->address + one->size) return (Range){MIXED, 0, NULL};
    return (Range){REGISTERED, one->is_shared, low};
}
/* Whether all of a range is mapped, to be read and written; and whether all of it is shared. */
static int is_mapped(const char *address, size_t size, int *is_shared) {
    FILE *maps = fopen("/proc/self/maps", "re");
    unsigned long low, high, at = (unsigned long)address, end = at + size;
    char rights[8], line[512];
    *is_shared = 1;
    while (maps && fgets(line, sizeof line, maps) && at < end) {
        if (sscanf(line, "%lx-%lx %4s", &low, &high, rights) != 3 || high <= at) continue;
        if (low > at || rights[0] != 'r' || rights[1] != 'w') break;
        if (rights[3] != 's') *is_shared = 0;
        at = high;
    }
    if (maps) fclose(maps);
    return at >= end;
}

/* ---- streams -------------------------------------------------------------------------------- */

static void nap(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&time, &time) && errno == EINTR) {}
}
/* Every move of a copy, the first at any place; whether all of it was done. */
static int move_all(const Op *op, size_t start) {
    size_t left = op->breaks_after;
    for (size_t i = 0; i < op->count; i++) {
        Move *move = &op->moves[(i + start) % op->count];
        size_t size = move->size < left ? move->size : left;
        if (move->from) memmove(move->to, move->from, size);
        else memset(move->to, move->fill, size);
        left -= left == SIZE_MAX ? 0 : size;
        if (size < move->size) return 0;
    }
    return 1;
}
static int run_copy(const Op *op) {
    long late = number_of("DOUBLE_LATE_US", 0), us = late ? (long)(roll() % (uint64_t)late) : 0;
    size_t start = op->count ? roll() % op->count : 0;
    if (op->error) return op->error;
    if (!op->can_outlive || number_of("DOUBLE_OUTLIVES", 0) != 1) {
        nap(us);
        return move_all(op, start) ? OK : LAUNCH_FAILURE;
    }
    /* All of it lies in shared mappings, which a forked process has at the same addresses. It keeps
     * nothing else of its parent: a descriptor would hide that end from who waits for it. */
    pid_t child = fork();
    if (!child) {
        syscall(SYS_close_range, 0, ~0U, 0);
        prctl(PR_SET_NAME, "double-copier");
        nap(us);
        _exit(move_all(op, start) ? 0 : 1);
    }
    int status = 1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return status ? LAUNCH_FAILURE : OK;
}
static int may_run(const Stream *stream) {
    const Op *op = stream->first;
    if (!op || stream->is_held) return 0;
    if (op->kind == WAIT_STREAM) return op->other->finished >= op->ticket;
    if (op->kind == WAIT_EVENT)
        return op->word->failed || (int32_t)(op->word->come - op->number) >= 0;
    return 1;
}
static void *serve(void *given) {
    Stream *stream = given;
    prctl(PR_SET_NAME, "cuda-double");
    pthread_mutex_lock(&lock);
    while (stream->first || !stream->is_over) {
        if (!may_run(stream)) {
            if (!stream->first || stream->is_held || stream->first->kind != WAIT_EVENT) {
                pthread_cond_wait(&changed, &lock);
                continue;
            }
            /* The event may be another process's, which sends no word to us. */
            pthread_mutex_unlock(&lock);
            nap(200);
            pthread_mutex_lock(&lock);
            continue;
        }
        Op *op = stream->first;
        if (op->kind == COPY && !poison) {
            pthread_mutex_unlock(&lock);
            int error = run_copy(op);
            pthread_mutex_lock(&lock);
            if (error && !poison) poison = error;
        }
        if (op->kind == CALL) {
            pthread_mutex_unlock(&lock);
            op->call(op->argument);
            pthread_mutex_lock(&lock);
        }
        if (op->kind == RECORD) {
            if (poison) op->word->failed = (uint32_t)poison;
            else if ((int32_t)(op->number - op->word->come) > 0) op->word->come = op->number;
        }
        stream->first = op->next;
        if (!stream->first) stream->end = &stream->first;
        stream->finished++;
        free(op->moves);
        free(op->staged);
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}
static Stream *new_stream(int device, int is_blocking) {
    pthread_t thread;
    sigset_t all, before;
    Stream *stream = calloc(1, sizeof *stream);
    stream->end = &stream->first;
    stream->device = device;
    stream->is_blocking = is_blocking;
    sigfillset(&all); /* signals are the process's, not ours */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, serve, stream)) abort();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_detach(thread);
    return stream;
}
/* The stream of a handle: NULL and 1 are the default one of this thread's device; NULL if none. */
static Stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= 1) {
        if (!defaults[current]) defaults[current] = new_stream(current, 1);
        return defaults[current];
    }
    for (int i = 0; i < MOST; i++)
        if (streams[i] && streams[i] == handle) return streams[i];
    return NULL;
}
/* The default stream cannot be used while a blocking stream of its device captures. */
static int is_locked_out(Stream *stream) {
    for (int i = 0; stream == defaults[stream->device] && i < MOST; i++)
        if (streams[i] && streams[i]->is_blocking && streams[i]->is_capturing &&
            streams[i]->device == stream->device)
            return 1;
    return 0;
}
static int find_stream(void *handle, Stream **found) {
    *found = stream_of(handle);
    if (!*found) return INVALID_HANDLE;
    return is_locked_out(*found) ? CAPTURE_IMPLICIT : OK;
}
/* One to be waited for, or asked: what is captured cannot be, and the capture is over by that. */
static int find_running_stream(void *handle, Stream **found) {
    int error = find_stream(handle, found);
    if (error || !(*found)->is_capturing) return error;
    (*found)->is_spoiled = 1;
    return CAPTURE_UNSUPPORTED;
}
static void append(Stream *stream, Op *op) {
    *stream->end = op;
    stream->end = &op->next;
    stream->submitted++;
}
static void append_wait(Stream *stream, Stream *other) {
    if (!other || other == stream || other->finished == other->submitted) return;
    Op *op = calloc(1, sizeof *op);
    op->kind = WAIT_STREAM;
    op->other = other;
    op->ticket = other->submitted;
    append(stream, op);
}
/* The default stream waits for the blocking ones of its device, and they for it. */
static void submit(Stream *stream, Op *op) {
    if (stream == defaults[stream->device]) {
        for (int i = 0; i < MOST; i++)
            if (streams[i] && streams[i]->is_blocking && streams[i]->device == stream->device)
                append_wait(stream, streams[i]);
    } else if (stream->is_blocking) {
        append_wait(stream, defaults[stream->device]);
    }
    append(stream, op);
    pthread_cond_broadcast(&changed);
}
static void wait_for(Stream *stream) { /* with the lock */
    uint64_t ticket = stream->submitted;
    while (stream->finished < ticket) pthread_cond_wait(&changed, &lock);
}
static void wait_for_device(int device) {
    if (defaults[device]) wait_for(defaults[device]);
    for (int i = 0; i < MOST; i++)
        if (streams[i] && streams[i]->device == device) wait_for(streams[i]);
}

int cudaStreamCreateWithFlags(Stream **stream, unsigned flags) {
    ENTER(SAFE);
    if (flags > NON_BLOCKING) return fail(INVALID_VALUE);
    pthread_mutex_lock(&lock);
    int error = NO_MEMORY;
    for (int i = 0; i < MOST && error; i++)
        if (!streams[i]) *stream = streams[i] = new_stream(current, !flags), error = OK;
    return locked(error);
}
static int is_at_rest(Stream *stream) { return stream->finished == stream->submitted; }
int cudaStreamQuery(void *handle) {
    ENTER(UNSAFE);
    Stream *stream;
    pthread_mutex_lock(&lock);
    int error = find_running_stream(handle, &stream);
    return locked(error ? error : is_at_rest(stream) ? poison : NOT_READY);
}
int cudaStreamSynchronize(void *handle) {
    ENTER(UNSAFE);
    Stream *stream;
    pthread_mutex_lock(&lock);
    int error = find_running_stream(handle, &stream);
    if (error) return locked(error);
    wait_for(stream);
    return locked(poison);
}
int cudaStreamDestroy(void *handle) {
    ENTER(SAFE);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (streams[i] && streams[i] == handle) {
            streams[i]->is_over = 1; /* what is in it still runs; its memory is never given back */
            streams[i] = NULL;
            pthread_cond_broadcast(&changed);
            return locked(OK);
        }
    return locked(INVALID_HANDLE);
}
int cudaLaunchHostFunc(void *handle, HostFunction call, void *argument) {
    ENTER(SAFE);
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (!stream || !call) return locked(stream ? INVALID_VALUE : INVALID_HANDLE);
    if (stream->is_capturing) return locked(OK);
    Op *op = calloc(1, sizeof *op);
    op->kind = CALL;
    op->call = call;
    op->argument = argument;
    submit(stream, op);
    return locked(OK);
}
int cudaDeviceSynchronize(void) {
    ENTER(UNSAFE);
    pthread_mutex_lock(&lock);
    wait_for_device(current);
    return locked(poison);
}
int cudaStreamIsCapturing(void *handle, int *status) {
    ENTER(SAFE);
    pthread_mutex_lock(&lock);
    Stream *stream;
    int error = find_stream(handle, &stream);
    if (error) return locked(error);
    *status = stream->is_capturing ? 1 + stream->is_spoiled : 0;
    return locked(OK);
}
int cudaStreamBeginCapture(void *handle, int mode) {
    ENTER(SAFE);
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (!stream) return locked(INVALID_HANDLE);
    if (stream == defaults[stream->device]) return locked(CAPTURE_UNSUPPORTED);
    if (stream->is_capturing || mode < 0 || mode > CAPTURE_RELAXED) return locked(INVALID_VALUE);
    stream->is_capturing = 1;
    stream->is_spoiled = 0;
    stream->capture_mode = mode;
    stream->capture_thread = gettid();
    return locked(OK);
}
/* A graph cannot be launched here: what was captured never happens. */
int cudaStreamEndCapture(void *handle, void **graph) {
    ENTER(SAFE);
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (!stream) return locked(INVALID_HANDLE);
    if (!stream->is_capturing) return locked(INVALID_VALUE);
    stream->is_capturing = 0;
    *graph = stream->is_spoiled ? NULL : calloc(1, 1);
    return locked(stream->is_spoiled ? CAPTURE_INVALIDATED : OK);
}
int cudaGraphDestroy(void *graph) {
    free(graph);
    return OK;
}

/* ---- memory --------------------------------------------------------------------------------- */

static char *map(size_t size, int fd, int rights) {
    void *found = mmap(NULL, size, rights, MAP_SHARED, fd, 0);
    return found == MAP_FAILED ? NULL : found;
}
static int place(Piece *one, size_t size, int fd, int device) {
    char *mine = map(size, fd, PROT_READ | PROT_WRITE);
    char *address = !mine || is_reachable() ? mine : map(size, fd, PROT_NONE);
    if (!address) return NO_MEMORY;
    *one = (Piece){address, mine, size, fd, device, 0, {0}};
    if (one - pieces >= n_pieces) n_pieces = (int)(one - pieces) + 1;
    return OK;
}
static void unmap(Piece *one) {
    munmap(one->address, one->size);
    if (one->mine != one->address) munmap(one->mine, one->size);
    *one = (Piece){0};
}
static Piece *free_piece(void) {
    for (int i = 0; i < MOST; i++)
        if (!pieces[i].address) return &pieces[i];
    return NULL;
}
int cudaMalloc(void **address, size_t size) {
    ENTER(UNSAFE);
    pthread_mutex_lock(&lock);
    Piece *one = free_piece();
    int error = NO_MEMORY;
    if (one && size && used[current] + size <= whole()) {
        int fd = memfd_create("double-cuda", MFD_CLOEXEC);
        if (fd >= 0 && !ftruncate(fd, (off_t)size)) error = place(one, size, fd, current);
        if (!error) {
            memset(one->mine, 0xA5, size); /* what is there is nobody's business */
            used[current] += size;
            *address = one->address;
        }
    }
    return locked(error);
}
int cudaFree(void *address) {
    ENTER(UNSAFE);
    if (!address) return OK;
    pthread_mutex_lock(&lock);
    Piece *one = piece_at(address);
    if (!one || one->opened) return locked(INVALID_VALUE);
    wait_for_device(one->device);
    used[one->device] -= one->size;
    close(one->fd);
    unmap(one);
    return locked(poison);
}
int cudaHostRegister(void *address, size_t size, unsigned flags) {
    size_t left = (size_t)number_of("DOUBLE_PINNABLE", LONG_MAX);
    int is_shared;
    ENTER(UNSAFE);
    if (!address || !size || flags > 15) return fail(INVALID_VALUE);
    pthread_mutex_lock(&lock);
    /* Pages are pinned, so two registrations share none. */
    char *low = (char *)((uintptr_t)address & -(uintptr_t)PAGE);
    size_t pages = (((uintptr_t)address + size + PAGE - 1) & -(uintptr_t)PAGE) - (uintptr_t)low;
    if (piece_meeting(low, pages)) return locked(INVALID_VALUE);
    for (int i = 0; i < MOST; i++) {
        Registration *one = &registrations[i];
        uintptr_t start = (uintptr_t)one->address & -(uintptr_t)PAGE;
        size_t room = (((uintptr_t)one->address + one->size + PAGE - 1) & -(uintptr_t)PAGE) - start;
        if (one->address && meets(low, pages, (char *)start, room))
            return locked(ALREADY_REGISTERED);
        left -= room < left ? room : left;
    }
    if (pages > left) return locked(NO_MEMORY);
    if (!is_mapped(address, size, &is_shared)) return locked(INVALID_VALUE);
    for (int i = 0; i < MOST; i++)
        if (!registrations[i].address) {
            registrations[i] = (Registration){address, size, current, is_shared};
            if (i >= n_registrations) n_registrations = i + 1;
            return locked(OK);
        }
    return locked(NO_MEMORY);
}
int cudaHostUnregister(void *address) {
    ENTER(UNSAFE);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (address && registrations[i].address == address) {
            for (int device = 0; device < devices(); device++) wait_for_device(device);
            registrations[i] = (Registration){0};
            return locked(poison);
        }
    return locked(NOT_REGISTERED);
}
typedef struct { int type, device; void *device_pointer, *host_pointer; } Where;
int cudaPointerGetAttributes(Where *where, const void *address) {
    ENTER(SAFE);
    pthread_mutex_lock(&lock);
    Piece *piece = piece_meeting(address, 1);
    Registration *one = registration_meeting(address, 1);
    *where = (Where){0, -1, NULL, (void *)address};
    if (piece && piece->address == piece->mine)
        *where = (Where){1, piece->device, (void *)address, (void *)address};
    else if (piece) *where = (Where){2, piece->device, (void *)address, NULL};
    else if (one) *where = (Where){1, one->device, (void *)address, (void *)address};
    return locked(OK);
}

/* ---- copies --------------------------------------------------------------------------------- */

/* Of a captured stream nothing is done: there is no graph to launch. */
static void begin(Stream *stream, Op *op) {
    size_t limit = (size_t)number_of("DOUBLE_BREAKS", LONG_MAX), size = 0;
    for (size_t i = 0; i < op->count; i++) size += op->moves[i].from ? op->moves[i].size : 0;
    op->breaks_after = next_break;
    if (begun + size > limit) op->breaks_after = begun < limit ? limit - begun : 0;
    begun += size;
    next_break = SIZE_MAX;
    if (!stream->is_capturing) {
        submit(stream, op);
        return;
    }
    free(op->moves);
    free(op->staged);
    free(op);
}
static Op *copy_of(size_t count) {
    Op *op = calloc(1, sizeof *op);
    op->kind = COPY;
    op->moves = calloc(count, sizeof *op->moves);
    op->count = count;
    op->can_outlive = 1;
    op->breaks_after = SIZE_MAX;
    return op;
}
/* Read what is to be read early now, whenever it is written. */
static void stage(Op *op) {
    size_t size = 0;
    for (size_t i = 0; i < op->count; i++) size += op->moves[i].is_early ? op->moves[i].size : 0;
    if (!size) return;
    char *at = op->staged = malloc(size);
    for (Move *move = op->moves; move < op->moves + op->count; move++) {
        if (!move->is_early) continue;
        memcpy(at, move->from, move->size);
        move->from = at;
        at += move->size;
    }
    op->can_outlive = 0;
}
static int is_kind(int kind, Range to, Range from) {
    int is = (from.kind == ON_DEVICE ? DEVICE_TO_HOST : 0) + (to.kind == ON_DEVICE ? 1 : 0);
    return kind == DEFAULT_COPY || kind == is;
}
/* Rows from one place to another. `waits`: as cudaMemcpy does, which returns early only where
 * memory of a device is written, and has read pageable memory by then. */
static int copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width,
                     size_t height, int kind, void *handle, int waits) {
    if (kind < 0 || kind > DEFAULT_COPY) return INVALID_DIRECTION;
    if (!width || !height) return OK;
    if (!to || !from) return INVALID_VALUE;
    Stream *stream;
    int error = find_stream(handle, &stream);
    if (error) return error;
    Range target = range_of(to, (height - 1) * to_pitch + width);
    Range source = range_of(from, (height - 1) * from_pitch + width);
    if (target.kind >= MIXED || source.kind >= MIXED) return INVALID_VALUE;
    if (!is_kind(kind, target, source)) return INVALID_VALUE;
    Op *op = copy_of(height);
    for (size_t i = 0; i < height; i++)
        op->moves[i] = (Move){target.mine + i * to_pitch, source.mine + i * from_pitch, width, 0,
                              source.kind == PAGEABLE && target.kind == ON_DEVICE};
    op->can_outlive = target.is_shared && source.is_shared;
    int returns_early = target.kind == ON_DEVICE && source.kind != REGISTERED;
    if (!waits) returns_early = target.kind != PAGEABLE;
    if (waits && op->moves[0].is_early) wait_for(stream); /* it may be what is written before */
    stage(op);
    begin(stream, op);
    if (!returns_early && !stream->is_capturing) wait_for(stream);
    return returns_early ? OK : poison;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    ENTER(UNSAFE);
    pthread_mutex_lock(&lock);
    return locked(copy_rows(to, size, from, size, size, 1, kind, NULL, 1));
}
int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                 size_t height, int kind) {
    ENTER(UNSAFE);
    if (width > to_pitch || width > from_pitch) return fail(INVALID_VALUE);
    pthread_mutex_lock(&lock);
    return locked(copy_rows(to, to_pitch, from, from_pitch, width, height, kind, NULL, 1));
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    ENTER((uintptr_t)stream <= 1 ? UNSAFE : SAFE);
    pthread_mutex_lock(&lock);
    return locked(copy_rows(to, size, from, size, size, 1, kind, stream, 0));
}
int cudaMemset(void *address, int value, size_t size) {
    ENTER(UNSAFE);
    if (!size) return OK;
    pthread_mutex_lock(&lock);
    Range range = range_of(address, size);
    if (range.kind != ON_DEVICE && range.kind != REGISTERED) return locked(INVALID_VALUE);
    Stream *stream;
    int error = find_stream(NULL, &stream);
    if (error) return locked(error);
    Op *op = copy_of(1);
    op->moves[0] = (Move){range.mine, NULL, size, value, 0};
    op->can_outlive = range.is_shared;
    begin(stream, op);
    if (range.kind == REGISTERED) wait_for(stream);
    return locked(OK);
}

#ifndef WITHOUT_BATCH
typedef struct { int order, hints[4]; unsigned flags; } Attributes;
typedef struct { const char *low; size_t size, piece; int is_written; } Stretch;
static int by_address(const void *a, const void *b) {
    const Stretch *one = a, *other = b;
    return (one->low > other->low) - (one->low < other->low);
}
/* Copies of a batch are in no order, so what one writes no other may read or write. */
static int are_dependent(void *const *to, void *const *from, const size_t *sizes, size_t count) {
    Stretch *all = calloc(2 * count, sizeof *all);
    const char *written = NULL, *read = NULL; /* up to where, by what came before */
    int found = 0;
    for (size_t i = 0; i < count; i++) {
        all[2 * i] = (Stretch){to[i], sizes[i], i, 1};
        all[2 * i + 1] = (Stretch){from[i], sizes[i], i, 0};
    }
    qsort(all, 2 * count, sizeof *all, by_address);
    for (size_t i = 0; i < 2 * count; i++) {
        const char *end = all[i].low + all[i].size;
        if (all[i].low < written || (all[i].is_written && all[i].low < read)) found = 1;
        if (all[i].is_written && end > written) written = end;
        if (!all[i].is_written && end > read) read = end;
    }
    free(all);
    return found;
}
static int batch(void *const *to, void *const *from, const size_t *sizes, size_t count,
                 const Attributes *attributes, const size_t *firsts, size_t n_attributes,
                 size_t *failed, void *handle) {
    *failed = SIZE_MAX;
    if ((uintptr_t)handle <= 1) return INVALID_VALUE; /* never the legacy stream */
    Stream *stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->is_capturing) return CAPTURE_UNSUPPORTED; /* and the capture goes on without it */
    if (!count || !to || !from || !sizes || !attributes || !firsts) return INVALID_VALUE;
    if (!n_attributes || n_attributes > count || firsts[0]) return INVALID_VALUE;
    for (size_t k = 0; k < n_attributes; k++) {
        if (k && firsts[k] <= firsts[k - 1]) return INVALID_VALUE;
        if (firsts[k] >= count || attributes[k].flags > 1) return INVALID_VALUE;
        if (attributes[k].order < IN_STREAM_ORDER || attributes[k].order > IN_ANY_ORDER)
            return INVALID_VALUE;
    }
    Op *op = copy_of(count);
    int error = OK;
    for (size_t i = 0, k = 0; i < count && !error; i++) {
        if (k + 1 < n_attributes && firsts[k + 1] == i) k++;
        Range target = range_of(to[i], sizes[i]), source = range_of(from[i], sizes[i]);
        int is_early = attributes[k].order != IN_STREAM_ORDER;
        *failed = i;
        if (!to[i] || !from[i] || !sizes[i]) error = INVALID_VALUE;
        else if (target.kind == MIXED || source.kind == MIXED) error = INVALID_VALUE;
        else if (target.kind == PAGEABLE) error = INVALID_VALUE;
        else if (source.kind == PAGEABLE && !is_early) error = INVALID_VALUE;
        else if (target.kind == BEYOND || source.kind == BEYOND) op->error = ILLEGAL_ADDRESS;
        op->moves[i] = (Move){target.mine, source.mine, sizes[i], 0, is_early};
        op->can_outlive &= target.is_shared && source.is_shared;
    }
    if (!error && !op->error && are_dependent(to, from, sizes, count)) error = INVALID_VALUE;
    if (!error) {
        if (!op->error) stage(op);
        *failed = SIZE_MAX;
        begin(stream, op);
        return OK;
    }
    free(op->moves);
    free(op->staged);
    free(op);
    return error;
}
/* In CUDA 12 the eighth argument is failIdx and the ninth the stream; in CUDA 13 the eighth is the
 * stream, and there is no ninth. Who calls by the other's signature gives a wrong stream. */
int cudaMemcpyBatchAsync(void *const *to, void *const *from, const size_t *sizes, size_t count,
                         const Attributes *attributes, const size_t *firsts, size_t n_attributes,
                         void *eighth, ...) {
    size_t mine, *failed = &mine;
    void *stream = eighth;
    ENTER(SAFE);
    if (version_of() < 13000) {
        /* By way of va_arg, because the place of an argument belongs to the function: of a call
         * without a ninth the compiler would write into its caller's memory. */
        va_list more;
        va_start(more, eighth);
        stream = va_arg(more, void *);
        va_end(more);
        if (eighth) failed = eighth;
    }
    pthread_mutex_lock(&lock);
    /* The ninth argument of a call with eight is what the stack holds: a stream of before, too. */
    if (failed != &mine && stream_of(failed)) return locked(INVALID_HANDLE);
    return locked(batch(to, from, sizes, count, attributes, firsts, n_attributes, failed, stream));
}
#endif

/* ---- memory of other processes -------------------------------------------------------------- */

int cudaIpcGetMemHandle(Handle *handle, void *address) {
    ENTER(UNSAFE);
    pthread_mutex_lock(&lock);
    Piece *one = piece_at(address);
    if (!one || one->opened) return locked(INVALID_VALUE);
    Name name = {MEMORY, (uint32_t)one->device, getpid(), one->fd, one->size};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &name, sizeof name);
    return locked(OK);
}
static int reopen(const Name *name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name->pid, name->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}
int cudaIpcOpenMemHandle(void **address, Handle handle, unsigned flags) {
    Name name;
    ENTER(UNSAFE);
    memcpy(&name, &handle, sizeof name);
    if (name.magic != MEMORY || flags != LAZY_PEER_ACCESS) return fail(INVALID_VALUE);
    if (name.pid == getpid()) return fail(INVALID_CONTEXT);
    if ((int)name.device != current && !number_of("DOUBLE_PEERS", 0)) return fail(INVALID_DEVICE);
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
        if (fd >= 0 && !fstat(fd, &now) && (uint64_t)now.st_size == name.size &&
            !place(one, name.size, fd, (int)name.device)) {
            one->fd = -1;
            one->opened = 1;
            one->of = name;
            *address = one->address;
            error = OK;
        }
        if (fd >= 0) close(fd);
    }
    return locked(error);
}
int cudaIpcCloseMemHandle(void *address) {
    ENTER(UNSAFE);
    pthread_mutex_lock(&lock);
    Piece *one = piece_at(address);
    if (!one || !one->opened) return locked(INVALID_VALUE);
    if (!--one->opened) {
        wait_for_device(one->device);
        unmap(one);
    }
    return locked(poison);
}

/* ---- events --------------------------------------------------------------------------------- */

static int add_event(Event **event, int fd, int is_mine, int is_shared) {
    Word *word = (Word *)map(PAGE, fd, PROT_READ | PROT_WRITE);
    for (int i = 0; word && i < MOST; i++)
        if (!events[i]) {
            *event = events[i] = malloc(sizeof **event);
            **event = (Event){word, fd, current, is_mine, is_shared, 0};
            return OK;
        }
    return NO_MEMORY;
}
static int is_event(const Event *event) {
    for (int i = 0; i < MOST; i++)
        if (event && events[i] == event) return 1;
    return 0;
}
int cudaEventCreateWithFlags(Event **event, unsigned flags) {
    ENTER(SAFE);
    if (flags > EVENT_FLAGS || ((flags & INTERPROCESS) && !(flags & DISABLE_TIMING)))
        return fail(INVALID_VALUE);
    int fd = memfd_create("double-cuda-event", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, PAGE)) return fail(NO_MEMORY);
    pthread_mutex_lock(&lock);
    return locked(add_event(event, fd, 1, !!(flags & INTERPROCESS)));
}
int cudaEventRecord(Event *event, void *handle) {
    ENTER((uintptr_t)handle <= 1 ? UNSAFE : SAFE);
    pthread_mutex_lock(&lock);
    Stream *stream;
    int error = find_stream(handle, &stream);
    if (error) return locked(error);
    if (!is_event(event) || stream->device != event->device) return locked(INVALID_HANDLE);
    event->is_captured = stream->is_capturing;
    if (stream->is_capturing) return locked(OK);
    Op *op = calloc(1, sizeof *op);
    op->kind = RECORD;
    op->word = event->word;
    op->number = ++event->word->wanted;
    event->word->failed = 0;
    submit(stream, op);
    return locked(OK);
}
static int state_of(const Word *word) {
    if (word->failed) return (int)word->failed;
    return (int32_t)(word->come - word->wanted) >= 0 ? OK : NOT_READY;
}
static int ask_event(Event *event) { /* with the lock */
    if (!is_event(event)) return INVALID_HANDLE;
    return event->is_captured ? CAPTURED_EVENT : state_of(event->word);
}
int cudaEventQuery(Event *event) {
    ENTER(UNSAFE);
    pthread_mutex_lock(&lock);
    return locked(ask_event(event));
}
int cudaEventSynchronize(Event *event) {
    ENTER(UNSAFE);
    for (;;) {
        pthread_mutex_lock(&lock);
        int state = ask_event(event);
        pthread_mutex_unlock(&lock);
        if (state != NOT_READY) return fail(state);
        nap(100);
    }
}
int cudaStreamWaitEvent(void *handle, Event *event, unsigned flags) {
    ENTER(SAFE);
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (!is_event(event) || !stream) return locked(INVALID_HANDLE);
    if (flags > 1) return locked(INVALID_VALUE);
    if (stream->is_capturing) return locked(OK);
    Op *op = calloc(1, sizeof *op);
    op->kind = WAIT_EVENT;
    op->word = event->word;
    op->number = event->word->wanted;
    submit(stream, op);
    return locked(OK);
}
/* Its word stays mapped: what waits for it may still be in a queue. */
int cudaEventDestroy(Event *event) {
    ENTER(SAFE);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (event && events[i] == event) {
            close(event->fd);
            free(event);
            events[i] = NULL;
            return locked(OK);
        }
    return locked(INVALID_HANDLE);
}
int cudaIpcGetEventHandle(Handle *handle, Event *event) {
    ENTER(UNSAFE);
    pthread_mutex_lock(&lock);
    if (!is_event(event) || !event->is_mine || !event->is_shared) return locked(INVALID_HANDLE);
    Name name = {EVENT, (uint32_t)event->device, getpid(), event->fd, PAGE};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &name, sizeof name);
    return locked(OK);
}
int cudaIpcOpenEventHandle(Event **event, Handle handle) {
    Name name;
    ENTER(UNSAFE);
    memcpy(&name, &handle, sizeof name);
    if (name.magic != EVENT || (int)name.device != current) return fail(INVALID_HANDLE);
    if (name.pid == getpid()) return fail(INVALID_CONTEXT);
    int fd = reopen(&name);
    pthread_mutex_lock(&lock);
    return locked(fd < 0 ? INVALID_HANDLE : add_event(event, fd, 0, 0));
}

/* ---- not of CUDA: what tests make a device do ------------------------------------------------ */

/* Nothing more of a stream is done until it is let go of; what has begun is brought to its end. */
void double_hold(Stream *stream, int is_held) {
    pthread_mutex_lock(&lock);
    stream->is_held = is_held;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
/* Its stream has come to the event, or what was before it has failed; whatever else is in it. */
void double_set(Event *event, int state) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        for (Op **at = streams[i] ? &streams[i]->first : NULL; at && *at;) {
            Op *op = *at;
            if (op->kind != RECORD || op->word != event->word) {
                at = &op->next;
                continue;
            }
            *at = op->next;
            if (!op->next) streams[i]->end = at;
            streams[i]->finished++;
            free(op);
        }
    event->word->come = event->word->wanted;
    event->word->failed = (uint32_t)state;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
/* The next call fails with this error, and does nothing. */
void double_fail_next(int error) { __atomic_store_n(&next_error, error, __ATOMIC_SEQ_CST); }
/* The next copy fails after so many bytes, as a device that breaks: for good. */
void double_break_next(size_t after) {
    pthread_mutex_lock(&lock);
    next_break = after;
    pthread_mutex_unlock(&lock);
}
/* Every call fails from now on; 0 ends it, which no real device does. */
void double_poison(int error) {
    pthread_mutex_lock(&lock);
    poison = error;
    pthread_mutex_unlock(&lock);
}
/* What this process opens or allocates from now on its processor reaches, as a kernel would: a test
 * that stands for an engine's kernels wants that, and what they work with says it is the host's. */
/* The device memory that this process has allocated; as many addresses as there are. */
int double_memory(void **found, int most) {
    int n = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && n < most; i++)
        if (pieces[i].address && !pieces[i].opened) found[n++] = pieces[i].address;
    pthread_mutex_unlock(&lock);
    return n;
}
void double_reach(int is_reached) { reaches = is_reached; }
