/* Counts bytes that a process copies: in memory, and between it and the kernel.

   Loaded before libc (LD_PRELOAD), so that every call of these functions in any library comes
   here first. Copies below SMALLEST are not counted: headers and bookkeeping. What a compiler has
   made into a loop of its own is not seen (torch's copies; they are counted in torch instead). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

#define SMALLEST 4096

static atomic_ullong copied, to_kernel, from_kernel;

unsigned long long copies_in_memory(void) { return copied; }
unsigned long long copies_to_kernel(void) { return to_kernel; }
unsigned long long copies_from_kernel(void) { return from_kernel; }

typedef void *copier(void *, const void *, size_t);

static copier *real_memcpy, *real_memmove;

/* What the loader itself copies comes before there is anything to pass it on to. */
static void *byte_by_byte(void *to, const void *from, size_t size) {
    unsigned char *target = to;
    const unsigned char *source = from;
    if (target <= source)
        for (size_t at = 0; at < size; at++) {
            target[at] = source[at];
            __asm__ volatile("" : : : "memory"); /* or it would be compiled into memcpy */
        }
    else
        while (size--) {
            target[size] = source[size];
            __asm__ volatile("" : : : "memory");
        }
    return to;
}

__attribute__((constructor)) static void find(void) {
    real_memcpy = (copier *)dlsym(RTLD_NEXT, "memcpy");
    real_memmove = (copier *)dlsym(RTLD_NEXT, "memmove");
}

void *memcpy(void *to, const void *from, size_t size) {
    if (size >= SMALLEST) atomic_fetch_add(&copied, size);
    return real_memcpy ? real_memcpy(to, from, size) : byte_by_byte(to, from, size);
}

void *memmove(void *to, const void *from, size_t size) {
    if (size >= SMALLEST) atomic_fetch_add(&copied, size);
    return real_memmove ? real_memmove(to, from, size) : byte_by_byte(to, from, size);
}

void *__memcpy_chk(void *to, const void *from, size_t size, size_t room) {
    (void)room;
    return memcpy(to, from, size);
}

void *__memmove_chk(void *to, const void *from, size_t size, size_t room) {
    (void)room;
    return memmove(to, from, size);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static ssize_t counted(atomic_ullong *counter, ssize_t moved) {
    if (moved > 0) atomic_fetch_add(counter, (unsigned long long)moved);
    return moved;
}

ssize_t send(int socket, const void *data, size_t size, int flags) {
    return counted(&to_kernel, NEXT(send)(socket, data, size, flags));
}

ssize_t sendmsg(int socket, const struct msghdr *message, int flags) {
    return counted(&to_kernel, NEXT(sendmsg)(socket, message, flags));
}

ssize_t recv(int socket, void *data, size_t size, int flags) {
    return counted(&from_kernel, NEXT(recv)(socket, data, size, flags));
}

ssize_t recvmsg(int socket, struct msghdr *message, int flags) {
    return counted(&from_kernel, NEXT(recvmsg)(socket, message, flags));
}
