/* Stands in for MPI_Iprobe and MPI_Test. The first counts calls, keeps the arguments of the last one, and can fail, block
 * or take its time on demand; the second answers as the request it is given says. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

_Atomic int calls, blocked, answer, source, tag, busy_us, fatal;
_Atomic intptr_t comm;

static long now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void work(int us)
{
    for (long end = now_us() + us; us && now_us() <= end;)
        ;
}

static int note(int source_, int tag_, intptr_t comm_, int *flag)
{
    source = source_;
    tag = tag_;
    comm = comm_;
    *flag = 0;
    calls++;
    work(busy_us);
    if (fatal)
        exit(fatal); /* as MPI does where errors are fatal */
    while (blocked)
        ;
    return answer;
}

/* What to call after counting: MPI's own function, if set. */
int (*real_pointer)(int, int, void *, int *, void *);
int (*real_integer)(int, int, int, int *, void *);

int iprobe_pointer(int s, int t, void *c, int *flag, void *status)
{
    int failed = note(s, t, (intptr_t)c, flag);
    return real_pointer ? real_pointer(s, t, c, flag, status) : failed;
}

int iprobe_integer(int s, int t, int c, int *flag, void *status)
{
    int failed = note(s, t, c, flag);
    return real_integer ? real_integer(s, t, c, flag, status) : failed;
}

/* Wait for `more` calls, at most `limit_ms`; returns how many came. Called through PyDLL it holds the GIL meanwhile. */
int hold(int more, int limit_ms)
{
    struct timespec pause = {0, 1000000};
    int before = calls;
    for (int ms = 0; calls - before < more && ms < limit_ms; ms++)
        nanosleep(&pause, 0);
    return calls - before;
}

/* The same, but on the core all the time, as a blocking MPI receive is. */
int spin(int more, int limit_ms)
{
    int before = calls;
    for (long end = now_us() + 1000L * limit_ms; calls - before < more && now_us() < end;)
        ;
    return calls - before;
}

/* Wait until a word that another process may store to is set, at most `limit_ms`; returns whether it was. */
int hold_until(_Atomic int *word, int limit_ms)
{
    struct timespec pause = {0, 1000000};
    for (int ms = 0; !*word && ms < limit_ms; ms++)
        nanosleep(&pause, 0);
    return *word != 0;
}

/* A request: complete at its `left`-th test, each of which takes `us`, sets the word `stop` if there is one, and returns
 * `error`. */
struct counted_request {
    int left, error, us, tests;
    _Atomic int64_t *stop;
};

int test(void *request, int *flag, void *status)
{
    struct counted_request *r = request;
    memset(status, 0, 64);
    r->tests++;
    work(r->us);
    if (r->stop)
        *r->stop = 1;
    *flag = r->tests >= r->left;
    return r->error;
}

/* Calls that come when MPI is gone come too late; and has the thread that made them left, as its own word says? */
_Atomic int64_t *left;
_Atomic int watch_the_end;

static void report(void)
{
    int late = hold(1000000, 30);
    printf("late calls: %d, left: %d\n", late, left && *left);
    fflush(stdout);
}

/* For Py_AtExit, registered before mpi4py does so and hence called after it has finalized MPI. */
void after_python(void)
{
    if (!watch_the_end)
        report();
}

/* At the end of the process; this library was loaded first, so it is taken down last. */
__attribute__((destructor)) static void after_all(void)
{
    if (watch_the_end)
        report();
}
