/* The native part: a thread that makes pending MPI sends progress while another holds the GIL, and tests without it.
 *
 * It never touches Python and links no MPI: the addresses of MPI_Iprobe and MPI_Test come from outside, so one build
 * serves every Python and every MPI. Needs MPI_THREAD_MULTIPLE, which the caller checks.
 *
 * The thread sleeps in a timer that is set while a send is pending, until nobody has driven it for `silence_ns`, and only
 * then calls MPI_Iprobe for a message nobody sends: the cheapest legal way into the progress engine. While `timed`, Python
 * stores what it has to say directly: a later `driven_ns`, or 0, and the thread looks again when the timer fires. Where
 * threads have cores of their own it lingers: it looks every LINGER_PERIOD_NS for a while, so that in a running ring
 * neither end of a send takes a system call. Elsewhere the timer is set and unset and never fires while all goes well. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define VERSION 5                    /* of the structs that driver/library.py mirrors, which refuses another */
#define PATIENCE 10                  /* silence and period are this many times longer while the thread that armed runs */
#define LONGEST_PERIOD_NS 20000000   /* and no more than a fiftieth of the time since the last drive */
#define MOVED_NS 10000               /* a call that takes so long has moved data: another one is due at once */
#define LINGER_NS 20000000           /* after the last send */
#define LINGER_PERIOD_NS 1000000
#define EXIT_TIMEOUT_NS 2000000000

typedef int (*iprobe_pointer)(int source, int tag, void *comm, int *flag, void *status); /* Open MPI, MPI 5 ABI */
typedef int (*iprobe_integer)(int source, int tag, int comm, int *flag, void *status);   /* MPICH and its family */
typedef int (*test_function)(void *request, int *flag, void *status);

struct look { /* at a Python thread that drives: the clock of its CPU time, when, and its CPU time then */
    clockid_t clock;
    int64_t ns, cpu_ns;
};

struct native_thread {
    /* Mirrored by driver/library.py, in this order. Each has a line on who writes it, and who reads it when; "Python" is
     * any Python thread, by plain stores and loads of one word, "the thread" is run(). */

    /* CLOCK_MONOTONIC of the last drive while a send is pending, 0 while none is.
     * Python writes a drive only where it has seen `timed`, and reads `timed` again afterwards; a later moment, or 0, only
     * where it is not 0. Arm and rest write it under the lock. The thread reads it first in each round, and again once it
     * has unset `timed`: one of the two sees the other. */
    _Atomic int64_t driven_ns;
    /* 1 between an arm and its undoing: then the timer is set, or the thread is up.
     * Arm and rest write it, under the lock; the thread unsets it, and sets it again if driven_ns is not 0 after that.
     * Python reads it before and after it writes driven_ns: 0 means that only an arm wakes the thread. */
    _Atomic int64_t timed;
    /* Calls of MPI_Iprobe. The thread alone writes it; status() reads it, in no order with anything. */
    _Atomic int64_t ticks;
    /* What MPI_Iprobe returned, or an errno below zero. The thread alone writes it, and leaves for good at the next round;
     * Python reads it to tell whether there is a thread. */
    _Atomic int64_t error;
    /* It was asked to leave, or leaves by itself. Written under the lock, once, before the timer is closed, so that who
     * has the lock and reads 0 may set the timer; the thread reads it in each round and around each sleep. */
    _Atomic int64_t stopping;
    /* It has left, and its timer is closed. The thread writes it as it ends, under the lock; stop() waits for it there. */
    _Atomic int64_t done;
    /* The last drive in driven_ns, written together with it. Python reads it before a store: a drive that is due earlier
     * needs an arm, for the timer may be set for later. The thread reads it only while driven_ns is 0, to linger. */
    _Atomic int64_t active_ns;
    /* What follows Python writes before start(), and nobody after that. */
    int64_t silence_ns, period_ns;
    void (*iprobe)(void);
    intptr_t comm;
    int64_t comm_is_pointer, any_source, tag, lingers;
    /* Ours alone. */
    pthread_mutex_t lock; /* of what follows; never held inside MPI: arm takes it while its caller holds the GIL */
    pthread_cond_t ended;
    struct look armed; /* at the thread that armed last */
    int timer;
    struct native_thread *next; /* of all that were started in this process */
};

static _Atomic(struct native_thread *) all;
static _Thread_local struct native_thread *own; /* of the calling thread, where it is one of these */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t sooner(int64_t a, int64_t b) { return a < b ? a : b; }

/* Let the timer fire at a moment of CLOCK_MONOTONIC, at once if it has passed, or never for 0. */
static void set_timer(int timer, int64_t ns)
{
    struct itimerspec when = {{0, 0}, {ns / 1000000000, ns % 1000000000}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, 0);
}

static void sleep_until_it_fires(struct native_thread *u)
{
    uint64_t times;
    ssize_t got = -1;
    while (!u->stopping && (got = read(u->timer, &times, sizeof times)) < 0 && errno == EINTR)
        ;
    if (!u->stopping && got != sizeof times)
        u->error = got < 0 ? -errno : -EBADF; /* somebody has closed our timer */
}

static struct look look_at(clockid_t clock)
{
    struct timespec t;
    struct look look = {clock, now_ns(), 0};
    if (clock_gettime(clock, &t) == 0) /* fails once that thread has ended */
        look.cpu_ns = t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
    return look;
}

/* Whether the thread that armed has had a core for a good part of the time since the last look. Then it is in MPI itself,
 * as a rule in a blocking receive, and a second thread there costs more than it brings: where cores are short it spins on
 * a lock whose holder is not running. A thread that waits for the GIL sleeps; one that computes outside MPI is the rare
 * case, hence patience instead of none. */
static int armer_ran(struct look *last)
{
    struct look look = look_at(last->clock);
    int ran = 4 * (look.cpu_ns - last->cpu_ns) > look.ns - last->ns;
    *last = look;
    return ran;
}

static int probe(const struct native_thread *u)
{
    _Alignas(16) char status[256]; /* a real one: MPI_STATUS_IGNORE differs between MPIs, no MPI_Status is this large */
    int flag = 0, source = (int)u->any_source, tag = (int)u->tag;
    if (u->comm_is_pointer)
        return ((iprobe_pointer)u->iprobe)(source, tag, (void *)u->comm, &flag, status);
    return ((iprobe_integer)u->iprobe)(source, tag, (int)u->comm, &flag, status);
}

static void *run(void *argument)
{
    struct native_thread *u = argument;
    struct look last = {CLOCK_MONOTONIC, 0, 0};
    pthread_setname_np(pthread_self(), "pp-progress");
    own = u;
    int64_t ticked = 0, period = u->period_ns, seen = 0, armed = 0;
    while (!u->stopping && !u->error) {
        int64_t driven = u->driven_ns, now = now_ns();
        if (!driven) {
            if (u->lingers && now - u->active_ns < LINGER_NS) {
                set_timer(u->timer, now + LINGER_PERIOD_NS);
            } else {
                u->timed = 0;
                /* For emulators: QEMU 7.2 on x86 keeps no order between Arm's store-release and load-acquire. */
                atomic_thread_fence(memory_order_seq_cst);
                if (u->driven_ns) { /* stored by somebody who saw `timed` */
                    u->timed = 1;
                    continue;
                }
            }
            sleep_until_it_fires(u); /* whoever stores driven_ns from now on sets it */
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
        int ran = armer_ran(&last);
        if (now >= due && now < patient && ran)
            due = now + u->silence_ns; /* look again then */
        if (now < due) {
            set_timer(u->timer, due);
            if (u->driven_ns >= driven) /* else an arm set it for sooner, perhaps just before */
                sleep_until_it_fires(u);
            continue;
        }
        u->error = probe(u);
        u->ticks++;
        ticked = now_ns();
        /* A send that did not move waits for its receiver, who may take long: never add more than two per cent to that. */
        int64_t patience = sooner((ticked - driven) / 50, LONGEST_PERIOD_NS);
        if (ticked - now > MOVED_NS)
            period = 0;
        else
            period = later(later(u->period_ns, sooner(4 * period, u->silence_ns)), patience);
    }
    pthread_mutex_lock(&u->lock);
    u->stopping = 1; /* the number of the timer may be another's from now on */
    u->done = 1;
    close(u->timer);
    pthread_cond_broadcast(&u->ended);
    pthread_mutex_unlock(&u->lock);
    return 0;
}

static void forget_the_parents(void) { all = 0; }
static void stop_all(void);

int native_version(void) { return VERSION; }

/* Never freed, some 200 bytes an executor: a late store of a Python thread, or a thread stuck in MPI at exit, must find it. */
struct native_thread *native_new(void) { return calloc(1, sizeof(struct native_thread)); }

/* Start the thread; the mirrored fields are filled in. Returns 0 or an errno. */
int native_start(struct native_thread *u)
{
    static _Atomic int ends_are_noticed;
    pthread_condattr_t monotonic;
    pthread_attr_t detached;
    pthread_t thread;
    sigset_t every, before;
    if ((u->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)) < 0)
        return errno;
    if (!atomic_exchange(&ends_are_noticed, 1)) {
        pthread_atfork(0, 0, forget_the_parents);
        /* For a process that ends without MPI_Finalize: before the destructors of any library, MPI's among them. */
        atexit(stop_all);
    }
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&u->ended, &monotonic);
    pthread_mutex_init(&u->lock, 0);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    /* Signals are for Python's main thread: delivered here, Ctrl-C would not interrupt what that thread waits in. */
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int failed = pthread_create(&thread, &detached, run, u);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    pthread_attr_destroy(&detached);
    if (failed) {
        close(u->timer);
        return failed;
    }
    u->next = all;
    while (!atomic_compare_exchange_weak(&all, &u->next, u))
        ;
    return 0;
}

/* Note that the calling thread drives while a send is pending, and will again in `planned_ns`; sets the timer. Harmless
 * after stop. */
void native_arm(struct native_thread *u, int64_t planned_ns)
{
    clockid_t mine;
    struct look caller = look_at(pthread_getcpuclockid(pthread_self(), &mine) ? CLOCK_MONOTONIC : mine);
    pthread_mutex_lock(&u->lock);
    u->armed = caller;
    u->driven_ns = u->active_ns = caller.ns + planned_ns;
    u->timed = 1;
    if (!u->stopping)
        set_timer(u->timer, u->driven_ns + u->silence_ns);
    pthread_mutex_unlock(&u->lock);
}

/* Note that no send is pending, and unset the timer; harmless after stop. */
void native_rest(struct native_thread *u)
{
    pthread_mutex_lock(&u->lock);
    u->driven_ns = u->timed = 0;
    if (!u->stopping)
        set_timer(u->timer, 0);
    pthread_mutex_unlock(&u->lock);
}

/* Ask the thread to leave. Returns 1 once it has, 0 if it has not left MPI within the timeout. */
int native_stop(struct native_thread *u, int64_t timeout_ns)
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
    int done = u->done != 0;
    pthread_mutex_unlock(&u->lock);
    return done;
}

static void stop_all(void)
{
    for (struct native_thread *u = all; u; u = u->next)
        if (u != own) /* an error that ends the process from inside MPI_Iprobe */
            native_stop(u, EXIT_TIMEOUT_NS);
}

/* The delete callback of an attribute of COMM_SELF: MPI_Finalize calls it first of all, whoever finalizes and whether or
 * not there is a Python left. A communicator of either kind comes in one register, and is not looked at. */
int native_at_finalize(intptr_t comm, int key, void *value, void *extra)
{
    (void)comm, (void)key, (void)value, (void)extra;
    stop_all();
    return 0;
}

/* The copy callback: a duplicate of COMM_SELF does not have the attribute. */
int native_not_copied(intptr_t comm, int key, void *extra, void *in, void *out, int *flag)
{
    (void)comm, (void)key, (void)extra, (void)in, (void)out;
    *flag = 0;
    return 0;
}

#define MOST_REQUESTS 8

struct native_test { /* mirrored by driver/library.py */
    void (*test)(void); /* MPI_Test */
    void *requests[MOST_REQUESTS];
    int64_t count;
    const _Atomic int64_t *stop; /* leave as soon as it is not 0 */
    int64_t rounds, limit_ns, yields;
    int64_t used, moved, error; /* answers: tests made, whether data moved, what MPI_Test returned */
};

/* Test requests, again and again, at most `rounds` times and for `limit_ns`. Returns whether all are complete. */
int native_test(struct native_test *t)
{
    _Alignas(16) char status[256];
    int64_t started = now_ns(), before = started;
    t->used = t->moved = t->error = 0;
    for (int64_t left = t->rounds; left > 0; left--) {
        int complete = 1;
        t->used++;
        for (int64_t i = 0; complete && i < t->count; i++)
            if ((t->error = ((test_function)t->test)(t->requests[i], &complete, status)))
                return 0;
        if (complete)
            return 1;
        int64_t now = now_ns();
        t->moved |= now - before > MOVED_NS;
        if (now - started >= t->limit_ns || (t->stop && *t->stop))
            return 0;
        if (t->yields)
            sched_yield();
        before = t->yields ? now_ns() : now; /* what others did meanwhile is no progress of ours */
    }
    return 0;
}
