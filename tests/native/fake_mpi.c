/* Stands in for the libmpi that mpi4py links: what driver/library.py looks for in it, and an MPI_Finalize that begins as
 * MPI's does, with the delete callbacks of the attributes of COMM_SELF. */
#include <stdint.h>

typedef int (*delete_function)(intptr_t comm, int key, void *value, void *extra);

int initialized = 1, keyvals, attributes, failing;
intptr_t self;
static delete_function deletes;

int MPI_Initialized(int *flag)
{
    *flag = initialized;
    return 0;
}

int MPI_Iprobe(int source, int tag, void *comm, int *flag, void *status)
{
    (void)source, (void)tag, (void)comm, (void)status;
    return *flag = 0;
}

int MPI_Test(void *request, int *flag, void *status)
{
    (void)request, (void)status;
    return *flag = 0;
}

int MPI_Comm_create_keyval(void *copy, delete_function delete_, int *key, void *extra)
{
    (void)extra;
    keyvals++;
    deletes = delete_;
    *key = 7;
    return failing == 1 || !copy;
}

int MPI_Comm_set_attr(intptr_t comm, int key, void *value)
{
    (void)value;
    attributes++;
    self = comm;
    return failing == 2 || key != 7;
}

int MPI_Finalize(void) { return attributes ? deletes(self, 7, 0, 0) : 0; }
