/* The understudy: makes pending MPI sends progress while another thread holds the GIL.
 *
 * One thread that never touches Python and links no MPI. It sleeps on a condition until a send is pending, then until the
 * Python driver has been silent for `silence_ns`, and only then calls MPI_Iprobe for a message nobody sends: the cheapest
 * legal way into the progress engine. Every `period_ns` at first, then less and less often, down to once a silence.
 * Needs MPI_THREAD_MULTIPLE, which the caller checks.
 *
 * No Python.h: _understudy.py loads this as a plain shared object, so one build serves every Python and every MPI.
 * Python stores to `driven_ns` directly: a call would release the GIL and could wait a whole switch interval for it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define VERSION 1   /* of `struct understudy`; _understudy.py refuses another */
#define PATIENCE 10 /* silence and period are this many times longer while the driver runs */
#define LINGER 50   /* looks, a silence apart, with nothing pending before it sleeps for good */

typedef int (*iprobe_pointer)(int source, int tag, void *comm, int *flag, void *status); /* Open MPI, MPI 5 ABI */
typedef int (*iprobe_integer)(int source, int tag, int comm, int *flag, void *status);   /* MPICH and its family */

struct understudy {
    /* Mirrored by _understudy._Shared, in this order. */
    _Atomic int64_t driven_ns; /* CLOCK_MONOTONIC of the last drive while a send is pending, 0 while none is */
    _Atomic int64_t driver;    /* kernel id of the thread that drove last */
    _Atomic int64_t asleep;    /* 1 while the thread waits without a timeout: whoever stores driven_ns must arm */
    _Atomic int64_t ticks;     /* calls of MPI_Iprobe */
    _Atomic int64_t error;     /* what MPI_Iprobe returned when it failed; the thread then leaves for good */
    int64_t silence_ns, period_ns;
    void (*iprobe)(void);
    intptr_t comm;
    int64_t comm_is_pointer, any_source, tag;
    /* Ours alone. */
    pthread_mutex_t lock; /* never held inside MPI: arm takes it while its caller holds the GIL */
    pthread_cond_t changed;
    pthread_t thread;
    int stopping, done, joined;
};

struct look {
    int64_t driver, ns, cpu_ns;
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static int wait_until(struct understudy *u, int64_t ns)
{
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    return pthread_cond_timedwait(&u->changed, &u->lock, &t);
}

/* Whether the driver has had a core for a good part of the time since the last look. Then it is in MPI itself, as a rule
 * in a blocking receive, and a second thread there costs more than it brings: where cores are short it spins on a lock
 * whose holder is not running. A driver that waits for the GIL sleeps; one that computes outside MPI is the rare case,
 * hence patience instead of none. */
static int driver_ran(const struct understudy *u, struct look *last)
{
    struct timespec t;
    clockid_t cpu_of_thread = (clockid_t)((~(unsigned)u->driver << 3) | 6); /* as pthread_getcpuclockid builds it */
    struct look look = {u->driver, now_ns(), 0};
    if (clock_gettime(cpu_of_thread, &t) == 0)
        look.cpu_ns = t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
    int ran = look.driver == last->driver && 4 * (look.cpu_ns - last->cpu_ns) > look.ns - last->ns;
    *last = look;
    return ran;
}

static int probe(const struct understudy *u)
{
    _Alignas(16) char status[256]; /* a real one: MPI_STATUS_IGNORE differs between MPIs, no MPI_Status is this large */
    int flag = 0, source = (int)u->any_source, tag = (int)u->tag;
    if (u->comm_is_pointer)
        return ((iprobe_pointer)u->iprobe)(source, tag, (void *)u->comm, &flag, status);
    return ((iprobe_integer)u->iprobe)(source, tag, (int)u->comm, &flag, status);
}

static void *run(void *argument)
{
    struct understudy *u = argument;
    struct look last = {0, 0, 0};
    int64_t ticked = 0, period = u->period_ns, seen = 0;
    int idle_looks = LINGER;
    pthread_mutex_lock(&u->lock);
    while (!u->stopping && !u->error) {
        int64_t driven = u->driven_ns, now = now_ns();
        if (!driven && idle_looks < LINGER) {
            /* Being woken costs the driver more than looking costs us, so stay a while. */
            idle_looks++;
            wait_until(u, now + u->silence_ns);
            continue;
        }
        if (!driven) {
            /* Announce first, look again second; arm stores first, looks second: one of the two sees the other. */
            u->asleep = 1;
            if (!u->driven_ns)
                pthread_cond_wait(&u->changed, &u->lock);
            u->asleep = 0;
            continue;
        }
        idle_looks = 0;
        if (driven != seen) {
            seen = driven;
            period = u->period_ns;
        }
        int64_t due = later(driven + u->silence_ns, ticked + period);
        int64_t patient = later(driven + PATIENCE * u->silence_ns, ticked + PATIENCE * period);
        int ran = driver_ran(u, &last);
        if (now >= due && now < patient && ran)
            due = now + u->silence_ns; /* look again then */
        if (now < due) {
            wait_until(u, due);
            continue;
        }
        pthread_mutex_unlock(&u->lock);
        u->error = probe(u);
        u->ticks++;
        ticked = now_ns();
        /* A send that did not move yet waits for its receiver, who may take long. */
        period = 4 * period < u->silence_ns ? 4 * period : later(u->period_ns, u->silence_ns);
        pthread_mutex_lock(&u->lock);
    }
    u->done = 1;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    return 0;
}

int understudy_version(void) { return VERSION; }

/* Never freed, some 200 bytes an executor: a late store of the driver, or a thread stuck in MPI at exit, must find it. */
struct understudy *understudy_new(void) { return calloc(1, sizeof(struct understudy)); }

/* Start the thread; the mirrored fields are filled in. Returns 0 or an errno. */
int understudy_start(struct understudy *u)
{
    pthread_condattr_t monotonic;
    sigset_t all, before;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&u->changed, &monotonic);
    pthread_mutex_init(&u->lock, 0);
    /* Signals are for Python's main thread: delivered here, Ctrl-C would not interrupt what that thread waits in. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&u->thread, 0, run, u);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (!failed)
        pthread_setname_np(u->thread, "pp-understudy");
    return failed;
}

/* Note a drive and wake the thread if it sleeps; harmless at any other time, also after stop. */
void understudy_arm(struct understudy *u, int64_t driven_ns)
{
    u->driven_ns = driven_ns;
    if (!u->asleep)
        return;
    pthread_mutex_lock(&u->lock);
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
}

/* Ask the thread to leave and join it. Returns 1 once it is joined, 0 if it has not left MPI within the timeout. */
int understudy_stop(struct understudy *u, int64_t timeout_ns)
{
    int64_t deadline = now_ns() + timeout_ns;
    pthread_mutex_lock(&u->lock);
    u->stopping = 1;
    pthread_cond_broadcast(&u->changed);
    while (!u->done && wait_until(u, deadline) == 0)
        ;
    int done = u->done, join = done && !u->joined;
    u->joined |= join;
    pthread_mutex_unlock(&u->lock);
    if (join)
        pthread_join(u->thread, 0);
    return done;
}
