/* Drives understudy.c without Python or MPI: contract checks and races, to be run under ThreadSanitizer (ci/tsan.sh).
 * Prints one success line; any failed check aborts. With -DCONTROL it holds a data race that the sanitizer must report. */
#include "../../trtllm_pp_progress/native/understudy.c"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
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

static struct understudy *start(int pointer)
{
    struct understudy *u = understudy_new();
    u->silence_ns = 20000;
    u->period_ns = 10000;
    u->iprobe = pointer ? (void (*)(void))by_pointer : (void (*)(void))by_integer;
    u->comm = pointer ? (intptr_t)&communicator : -7;
    u->comm_is_pointer = pointer;
    u->any_source = -2;
    u->tag = 99;
    CHECK(understudy_start(u) == 0);
    return u;
}

/* Wait for a fact that must come true; only a fault makes this reach its limit. */
#define AWAIT(fact)                                                                                                     \
    for (int64_t limit = now_ns() + LIMIT_NS; !(fact); sched_yield())                                                   \
    CHECK(now_ns() < limit)

static void await_calls(int more)
{
    int target = calls + more;
    AWAIT(calls >= target);
}

static void finish(struct understudy *u)
{
    CHECK(understudy_stop(u, LIMIT_NS) == 1);
    int before = calls;
    understudy_arm(u); /* late drivers are harmless */
    CHECK(understudy_stop(u, 0) == 1);
    CHECK(calls == before);
    free(u);
}

static void ticks_while_armed(int pointer)
{
    struct understudy *u = start(pointer);
    understudy_arm(u);
    await_calls(3);
    understudy_rest(u);
    finish(u);
}

/* A driver that spins (here: this thread) is given patience, not for ever. */
static void ticks_beside_a_running_driver(void)
{
    struct understudy *u = start(1);
    understudy_arm(u);
    int64_t begun = now_ns();
    int target = calls + 3;
    while (calls < target)
        CHECK(now_ns() - begun < LIMIT_NS);
    struct look last = look_at(syscall(SYS_gettid));
    do /* however busy the machine is, for a while this thread has a core */
        for (int64_t end = now_ns() + 1000000; now_ns() < end;)
            CHECK(now_ns() - begun < LIMIT_NS);
    while (!driver_ran(&last));
    last = look_at(0x3fffff); /* gone: never waited for */
    CHECK(!driver_ran(&last) && !driver_ran(&last));
    finish(u);
}

/* A driver that was held up between a look at `timed` and its store. */
static void a_late_store_is_undone_by_a_rest(void)
{
    struct understudy *u = start(1);
    understudy_arm(u);
    understudy_rest(u);
    u->driven_ns = now_ns();
    understudy_rest(u);
    CHECK(u->driven_ns == 0);
    understudy_arm(u);
    await_calls(1);
    finish(u);
}

static void leaves_when_its_timer_is_closed(void)
{
    struct understudy *u = start(1);
    int timer = dup(u->timer);
    CHECK(dup2(open("/dev/null", O_RDONLY), u->timer) == u->timer);
    struct itimerspec soon = {{0, 0}, {0, 1}};
    timerfd_settime(timer, 0, &soon, 0); /* out of the read that it may be in */
    AWAIT(u->error);
    finish(u);
}

static void leaves_on_error(void)
{
    struct understudy *u = start(1);
    answer = 15;
    understudy_arm(u);
    AWAIT(u->error == 15);
    answer = 0;
    finish(u);
}

static void stop_is_bounded(void)
{
    struct understudy *u = start(1);
    blocked = 1;
    understudy_arm(u);
    AWAIT(inside);
    CHECK(understudy_stop(u, 1000000) == 0);
    blocked = 0;
    finish(u);
}

static _Atomic int driving;

static void *driver(void *argument)
{
    struct understudy *u = argument;
    for (unsigned turn = 0; driving; turn++) {
        if (turn % 3 == 0)
            understudy_rest(u);
        else if (u->timed)
            u->driven_ns = now_ns();
        else
            understudy_arm(u);
#ifdef CONTROL
        unguarded++;
#endif
    }
    return 0;
}

static void *stopper(void *u)
{
    CHECK(understudy_stop(u, LIMIT_NS) == 1);
    return 0;
}

static void drivers_and_stoppers(int turn)
{
    struct understudy *u = start(turn % 2);
    pthread_t drivers[2], stoppers[2];
    driving = 1;
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&drivers[i], 0, driver, u) == 0);
    for (int i = 0; i < turn % 7; i++)
        sched_yield();
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&stoppers[i], 0, stopper, u) == 0);
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
    a_late_store_is_undone_by_a_rest();
    leaves_when_its_timer_is_closed();
    leaves_on_error();
    stop_is_bounded();
    for (int turn = 0; turn < turns; turn++)
        drivers_and_stoppers(turn);
#ifdef CONTROL
    struct understudy *u = start(1);
    understudy_arm(u);
    for (int i = 0; i < 1000; i++)
        unguarded++;
    await_calls(3);
    finish(u);
#endif
    printf("stress: %d turns, %d calls, every check held (%ld)\n", turns, calls, unguarded);
    return 0;
}
