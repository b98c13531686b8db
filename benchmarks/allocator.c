/* Counts what torch's CPU allocator has given and not yet got back, in all threads. To be preloaded:

     cc -O2 -shared -fPIC -o allocator.so allocator.c -ldl -lpthread

   The allocator asks posix_memalign for each block, from libc10.so; other libraries' blocks are not counted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS (1u << 22)
#define GONE ((void *)1)

static struct { void *block; size_t size; } slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t held, most;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static size_t place(void *block) { return ((uintptr_t)block >> 6) * 2654435761u % SLOTS; }

int posix_memalign(void **block, size_t alignment, size_t size) {
  if (!real_memalign) real_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  int code = real_memalign(block, alignment, size);
  Dl_info from;
  if (code || !dladdr(__builtin_return_address(0), &from) || !strstr(from.dli_fname, "libc10.so")) return code;
  pthread_mutex_lock(&lock);
  size_t at = place(*block);
  while (slots[at].block && slots[at].block != GONE) at = (at + 1) % SLOTS;
  slots[at].block = *block;
  slots[at].size = size;
  held += size;
  if (held > most) most = held;
  pthread_mutex_unlock(&lock);
  return code;
}

void free(void *block) {
  if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
  if (block && !((uintptr_t)block & 63)) {
    pthread_mutex_lock(&lock);
    for (size_t at = place(block); slots[at].block; at = (at + 1) % SLOTS)
      if (slots[at].block == block) {
        held -= slots[at].size;
        slots[at].block = GONE;
        break;
      }
    pthread_mutex_unlock(&lock);
  }
  real_free(block);
}

size_t allocator_held(void) { return held; }
size_t allocator_most(void) { return most; }
void allocator_reset(void) { most = held; }
