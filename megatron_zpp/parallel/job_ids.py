"""Tells the ranks of one job from those of another that uses the same host and port, by what their launchers say (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_zpp.system.user_error import UserError

JOB_VARIABLE = "MEGATRON_ZPP_JOB_ID"
MOST_CHARACTERS = 200
SHARED_RUN_ID = "none"  # torchrun's --rdzv_id unless one is given
# Ids that all ranks of one start have, and no other start.
_OF_A_START: dict[str, tuple[str, ...]] = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "Open MPI": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "MPICH or Intel MPI": ("PMI_JOBID",),
    "HPE PALS": ("PALS_APID",),
    "Flux": ("FLUX_JOB_ID",),
}


@dataclass(frozen=True)
class JobIds:
    """The kind of the launcher, and the ids that it and the scheduler give, as variable and value; the most reliable is first."""

    launcher: str = "none"
    ids: tuple[tuple[str, str], ...] = ()

    def differ_from(self, other: JobIds) -> bool:
        """Whether they belong to another job: by the first variable that both have, and by the launcher unless JOB_VARIABLE is the same."""
        others = dict(other.ids)
        for name, value in self.ids:
            if name not in others:
                continue
            if value != others[name]:
                return True
            if name == JOB_VARIABLE:
                return False
            break
        return self.launcher != other.launcher

    def __str__(self) -> str:
        return "no job id" if not self.ids else "=".join(self.ids[0])


def read_job_ids(environment: Mapping[str, str], launcher: str) -> JobIds:
    """The ids of this process's job. Raises UserError, naming the variable, for one that is too long or cannot be printed."""
    own = {name: environment.get(name, "") for name in (JOB_VARIABLE, *_OF_A_START.get(launcher, ()))}
    if own.get("TORCHELASTIC_RUN_ID") == SHARED_RUN_ID:
        del own["TORCHELASTIC_RUN_ID"]
    found = tuple((name, value) for name, value in (own | _ids_of_scheduler(environment, launcher)).items() if value)
    for name, value in found:
        if len(value) > MOST_CHARACTERS or not value.isprintable():
            remedy = "choose another" if name == JOB_VARIABLE else f"export {JOB_VARIABLE}, the same on every rank, and unset it"
            raise UserError(f"{name} has {len(value)} characters, but an id has at most {MOST_CHARACTERS} that can be printed; {remedy}")
    return JobIds(launcher, found)


def _ids_of_scheduler(environment: Mapping[str, str], launcher: str) -> dict[str, str]:
    """Of the step that srun started, and of the job, which may start several runs."""
    slurm = environment.get("SLURM_HET_JOB_ID") or environment.get("SLURM_JOB_ID", "")
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID", "")
    lsf, element = environment.get("LSB_JOBID", ""), environment.get("LSB_JOBINDEX", "0")
    return {
        "SLURM_JOB_ID.SLURM_STEP_ID": f"{slurm}.{step}" if slurm and step and launcher == "srun" else "",
        "SLURM_JOB_ID": slurm,
        "PBS_JOBID": environment.get("PBS_JOBID", ""),
        "LSB_JOBID": lsf if not lsf or element == "0" else f"{lsf}[{element}]",
    }
