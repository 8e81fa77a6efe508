"""What launchers say that a process is, and what of it can be true."""

import pytest

from trtllm_pp_progress.tools.job.library import Library
from trtllm_pp_progress.tools.job.role import CLAIMS, on_this_host, role, without_role

OPEN_MPI = Library("Open MPI", "5.0.11", "Open MPI v5.0.11", "/lib/libmpi.so.40")
OPEN_MPI_4 = Library("Open MPI", "4.1.6", "Open MPI v4.1.6", "/lib/libmpi.so.40")
MPICH = Library("MPICH", "5.0.2", "MPICH configure: --with-pm=hydra", "/lib/libmpi.so.12")
MPICH_PMIX = Library("MPICH", "5.0.2", "MPICH configure: --with-pmix=/usr", "/lib/libmpi.so.12")
INTEL = Library("Intel MPI", "2021.18.1", "Intel(R) MPI Library 2021.18", "/lib/libmpi.so.12")
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "HYDI_CONTROL_FD": "7"}


@pytest.mark.parametrize(("launcher", "rank", "size"), CLAIMS)
def test_each_launcher_is_known_by_its_variables(launcher, rank, size):
    """The rank, and how many there are; what is no number is no launcher's."""
    found = role({rank: "1", size: "4"})
    assert (found.launcher, found.rank, found.size, found.joins) == (launcher, 1, 4, True)
    assert found.said == f"{rank}=1, {size}=4"
    assert found.trouble() is None
    assert role({rank: "1"}).size is None
    assert role({"PATH": "/bin", f"{rank}S": "0", rank: "x"}) is None


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (MPIRUN, "Open MPI's mpirun"),
        (HYDRA, "MPICH's mpiexec"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "I_MPI_HYDRA_UUID": "u", "HYDI_CONTROL_FD": "7"}, "Intel MPI's mpiexec"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "1"}, "srun --mpi=pmi2"),
        ({"PMIX_RANK": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "srun --mpi=pmix"),
        ({"PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}, "prterun"),
    ],
)
def test_launchers_of_one_protocol_are_told_apart(environ, launcher):
    """Several set the same variables."""
    assert role(environ).launcher == launcher


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**MPIRUN, "PMI_RANK": "0", "PMI_SIZE": "1"}, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4"),
        ({**HYDRA, "PMIX_RANK": "0"}, "PMI_RANK=1, PMI_SIZE=4"),
        ({**MPIRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4"),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1",
        ),
    ],
)
def test_of_launchers_within_each_other_the_one_that_started_several_counts(environ, said):
    """Mpirun in a shell that is itself a job of one, or in an allocation."""
    assert role(environ).said == said


@pytest.mark.parametrize(
    "environ",
    [{"PMI_RANK": "0", "PMI_SIZE": "1"}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}],
    ids=["a shell inside Slurm", "mpirun -n 1"],
)
def test_case_62_one_rank_alone_names_the_variables_to_unset(environ):
    """TACC/remora#47: nobody knows whether it is a shell's own job, so both ways on are said."""
    said = role(environ).trouble()
    assert all(f"-u {name}" in said for name in environ)
    assert "this is the only rank of its job" in said
    assert "mpirun -n 1" not in said


@pytest.mark.parametrize("size", ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS"])
def test_case_64_tasks_of_slurm_without_pmi_are_no_ranks(size):
    """open-mpi/ompi#13523: MPI would start alone in each."""
    found = role({"SLURM_PROCID": "2", size: "4"})
    assert (found.rank, found.size, found.joins) == (2, 4, False)
    assert "srun --mpi=pmix" in found.trouble()
    assert f"env -u SLURM_PROCID -u {size} COMMAND" in found.trouble()


@pytest.mark.parametrize("plumbing", ["PMI_FD", "PMIX_NAMESPACE", "PMI_CONTROL_PORT", "PALS_APID"])
def test_case_64_tasks_with_something_to_meet_by_are_ranks(plumbing):
    """Control: MPI can find them, and says itself which they are."""
    assert role({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", plumbing: "1"}).joins


@pytest.mark.parametrize("environ", [{"SLURM_PROCID": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {}])
def test_case_64_a_batch_script_of_one_task_is_no_rank(environ):
    """Control: mpirun is started there, as anywhere."""
    assert role(environ) is None


@pytest.mark.parametrize(
    ("environ", "library", "joins"),
    [
        (MPIRUN, OPEN_MPI, True),
        (MPIRUN, OPEN_MPI_4, True),
        (MPIRUN, MPICH, False),
        (MPIRUN, MPICH_PMIX, True),
        (MPIRUN, INTEL, True),
        (HYDRA, MPICH, True),
        (HYDRA, INTEL, True),
        (HYDRA, OPEN_MPI, False),
        (HYDRA, OPEN_MPI_4, True),
        ({"PMIX_RANK": "0"}, OPEN_MPI, True),
        ({"PALS_RANKID": "0"}, MPICH, True),
    ],
)
def test_case_63_which_library_joins_which_launcher(environ, library, joins):
    """mpi4py/mpi4py#155, open-mpi/ompi#10799: where it is certain before MPI starts; else MPI is asked afterwards."""
    assert role(environ).cannot_join(library) != joins


@pytest.mark.parametrize(("environ", "launcher"), [(MPIRUN, "Open MPI's mpirun"), (HYDRA, "MPICH's mpiexec")])
def test_case_63_the_line_names_both_and_advises_another_launcher(environ, launcher):
    """One line, and not what was just done."""
    said = role(environ).mismatch(OPEN_MPI)
    assert launcher in said
    assert "Open MPI 5.0.11 (/lib/libmpi.so.40)" in said
    assert "\n" not in said
    assert "mpirun -n" not in said


def test_case_63_a_variable_left_behind_may_be_the_reason_where_no_size_is_known():
    """PMIX_RANK alone says nothing of others."""
    assert "env -u PMIX_RANK COMMAND" in role({"PMIX_RANK": "0"}).mismatch(OPEN_MPI)


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("OMPI_COMM_WORLD_RANK", True),
        ("OMPI_UNIVERSE_SIZE", True),
        ("OMPI_MCA_ess_base_jobid", True),
        ("PMIX_RANK", True),
        ("PMIX_SERVER_URI4", True),
        ("PMI_RANK", True),
        ("PMI_FD", True),
        ("PRTE_LAUNCHED", True),
        ("HYDI_CONTROL_FD", True),
        ("HYDRA_BSTRAP_PGID", True),
        ("MPI_LOCALRANKID", True),
        ("PALS_RANKID", True),
        ("I_MPI_HYDRA_UUID", True),
        ("OMPI_MCA_pml", False),
        ("OMPI_ALLOW_RUN_AS_ROOT", False),
        ("UCX_TLS", False),
        ("MPIR_CVAR_CH4_NETMOD", False),
        ("MPI4PY_RC_THREAD_LEVEL", False),
        ("I_MPI_FABRICS", False),
        ("SLURM_PROCID", False),
        ("PMIX_MCA_psec", False),
        ("PMIX_MCA_gds", False),
    ],
)
def test_what_a_launcher_tells_its_ranks_is_kept_from_a_child_and_what_configures_mpi_is_not(name, dropped):
    """Case 73 hangs on the last ones: a child without them is not what a worker is."""
    assert (without_role({name: "1"}) == {}) == dropped


def test_ranks_are_started_on_this_host_whatever_the_allocation():
    """A launcher would use all its hosts."""
    environ = {"SLURM_JOB_NODELIST": "a,b", "PBS_NODEFILE": "/f", "LSB_HOSTS": "a b", "UCX_TLS": "tcp", "PMI_RANK": "0"}
    assert on_this_host(environ) == {"UCX_TLS": "tcp"}
