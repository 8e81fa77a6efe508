/* A peer to measure against: a thread that calls MPI_Iprobe for a tag nobody sends, every interval, for as long as the
 * executor lives. TensorRT-LLM's newest era has such a thread (docs/eras.md, era I); this one is written from its
 * description. It never touches Python and links no MPI: the function's address comes from outside. Needs
 * MPI_THREAD_MULTIPLE. Mirrored by native_peer.py. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

typedef int (*iprobe_pointer)(int source, int tag, void *comm, int *flag, void *status); /* Open MPI, MPI 5 ABI */
typedef int (*iprobe_integer)(int source, int tag, int comm, int *flag, void *status);   /* MPICH and its family */

struct peer {
    void (*iprobe)(void);
    intptr_t comm;
    int64_t comm_is_pointer, any_source, tag, interval_us;
    _Atomic int64_t stopping, probes, error;
    pthread_t thread;
};

static void *run(void *argument)
{
    struct peer *p = argument;
    struct timespec interval = {p->interval_us / 1000000, p->interval_us % 1000000 * 1000};
    pthread_setname_np(pthread_self(), "peer-progress");
    while (!p->stopping && !p->error) {
        _Alignas(16) char status[256]; /* no MPI_Status is this large */
        int flag = 0, source = (int)p->any_source, tag = (int)p->tag;
        if (p->comm_is_pointer)
            p->error = ((iprobe_pointer)p->iprobe)(source, tag, (void *)p->comm, &flag, status);
        else
            p->error = ((iprobe_integer)p->iprobe)(source, tag, (int)p->comm, &flag, status);
        p->probes++;
        nanosleep(&interval, NULL);
    }
    return NULL;
}

int peer_size(void) { return (int)sizeof(struct peer); }

int peer_start(struct peer *p) { return pthread_create(&p->thread, NULL, run, p); }

void peer_stop(struct peer *p)
{
    p->stopping = 1;
    pthread_join(p->thread, NULL);
}
