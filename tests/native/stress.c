/* Drives native_thread.c without Python or MPI: contract checks and races, to be run under ThreadSanitizer (ci/tsan.sh).
 * Prints one success line; any failed check aborts. With -DCONTROL it holds a data race that the sanitizer must report. */
#include "../../trtllm_pp_progress/driver/native_thread.c"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#define CHECK(fact) ((fact) ? (void)0 : (fprintf(stderr, "line %d: not so: %s\n", __LINE__, #fact), abort()))
#define LIMIT_NS INT64_C(20000000000)

static char communicator;
static _Atomic int calls, inside, blocked, answer;
static long unguarded; /* touched only with -DCONTROL */

static int called(int source, int tag, int *flag, void *status)
{
    CHECK(inside++ == 0); /* one thread, never two at once */
    CHECK(source == -2 && tag == 99);
    memset(status, 0, 64);
    *flag = 0;
    calls++;
#ifdef CONTROL
    unguarded++;
#endif
    while (blocked)
        sched_yield();
    inside--;
    return answer;
}

static int by_pointer(int source, int tag, void *comm, int *flag, void *status)
{
    CHECK(comm == &communicator);
    return called(source, tag, flag, status);
}

static int by_integer(int source, int tag, int comm, int *flag, void *status)
{
    CHECK(comm == -7);
    return called(source, tag, flag, status);
}

static struct native_thread *start_with(int pointer, int64_t silence_ns, int lingers)
{
    struct native_thread *u = native_new();
    u->silence_ns = silence_ns;
    u->lingers = lingers;
    u->period_ns = 10000;
    u->iprobe = pointer ? (void (*)(void))by_pointer : (void (*)(void))by_integer;
    u->comm = pointer ? (intptr_t)&communicator : -7;
    u->comm_is_pointer = pointer;
    u->any_source = -2;
    u->tag = 99;
    CHECK(native_start(u) == 0);
    return u;
}

static struct native_thread *start(int pointer) { return start_with(pointer, 20000, 0); }

/* Wait for a fact that must come true; only a fault makes this reach its limit. */
#define AWAIT(fact)                                                                                                     \
    for (int64_t limit = now_ns() + LIMIT_NS; !(fact); sched_yield())                                                   \
    CHECK(now_ns() < limit)

static void await_calls(int more)
{
    int target = calls + more;
    AWAIT(calls >= target);
}

/* Never freed: the list of all threads has it. */
static void finish(struct native_thread *u)
{
    CHECK(native_stop(u, LIMIT_NS) == 1);
    CHECK(u->stopping && u->done);
    int before = calls;
    native_arm(u, 0); /* late drivers are harmless */
    native_rest(u);
    CHECK(native_stop(u, 0) == 1);
    CHECK(calls == before);
}

static void ticks_while_armed(int pointer)
{
    struct native_thread *u = start(pointer);
    native_arm(u, 0);
    await_calls(3);
    native_rest(u);
    finish(u);
}

static void *clock_of_a_thread(void *clock)
{
    CHECK(pthread_getcpuclockid(pthread_self(), clock) == 0);
    return 0;
}

/* A driver that spins (here: this thread) is given patience, not for ever. */
static void ticks_beside_a_running_driver(void)
{
    struct native_thread *u = start(1);
    native_arm(u, 0);
    int64_t begun = now_ns();
    int target = calls + 3;
    while (calls < target)
        CHECK(now_ns() - begun < LIMIT_NS);
    clockid_t clock;
    CHECK(pthread_getcpuclockid(pthread_self(), &clock) == 0);
    struct look last = look_at(clock);
    do /* however busy the machine is, for a while this thread has a core */
        for (int64_t end = now_ns() + 1000000; now_ns() < end;)
            CHECK(now_ns() - begun < LIMIT_NS);
    while (!armer_ran(&last));
    pthread_t gone;
    CHECK(pthread_create(&gone, 0, clock_of_a_thread, &clock) == 0);
    CHECK(pthread_join(gone, 0) == 0);
    struct timespec end; /* a joined thread may still be on its way out of the kernel */
    AWAIT(clock_gettime(clock, &end) != 0);
    last = look_at(clock); /* a driver that has ended is never waited for */
    CHECK(!armer_ran(&last) && !armer_ran(&last));
    finish(u);
}

/* The same with nothing left to chance: the clock of one that runs all the time. */
static void keeps_out_beside_a_running_driver(void)
{
    struct native_thread *u = start_with(1, 5000000, 0);
    int before = calls;
    int64_t armed = now_ns();
    native_arm(u, 0);
    pthread_mutex_lock(&u->lock);
    u->armed = look_at(CLOCK_MONOTONIC);
    u->armed.cpu_ns = u->armed.ns;
    pthread_mutex_unlock(&u->lock);
    AWAIT(calls > before);
    CHECK(now_ns() - armed >= PATIENCE * u->silence_ns);
    finish(u);
}

/* What driver/native.py does at a drive of the thread that armed, and with nothing pending. */
static void drive(struct native_thread *u)
{
    if (u->timed) {
        u->driven_ns = u->active_ns = now_ns();
        atomic_thread_fence(memory_order_seq_cst); /* in Python a hundred instructions are in between; see run() */
        if (u->timed)
            return;
    }
    native_arm(u, 0);
}

static void idle(struct native_thread *u)
{
    if (u->lingers)
        u->driven_ns = 0;
    else
        native_rest(u);
}

/* For a while after the last send it looks without being told, and enters no MPI; then it sleeps until it is told. A send
 * that comes in that very moment is not overlooked. */
static void lingers(void)
{
    struct native_thread *u = start_with(1, 20000, 1);
    for (unsigned turn = 0; turn < 30; turn++) {
        int before = calls;
        drive(u);
        AWAIT(calls > before);
        idle(u);
        int64_t last = u->active_ns;
        if (turn % 3 == 0) {
            AWAIT(!u->timed);
            CHECK(now_ns() - last >= LINGER_NS);
        } else { /* the moment in which it is about to go to sleep, give or take some */
            while (now_ns() - last < LINGER_NS + 100000 * (turn % 7))
                sched_yield();
        }
    }
    idle(u);
    AWAIT(!u->timed);
    int before = calls;
    usleep(30000);
    CHECK(calls == before);
    finish(u);
}

/* A driver that was held up between a look at `timed` and its store. */
static void a_late_store_is_undone_by_a_rest(void)
{
    struct native_thread *u = start(1);
    native_arm(u, 0);
    native_rest(u);
    u->driven_ns = now_ns();
    native_rest(u);
    CHECK(u->driven_ns == 0);
    native_arm(u, 0);
    await_calls(1);
    finish(u);
}

static void leaves_when_its_timer_is_closed(void)
{
    struct native_thread *u = start(1);
    int timer = dup(u->timer);
    pthread_mutex_lock(&u->lock); /* which it takes before it closes what has that number now */
    CHECK(dup2(open("/dev/null", O_RDONLY), u->timer) == u->timer);
    struct itimerspec soon = {{0, 0}, {0, 1}};
    timerfd_settime(timer, 0, &soon, 0); /* out of the read that it may be in */
    pthread_mutex_unlock(&u->lock);
    AWAIT(u->error);
    finish(u);
}

/* Until a pause that was announced is over there is no call; one that is cut short is over. */
static void keeps_out_of_a_planned_pause(void)
{
    struct native_thread *u = start(1);
    int before = calls;
    int64_t planned_ns = 20000000, begun = now_ns();
    native_arm(u, planned_ns);
    AWAIT(calls > before);
    CHECK(now_ns() - begun >= planned_ns);
    native_rest(u);
    native_arm(u, LIMIT_NS * 10);
    native_arm(u, 0);
    await_calls(1);
    finish(u);
}

/* Cut short in the very moment in which the thread sets its timer for the end of the pause: the sooner one counts. */
static void a_pause_cut_short_is_never_slept_through(void)
{
    struct native_thread *u = start_with(1, 20000, 0);
    for (unsigned turn = 0; turn < 300; turn++) {
        native_arm(u, 0);
        await_calls(1);                /* it is up, */
        native_arm(u, LIMIT_NS * 10);  /* and this is what it finds; */
        for (volatile unsigned spin = 0; spin < 40 * (turn % 50); spin++)
            ;
        native_arm(u, 0);              /* some time later */
        await_calls(1);
        native_rest(u);
    }
    finish(u);
}

/* The timer of a thread that has left is closed, and its number may be anybody's. */
static void leaves_on_error(void)
{
    struct native_thread *u = start(1);
    answer = 15;
    native_arm(u, 0);
    AWAIT(u->error == 15 && u->done);
    CHECK(u->stopping);
    answer = 0;
    int others = timerfd_create(CLOCK_MONOTONIC, 0);
    CHECK(others == u->timer);
    struct itimerspec far = {{0, 0}, {1000, 0}}, found;
    timerfd_settime(others, 0, &far, 0);
    native_arm(u, 0);
    native_rest(u);
    CHECK(native_stop(u, 0) == 1);
    CHECK(timerfd_gettime(others, &found) == 0 && found.it_value.tv_sec > 900);
    close(others);
    finish(u);
}

/* What MPI_Finalize calls first, from whatever thread: every thread leaves, those that others stop as well. */
static void all_leave_when_mpi_ends(void)
{
    struct native_thread *several[3] = {start(1), start(1), start(1)};
    native_arm(several[0], 0);
    CHECK(native_stop(several[1], LIMIT_NS) == 1);
    CHECK(native_at_finalize(0, 0, 0, 0) == 0);
    for (int i = 0; i < 3; i++) {
        CHECK(several[i]->done);
        finish(several[i]);
    }
    int copied = 1;
    CHECK(native_not_copied(0, 0, 0, 0, 0, &copied) == 0 && !copied);
}

static void stop_is_bounded(void)
{
    struct native_thread *u = start(1);
    blocked = 1;
    native_arm(u, 0);
    AWAIT(inside);
    CHECK(native_stop(u, 1000000) == 0);
    blocked = 0;
    finish(u);
}

static _Atomic int driving;

static void *driver(void *argument)
{
    struct native_thread *u = argument;
    for (unsigned turn = 0; driving; turn++) {
        if (turn % 3 == 0)
            idle(u);
        else if (turn % 5)
            drive(u);
        else
            native_arm(u, 50000);
#ifdef CONTROL
        unguarded++;
#endif
    }
    return 0;
}

static void *stopper(void *u)
{
    CHECK(native_stop(u, LIMIT_NS) == 1);
    return 0;
}

static void *finalizer(void *u)
{
    native_at_finalize(0, 0, 0, 0);
    return u;
}

static void drivers_and_stoppers(int turn)
{
    struct native_thread *u = start_with(turn % 2, 20000, turn % 3 == 0);
    pthread_t drivers[2], stoppers[2];
    driving = 1;
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&drivers[i], 0, driver, u) == 0);
    for (int i = 0; i < turn % 7; i++)
        sched_yield();
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&stoppers[i], 0, i && turn % 2 ? finalizer : stopper, u) == 0);
    for (int i = 0; i < 2; i++)
        pthread_join(stoppers[i], 0);
    driving = 0;
    for (int i = 0; i < 2; i++)
        pthread_join(drivers[i], 0);
    finish(u);
}

int main(int argc, char **argv)
{
    int turns = argc > 1 ? atoi(argv[1]) : 200;
    ticks_while_armed(1);
    ticks_while_armed(0);
    ticks_beside_a_running_driver();
    keeps_out_beside_a_running_driver();
    lingers();
    a_late_store_is_undone_by_a_rest();
    leaves_when_its_timer_is_closed();
    keeps_out_of_a_planned_pause();
    a_pause_cut_short_is_never_slept_through();
    leaves_on_error();
    all_leave_when_mpi_ends();
    stop_is_bounded();
    for (int turn = 0; turn < turns; turn++)
        drivers_and_stoppers(turn);
#ifdef CONTROL
    struct native_thread *u = start(1);
    native_arm(u, 0);
    for (int i = 0; i < 1000; i++)
        unguarded++;
    await_calls(3);
    finish(u);
#endif
    printf("stress: %d turns, %d calls, every check held (%ld)\n", turns, calls, unguarded);
    return 0;
}
