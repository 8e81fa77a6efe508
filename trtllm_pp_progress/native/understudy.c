/* The understudy: makes pending MPI sends progress while another thread holds the GIL.
 *
 * One thread that never touches Python and links no MPI. It sleeps in a timer that is set while a send is pending, until
 * the Python driver has been silent for `silence_ns`, and only then calls MPI_Iprobe for a message nobody sends: the
 * cheapest legal way into the progress engine. Every `period_ns` at first, then less and less often, down to once a
 * silence. While all goes well the timer is set and unset and never fires: a system call each, and no thread wakes.
 * Needs MPI_THREAD_MULTIPLE, which the caller checks.
 *
 * No Python.h: _understudy.py loads this as a plain shared object, so one build serves every Python and every MPI.
 * While `timed`, Python stores a later `driven_ns` directly: this thread looks again when the timer fires. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define VERSION 2   /* of `struct understudy`; _understudy.py refuses another */
#define PATIENCE 10 /* silence and period are this many times longer while the driver runs */

typedef int (*iprobe_pointer)(int source, int tag, void *comm, int *flag, void *status); /* Open MPI, MPI 5 ABI */
typedef int (*iprobe_integer)(int source, int tag, int comm, int *flag, void *status);   /* MPICH and its family */

struct look { /* at a driver: its kernel id, when, and its CPU time then */
    int64_t driver, ns, cpu_ns;
};

struct understudy {
    /* Mirrored by _understudy._Shared, in this order. */
    _Atomic int64_t driven_ns; /* CLOCK_MONOTONIC of the last drive while a send is pending, 0 while none is */
    _Atomic int64_t timed;     /* 1 between an arm and its undoing: then the timer is set, or the thread is up */
    _Atomic int64_t ticks;     /* calls of MPI_Iprobe */
    _Atomic int64_t error;     /* what MPI_Iprobe returned, or an errno below zero; the thread then leaves for good */
    int64_t silence_ns, period_ns;
    void (*iprobe)(void);
    intptr_t comm;
    int64_t comm_is_pointer, any_source, tag;
    /* Ours alone. */
    pthread_mutex_t lock; /* of what follows; never held inside MPI: arm takes it while its caller holds the GIL */
    pthread_cond_t ended;
    pthread_t thread;
    struct look armed; /* at the driver that armed last */
    int timer, done, joined;
    _Atomic int stopping;
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

/* Let the timer fire at a moment of CLOCK_MONOTONIC, at once if it has passed, or never for 0. */
static void set_timer(int timer, int64_t ns)
{
    struct itimerspec when = {{0, 0}, {ns / 1000000000, ns % 1000000000}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, 0);
}

static void sleep_until_it_fires(struct understudy *u)
{
    uint64_t times;
    ssize_t got = -1;
    while (!u->stopping && (got = read(u->timer, &times, sizeof times)) < 0 && errno == EINTR)
        ;
    if (!u->stopping && got != sizeof times)
        u->error = got < 0 ? -errno : -EBADF; /* somebody has closed our timer */
}

static struct look look_at(int64_t driver)
{
    struct timespec t;
    clockid_t cpu_of_thread = (clockid_t)((~(unsigned)driver << 3) | 6); /* as pthread_getcpuclockid builds it */
    struct look look = {driver, now_ns(), 0};
    if (clock_gettime(cpu_of_thread, &t) == 0)
        look.cpu_ns = t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
    return look;
}

/* Whether the driver has had a core for a good part of the time since the last look. Then it is in MPI itself, as a rule
 * in a blocking receive, and a second thread there costs more than it brings: where cores are short it spins on a lock
 * whose holder is not running. A driver that waits for the GIL sleeps; one that computes outside MPI is the rare case,
 * hence patience instead of none. */
static int driver_ran(struct look *last)
{
    struct look look = look_at(last->driver);
    int ran = 4 * (look.cpu_ns - last->cpu_ns) > look.ns - last->ns;
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
    int64_t ticked = 0, period = u->period_ns, seen = 0, armed = 0;
    while (!u->stopping && !u->error) {
        int64_t driven = u->driven_ns, now = now_ns();
        if (!driven) {
            sleep_until_it_fires(u); /* whoever has stored driven_ns since sets it next */
            continue;
        }
        if (driven != seen) {
            seen = driven;
            period = u->period_ns;
        }
        pthread_mutex_lock(&u->lock);
        if (armed != u->armed.ns) {
            last = u->armed;
            armed = last.ns;
        }
        pthread_mutex_unlock(&u->lock);
        int64_t due = later(driven + u->silence_ns, ticked + period);
        int64_t patient = later(driven + PATIENCE * u->silence_ns, ticked + PATIENCE * period);
        int ran = driver_ran(&last);
        if (now >= due && now < patient && ran)
            due = now + u->silence_ns; /* look again then */
        if (now < due) {
            set_timer(u->timer, due);
            sleep_until_it_fires(u);
            continue;
        }
        u->error = probe(u);
        u->ticks++;
        ticked = now_ns();
        /* A send that did not move yet waits for its receiver, who may take long. */
        period = 4 * period < u->silence_ns ? 4 * period : later(u->period_ns, u->silence_ns);
    }
    pthread_mutex_lock(&u->lock);
    u->done = 1;
    pthread_cond_broadcast(&u->ended);
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
    if ((u->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)) < 0)
        return errno;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&u->ended, &monotonic);
    pthread_mutex_init(&u->lock, 0);
    /* Signals are for Python's main thread: delivered here, Ctrl-C would not interrupt what that thread waits in. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&u->thread, 0, run, u);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (failed)
        close(u->timer);
    else
        pthread_setname_np(u->thread, "pp-understudy");
    return failed;
}

/* Note that the calling thread drives while a send is pending, and set the timer; harmless after stop. */
void understudy_arm(struct understudy *u)
{
    struct look driver = look_at(syscall(SYS_gettid)); /* glibc has a gettid() of its own since 2.30 */
    pthread_mutex_lock(&u->lock);
    u->armed = driver;
    u->driven_ns = driver.ns;
    u->timed = 1;
    if (!u->stopping)
        set_timer(u->timer, driver.ns + u->silence_ns);
    pthread_mutex_unlock(&u->lock);
}

/* Note that no send is pending, and unset the timer; harmless after stop. */
void understudy_rest(struct understudy *u)
{
    pthread_mutex_lock(&u->lock);
    u->driven_ns = u->timed = 0;
    if (!u->stopping)
        set_timer(u->timer, 0);
    pthread_mutex_unlock(&u->lock);
}

/* Ask the thread to leave and join it. Returns 1 once it is joined, 0 if it has not left MPI within the timeout. */
int understudy_stop(struct understudy *u, int64_t timeout_ns)
{
    int64_t deadline = now_ns() + timeout_ns;
    struct timespec until = {deadline / 1000000000, deadline % 1000000000};
    pthread_mutex_lock(&u->lock);
    if (!u->stopping) {
        u->stopping = 1;
        set_timer(u->timer, 1); /* long past */
    }
    while (!u->done && pthread_cond_timedwait(&u->ended, &u->lock, &until) == 0)
        ;
    int done = u->done, join = done && !u->joined;
    u->joined |= join;
    pthread_mutex_unlock(&u->lock);
    if (join) {
        pthread_join(u->thread, 0);
        close(u->timer);
    }
    return done;
}
