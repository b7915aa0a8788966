"""`enter_process` and `confine`: the layers of isolation, applied to the calling process.

`enter_process` is for the process that keeps the sandbox, once; `confine` for each process in it
that runs what nobody has read, after its fork.
"""

import os
from collections.abc import Callable, Sequence

from meshwright.run.posttrain.rollout.verifiers.sandbox.landlock import (
    apply_ruleset,
    create_ruleset,
    get_landlock_version,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.namespaces import (
    SHARED_MEMORY,
    enter_namespaces,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.privileges import (
    are_open_to_all,
    become_unprivileged,
    drop_bounding_set,
    drop_capabilities,
    forbid_inspection,
    forbid_new_privileges,
    prefer_as_oom_victim,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.process_tree import (
    adopt_orphans,
    end_with_parent,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.resource_limits import apply_limits
from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import (
    LayerRecord,
    SandboxConfig,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.seccomp_filter import install_filter


def enter_process(config: SandboxConfig) -> LayerRecord:
    """Prepare the process that keeps a sandbox; its next child is the first in the namespaces."""
    record = LayerRecord()
    _try(record, "", prefer_as_oom_victim)
    _try(record, "subreaper", adopt_orphans)
    if "namespaces" in config.layers:
        enter_namespaces(config, record)
    return record


class Confinement:
    """The layers for processes of one kind; made once, and applied after each fork."""

    def __init__(self, config: SandboxConfig, entered: Sequence[str]) -> None:
        """Build what several processes share; `entered` are the layers around them."""
        self.config, self.ruleset = config, -1
        self._entered, self._landlock_error = tuple(entered), ""
        # Without another user the process stays root, with no capability and the rules below.
        self.changes_user = (
            "user" in config.layers
            and os.geteuid() == 0
            and "user namespace" not in entered
            and "bounded disk" in entered  # which every user may write
            and config.readable is not None
            and are_open_to_all(config.readable)
        )
        self.refresh()

    def refresh(self) -> None:
        """Build the rules for files again, where the folder was replaced by another one."""
        self.close()
        if "landlock" not in self.config.layers:
            return
        config = self.config
        writable = [config.folder, *config.writable]
        if "own shared memory" in self._entered or config.processes:
            writable.append(SHARED_MEMORY)
        try:
            self.ruleset = create_ruleset(
                readable=config.readable, writable=writable, network=config.network
            )
        except OSError as error:
            self._landlock_error = str(error)

    def close(self) -> None:
        """Close the rules."""
        if self.ruleset >= 0:
            os.close(self.ruleset)
            self.ruleset = -1

    def confine(self, *, parent: int, inspectable: bool) -> LayerRecord:
        """Apply all layers to this process, the child of `parent`; return which ones held."""
        config, record = self.config, LayerRecord()
        os.setsid()
        refused = apply_limits(
            memory_bytes=config.memory_bytes,
            file_bytes=config.file_bytes,
            processes=config.processes,
        )
        if refused:
            record.refuse("rlimits", ", ".join(refused))
        else:
            record.add("rlimits")
        if not config.layers:
            _try(record, "", lambda: end_with_parent(parent))
            return record
        _try(record, "no_new_privs", forbid_new_privileges)
        if self.changes_user:
            _try(record, "", drop_bounding_set)
            _try(record, "other user", become_unprivileged)
        if "user" in config.layers:
            _try(record, "no capabilities", drop_capabilities)
        _try(record, "", lambda: end_with_parent(parent))  # another user's process forgets it
        if not inspectable:
            _try(record, "", forbid_inspection)
        if self.ruleset >= 0:
            name = f"Landlock {get_landlock_version()}"
            _try(record, name, lambda: apply_ruleset(self.ruleset))
        elif "landlock" in config.layers:
            record.refuse("Landlock", self._landlock_error)
        if "seccomp" in config.layers:
            self._filter(record)
        if config.network:
            record.add("network")
        return record

    def _filter(self, record: LayerRecord) -> None:
        config = self.config
        _try(
            record,
            "seccomp",
            lambda: install_filter(processes=config.processes, network=config.network),
        )
        if "seccomp" in record.active and not config.network:
            record.add("no sockets")


def _try(record: LayerRecord, name: str, apply: Callable[[], object]) -> None:
    try:
        apply()
    except (OSError, KeyError) as error:
        if name:
            record.refuse(name, error)
    else:
        if name:
            record.add(name)
