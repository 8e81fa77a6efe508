/* Stands in for MPI_Iprobe in tests: counts calls, keeps the arguments of the last one, can fail or block on demand. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

_Atomic int calls, blocked, answer, source, tag;
_Atomic intptr_t comm;

static int note(int source_, int tag_, intptr_t comm_, int *flag)
{
    source = source_;
    tag = tag_;
    comm = comm_;
    *flag = 0;
    calls++;
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
    struct timespec t;
    int before = calls;
    clock_gettime(CLOCK_MONOTONIC, &t);
    long begun = t.tv_sec * 1000 + t.tv_nsec / 1000000;
    do
        clock_gettime(CLOCK_MONOTONIC, &t);
    while (calls - before < more && t.tv_sec * 1000 + t.tv_nsec / 1000000 - begun < limit_ms);
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

/* For Py_AtExit, which is where mpi4py finalizes MPI: calls that come now would come too late. */
void after_python(void)
{
    int late = hold(1000000, 30);
    printf("late calls: %d\n", late);
    fflush(stdout);
}
