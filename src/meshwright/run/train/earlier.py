"""What a job would go on from, held against it by headers alone: nothing is built or loaded.

One rank of several looks before they form a group, so that weights of another model are refused
while there is nothing to undo.
"""

from pathlib import Path

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.nn.huggingface.load import misfits
from meshwright.run.train.checkpoint.disk import Disk
from meshwright.run.train.checkpoint.folder import Folder, is_sound, read_record
from meshwright.run.train.checkpoint.record import decode_extra
from meshwright.run.train.job import Job
from meshwright.run.train.run_state import changes, state_of


def earlier_problems(job: Job, folder: Path | None) -> list[Problem]:
    """Return what keeps a job from going on with a run, or from beginning with given weights.

    Without a folder it begins anew.
    """
    saved = () if folder is None else Folder(folder / "checkpoints", Disk()).found()
    newest = next((found for found in reversed(saved) if is_sound(found)), None)
    try:
        if newest is not None:
            return changes(job, state_of(decode_extra(read_record(newest.path)), newest.path))
        if job.start_from is not None and not saved:
            return misfits(job.model, job.start_from, job.loss.options(job.model))
    except DamagedFile:
        return []  # whether an older one will do is for those who load it
    except InputError as error:
        return list(error.problems)
    return []
